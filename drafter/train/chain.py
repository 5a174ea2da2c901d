"""Eagle3 and MTP as trainable modules: one layer, run for each slot of a block after the other on its own output.

The rows of committed tokens (each token with the target's state before it) are projected once per sequence and seen by all
its anchors; slot k of anchor a is token a + k with the layer's output at slot k - 1 as its state, and sees the committed rows
before the anchor and the slots before it. That is what serving does (drafter/chain.py; a test holds the two together) and
what Eagle3 calls test-time training: slots are trained on the layer's own outputs, with the tokens that the target wrote.

Must not know losses or optimisers. Shapes as in drafter/train/network.py; M = sum of A anchors, F width of the layer's input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafter.checkpoint import VOCABULARY, vocabulary_maps
from drafter.train.heads import Weight, linear
from drafter.train.layers import DraftLayer
from drafter.train.native import rms_norm
from drafter.train.network import Blocks, DraftNetwork
from verifier.architecture import Architecture


class ChainLayer(DraftLayer):
    """A decoder layer whose projections read F columns, normed by the caller."""

    def __init__(self, arch: Architecture, width: int) -> None:
        super().__init__(arch)
        attn = self.self_attn
        for projection in (attn.q_proj, attn.k_proj, attn.v_proj):
            projection.weight = nn.Parameter(torch.empty(projection.weight.shape[0], width))


class Eagle3Layer(ChainLayer):
    def __init__(self, arch: Architecture) -> None:
        super().__init__(arch, 2 * arch.hidden_size)
        self.hidden_norm = Weight(arch.hidden_size)


class ChainNetwork(DraftNetwork):
    """What Eagle3 and MTP share. The parameters are those of the checkpoint."""

    layers: nn.ModuleList

    def state(self, features: Tensor) -> Tensor:
        """Captured features [C, m d] -> the target's states [C, d]."""
        raise NotImplementedError

    def enter(self, embeddings: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings and the states before them [N, d] -> input of the projections [N, F], residual stream [N, d]."""
        raise NotImplementedError

    @property
    def layer(self) -> ChainLayer:
        layer = self.layers[0]
        assert isinstance(layer, ChainLayer)
        return layer

    def forward(self, batch: Sequence[Blocks]) -> Tensor:
        """Hidden states after the last norm of all block slots, [N, d], sequence by sequence, anchor by anchor."""
        features = torch.cat([blocks.features for blocks in batch]).to(self.embed_tokens.dtype)
        states = self.state(features).split([len(blocks.features) for blocks in batch])
        committed = self._committed(batch, states)
        rows = _Rows.of(batch)
        state = torch.cat([s.index_select(0, b.anchors - 1) for s, b in zip(states, batch, strict=True)])
        own: list[Tensor] = []
        outputs: list[Tensor] = []
        for k in range(max(blocks.length for blocks in batch)):
            entered, residual = self.enter(self.embed_tokens.index_select(0, rows.ids[:, k]), state)
            qkv = self.layer.project_entered(entered)
            qkv = self.rotary.rotate(qkv, self.rotary.at(rows.anchors - 1 + k))
            own.append(qkv[:, self.layer.num_heads :])
            attended = _attend(batch, qkv[:, : self.layer.num_heads], committed, torch.stack(own, dim=1))
            state = self.layer.finish(residual, attended)
            outputs.append(state)
        hidden = torch.stack(outputs, dim=1).split([len(blocks.anchors) for blocks in batch])
        used = [h[:, : blocks.length].flatten(0, 1) for h, blocks in zip(hidden, batch, strict=True)]
        return rms_norm(torch.cat(used), self.norm.weight, self.eps)

    def _committed(self, batch: Sequence[Blocks], states: Sequence[Tensor]) -> list[Tensor]:
        """Per sequence, rotated keys and values of tokens 1, 2, .. [S - 1, 2 KV, hd], each with the state before it."""
        ids = torch.cat([blocks.ids[1 : len(blocks.features)] for blocks in batch])
        before = torch.cat([s[:-1] for s in states])
        entered, _ = self.enter(self.embed_tokens.index_select(0, ids), before)
        positions = torch.cat([torch.arange(len(s) - 1, device=s.device) for s in states])
        cos_sin = self.rotary.at(positions, self.layer.num_kv_heads)
        rows = self.rotary.rotate(self.layer.project_context(entered), cos_sin)
        return list(rows.split([len(s) - 1 for s in states]))


class Eagle3Network(ChainNetwork):
    """fc reads the features times `feature_scale`, which is folded into it on export."""

    def _add_modules(self, num_drafted: int) -> None:
        d = self.arch.decoder.hidden_size
        self.fc = Weight(d, len(self.arch.target_layer_ids) * d)
        self.layers = nn.ModuleList([Eagle3Layer(self.arch.decoder)])

    def state(self, features: Tensor) -> Tensor:
        return linear(features * self.feature_scale, self.fc.weight)

    def enter(self, embeddings: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        normed = (
            rms_norm(embeddings, layer.input_layernorm.weight, self.eps),
            rms_norm(states, layer.hidden_norm.weight, self.eps),
        )
        return torch.cat(normed, dim=-1), states

    @torch.no_grad()
    def checkpoint_tensors(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """As DeepSpec writes it; a reduced vocabulary as other engines read it."""
        tensors = super().checkpoint_tensors(dtype)
        if self.reduced:
            tensors |= vocabulary_maps(tensors.pop(VOCABULARY).long(), self.arch.decoder.vocab_size)
        return tensors


class MtpNetwork(ChainNetwork):
    """Reads the last of the layers that the features hold."""

    def _add_modules(self, num_drafted: int) -> None:
        d = self.arch.decoder.hidden_size
        self.enorm, self.hnorm, self.eh_proj = Weight(d), Weight(d), Weight(d, 2 * d)
        self.layers = nn.ModuleList([ChainLayer(self.arch.decoder, d)])

    @torch.no_grad()
    def initialise(self, generator: torch.Generator, target_norm: Tensor) -> None:
        """hnorm starts as what gives every dimension of the target's states the same size."""
        super().initialise(generator, target_norm)
        scale = self.feature_scale[-len(self.hnorm.weight) :].float()
        self.hnorm.weight.copy_(scale * scale.reciprocal().square().mean().sqrt())

    def _folded(self) -> dict[str, Tensor]:
        return {}

    def state(self, features: Tensor) -> Tensor:
        return features[:, -self.arch.decoder.hidden_size :]

    def enter(self, embeddings: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        normed = (
            rms_norm(embeddings, self.enorm.weight, self.eps),
            rms_norm(states, self.hnorm.weight, self.eps),
        )
        residual = linear(torch.cat(normed, dim=-1), self.eh_proj.weight)
        return rms_norm(residual, self.layer.input_layernorm.weight, self.eps), residual


@dataclass(frozen=True, slots=True)
class _Rows:
    """All anchors of a batch. anchors: [M] positions. ids: [M, L] the tokens that their slots are fed, from the anchor on."""

    anchors: Tensor
    ids: Tensor

    @classmethod
    def of(cls, batch: Sequence[Blocks]) -> _Rows:
        length = max(blocks.length for blocks in batch)
        ids = []
        for blocks in batch:
            # slots past the end have no weight in the loss; they are fed something
            at = blocks.anchors.unsqueeze(1) + torch.arange(length, device=blocks.anchors.device)
            ids.append(blocks.ids[at.clamp_max(len(blocks.ids) - 1)])
        return cls(torch.cat([blocks.anchors for blocks in batch]), torch.cat(ids))


def _attend(batch: Sequence[Blocks], query: Tensor, committed: Sequence[Tensor], own: Tensor) -> Tensor:
    """query [M, H, hd] of one slot of every anchor, committed rows per sequence, own [M, k + 1, 2 KV, hd] -> [M, H * hd]."""
    counts = [len(blocks.anchors) for blocks in batch]
    parts = zip(batch, query.split(counts), committed, own.split(counts), strict=True)
    return torch.cat([_attend_sequence(*part) for part in parts])


def _attend_sequence(blocks: Blocks, query: Tensor, committed: Tensor, own: Tensor) -> Tensor:
    """One slot of the A anchors of a sequence sees the committed rows before its anchor, and its anchor's slots so far.

    The committed rows are one large product for all anchors of the sequence. [A, H, hd] -> [A, H * hd].
    """
    num_anchors, num_heads, hd = query.shape
    num_kv_heads, num_rows = committed.shape[1] // 2, len(committed)
    # [KV, A, G, hd]: query heads that share a key head are rows of one product
    query = (query * hd**-0.5).view(num_anchors, num_kv_heads, -1, hd).transpose(0, 1)
    seen_key, seen_value = committed.transpose(0, 1).split(num_kv_heads)
    own_key, own_value = own.permute(2, 0, 1, 3).split(num_kv_heads)
    scores = torch.bmm(query.flatten(1, 2), seen_key.transpose(1, 2)).view(num_kv_heads, num_anchors, -1, num_rows)
    # row i is of token i + 1
    hidden = torch.arange(1, num_rows + 1, device=query.device) >= blocks.anchors.unsqueeze(1)
    scores = scores.masked_fill(hidden[None, :, None, :], float("-inf"))
    weights = torch.cat((scores, torch.matmul(query, own_key.transpose(2, 3))), dim=-1).softmax(-1)
    from_committed = torch.bmm(weights[..., :num_rows].flatten(1, 2), seen_value).view(
        num_kv_heads, num_anchors, -1, hd
    )
    attended = from_committed + torch.matmul(weights[..., num_rows:], own_value)
    return attended.transpose(0, 1).reshape(num_anchors, num_heads * hd)
