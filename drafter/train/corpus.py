"""Answers that the target itself writes to prompts, many at a time, with the target states kept as they pass by.

Owns the batched decoding for data: a fixed number of rows, each refilled as soon as its answer ends, with a contiguous
cache per row. Must not know where prompts come from or what is trained on them.

The states cost nothing extra here: a decode step computes exactly what the drafter will read when served.
Shapes: R rows in flight, N prompt tokens of one refill, T positions of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.train.states import States
from verifier.layers import rms_norm
from verifier.model import Decoder

# Fewer free rows than this wait for company, so that prompts are computed in products of a decent size.
_REFILL_ROWS = 6
# Columns of the cache that attention reads are rounded up to this, so that shapes repeat.
_COLUMN_STEP = 32


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


class AnswerWriter:
    """rows: answers in flight. max_len: prompt and answer together. capture: layers whose outputs are kept."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        capture: Sequence[int],
        stop_ids: Iterable[int],
        rows: int = 64,
        max_len: int = 512,
        seed: int = 0,
    ) -> None:
        arch, dtype = decoder.arch, decoder.dtype
        self.decoder, self.capture, self.stop_ids = decoder, tuple(capture), frozenset(stop_ids)
        self.max_len = max_len
        self._random = torch.Generator().manual_seed(seed)
        shape = (arch.num_layers, rows, arch.num_kv_heads, max_len, arch.head_dim)
        self._keys, self._values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self._features = torch.zeros(rows, max_len, len(self.capture) * arch.hidden_size, dtype=dtype)
        self._last = torch.zeros(rows, max_len, arch.hidden_size, dtype=dtype)
        self._rows: list[_Row | None] = [None] * rows
        self._row_index = torch.arange(rows)

    @property
    def num_live(self) -> int:
        return sum(row is not None for row in self._rows)

    def write(self, jobs: Iterable[Job]) -> Iterator[States]:
        """Finished answers, in the order in which they end. Jobs that leave no room for an answer are skipped."""
        source = (job for job in jobs if len(job.prompt_ids) + 2 <= self.max_len)
        pending: list[Job] = list(islice(source, len(self._rows)))
        while pending or self.num_live:
            free = [index for index, row in enumerate(self._rows) if row is None]
            if pending and (len(free) >= min(_REFILL_ROWS, len(self._rows)) or not self.num_live):
                started = pending[: len(free)]
                yield from self._start(started, free)
                pending = pending[len(started) :] + list(islice(source, len(started)))
            if self.num_live:
                yield from self._step()

    @torch.inference_mode()
    def _start(self, jobs: Sequence[Job], free: Sequence[int]) -> list[States]:
        """Computes the prompts in one flat batch and samples each first answer token."""
        rows = list(zip(free, jobs, strict=False))
        for index, job in rows:
            self._rows[index] = _Row(job, list(job.prompt_ids))
        lengths = [len(job.prompt_ids) for _, job in rows]
        ids = torch.tensor([token for _, job in rows for token in job.prompt_ids])
        positions = torch.cat([torch.arange(length) for length in lengths])

        def attend(layer: int, qkv: Tensor) -> Tensor:
            parts = qkv.split(lengths)
            return torch.cat([self._attend_prompt(layer, rows[i][0], part) for i, part in enumerate(parts)])

        hidden, features = self.decoder.forward(ids, positions, attend, self.capture)
        last = rms_norm(hidden, self.decoder.norm, self.decoder.arch.rms_norm_eps)
        ends = torch.tensor(lengths).cumsum(0) - 1
        for (index, _), part, length in zip(rows, _split(features, lengths), lengths, strict=True):
            self._features[index, :length] = part
        for (index, _), end, length in zip(rows, ends.tolist(), lengths, strict=True):
            self._last[index, length - 1] = last[end]
        return self._sample([index for index, _ in rows], last[ends])

    def _attend_prompt(self, layer: int, row: int, qkv: Tensor) -> Tensor:
        """qkv [n, H + 2 KV, hd] of one prompt -> [n, H * hd]; writes the row's cache."""
        query, key, value = _heads(qkv, self.decoder.arch.num_heads, self.decoder.arch.num_kv_heads)
        self._keys[layer, row, :, : key.shape[1]] = key
        self._values[layer, row, :, : key.shape[1]] = value
        attended = F.scaled_dot_product_attention(
            query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), is_causal=True, enable_gqa=True
        )
        return attended.squeeze(0).transpose(0, 1).reshape(qkv.shape[0], -1)

    @torch.inference_mode()
    def _step(self) -> list[States]:
        """One token for every live row; rows without an answer compute along and are ignored."""
        arch = self.decoder.arch
        live = [index for index, row in enumerate(self._rows) if row is not None]
        ids = torch.tensor([row.ids[-1] if row else 0 for row in self._rows])
        positions = torch.tensor([len(row.ids) - 1 if row else 0 for row in self._rows])
        columns = min(-(-(int(positions.max()) + 1) // _COLUMN_STEP) * _COLUMN_STEP, self.max_len)
        mask = torch.zeros(len(self._rows), 1, 1, columns, dtype=self.decoder.dtype)
        mask.masked_fill_((torch.arange(columns) > positions.unsqueeze(1))[:, None, None], float("-inf"))

        def attend(layer: int, qkv: Tensor) -> Tensor:
            query, key, value = qkv.split((arch.num_heads, arch.num_kv_heads, arch.num_kv_heads), dim=1)
            self._keys[layer][self._row_index, :, positions] = key
            self._values[layer][self._row_index, :, positions] = value
            return self._attend_step(layer, query * arch.head_dim**-0.5, mask)

        hidden, features = self.decoder.forward(ids, positions, attend, self.capture)
        last = rms_norm(hidden, self.decoder.norm, arch.rms_norm_eps)
        if features is not None:
            self._features[self._row_index, positions] = features
        self._last[self._row_index, positions] = last
        return self._sample(live, last[live] if len(live) < len(self._rows) else last)

    def _attend_step(self, layer: int, query: Tensor, mask: Tensor) -> Tensor:
        """query [R, H, hd] scaled, mask [R, 1, 1, T] -> [R, H * hd].

        Query heads that share a key head become columns of one product. K q^T in this order is three times as fast on a
        CPU as scaled_dot_product_attention with so few queries.
        """
        rows, heads, columns = len(self._rows), self.decoder.arch.num_kv_heads, mask.shape[-1]
        keys = self._keys[layer].flatten(0, 1)[:, :columns]
        values = self._values[layer].flatten(0, 1)[:, :columns]
        folded = query.reshape(rows * heads, -1, query.shape[-1])
        scores = torch.bmm(keys, folded.transpose(1, 2)).transpose(1, 2)
        weights = (scores.reshape(rows, heads, -1, columns) + mask).softmax(-1)
        return torch.bmm(weights.flatten(0, 1), values).reshape(rows, -1)

    def _sample(self, rows: Sequence[int], last: Tensor) -> list[States]:
        """rows: indices of the rows that `last` [len(rows), d] belongs to. Appends one token to each."""
        logits = self.decoder.lm_head(last).float()
        lse = logits.logsumexp(-1).tolist()
        chosen = logits.argmax(-1)
        temperatures = torch.tensor([self._row(index).job.temperature for index in rows])
        sampled = (temperatures > 0).nonzero().squeeze(1)
        if len(sampled):
            chosen[sampled] = self._draw(logits[sampled] / temperatures[sampled].unsqueeze(1))
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
        uniform = torch.rand(len(logits), 1, generator=self._random) * cumulative[:, -1:]
        return torch.searchsorted(cumulative, uniform, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)

    def _row(self, index: int) -> _Row:
        row = self._rows[index]
        assert row is not None
        return row

    def _finish(self, index: int, reason: str) -> States:
        row = self._row(index)
        self._rows[index] = None
        n, prompt_len = len(row.ids), len(row.job.prompt_ids)
        features, last = self._features[index, :n].clone(), self._last[index, :n].clone()
        # the last token was never read by the target; rows left by earlier answers are no states of this one
        features[n - 1], last[n - 1], last[: prompt_len - 1] = 0, 0, 0
        lse = torch.zeros(n)
        lse[prompt_len - 1 : n - 1] = torch.tensor(row.lse)
        return States(
            ids=torch.tensor(row.ids, dtype=torch.int32),
            features=features,
            last=last,
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


def _heads(qkv: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[n, H + 2 KV, hd] -> query [H, n, hd], key and value [KV, n, hd]."""
    query, key, value = qkv.transpose(0, 1).split((num_heads, num_kv_heads, num_kv_heads))
    return query, key, value
