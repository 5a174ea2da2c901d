"""Answers that the target itself writes to prompts, many at a time; on request the target states are kept as they pass by.

Owns the batched decoding for data: a fixed number of rows, each refilled as soon as its answer ends, with cache blocks of
its own. Must not know where prompts come from or what is trained on them.

States cost nothing extra here: a decode step computes exactly what the drafter will read when served.
Shapes: R rows in flight, N prompt tokens of one refill, T positions of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from drafter.train.states import States
from verifier.attention import Span, paged_attention
from verifier.kv import PagedKV, slots_of
from verifier.layers import rms_norm
from verifier.model import Decoder

# Fewer free rows than this wait for company, so that prompts are computed in products of a decent size.
_REFILL_ROWS = 6
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to write. temperature 0 is greedy; the sampling settings are recorded with the answer."""

    prompt_id: str
    domain: str
    prompt_ids: tuple[int, ...]
    temperature: float
    max_tokens: int


@dataclass(slots=True)
class _Row:
    """ids: prompt and answer so far; the last one is not in the cache yet. lse: one entry per answer token."""

    job: Job
    ids: list[int]
    lse: list[float] = field(default_factory=list)

    @property
    def num_answered(self) -> int:
        return len(self.ids) - len(self.job.prompt_ids)


@dataclass(frozen=True, slots=True)
class Written:
    """A finished answer. ids: prompt and answer. states: None unless they are kept."""

    job: Job
    ids: list[int]
    finish_reason: str
    states: States | None


class AnswerWriter:
    """rows: answers in flight. max_len: prompt and answer together. capture: layers whose outputs are kept as states; None
    keeps no states."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        capture: Sequence[int] | None,
        stop_ids: Iterable[int],
        rows: int = 64,
        max_len: int = 512,
        seed: int = 0,
    ) -> None:
        arch, dtype = decoder.arch, decoder.dtype
        self.decoder, self.stop_ids = decoder, frozenset(stop_ids)
        self.capture, self._keep = tuple(capture or ()), capture is not None
        self.max_len = max_len
        self._random = torch.Generator().manual_seed(seed)
        blocks = -(-max_len // _BLOCK)
        self._kv = PagedKV(
            num_layers=arch.num_layers,
            num_blocks=1 + rows * blocks,
            block_size=_BLOCK,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            dtype=dtype,
            device=decoder.device,
        )
        # every row owns its blocks for good; block 0 is padding
        self._tables = np.arange(1, 1 + rows * blocks, dtype=np.int32).reshape(rows, blocks)
        kept = (rows if self._keep else 0, max_len)
        self._features = torch.zeros(*kept, len(self.capture) * arch.hidden_size, dtype=dtype, device=decoder.device)
        self._last = torch.zeros(*kept, arch.hidden_size, dtype=dtype, device=decoder.device)
        self._rows: list[_Row | None] = [None] * rows

    @property
    def num_live(self) -> int:
        return sum(row is not None for row in self._rows)

    def write(self, jobs: Iterable[Job]) -> Iterator[States]:
        """States of finished answers, in the order in which they end."""
        for written in self.answers(iter(jobs)):
            assert written.states is not None, "this writer keeps no states"
            yield written.states

    def answers(self, jobs: Iterator[Job]) -> Iterator[Written]:
        """Finished answers, in the order in which they end. Jobs that leave no room for an answer are skipped. `jobs` is
        asked again after every answer, also when it had none before: an answer may have made the next question."""
        pending: list[Job] = []
        while True:
            wanted = len(self._rows) - len(pending)
            pending += [job for job in islice(jobs, wanted) if len(job.prompt_ids) + 2 <= self.max_len]
            if not pending and not self.num_live:
                return
            free = [index for index, row in enumerate(self._rows) if row is None]
            if pending and (len(free) >= min(_REFILL_ROWS, len(self._rows)) or not self.num_live):
                started = pending[: len(free)]
                del pending[: len(free)]
                yield from self._start(started, free)
            if self.num_live:
                yield from self._step()

    @torch.inference_mode()
    def _start(self, jobs: Sequence[Job], free: Sequence[int]) -> list[Written]:
        """Computes the prompts in one flat batch and samples each first answer token."""
        rows = list(zip(free, jobs, strict=False))
        for index, job in rows:
            self._rows[index] = _Row(job, list(job.prompt_ids))
        lengths = [len(job.prompt_ids) for _, job in rows]
        ids = torch.tensor([token for _, job in rows for token in job.prompt_ids])
        hidden, features = self._forward(
            ids, [(index, 0, length) for (index, _), length in zip(rows, lengths, strict=True)]
        )
        ends = torch.tensor(lengths).cumsum(0) - 1
        last = rms_norm(hidden[ends.to(hidden.device)], self.decoder.norm, self.decoder.arch.rms_norm_eps)
        if self._keep:
            for (index, _), part, length in zip(rows, _split(features, lengths), lengths, strict=True):
                self._features[index, :length] = part
            for (index, _), row, length in zip(rows, last, lengths, strict=True):
                self._last[index, length - 1] = row
        return self._sample([index for index, _ in rows], last)

    @torch.inference_mode()
    def _step(self) -> list[Written]:
        """One token for every live row."""
        live = [index for index, row in enumerate(self._rows) if row is not None]
        lengths = [len(self._row(index).ids) for index in live]
        ids = torch.tensor([self._row(index).ids[-1] for index in live])
        hidden, features = self._forward(ids, [(index, n - 1, 1) for index, n in zip(live, lengths, strict=True)])
        last = rms_norm(hidden, self.decoder.norm, self.decoder.arch.rms_norm_eps)
        if self._keep:
            places = torch.tensor(live), torch.tensor(lengths) - 1
            if features is not None:
                self._features[places] = features
            self._last[places] = last
        return self._sample(live, last)

    def _forward(self, ids: Tensor, parts: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor | None]:
        """ids [N]; parts: (row, first position, number of tokens), in order. Hidden states [N, d] and features."""
        firsts = np.cumsum([0] + [n for _, _, n in parts])
        spans = [
            Span(int(first), n, start, self._tables[row]) for first, (row, start, n) in zip(firsts, parts, strict=False)
        ]
        positions = torch.cat([torch.arange(start, start + n) for _, start, n in parts])
        slots = torch.cat([torch.from_numpy(slots_of(s.block_ids, s.start, s.context_len, _BLOCK)) for s in spans])
        device = self.decoder.device
        ids, positions, slots = ids.to(device), positions.to(device), slots.to(device)
        attend = paged_attention(
            self._kv, self.decoder.rotary, slots, positions, spans, num_heads=self.decoder.arch.num_heads
        )
        return self.decoder.forward(ids, positions, attend, self.capture)

    def _sample(self, rows: Sequence[int], last: Tensor) -> list[Written]:
        """rows: indices of the rows that `last` [len(rows), d] belongs to. Appends one token to each."""
        logits = self.decoder.lm_head(last).float()
        lse = logits.logsumexp(-1).tolist()
        chosen = logits.argmax(-1)
        temperatures = torch.tensor([self._row(index).job.temperature for index in rows])
        sampled = (temperatures > 0).nonzero().squeeze(1)
        if len(sampled):
            at, divisors = sampled.to(logits.device), temperatures[sampled].unsqueeze(1).to(logits.device)
            chosen[at] = self._draw(logits[at] / divisors)
        finished = []
        for index, token, denominator in zip(rows, chosen.tolist(), lse, strict=True):
            row = self._row(index)
            row.ids.append(token)
            row.lse.append(denominator)
            full = row.num_answered >= row.job.max_tokens or len(row.ids) >= self.max_len
            if token in self.stop_ids or full:
                finished.append(self._finish(index, "stop" if token in self.stop_ids else "length"))
        return finished

    def _draw(self, logits: Tensor) -> Tensor:
        """logits [S, V] float32 -> [S] tokens by inverse transform: one uniform a row instead of V."""
        cumulative = logits.softmax(-1).cumsum(-1)
        uniform = torch.rand(len(logits), 1, generator=self._random).to(logits.device) * cumulative[:, -1:]
        return torch.searchsorted(cumulative, uniform, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)

    def _row(self, index: int) -> _Row:
        row = self._rows[index]
        assert row is not None
        return row

    def _finish(self, index: int, reason: str) -> Written:
        row = self._row(index)
        self._rows[index] = None
        return Written(row.job, row.ids, reason, self._states(index, row, reason) if self._keep else None)

    def _states(self, index: int, row: _Row, reason: str) -> States:
        n, prompt_len = len(row.ids), len(row.job.prompt_ids)
        features, last = self._features[index, :n].clone(), self._last[index, :n].clone()
        # the last token was never read by the target; rows left by earlier answers are no states of this one
        features[n - 1], last[n - 1], last[: prompt_len - 1] = 0, 0, 0
        lse = torch.zeros(n)
        lse[prompt_len - 1 : n - 1] = torch.tensor(row.lse)
        return States(
            ids=torch.tensor(row.ids, dtype=torch.int32),
            features=features.cpu(),
            last=last.cpu(),
            lse=lse,
            prompt_len=prompt_len,
            meta={
                "prompt_id": row.job.prompt_id,
                "domain": row.job.domain,
                "temperature": row.job.temperature,
                "max_tokens": row.job.max_tokens,
                "finish_reason": reason,
            },
        )


def _split(features: Tensor | None, lengths: Sequence[int]) -> Sequence[Tensor]:
    return features.split(list(lengths)) if features is not None else [torch.empty(n, 0) for n in lengths]
