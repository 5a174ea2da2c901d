"""What the loop calls. A port has few async methods; actors, Ray handles and in-process objects all implement it.

`Features` is opaque to the scheduler: in one process it is the tensors themselves, between Ray actors an object reference
that is handed on without being fetched. It holds, for every committed row of the verify step, the target's hidden states
at the captured layers, the KV slot and the position, so the drafter writes its context without knowing requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from scheduler.wire import Delta, Draft, DraftAsk, DrafterInfo, Grammar, Plan, Verdict, VerifierInfo

Features = Any

# Of a step that is timed, as drafts come: a request for so many of its tokens.
ROWS_PER_REQUEST = 8


class Drafter(Protocol):
    async def describe(self) -> DrafterInfo: ...

    async def progress(self) -> int:
        """A number that changes while the worker computes, also within a call. Answers at once, whatever is computed."""
        ...

    async def propose(self, asks: Sequence[DraftAsk], width: int, features: Sequence[Features]) -> list[Draft]:
        """First writes `features` (in order) into the draft KV cache, then drafts up to `width` tokens per ask.

        `asks` may be empty: then only the context is absorbed. One Draft per ask, in order. Raises DrafterLost.
        """
        ...

    async def measure(self, num_requests: Sequence[int], widths: Sequence[int]) -> list[list[float]]:
        """Seconds of one propose: [len(num_requests)][len(widths)], median of real calls. Uses only block 0."""
        ...


class Verifier(Protocol):
    async def describe(self) -> VerifierInfo: ...

    async def progress(self) -> int:
        """As the drafter's."""
        ...

    async def verify(self, plan: Plan) -> tuple[list[Verdict], Features | None]:
        """One forward over all extensions, then acceptance. Verdicts in the order of the extensions. Raises VerifierLost."""
        ...

    async def check_grammar(self, grammar: Grammar) -> None:
        """Compiles it, beside whatever step is under way; raises BadParams when it cannot be followed."""
        ...

    async def measure(
        self, num_tokens: Sequence[int], context_lens: Sequence[int], rows_per_request: int = ROWS_PER_REQUEST
    ) -> list[list[float]]:
        """Seconds of one verify step: [len(context_lens)][len(num_tokens)], median of real steps. Writes only block 0.

        rows_per_request: the tokens are those of as many requests as that makes, each with a context of its own.
        """
        ...


class Sink(Protocol):
    def emit(self, deltas: Sequence[Delta]) -> None:
        """Called once per step with everything it produced, for all requests. Must not block."""
        ...
