"""Batched, paged, fused drafting against a slow dense twin of the reference forward, over many rounds of random requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drafter.architecture import drafter_shapes, parse_drafter
from drafter.checkpoint import load_checkpoint, write_checkpoint
from drafter.config import DrafterConfig
from drafter.runner import DraftRunner
from scheduler.wire import Draft, DraftAsk, SamplingParams
from verifier.features import CommittedFeatures
from verifier.kv import slots_of
from verifier.sampling import SamplingTable, transform

BLOCK_SIZE = 4
NUM_BLOCKS = 800
GAMMA = 5
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats the small vocabularies here as one too large to be scored whole, where candidates are chosen beforehand."""
    monkeypatch.setattr("drafter.propose.SCORED_WHOLE", 0)


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


FLAVOURS = {
    "qwen3 vanilla, whole vocabulary": Flavour("qwen3", "vanilla"),
    "qwen3 rnn, candidates": Flavour("qwen3", "rnn", candidates=6),
    "qwen3 gated, lighter, reduced vocabulary": Flavour(
        "qwen3", "gated", draft_vocab=40, short_w1=True, lighter=True, candidates=8
    ),
    "llama vanilla, reduced vocabulary, variable block": Flavour(
        "llama", "vanilla", draft_vocab=40, short_w1=True, lighter=True, variable=True, candidates=8
    ),
    "llama rnn with biases, confidence without Markov": Flavour(
        "llama", "rnn", with_markov=False, bias=True, variable=True
    ),
    "llama gated, reduced vocabulary, long W1": Flavour("llama", "gated", draft_vocab=48, candidates=48),
    "qwen2 vanilla without confidence": Flavour("qwen2", "vanilla", confidence=False, bias=True, candidates=12),
    "llama without heads (DFlash)": Flavour("llama", "none", confidence=False, candidates=10),
}


def write_drafter(folder: Path, target: Path, flavour: Flavour, seed: int = 0) -> Path:
    """A random drafter with two layers for this target."""
    config: dict[str, Any] = json.loads((target / "config.json").read_text())
    name = {"qwen3": "Qwen3DSparkModel", "llama": "LlamaDSparkModel", "qwen2": "Qwen2DSparkModel"}[flavour.family]
    config |= {
        "architectures": [name],
        "num_target_layers": config["num_hidden_layers"],
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "intermediate_size": 80,
        "max_position_embeddings": 700,
        "block_size": GAMMA,
        "mask_token_id": 3,
        "target_layer_ids": [-1, 1],
        "markov_rank": 0 if flavour.head == "none" else 8,
        "markov_head_type": flavour.head,
        "enable_confidence_head": flavour.confidence,
        "confidence_head_with_markov": flavour.confidence and flavour.with_markov,
        "variable_block": flavour.variable,
        "attention_bias": flavour.bias,
        "dspark_serve": {"trained": "never"},
    }
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
        tensors["draft_vocab_ids"] = chosen.sort().values
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


@dataclass
class Life:
    """One random request: its block table and the features of its context so far."""

    name: str
    params: SamplingParams
    block_ids: np.ndarray
    features: Tensor
    num_absorbed: int = 0
    anchor_id: int = 1

    def take(self, stop: int) -> CommittedFeatures:
        first, self.num_absorbed = self.num_absorbed, stop
        return CommittedFeatures(
            features=self.features[first:stop],
            slots=torch.from_numpy(slots_of(self.block_ids, first, stop, BLOCK_SIZE)),
            positions=torch.arange(first, stop),
        )

    def ask(self) -> DraftAsk:
        used = self.block_ids[: -(-self.num_absorbed // BLOCK_SIZE)]
        return DraftAsk(self.name, self.anchor_id, self.num_absorbed, used, self.params, output_index=1)


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_p=0.9),
    SamplingParams(temperature=1.3, seed=7),
    SamplingParams(temperature=0.8, top_k=4),
]


def lives(rng: np.random.Generator, width: int, max_len: int) -> list[Life]:
    blocks = rng.permutation(np.arange(1, NUM_BLOCKS)).astype(np.int32)
    per_request = NUM_BLOCKS // len(PARAMS) - 1
    made = []
    for i, params in enumerate(PARAMS):
        table = blocks[i * per_request : (i + 1) * per_request]
        features = torch.from_numpy(rng.normal(size=(max_len, width)).astype(np.float32))
        made.append(Life(str(i), params, table, features, anchor_id=int(rng.integers(64))))
    return made


def assert_like_twin(twin: DenseTwin, life: Life, draft: Draft, width: int, candidates: int) -> None:
    num_slots = width if twin.arch.variable_block else GAMMA
    hidden = twin.block(life.features[: life.num_absorbed], life.anchor_id, num_slots)[:width]
    drawn = draft.token_ids.tolist()
    assert len(drawn) == width
    base, corrected, confidence = twin.walk(hidden, life.anchor_id, drawn)
    law = twin.law(base, corrected, life.params, candidates)
    if life.params.greedy:
        assert drawn == law.argmax(-1).tolist()
    assert (law[torch.arange(width), drawn] > 0).all()
    if confidence is None:
        assert draft.confidence is None
    else:
        np.testing.assert_allclose(draft.confidence, confidence.sigmoid().numpy(), atol=TOLERANCE)
    if life.params.greedy or life.params.seed is not None:
        assert draft.q_ids is None
        return
    assert draft.q_ids is not None
    assert draft.q_probs is not None
    assert draft.q_probs.dtype == np.float32
    ours = torch.zeros_like(law).scatter_(1, torch.from_numpy(draft.q_ids).long(), torch.from_numpy(draft.q_probs))
    torch.testing.assert_close(ours, law, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(draft.q_probs.sum(-1), 1.0, atol=1e-5)


@pytest.mark.parametrize("flavour", FLAVOURS.values(), ids=FLAVOURS.keys())
def test_many_rounds_of_batched_paged_drafting_equal_the_dense_twin(
    flavour: Flavour, tmp_path: Path, write_target: Callable[..., Path]
) -> None:
    target = write_target(tmp_path / "target", flavour.family)
    drafter = write_drafter(tmp_path / "drafter", target, flavour)
    runner = DraftRunner(
        DrafterConfig(
            str(drafter),
            str(target),
            dtype="float32",
            device="cpu",
            candidates=flavour.candidates,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            num_threads=1,
        )
    )
    twin = DenseTwin(drafter, target)
    rng = np.random.default_rng(5)
    requests = lives(rng, 128, 640)
    for round_index in range(10):
        # one request soon has a context so long that it must not share a padded call with the others
        chunks = [60 if life is requests[1] else int(rng.integers(1, GAMMA + 2)) for life in requests]
        active = [life for life in requests if round_index == 0 or rng.random() < 0.7]
        messages = [
            life.take(life.num_absorbed + n) for life, n in zip(requests, chunks, strict=True) if life in active
        ]
        width = int(rng.integers(1, GAMMA + 1))
        drafts = runner.propose([life.ask() for life in active], width, messages)
        assert [d.request_id for d in drafts] == [life.name for life in active]
        for life, draft in zip(active, drafts, strict=True):
            assert_like_twin(twin, life, draft, width, flavour.candidates)
            life.anchor_id = int(rng.integers(64))


def test_context_beyond_one_padded_call_is_split_and_still_right(
    tmp_path: Path, write_target: Callable[..., Path]
) -> None:
    target = write_target(tmp_path / "target", "llama")
    flavour = FLAVOURS["llama vanilla, reduced vocabulary, variable block"]
    drafter = write_drafter(tmp_path / "drafter", target, flavour)
    config = DrafterConfig(
        str(drafter), str(target), "float32", "cpu", flavour.candidates, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE
    )
    runner = DraftRunner(replace(config, num_threads=1))
    twin = DenseTwin(drafter, target)
    requests = lives(np.random.default_rng(1), 128, 640)
    lengths = [3, 630, 0, 610, 17]
    messages = [life.take(n) for life, n in zip(requests, lengths, strict=True)]
    for life, draft in zip(requests, runner.propose([r.ask() for r in requests], GAMMA, messages), strict=True):
        assert_like_twin(twin, life, draft, GAMMA, flavour.candidates)


def test_reused_slots_hold_the_rows_of_the_later_message(tmp_path: Path, write_target: Callable[..., Path]) -> None:
    target = write_target(tmp_path / "target", "llama")
    flavour = FLAVOURS["llama vanilla, reduced vocabulary, variable block"]
    drafter = write_drafter(tmp_path / "drafter", target, flavour)
    config = DrafterConfig(
        str(drafter), str(target), "float32", "cpu", flavour.candidates, num_blocks=40, block_size=BLOCK_SIZE
    )
    runner = DraftRunner(replace(config, num_threads=1))
    twin = DenseTwin(drafter, target)
    first, second = lives(np.random.default_rng(1), 128, 40)[:2]
    first.block_ids = second.block_ids = np.arange(1, 11, dtype=np.int32)
    messages = [first.take(9), second.take(9)]
    (draft,) = runner.propose([second.ask()], GAMMA, messages)
    assert_like_twin(twin, second, draft, GAMMA, flavour.candidates)
