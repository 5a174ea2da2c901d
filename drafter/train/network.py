"""The drafter as trainable modules: DSpark backbone, Markov head and confidence head, under the names of a checkpoint.

Owns the parameters (float32 masters, computed in the features' dtype) and the block attention of training, where all blocks
of a sequence share one pass over its context. Must not know losses or optimisers. Serving has its own forward
(drafter/backbone.py); a test holds the two together.

Shapes: S context rows of a sequence, A anchors of it, L slots of each of its blocks (one length per sequence and step),
N = sum of A L over the batch, C = sum of S, d hidden, m captured layers, r Markov rank, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafter.architecture import DrafterArchitecture
from drafter.checkpoint import VOCABULARY
from drafter.train.heads import ConfidenceHead, HeadTerms, MarkovHead, Weight, linear
from drafter.train.layers import DraftLayer
from drafter.train.native import rms_norm
from scheduler.errors import SettingsError
from verifier.layers import Rotary

_CELLS = ("markov_head.gate_proj", "markov_head.joint_proj")


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one sequence. anchors: [A] positions, each seeing the context rows before it. ids: [n] all its tokens."""

    features: Tensor
    anchors: Tensor
    ids: Tensor
    length: int

    def positions(self) -> Tensor:
        """[A, L]"""
        return self.anchors.unsqueeze(1) + torch.arange(self.length, device=self.anchors.device)

    def to(self, device: torch.device) -> Blocks:
        return Blocks(self.features.to(device), self.anchors.to(device), self.ids.to(device), self.length)


class DraftNetwork(nn.Module):
    """arch: of the checkpoint to be. embed_tokens [V, d] and lm_head [Vd, d] are the target's: frozen, not stored.

    draft_vocab_ids: [Vd] ascending target ids, or None for all. feature_scale: [m d] by which the target's features are
    multiplied before `fc`; folded into `fc` on export, so that a checkpoint reads raw features.
    """

    embed_tokens: Tensor
    lm_head: Tensor
    feature_scale: Tensor
    draft_vocab_ids: Tensor
    row_of: Tensor

    def __init__(
        self,
        arch: DrafterArchitecture,
        embed_tokens: Tensor,
        lm_head: Tensor,
        draft_vocab_ids: Tensor | None,
        feature_scale: Tensor,
        *,
        max_len: int,
    ) -> None:
        super().__init__()
        decoder, num_ids = arch.decoder, arch.decoder.vocab_size
        self.arch, self.reduced, self.eps = arch, draft_vocab_ids is not None, decoder.rms_norm_eps
        device = embed_tokens.device
        ids = draft_vocab_ids.to(device) if draft_vocab_ids is not None else torch.arange(num_ids, device=device)
        self.norm = Weight(decoder.hidden_size)
        self._add_modules(len(ids))
        row_of = torch.full((num_ids,), len(ids), dtype=torch.int64, device=device)
        row_of.index_copy_(0, ids, torch.arange(len(ids), device=device))
        frozen = {
            "embed_tokens": embed_tokens,
            "lm_head": lm_head,
            "feature_scale": feature_scale.to(device, embed_tokens.dtype),
        }
        for name, tensor in {**frozen, "draft_vocab_ids": ids, "row_of": row_of}.items():
            self.register_buffer(name, tensor, persistent=False)
        self.rotary = Rotary(decoder, max_len, embed_tokens.dtype, device)
        self.to(device)

    def _add_modules(self, num_drafted: int) -> None:
        arch, rank, d = self.arch, self.arch.markov_rank, self.arch.decoder.hidden_size
        self.fc, self.hidden_norm = Weight(d, len(arch.target_layer_ids) * d), Weight(d)
        self.layers = nn.ModuleList(DraftLayer(arch.decoder) for _ in range(arch.decoder.num_layers))
        if rank:
            self.markov_head = MarkovHead(arch.head_type, num_drafted + self.reduced, num_drafted, rank, d)
        if arch.has_confidence:
            self.confidence_head = ConfidenceHead(d + (rank if arch.confidence_with_markov else 0))

    def initialise(self, generator: torch.Generator, target_norm: Tensor) -> None:
        """Normal weights of std 0.02 as in DeepSpec. The last norm starts as a twentieth of the target's, whose head it feeds:
        with tied embeddings a slot's own token would otherwise begin with a logit above 100."""
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                nn.init.ones_(parameter)
            elif name.endswith(("bias", "markov_w2.weight")) or name.startswith("confidence_head"):
                nn.init.zeros_(parameter)
            else:
                # drawn on the CPU: the same start on every device
                drawn = torch.empty(parameter.shape).normal_(std=0.02, generator=generator)
                with torch.no_grad():
                    parameter.copy_(drawn)
        with torch.no_grad():
            self.norm.weight.copy_(0.05 * target_norm)

    def forward(self, batch: Sequence[Blocks]) -> Tensor:
        """Hidden states after the last norm of all block slots, [N, d], sequence by sequence, anchor by anchor."""
        context = self._context(batch)
        ids = [_block_ids(blocks, self.arch.mask_token_id) for blocks in batch]
        positions = torch.cat([b.positions().flatten() for b in batch])
        hidden = self.embed_tokens.index_select(0, torch.cat(ids))
        cos_sin = self.rotary.at(positions)
        for layer, rows in zip(self.draft_layers, context, strict=True):
            qkv = self.rotary.rotate(layer.project(hidden), cos_sin)
            hidden = layer.finish(hidden, _attend(batch, qkv, rows, layer.num_heads))
        return rms_norm(hidden, self.norm.weight, self.eps)

    def _context(self, batch: Sequence[Blocks]) -> list[Tensor]:
        """Per layer, rotated keys and values of all context rows [C, 2 KV, hd]."""
        features = torch.cat([blocks.features for blocks in batch]).to(self.embed_tokens.dtype)
        normed = rms_norm(linear(features * self.feature_scale, self.fc.weight), self.hidden_norm.weight, self.eps)
        positions = torch.cat([torch.arange(len(b.features), device=features.device) for b in batch])
        cos_sin = self.rotary.at(positions, self.arch.decoder.num_kv_heads)
        return [self.rotary.rotate(layer.project_context(normed), cos_sin) for layer in self.draft_layers]

    @property
    def draft_layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def head_terms(self, hidden: Tensor, batch: Sequence[Blocks], previous_ids: Tensor) -> HeadTerms:
        """The Markov head on hidden states [N, d] of `forward` and the target ids before each slot [N]. Of W1 the last row
        stands for all tokens outside the draft vocabulary."""
        if not self.arch.markov_rank:
            return HeadTerms()
        lengths = [blocks.length for blocks in batch for _ in range(len(blocks.anchors))]
        terms: HeadTerms = self.markov_head(self.row_of.index_select(0, previous_ids), hidden, lengths)
        return terms

    def confidence_logits(self, hidden: Tensor, embeddings: Tensor | None) -> Tensor:
        """hidden [N, d], W1 rows of the previous tokens [N, r] -> [N] float32."""
        logits: Tensor = self.confidence_head(hidden, embeddings if self.arch.confidence_with_markov else None)
        return logits

    @torch.no_grad()
    def checkpoint_tensors(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """What `write_checkpoint` takes: names and shapes of the DeepSpec format, features read raw."""
        tensors = {name: parameter.detach().to("cpu", dtype) for name, parameter in self.named_parameters()}
        tensors |= {name: tensor.to("cpu", dtype) for name, tensor in self._folded().items()}
        if self.reduced:
            tensors[VOCABULARY] = self.draft_vocab_ids.to("cpu", torch.int32)
        return tensors

    @torch.no_grad()
    def load_checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The reverse of `checkpoint_tensors`, for a checkpoint of this architecture and vocabulary. The cell of a Markov head
        stays as it is where the checkpoint's head has none."""
        folded = self._folded()
        for name, parameter in self.named_parameters():
            if name.startswith(_CELLS) and name not in tensors:
                continue
            tensor = tensors[name].to(parameter)
            if tensor.shape != parameter.shape:
                raise SettingsError(f"init_from: {name} has shape {tuple(tensor.shape)}, here {tuple(parameter.shape)}")
            parameter.copy_(tensor / self.feature_scale.float() if name in folded else tensor)

    def _folded(self) -> dict[str, Tensor]:
        """Weights that read raw features instead of scaled ones."""
        return {"fc.weight": self.fc.weight * self.feature_scale.float()}


def _block_ids(blocks: Blocks, mask_token_id: int) -> Tensor:
    """[A L]: the anchor, then masks."""
    ids = blocks.ids.new_full((len(blocks.anchors), blocks.length), mask_token_id)
    ids[:, 0] = blocks.ids[blocks.anchors]
    return ids.flatten()


def _attend(batch: Sequence[Blocks], qkv: Tensor, context: Tensor, num_heads: int) -> Tensor:
    """qkv [N, H + 2 KV, hd], context [C, 2 KV, hd] -> [N, H * hd]."""
    rows = qkv.split([len(blocks.anchors) * blocks.length for blocks in batch])
    contexts = context.split([len(blocks.features) for blocks in batch])
    parts = zip(batch, rows, contexts, strict=True)
    return torch.cat([_attend_sequence(blocks, part, seen, num_heads) for blocks, part, seen in parts])


def _attend_sequence(blocks: Blocks, qkv: Tensor, context: Tensor, num_heads: int) -> Tensor:
    """Every slot sees the context rows before its anchor, and its whole block. [A L, H + 2 KV, hd] -> [A L, H * hd].

    The context is one large product for all anchors of the sequence; the block's own keys are a small product per anchor.
    """
    num_anchors, length, hd = len(blocks.anchors), blocks.length, qkv.shape[-1]
    num_kv_heads, num_rows = context.shape[1] // 2, context.shape[0]
    group = num_heads // num_kv_heads
    query, key, value = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    # [KV, A, L G, hd]: query heads that share a key head are rows of one product
    query = (query * hd**-0.5).view(num_anchors, length, num_kv_heads, group, hd).permute(2, 0, 1, 3, 4)
    query = query.reshape(num_kv_heads, num_anchors, length * group, hd)
    own_key, own_value = (x.view(num_anchors, length, num_kv_heads, hd).permute(2, 0, 1, 3) for x in (key, value))
    seen_key, seen_value = context.transpose(0, 1).split(num_kv_heads)

    scores = torch.bmm(query.flatten(1, 2), seen_key.transpose(1, 2)).view(num_kv_heads, num_anchors, -1, num_rows)
    hidden = torch.arange(num_rows, device=context.device) >= blocks.anchors.unsqueeze(1)
    scores = scores.masked_fill(hidden[None, :, None, :], float("-inf"))
    own_scores = torch.matmul(query, own_key.transpose(2, 3))
    weights = torch.cat((scores, own_scores), dim=-1).softmax(-1)
    from_context = torch.bmm(weights[..., :num_rows].flatten(1, 2), seen_value).view(num_kv_heads, num_anchors, -1, hd)
    attended = from_context + torch.matmul(weights[..., num_rows:], own_value)
    attended = attended.view(num_kv_heads, num_anchors, length, group, hd).permute(1, 2, 0, 3, 4)
    return attended.reshape(num_anchors * length, num_heads * hd)
