"""Random drafters of every design, and their reference forwards: one request, no cache, no batch, every product on its own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafter.architecture import drafter_shapes, parse_drafter
from drafter.checkpoint import load_checkpoint, vocabulary_maps, write_checkpoint
from scheduler.wire import SamplingParams
from verifier.sampling import SamplingTable, transform

GAMMA = 5
_PREFIXES = {"qwen3": "Qwen3", "llama": "Llama", "qwen2": "Qwen2"}
_SUFFIXES = {"dspark": "DSparkModel", "eagle3": "Eagle3Model", "mtp": "MTPModel"}


@dataclass(frozen=True)
class Flavour:
    family: str
    head: str
    confidence: bool = True
    with_markov: bool = True
    bias: bool = False
    draft_vocab: int = 0
    short_w1: bool = False
    lighter: bool = False
    variable: bool = False
    candidates: int = 0
    design: str = "dspark"
    maps: bool = False


def write_drafter(folder: Path, target: Path, flavour: Flavour, seed: int = 0) -> Path:
    """A random drafter for this target: of two layers, or one where the design has one."""
    config: dict[str, Any] = json.loads((target / "config.json").read_text())
    num_layers = 2 if flavour.design == "dspark" else 1
    config |= {
        "architectures": [_PREFIXES[flavour.family] + _SUFFIXES[flavour.design]],
        "num_target_layers": config["num_hidden_layers"],
        "num_hidden_layers": num_layers,
        "layer_types": ["full_attention"] * num_layers,
        "intermediate_size": 80,
        "max_position_embeddings": 700,
        "target_layer_ids": [1] if flavour.design == "mtp" else [-1, 1],
        "attention_bias": flavour.bias,
        "dspark_serve": {"trained": "never"},
    }
    if flavour.design == "dspark":
        config |= {
            "block_size": GAMMA,
            "mask_token_id": 3,
            "markov_rank": 0 if flavour.head == "none" else 8,
            "markov_head_type": flavour.head,
            "enable_confidence_head": flavour.confidence,
            "confidence_head_with_markov": flavour.confidence and flavour.with_markov,
            "variable_block": flavour.variable,
        }
    else:
        config["ttt_length"] = GAMMA
    arch = parse_drafter(config, "config.json")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for tensor, shapes in drafter_shapes(arch, flavour.draft_vocab or None).items():
        shape = shapes[-1] if flavour.short_w1 else shapes[0]
        scale = 0.3 if len(shape) > 1 else 0.2
        tensors[tensor] = torch.randn(shape, generator=generator) * scale + (1.0 if "norm" in tensor else 0.0)
    if flavour.lighter:
        del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    if flavour.draft_vocab:
        chosen = torch.randperm(arch.decoder.vocab_size, generator=generator)[: flavour.draft_vocab]
        ids = chosen.sort().values
        tensors |= vocabulary_maps(ids, arch.decoder.vocab_size) if flavour.maps else {"draft_vocab_ids": ids}
    write_checkpoint(folder, config, tensors)
    return folder


class DenseTwin:
    """The reference forward for one request: no cache, no batch, every product on its own. float32."""

    def __init__(self, folder: Path, target: Path) -> None:
        checkpoint = load_checkpoint(folder, target, torch.float32, torch.device("cpu"))
        self.arch, self.w, self.vocabulary = checkpoint.arch, checkpoint.tensors, checkpoint.draft_vocab_ids

    def linear(self, name: str, x: Tensor) -> Tensor:
        out = x @ self.w[f"{name}.weight"].T
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.arch.decoder.rms_norm_eps).rsqrt() * self.w[f"{name}.weight"]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [S, heads, hd]"""
        half = x.shape[-1] // 2
        angles = positions[:, None] / self.arch.decoder.rope_theta ** (torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def block(self, features: Tensor, anchor_id: int, num_slots: int) -> Tensor:
        """features [start, m d] -> hidden states of the block [num_slots, d] after the last norm."""
        decoder = self.arch.decoder
        hd, start = decoder.head_dim, len(features)
        context = self.norm("hidden_norm", features @ self.w["fc.weight"].T)
        ids = torch.tensor([anchor_id] + [self.arch.mask_token_id] * (num_slots - 1))
        h = self.w["embed_tokens.weight"][ids]
        positions = torch.arange(start + num_slots)
        for i in range(decoder.num_layers):
            at = f"layers.{i}.self_attn"
            x = self.norm(f"layers.{i}.input_layernorm", h)
            rows = torch.cat((context, x))
            q = self.linear(f"{at}.q_proj", x).view(-1, decoder.num_heads, hd)
            k = self.linear(f"{at}.k_proj", rows).view(-1, decoder.num_kv_heads, hd)
            v = self.linear(f"{at}.v_proj", rows).view(-1, decoder.num_kv_heads, hd)
            if decoder.qk_norm:
                q, k = self.norm(f"{at}.q_norm", q), self.norm(f"{at}.k_norm", k)
            q, k = self.rotate(q, positions[start:]), self.rotate(k, positions)
            group = decoder.num_heads // decoder.num_kv_heads
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            law = (torch.einsum("qhd,khd->hqk", q, k) * hd**-0.5).softmax(-1)
            h = h + self.linear(f"{at}.o_proj", torch.einsum("hqk,khd->qhd", law, v).flatten(1))
            x = self.norm(f"layers.{i}.post_attention_layernorm", h)
            gated = torch.nn.functional.silu(self.linear(f"layers.{i}.mlp.gate_proj", x))
            h = h + self.linear(f"layers.{i}.mlp.down_proj", gated * self.linear(f"layers.{i}.mlp.up_proj", x))
        return self.norm("norm", h)

    def logits(
        self, features: Tensor, token_ids: list[int], drawn: list[int], num_slots: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Base and corrected logits [w, Vd] and confidence logits [w] of the slots after `token_ids`, the last of which is
        the anchor, given what was really drawn at them."""
        hidden = self.block(features, token_ids[-1], num_slots)[: len(drawn)]
        return self.walk(hidden, token_ids[-1], drawn)

    def embedding(self, token_id: int) -> Tensor:
        w1 = self.w["markov_head.markov_w1.weight"]
        if self.vocabulary is None or len(w1) == self.arch.decoder.vocab_size:
            return w1[token_id]
        column = (self.vocabulary == token_id).nonzero()
        return w1[int(column) if len(column) else len(self.vocabulary)]

    def walk(self, hidden: Tensor, anchor_id: int, drawn: list[int]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Base logits, corrected logits [w, Vd] and confidence logits [w], each slot after the token really drawn before."""
        base = hidden @ self.w["lm_head.weight"].T
        previous, state = anchor_id, torch.zeros(self.arch.markov_rank)
        corrected, confidence = [], []
        for k in range(len(drawn)):
            h, logits, seen = hidden[k], base[k], hidden[k]
            if self.arch.markov_rank:
                e = self.embedding(previous)
                u = e
                if self.arch.head_type == "gated":
                    u = self.linear("markov_head.gate_proj", torch.cat((h, e))).sigmoid() * e
                elif self.arch.head_type == "rnn":
                    gate, new, output = self.linear("markov_head.joint_proj", torch.cat((state, e, h))).chunk(3)
                    state = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh()
                    u = output.tanh()
                logits = logits + self.w["markov_head.markov_w2.weight"] @ u
                seen = torch.cat((h, e)) if self.arch.confidence_with_markov else h
            corrected.append(logits)
            if self.arch.has_confidence:
                confidence.append(self.linear("confidence_head.proj", seen)[0])
            previous = drawn[k]
        return base, torch.stack(corrected), torch.stack(confidence) if confidence else None

    def law(self, base: Tensor, corrected: Tensor, params: SamplingParams, candidates: int) -> Tensor:
        """[w, V] probability of each target id: the best candidates by base logit, then the request's transform."""
        law = torch.zeros(len(base), self.arch.decoder.vocab_size)
        for k in range(len(base)):
            columns = (
                base[k].topk(min(candidates, base.shape[1]) if candidates else base.shape[1]).indices.sort().values
            )
            table = SamplingTable.build([params], "cpu")
            probabilities = transform(corrected[k, columns][None], table)[0]
            law[k, columns if self.vocabulary is None else self.vocabulary[columns]] = probabilities
        return law


class ChainTwin(DenseTwin):
    """Eagle3 and MTP: the whole sequence of (token, state before it) again for every draft."""

    def logits(
        self, features: Tensor, token_ids: list[int], drawn: list[int], num_slots: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        states = [self.state(row) for row in features]
        tokens = token_ids[1:]
        logits = []
        for token in drawn:
            hidden = self.run(tokens, torch.stack(states))
            logits.append(self.norm("norm", hidden) @ self.w["lm_head.weight"].T)
            states, tokens = [*states, hidden], [*tokens, token]
        return torch.stack(logits), torch.stack(logits), None

    def state(self, features: Tensor) -> Tensor:
        return self.w["fc.weight"] @ features if self.arch.design == "eagle3" else features

    def run(self, tokens: list[int], states: Tensor) -> Tensor:
        """Output of the layer [d] at the last of these tokens, each paired with the state before it [n, d]."""
        decoder, at = self.arch.decoder, "layers.0.self_attn"
        embeddings = self.w["embed_tokens.weight"][tokens]
        if self.arch.design == "eagle3":
            h = states
            pair = (self.norm("layers.0.input_layernorm", embeddings), self.norm("layers.0.hidden_norm", states))
            x = torch.cat(pair, dim=-1)
        else:
            pair = (self.norm("enorm", embeddings), self.norm("hnorm", states))
            h = torch.cat(pair, dim=-1) @ self.w["eh_proj.weight"].T
            x = self.norm("layers.0.input_layernorm", h)
        n, group = len(tokens), decoder.num_heads // decoder.num_kv_heads
        q, k, v = (self.linear(f"{at}.{p}_proj", x).view(n, -1, decoder.head_dim) for p in "qkv")
        if decoder.qk_norm:
            q, k = self.norm(f"{at}.q_norm", q), self.norm(f"{at}.k_norm", k)
        q, k = self.rotate(q, torch.arange(n)), self.rotate(k, torch.arange(n))
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * decoder.head_dim**-0.5
        law = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf")).softmax(-1)
        h = h + self.linear(f"{at}.o_proj", torch.einsum("hqk,khd->qhd", law, v).flatten(1))
        x = self.norm("layers.0.post_attention_layernorm", h)
        gated = torch.nn.functional.silu(self.linear("layers.0.mlp.gate_proj", x))
        return (h + self.linear("layers.0.mlp.down_proj", gated * self.linear("layers.0.mlp.up_proj", x)))[-1]


def twin_of(folder: Path, target: Path) -> DenseTwin:
    twin = DenseTwin(folder, target)
    return twin if twin.arch.design == "dspark" else ChainTwin(folder, target)
