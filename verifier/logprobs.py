"""How probable the target found the tokens that were emitted: log-softmax of its raw logits, at each token's own row.

Raw: before penalties, bias, grammar, temperature and truncation. Only the rows of emitted tokens of requests that ask are
computed. Knows no acceptance: it is told which rows count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scheduler.wire import TokenLogprob


def token_logprobs(
    logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """One entry per row of logits [S, V] that is named: of its token, and of its num_top most probable ones."""
    if not rows:
        return []
    device = logits.device
    chosen = logits.index_select(0, torch.tensor(rows, device=device))
    chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
    total = chosen.logsumexp(dim=-1, keepdim=True)
    of_tokens = (chosen.gather(-1, torch.tensor(token_ids, device=device)[:, None]) - total)[:, 0].tolist()
    widest = min(max(num_top), logits.shape[-1])
    if widest == 0:
        return [TokenLogprob(value) for value in of_tokens]
    top = chosen.topk(widest, dim=-1)
    tops = zip(top.indices.tolist(), (top.values - total).tolist(), strict=True)
    return [
        TokenLogprob(value, tuple(zip(ids[:count], values[:count], strict=True)))
        for value, (ids, values), count in zip(of_tokens, tops, num_top, strict=True)
    ]
