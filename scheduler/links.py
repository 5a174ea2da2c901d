"""The workers as the loop sees them: calls that end in bounded time, and the drafter's comings and goings.

Owns the features on their way from the verifier to the drafter, in order. Must not know requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from scheduler.errors import DrafterLost, VerifierLost
from scheduler.ports import Drafter, Features, Verifier
from scheduler.proposals import DraftCall
from scheduler.wire import Draft, DrafterInfo, Plan, Verdict, VerifierInfo

logger = logging.getLogger(__name__)

T = TypeVar("T")

# While nobody drafts, features are handed over in batches: a call per step would cost more than the work in it, and few rows
# cost the drafter nearly as much as many.
_HELD_STEPS = 64
_HELD_TOKENS = 256
_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 30.0
_STEADY_S = 60.0
# How often the drafter is looked at: while nobody drafts, its death shows nowhere else.
_LOOK_S = 5.0


async def bounded(call: Awaitable[T], timeout_s: float) -> T:
    """The call's result; TimeoutError after `timeout_s`. A call cancelled from within is a failed call, not our end."""
    task = asyncio.current_task()
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except asyncio.CancelledError as error:
        if task is not None and task.cancelling():
            raise
        raise ConnectionError("the worker's call was cancelled") from error


class Patience:
    """How long a call may take: as long as its worker makes progress. A worker that stands still, or does not say, for half
    of `timeout_s` is lost, and so is found after `timeout_s` when it hangs from the start."""

    def __init__(self, worker: Drafter | Verifier, timeout_s: float, on_progress: Callable[[], None]) -> None:
        self._worker = worker
        self._look_s = timeout_s / 2
        self._on_progress = on_progress

    async def wait(self, call: Coroutine[Any, Any, T]) -> T:
        """The call's result; raises TimeoutError, the call cancelled. One that is cancelled from within is a failed call."""
        job = asyncio.create_task(call)
        seen: int | None = None
        try:
            while not (await asyncio.wait({job}, timeout=self._look_s))[0]:
                last, seen = seen, await bounded(self._worker.progress(), self._look_s)
                if seen == last:
                    raise TimeoutError
                self._on_progress()
        finally:
            if not job.done():
                job.cancel()
                await asyncio.wait({job}, timeout=self._look_s)
        if job.cancelled():
            raise ConnectionError("the worker's call was cancelled")
        return job.result()

    async def measure(self, rows: Sequence[int], columns: Sequence[int], /, *spread: int) -> list[list[float]]:
        """The worker's `measure`, waited for."""
        return await self.wait(self._worker.measure(rows, columns, *spread))


class DrafterLink:
    """Hands features and asks to the drafter; after a loss asks for it in the background until it answers again. One that does
    not answer a look is due for a call, which finds out."""

    def __init__(
        self,
        drafter: Drafter | None,
        *,
        timeout_s: float,
        clock: Callable[[], float],
        wake: Callable[[], None],
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """timeout_s, on_progress: see Patience."""
        self.lost = False
        self._drafter = drafter
        self._patience = Patience(drafter, timeout_s, on_progress) if drafter is not None else None
        self._timeout_s = timeout_s
        self._clock = clock
        self._wake = wake
        self._features: list[Features] = []
        self._num_tokens = 0
        self._returned: DrafterInfo | None = None
        self._watch: asyncio.Task[None] | None = None
        self._looks: asyncio.Task[None] | None = None
        self._suspected = False
        self._retry_s = _FIRST_RETRY_S
        self._returned_s = clock()

    @property
    def holds_features(self) -> bool:
        return bool(self._features)

    @property
    def is_due(self) -> bool:
        """It must be called though nobody asks for a draft."""
        return self._suspected or len(self._features) >= _HELD_STEPS or self._num_tokens >= _HELD_TOKENS

    def start(self) -> None:
        """Looks after it until `stop`."""
        if self._drafter is not None:
            self._looks = asyncio.create_task(self._look_after(self._drafter))

    def hold(self, features: Features, num_tokens: int) -> None:
        """Keeps what a verify step of `num_tokens` tokens returned for the next propose."""
        self._features.append(features)
        self._num_tokens += num_tokens

    def drop_features(self) -> None:
        self._features = []
        self._num_tokens = 0

    async def propose(self, call: DraftCall) -> list[Draft]:
        """One propose with all features held; raises whatever the drafter raises, or TimeoutError."""
        if self._drafter is None or self._patience is None:
            raise DrafterLost("there is no drafter")
        features, self._suspected = self._features, False
        self.drop_features()
        return await self._patience.wait(self._drafter.propose(call.asks, call.width, features))

    def lose(self) -> None:
        """It is gone: forgets what it was to absorb and begins to ask for it."""
        self.lost, self._suspected = True, False
        self.drop_features()
        steady = self._clock() - self._returned_s > _STEADY_S
        self._retry_s = _FIRST_RETRY_S if steady else min(2 * self._retry_s, _LONGEST_RETRY_S)
        self._watch = asyncio.create_task(self._ask_until_back())

    def take_return(self) -> DrafterInfo | None:
        """What the drafter is, once, after it has come back."""
        returned, self._returned = self._returned, None
        if returned is not None:
            self.lost = False
            self._returned_s = self._clock()
        return returned

    async def stop(self) -> None:
        for task in (self._watch, self._looks):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})

    async def _look_after(self, drafter: Drafter) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if self.lost:
                continue
            try:
                await bounded(drafter.progress(), self._timeout_s)
            except Exception as error:
                logger.info("the drafter does not answer: %s", error)
                self._suspected = not self.lost
                self._wake()

    async def _ask_until_back(self) -> None:
        assert self._drafter is not None
        delay_s = self._retry_s
        while self._returned is None:
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_RETRY_S)
            try:
                self._returned = await bounded(self._drafter.describe(), self._timeout_s)
            except Exception as error:
                logger.info("the drafter is not back yet: %s", error)
        self._wake()


class VerifierLink:
    def __init__(self, verifier: Verifier, *, timeout_s: float, on_progress: Callable[[], None]) -> None:
        """timeout_s, on_progress: see Patience."""
        self.lost = False
        self._verifier = verifier
        self._timeout_s = timeout_s
        self._patience = Patience(verifier, timeout_s, on_progress)

    async def verify(self, plan: Plan) -> tuple[list[Verdict], Features | None]:
        """Raises whatever the verifier raises; VerifierLost when it does not answer in time."""
        try:
            return await self._patience.wait(self._verifier.verify(plan))
        except TimeoutError:
            raise VerifierLost(f"the target made no progress within {self._timeout_s:g} s") from None

    async def ask(self, *, within_s: float) -> VerifierInfo | None:
        """One question whether it is back; None when it does not answer."""
        try:
            info = await bounded(self._verifier.describe(), within_s)
        except Exception as error:
            logger.info("the verifier is not back yet: %s", error)
            return None
        self.lost = False
        return info
