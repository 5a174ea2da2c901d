"""How probable the target found the tokens that were emitted: log-softmax of its raw logits, at each token's own row.

Raw: before penalties, bias, grammar, temperature and truncation. Only the rows of emitted tokens of requests that ask are
computed. Knows no acceptance: it is told which rows count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scheduler.wire import TokenLogprob
from verifier.wide_rows import as_blocks, find_between


def token_logprobs(
    logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """One entry per row of logits [S, V] that is named: of its token, and of its num_top most probable ones, of equal ones those
    with the lowest ids. What a row gets does not depend on the others."""
    if not rows:
        return []
    device = logits.device
    chosen = logits.index_select(0, torch.tensor(rows, device=device))
    chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
    # in blocks: a whole row's sum would be split among threads where it is the only one
    totals = as_blocks(chosen).logsumexp(dim=-1).logsumexp(dim=-1).tolist()
    of_tokens = chosen.gather(-1, torch.tensor(token_ids, device=device)[:, None])[:, 0].tolist()
    tops = _largest(chosen, [min(count, logits.shape[-1]) for count in num_top])
    # one subtraction for both, so that a token has the same logprob among the most probable ones
    return [
        TokenLogprob(logit - total, tuple((column, other - total) for column, other in top))
        for logit, top, total in zip(of_tokens, tops, totals, strict=True)
    ]


def _largest(values: Tensor, counts: Sequence[int]) -> list[list[tuple[int, float]]]:
    """Columns and values of as many largest of each row [N, V], descending."""
    widest, found = max(counts), [list[tuple[int, float]]() for _ in counts]
    if widest == 0:
        return found
    wanted = torch.tensor(counts, device=values.device)[:, None]
    least = values.topk(widest, dim=-1).values.gather(-1, (wanted - 1).clamp_min(0))
    rows, columns = find_between(values, least.masked_fill(wanted == 0, torch.inf)[:, 0])
    for row, column, value in zip(rows.tolist(), columns.tolist(), values[rows, columns].tolist(), strict=True):
        found[row].append((column, value))
    # sorting keeps equal ones as they are found, by column
    return [sorted(each, key=lambda top: -top[1])[:count] for each, count in zip(found, counts, strict=True)]
