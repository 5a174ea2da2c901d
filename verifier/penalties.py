"""What a request's own parameters and tokens do to its logits, before the temperature: penalties and logit bias.

For a token with raw logit x, c times in the output, seen or not anywhere in prompt and output:

    x = x / repetition_penalty where x > 0 else x * repetition_penalty, if seen      (CTRL, as transformers has it)
    x = x - frequency_penalty * c - presence_penalty * [c > 0]                       (OpenAI)
    x = x + logit_bias

A request's row k is judged as if its drafts 0..k-1 were output already: whether they are is what the rows before it decide, and
row k counts only if they are. Knows no law and no acceptance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scheduler.wire import IntArray, SamplingParams

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_NOTHING = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Judged:
    """One request's consecutive rows of logits: its `drafts` [n] stand between n + 1 rows, the first of which is `first_row`.

    history_ids: prompt, then the `num_output` output tokens; may be None where no penalty looks at it.
    """

    params: SamplingParams
    first_row: int
    drafts: npt.NDArray[np.integer]
    history_ids: IntArray | None
    num_output: int


@dataclass(frozen=True, slots=True)
class _Change:
    """Of the tokens `ids` at `rows`, both [(n + 1) U]: the divisor of positive logits (factor of others) and the summand."""

    rows: Ints
    ids: Ints
    divisor: Floats
    summand: Floats


def changes_logits(params: SamplingParams) -> bool:
    return bool(params.logit_bias) or _looks_back(params)


def penalise(logits: Tensor, requests: Iterable[Judged]) -> None:
    """Changes the rows of these requests in contiguous logits [S, V], in place. Raises ValueError where a history is missing."""
    changes = [_change(request) for request in requests]
    if not changes:
        return
    places = np.concatenate([c.rows * logits.shape[-1] + c.ids for c in changes])
    where = torch.from_numpy(places).to(logits.device)
    divisor = torch.from_numpy(np.concatenate([c.divisor for c in changes]))
    summand = torch.from_numpy(np.concatenate([c.summand for c in changes]))
    flat = logits.view(-1)
    values = flat.index_select(0, where)
    if bool((divisor != 1).any()):
        divisor = divisor.to(logits.device, logits.dtype)
        values = torch.where(values > 0, values / divisor, values * divisor)
    flat.index_copy_(0, where, values.add_(summand.to(logits.device, logits.dtype)))


def change_at(params: SamplingParams, history_ids: IntArray | None, num_output: int) -> tuple[Ints, Floats, Floats]:
    """What happens to the logits of the next token: ids [U], divisors of positive logits (factors of others), summands."""
    change = _change(Judged(params, 0, _NOTHING, history_ids, num_output))
    return change.ids, change.divisor, change.summand


def _looks_back(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1


def _change(request: Judged) -> _Change:
    params, num_rows = request.params, len(request.drafts) + 1
    prompt, output, drafts = _tokens_before(request)
    biased = np.array([token for token, _ in params.logit_bias], dtype=np.int64)
    ids = np.unique(np.concatenate((prompt, output, drafts, biased), dtype=np.int64))
    counts = np.zeros((num_rows, len(ids)), dtype=np.int64)
    np.add.at(counts[0], np.searchsorted(ids, output), 1)
    counts[np.arange(1, len(drafts) + 1), np.searchsorted(ids, drafts)] = 1
    counts = counts.cumsum(axis=0)
    bias = np.zeros(len(ids))
    np.add.at(bias, np.searchsorted(ids, biased), [value for _, value in params.logit_bias])
    return _Change(
        rows=np.repeat(request.first_row + np.arange(num_rows), len(ids)),
        ids=np.tile(ids, num_rows),
        divisor=np.where((counts > 0) | np.isin(ids, prompt), params.repetition_penalty, 1.0).ravel(),
        summand=(bias - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)).ravel(),
    )


def _tokens_before(request: Judged) -> tuple[npt.NDArray[np.integer], ...]:
    """Prompt, output and drafts, as far as a penalty looks at them."""
    if not _looks_back(request.params):
        return _NOTHING, _NOTHING, _NOTHING
    history = request.history_ids
    if history is None or len(history) <= request.num_output:
        raise ValueError("penalties need the history: all known tokens of the request")
    first = len(history) - request.num_output
    prompt = history[:first] if request.params.repetition_penalty != 1 else _NOTHING
    return prompt, history[first:], request.drafts
