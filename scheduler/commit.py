"""The one function through which a request grows, token by token, whatever produced the token.

Owns: stop ids, min_tokens, max_tokens. Must not know drafts: a block of accepted tokens ends where plain decoding would have.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.live import Live
from scheduler.wire import FinishReason


def commit(live: Live, token_id: int) -> FinishReason | None:
    """Appends one output token; the reason when it was the last. A stop id is kept and counted.

    A stop id at an output position below min_tokens does not end the request; the verifier masks it there anyway, unless a
    grammar allows nothing else any more, and then it does end it.
    """
    params = live.request.params
    may_stop = live.num_output >= params.min_tokens or params.grammar is not None
    live.append(token_id)
    if token_id in params.stop_ids and may_stop:
        return FinishReason.STOP
    if live.num_remaining == 0:
        return FinishReason.LENGTH
    return None


def commit_all(live: Live, token_ids: Iterable[int]) -> tuple[tuple[int, ...], FinishReason | None]:
    """Commits until one ends the request; returns what was committed and why it ended. The rest is dropped."""
    committed: list[int] = []
    reason = None
    for token_id in token_ids:
        reason = commit(live, token_id)
        committed.append(token_id)
        if reason is not None:
            break
    return tuple(committed), reason
