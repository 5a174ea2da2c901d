"""Target states recomputed beside training: nothing is stored, the target reads each answer again whenever it is trained on.

Owns the target's pass over whole answers, on a device of its own if there is one, and which answers share a pass. Must not know
how answers were written or what is trained.

Shapes: n tokens of a sequence, N of all sequences of a pass, m captured layers, d hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.train.answers import Answer, AnswerFolder
from drafter.train.states import Spans, States
from drafter.train.states_cache import StatesCache
from scheduler.errors import SettingsError
from verifier.layers import rms_norm
from verifier.model import Decoder

# Tokens of one pass, and rows of the target's logits at a time: [1024, V] in float32 is 200 MB for V = 49,152.
_PASS_TOKENS = 2048
_LOGIT_ROWS = 1024


class FreshStates:
    """Reads like a StatesFolder. capture: layers whose outputs the drafter reads. cache: what is computed is kept there."""

    def __init__(
        self, answers: AnswerFolder, decoder: Decoder, capture: Sequence[int], cache: StatesCache | None = None
    ) -> None:
        if not len(answers):
            raise SettingsError(f"{answers.folder} holds no answers (answers-*.jsonl); run prepare first")
        self.answers, self.decoder, self.capture, self.cache = answers, decoder, tuple(capture), cache
        self.feature_size = len(self.capture) * decoder.arch.hidden_size
        self._ready: dict[str, States] = {}

    @property
    def where(self) -> str:
        return str(self.answers.folder)

    def refresh(self) -> int:
        return self.answers.refresh()

    def named(self) -> list[tuple[str, dict[str, Any]]]:
        return self.answers.named()

    def spans(self, name: str) -> Spans:
        return self.answers.read(name).spans

    def read_named(self, name: str) -> States:
        """Also computes nothing twice that `upcoming` has computed."""
        if name not in self._ready:
            self.upcoming([name])
        return self._ready.pop(name)

    def upcoming(self, names: Sequence[str]) -> None:
        """Computes the first of these sequences in one pass, as many as fit into it, unless the first is there already."""
        if not names or names[0] in self._ready:
            return
        missing: list[Answer] = []
        num_tokens = 0
        for name in names:
            answer = self.answers.read(name)
            if num_tokens and num_tokens + len(answer.ids) > _PASS_TOKENS:
                break
            num_tokens += len(answer.ids)
            found = self.cache.get(name) if self.cache is not None else None
            if found is not None:
                self._ready[name] = found
            elif name not in self._ready:
                missing.append(answer)
        for answer, states in zip(missing, self._compute(missing), strict=True):
            self._ready[answer.prompt_id] = states
            if self.cache is not None:
                self.cache.put(answer.prompt_id, states)

    @torch.no_grad()
    def _compute(self, answers: Sequence[Answer]) -> list[States]:
        if not answers:
            return []
        device, lengths = self.decoder.device, [len(answer.ids) for answer in answers]
        self._check(answers)
        ids = torch.tensor([token for answer in answers for token in answer.ids])
        positions = torch.cat([torch.arange(n) for n in lengths])
        attend = _CausalAttention(lengths, self.decoder)
        hidden, features = self.decoder.forward(ids.to(device), positions.to(device), attend, self.capture)
        assert features is not None
        # an answer token's law stands in the row before it
        firsts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        spans = [(f + s, f + e) for f, a in zip(firsts, answers, strict=False) for s, e in a.spans]
        rows = torch.cat([torch.arange(start - 1, end - 1) for start, end in spans]).to(device)
        normed = rms_norm(hidden.index_select(0, rows), self.decoder.norm, self.decoder.arch.rms_norm_eps)
        last, lse = torch.zeros_like(hidden), torch.zeros(len(ids), device=device)
        last[rows] = normed
        lse[rows] = torch.cat([self.decoder.lm_head(part).float().logsumexp(-1) for part in normed.split(_LOGIT_ROWS)])
        parts = zip(
            answers, ids.split(lengths), features.split(lengths), last.split(lengths), lse.split(lengths), strict=True
        )
        return [
            States(sequence.int(), f.clone(), h.clone(), z.clone(), answer.spans[0][0], answer.meta())
            for answer, sequence, f, h, z in parts
        ]

    def _check(self, answers: Sequence[Answer]) -> None:
        num_ids, max_len = self.decoder.arch.vocab_size, self.decoder.rotary.max_len
        for answer in answers:
            if max(answer.ids) >= num_ids:
                raise SettingsError(
                    f"{self.where}: answer {answer.prompt_id} has token {max(answer.ids)}, this target's vocabulary "
                    f"{num_ids}: it was prepared with another target"
                )
            if len(answer.ids) > max_len:
                raise SettingsError(
                    f"max_len: answer {answer.prompt_id} has {len(answer.ids)} tokens, more than {max_len}"
                )


class _CausalAttention:
    """`attend(layer, qkv)` of whole sequences without a cache."""

    rotates = False

    def __init__(self, lengths: Sequence[int], decoder: Decoder) -> None:
        self._lengths = list(lengths)
        arch = decoder.arch
        self._heads = (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """qkv [N, H + 2 KV, hd], rotated -> [N, H * hd]."""
        return torch.cat([self._sequence(part) for part in qkv.split(self._lengths)])

    def _sequence(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv.transpose(0, 1).split(self._heads)
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)
