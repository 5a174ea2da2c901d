"""From logits to a law over tokens, and from a law to a token. The one transform that drafter and verifier share.

Shapes: B rows; V columns, which are the vocabulary (verifier) or the drafter's candidates. A `SamplingTable` has one
row per row of logits. Laws are float32 (float64 for float64 logits), whatever the logits are. Knows no drafts: judging
them is acceptance.py's. Randomness enters as a generator, or as (seed, output position) through noise.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verifier import native
from verifier.noise import BLOCK_ID, TAIL_ID, keyed_gumbel, row_keys
from verifier.sampling_table import SamplingTable
from verifier.truncation import truncate
from verifier.wide_rows import NARROW, as_blocks, block_of_each, columns_of_each, find_between

# Tokens below this probability share one noise in a seeded draw over a wide row: at most 1 / _HEAD_FLOOR tokens
# need their own. With K draft candidates at most K * _HEAD_FLOOR of mass is not coupled to the draft.
_HEAD_FLOOR = 2.0**-13


def transform(logits: Tensor, table: SamplingTable, *, token_ids: Tensor | None = None) -> Tensor:
    """The law of each row, [B, V], rows sum to 1: temperature, then top-k, then top-p, then min-p, renormalised.

    Each cut keeps a prefix of the tokens in order of probability (ties: lower column first): the first top_k; the
    fewest whose share of what top-k kept reaches top_p; those with at least min_p times the largest probability. The
    most likely token always stays. Greedy rows are one-hot at the largest logit (ties: lowest token id; token_ids
    [B, V] names the columns, None is 0..V-1). A row with NaN, +inf or only -inf gives NaN or nonsense: see `peak`.
    """
    if table.all_greedy:
        return _one_hot(logits, token_ids)
    law = _soften(logits, table)
    if table.any_truncated:
        law = truncate(law, table)
    if table.any_greedy:
        rows = table.greedy_rows
        law[rows] = _one_hot(logits[rows], None if token_ids is None else token_ids[rows])
    return law


def peak(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit of each row and its column (ties: lowest), both [B]. The value is finite iff the row has a law."""
    found = native.peak(logits)
    if found is not None:
        return found
    logits = _widen(logits)
    if logits.shape[-1] <= NARROW:
        narrow = logits.max(dim=-1)
        return narrow.values, narrow.indices
    blocks = as_blocks(logits)
    best = blocks.amax(dim=-1).max(dim=-1)
    inside = block_of_each(blocks, best.indices).max(dim=-1).indices
    return best.values, best.indices * blocks.shape[-1] + inside


def pick(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """One column per row, int64 [B], drawn in proportion to weights [B, V] >= 0; a zero weight is never picked."""
    noise = torch.rand(weights.shape[0], 2, dtype=torch.float64, device=weights.device, generator=generator)
    if weights.shape[-1] <= NARROW:
        return _invert(weights, noise[:, 0])
    blocks = as_blocks(weights)
    block = _invert(blocks.sum(dim=-1), noise[:, 0])
    return block * blocks.shape[-1] + _invert(block_of_each(blocks, block), noise[:, 1])


def seeded_pick(logits: Tensor, table: SamplingTable, positions: Tensor) -> Tensor:
    """The token of each seeded row, int64 [B]: a function of its logits, seed and output position (int64 [B]) alone.

    Over seeds its law is exactly `transform(logits, table)`.
    """
    return _race(transform(logits, table), row_keys(table.seed_key_tensor, positions), None)


def draw(
    logits: Tensor,
    token_ids: Tensor | None,
    table: SamplingTable,
    positions: Tensor,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor | None]:
    """One drafted token per row, int64 [B], and the law [B, V] float32 it came from (None when no row needs it).

    token_ids: [B, V] the candidates' ids, None is 0..V-1. positions: int64 [B] output position of the drafted token.
    Greedy rows take the largest logit (ties: lowest id). Seeded rows use the very noise of `seeded_pick`, so that draft
    and target agree wherever their laws allow. All others are drawn from exactly the float32 numbers returned.
    """
    if table.all_greedy:
        return _named(_top_column(logits, token_ids), token_ids), None
    law = transform(logits, table, token_ids=token_ids).to(torch.float32)
    if table.all_seeded:
        columns = _race(law, row_keys(table.seed_key_tensor, positions), token_ids)
        return _named(columns, token_ids), None
    columns = pick(law, generator)
    if table.any_seeded:
        rows = table.seeded_rows
        keys = row_keys(table.seeded_table.seed_key_tensor, positions[rows])
        columns[rows] = _race(law[rows], keys, None if token_ids is None else token_ids[rows])
    return _named(columns, token_ids), law if table.any_unseeded else None


def _named(columns: Tensor, token_ids: Tensor | None) -> Tensor:
    return columns if token_ids is None else token_ids.gather(-1, columns[:, None])[:, 0].to(torch.int64)


# --- laws


def _soften(logits: Tensor, table: SamplingTable) -> Tensor:
    """softmax(logits / T). The peak is subtracted before the division, so a small T costs no precision."""
    logits = _widen(logits)
    if not table.plain_temperature:
        logits = (logits - logits.amax(dim=-1, keepdim=True)).div_(table.temperature_tensor.to(logits.dtype)[:, None])
    return logits.softmax(dim=-1)


def _widen(logits: Tensor) -> Tensor:
    """float32, or float64 as it is: half-precision reductions and softmax are slower than the copy."""
    return logits if logits.dtype == torch.float64 else logits.to(torch.float32)


def _top_column(logits: Tensor, token_ids: Tensor | None) -> Tensor:
    if token_ids is None:
        return peak(logits)[1]
    is_top = logits == logits.amax(dim=-1, keepdim=True)
    return torch.where(is_top, token_ids, torch.iinfo(token_ids.dtype).max).argmin(dim=-1)


def _one_hot(logits: Tensor, token_ids: Tensor | None) -> Tensor:
    logits = _widen(logits)
    return torch.zeros_like(logits).scatter_(-1, _top_column(logits, token_ids)[:, None], 1.0)


# --- draws


def _invert(weights: Tensor, noise: Tensor) -> Tensor:
    """The column where the running share of weights [B, M] passes noise [B] in [0, 1)."""
    reached = weights.cumsum(dim=-1, dtype=torch.float64)
    total = reached[:, -1]
    goal = torch.minimum(noise * total, total.nextafter(torch.zeros_like(total)))
    return (reached <= goal[:, None]).sum(dim=-1).clamp_max(weights.shape[-1] - 1)


def _race(law: Tensor, keys: Tensor, token_ids: Tensor | None, head_floor: float = _HEAD_FLOOR) -> Tensor:
    """The column that wins log p + Gumbel(key, token id), int64 [B]; exactly distributed as law [B, V].

    In a wide row only the head (tokens from head_floor up) races one by one. The tail enters as one pseudo-token with
    the sum of its mass and a noise of its own; where it wins, its blocks race for the row, then that block's tokens.
    Overwrites the heads of `law`.
    """
    if law.shape[-1] <= NARROW:
        ids = torch.arange(law.shape[-1], device=law.device) if token_ids is None else token_ids
        return _log(law).add_(keyed_gumbel(keys[:, None], ids)).argmax(dim=-1)
    rows, columns = find_between(law, law.new_full(keys.shape, head_floor))
    ids = columns if token_ids is None else token_ids[rows, columns]
    winner, score = _best_of_each(_log(law[rows, columns]).add_(keyed_gumbel(keys[rows], ids)), rows, columns, law)
    law[rows, columns] = 0
    tail = as_blocks(law)
    tail_score = _log(tail.sum(dim=(-2, -1))).add_(keyed_gumbel(keys, torch.tensor(TAIL_ID, device=keys.device)))
    beaten = (tail_score > score).nonzero()[:, 0]
    if len(beaten):
        winner[beaten] = _race_tails(tail[beaten], keys[beaten], None if token_ids is None else token_ids[beaten])
    return winner


def _best_of_each(scores: Tensor, rows: Tensor, columns: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
    """Column and score of the best entry [N] of each row of law, both [B]; a row without an entry scores -inf."""
    best = scores.new_full(law.shape[:1], -torch.inf).scatter_reduce_(0, rows, scores, "amax")
    last = law.shape[-1] - 1
    candidates = torch.where(scores == best[rows], columns, last)
    return columns.new_full(law.shape[:1], last).scatter_reduce_(0, rows, candidates, "amin"), best


def _race_tails(tail: Tensor, keys: Tensor, token_ids: Tensor | None) -> Tensor:
    """The winning column of each tail [B, N, width], whose head columns are 0."""
    block_ids = BLOCK_ID - torch.arange(tail.shape[1], device=tail.device)
    block = _log(tail.sum(dim=-1)).add_(keyed_gumbel(keys[:, None], block_ids)).argmax(dim=-1)
    columns = columns_of_each(tail, block)
    ids = columns if token_ids is None else token_ids.gather(-1, columns)
    inside = _log(block_of_each(tail, block)).add_(keyed_gumbel(keys[:, None], ids)).argmax(dim=-1)
    return columns.gather(-1, inside[:, None])[:, 0]


def _log(weights: Tensor) -> Tensor:
    return weights.to(torch.float64).log()
