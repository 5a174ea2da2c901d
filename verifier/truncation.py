"""Top-k, top-p and min-p cuts of a law, exact, without sorting a vocabulary.

All three keep a prefix of the tokens in order of probability (ties: lower column first), so only the tokens about where
the prefix ends need sorting. Owns the cuts; the order of the whole transform is sampling.py's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verifier.sampling_table import SamplingTable
from verifier.wide_rows import NARROW, as_blocks, find_between, side_by_side, zero_below

# Probabilities are binned by their leading float32 bits: sign, exponent and 6 bits of mantissa.
_BIN_SHIFT = 17
_NUM_BINS = (0x3F800000 >> _BIN_SHIFT) + 1  # the last one holds 1.0
_ROWS_AT_ONCE = 4  # of an int64 index as wide as the vocabulary: more would leave the cache


def truncate(law: Tensor, table: SamplingTable) -> Tensor:
    """law [B, V] cut and renormalised, row by row as the table says. May overwrite `law`."""
    width = law.shape[-1]
    if width <= NARROW:
        return _cut_rows(law, table, table.truncated, _cut_sorted)
    limited = table.truncated & (table.top_k > 0) & (table.top_k < width)
    law = _cut_rows(law, table, limited, _cut_top_k)
    return _cut_rows(law, table, table.truncated & ~limited, _cut_nucleus)


def _cut_rows(
    law: Tensor, table: SamplingTable, chosen: npt.NDArray[np.bool_], cut: Callable[[Tensor, SamplingTable], Tensor]
) -> Tensor:
    if chosen.all():
        return cut(law, table)
    if chosen.any():
        rows = np.flatnonzero(chosen)
        law[table.tensor(rows)] = cut(law[table.tensor(rows)], table.take(rows))
    return law


def _cut_sorted(law: Tensor, table: SamplingTable) -> Tensor:
    """Rows short enough to sort."""
    return _cut_lists(law, torch.arange(law.shape[-1], device=law.device).expand(law.shape), table)


def _cut_top_k(law: Tensor, table: SamplingTable) -> Tensor:
    """Wide rows that top-k bounds: the few tokens not below a bound of the k-th largest are listed and sorted."""
    largest = int(table.top_k.max())
    blocks = as_blocks(law).amax(dim=-1)
    # The k-th largest block maximum is such a bound: k tokens reach it.
    tops = (blocks if largest <= blocks.shape[-1] else law).topk(largest, dim=-1).values
    bound = tops.gather(-1, table.tensor(table.top_k)[:, None] - 1)[:, 0]
    return _cut_lists(law, side_by_side(*find_between(law, bound), len(law)), table)


def _cut_lists(law: Tensor, columns: Tensor, table: SamplingTable) -> Tensor:
    """Cuts applied to listed columns [B, M] (ascending, -1 is none), which hold all that can be kept."""
    probs = law.gather(-1, columns.clamp_min(0)).masked_fill_(columns < 0, 0)
    ordered = probs.sort(dim=-1, descending=True, stable=True)
    probs, columns = ordered.values, columns.gather(-1, ordered.indices).clamp_min_(0)
    top_k = np.where(table.top_k > 0, table.top_k, law.shape[-1])
    probs.masked_fill_(torch.arange(columns.shape[-1], device=law.device) >= table.tensor(top_k)[:, None], 0)
    reached = probs.cumsum(dim=-1, dtype=torch.float64)
    goal = reached[:, -1:] * table.tensor(np.where(table.top_p < 1, table.top_p, np.inf))[:, None]
    least = probs[:, :1] * table.tensor(table.min_p).to(law.dtype)[:, None]
    kept = probs * ((reached - probs < goal) & (probs >= least))
    return torch.zeros_like(law).scatter_add_(-1, columns, kept.div_(kept.sum(dim=-1, keepdim=True)))


def _cut_nucleus(law: Tensor, table: SamplingTable) -> Tensor:
    """Wide rows that only top-p and min-p bound. What lies above the bin where the nucleus ends is kept unsorted."""
    least = law.amax(dim=-1) * table.tensor(table.min_p).to(law.dtype)
    if (table.top_p >= 1).all():
        kept = zero_below(law, least)
        return kept.div_(kept.sum(dim=-1, keepdim=True))
    goal = table.tensor(np.where(table.top_p < 1, table.top_p, np.inf))
    low, high, above = _last_bin(law, goal)
    columns = side_by_side(*find_between(law, low, high), len(law))
    probs = law.gather(-1, columns.clamp_min(0)).masked_fill_(columns < 0, 0)
    probs, order = probs.sort(dim=-1, descending=True, stable=True)
    before = above[:, None] + probs.cumsum(dim=-1, dtype=torch.float64) - probs
    probs.mul_((before < goal[:, None]) & (probs >= least[:, None]))
    kept = zero_below(law, torch.maximum(high, least))
    kept.scatter_add_(-1, columns.gather(-1, order).clamp_min_(0), probs)
    return kept.div_(kept.sum(dim=-1, keepdim=True))


def _last_bin(law: Tensor, goal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The bin of probabilities in which the mass from the top down reaches the goal, each [B]: its bounds (float32,
    low <= p < high) and the mass above it (float64). Where the goal is out of reach: 0, 0 and everything."""
    mass = law.new_zeros(len(law), _NUM_BINS)
    for some_mass, some_rows in zip(mass.split(_ROWS_AT_ONCE), law.split(_ROWS_AT_ONCE), strict=True):
        bins = (_rounded_down(some_rows).view(torch.int32) >> _BIN_SHIFT).clamp_(0, _NUM_BINS - 1).to(torch.int64)
        some_mass.scatter_add_(-1, bins, some_rows)
    reached = mass.flip(-1).cumsum(dim=-1, dtype=torch.float64)
    place = torch.searchsorted(reached, goal[:, None])
    above = reached.gather(-1, (place - 1).clamp_min_(0)).masked_fill_(place == 0, 0)[:, 0]
    last_bin = (_NUM_BINS - 1 - place[:, 0]).to(torch.int32)
    low, high = last_bin.clamp_min(0) << _BIN_SHIFT, last_bin + 1 << _BIN_SHIFT
    return low.view(torch.float32), high.view(torch.float32), above


def _rounded_down(law: Tensor) -> Tensor:
    """float32, never above law, so that law and its bin agree about a bin's bounds."""
    if law.dtype == torch.float32:
        return law
    single = law.to(torch.float32)
    return torch.where(single > law, single.nextafter(torch.zeros_like(single)), single)
