"""How a shut gate waits: when it is asked again, and whether the drafter's context is kept up meanwhile.

Readiness costs even where nobody drafts: the target's states are captured, the drafter absorbs them, the gate is asked (3 to
4 % of a step of 16 requests on the demo model). So a gate that has been shut for long, and clearly, is suspended: nothing is
captured. When drafting seems to pay again, or it is time to look, rows are captured again, and requests draft as soon as they
have a context (Live.has_context). Must not know requests, prices or the gate; steps are the caller's step numbers.
"""

from __future__ import annotations

# Asking the gate costs up to 3 % of a step. Shut it is asked again after so many steps, or when the running answers have become
# more or fewer by over an eighth.
_ASK_AGAIN = 8
_SAME_LOAD = 8
# Rounds (a request's step) that the gate has been shut before it is suspended, for readiness costs by the request, and how far
# from opening it must be: a gate that opens now and then would have to wait for contexts each time.
_SETTLES = 512
_CLEARLY = 0.97
# Suspended it is asked less often, for what it was asked about does not change but with the load.
_ASK_SUSPENDED = 32
# And it looks anew after so many steps: that takes some twenty steps of captured rows and a draft.
_LOOKS_AFTER = 512


class Standby:
    """suspended: nobody needs the drafter's context."""

    def __init__(self) -> None:
        self.suspended = False
        self._asks_at = 0
        self._looks_at = 0
        self._asked_at: int | None = None
        self._shut_rounds = 0
        self._seemed_open = False
        self._load: tuple[int, list[str]] = (0, [])

    def lasts(self, step: int, num_decoding: int, wishes: list[str]) -> bool:
        """Nothing has changed that could open the gate: it was asked not long ago, the load is much the same, and nobody came
        with a wish of his own."""
        count, wished = self._load
        return step < self._asks_at and _SAME_LOAD * abs(num_decoding - count) <= count and wishes == wished

    def opened(self) -> None:
        """The gate was asked and is open."""
        self._asked_at = None

    def interrupted(self) -> None:
        """Another planner decides. What was suspended will still be when one that weighs is back, until it is asked, at once."""
        self._asked_at, self._asks_at = None, 0

    def shut(
        self, step: int, *, margin: float, next_probe: int, may_suspend: bool, num_decoding: int, wishes: list[str]
    ) -> None:
        """The gate was asked and is shut. margin: what drafting would bring over what plain decoding does; next_probe: when it
        wants to be asked whatever happens; may_suspend: nobody drafts even so, or is going to."""
        self._shut_rounds = 0 if self._asked_at is None else self._shut_rounds + num_decoding * (step - self._asked_at)
        self._asked_at = step
        self._load = num_decoding, wishes
        if may_suspend and margin < _CLEARLY and self._shut_rounds >= _SETTLES:
            self.suspended, self._seemed_open = True, False
            self._asks_at, self._looks_at = step + _ASK_SUSPENDED, max(step + _LOOKS_AFTER, next_probe)
        else:
            self._asks_at = min(step + _ASK_AGAIN, next_probe)

    def wakes(self, step: int, *, would_open: bool, num_decoding: int, wishes: list[str]) -> bool:
        """Suspended, it was reckoned whether the gate would open. It takes two such findings to wake: while many prompts are
        computed, few answers run for a moment."""
        self._load = num_decoding, wishes
        self._asks_at = min(step + (_ASK_AGAIN if would_open else _ASK_SUSPENDED), max(step + 1, self._looks_at))
        if would_open and self._seemed_open:
            self.wake()
            self.opened()
        elif step >= self._looks_at:
            self.wake()
        self._seemed_open = would_open
        return not self.suspended

    def wake(self) -> None:
        """Contexts are wanted again."""
        self.suspended = False
