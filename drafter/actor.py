"""The drafter as a plain async class: one device, one thread that computes, an event loop that is never blocked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from drafter.config import DrafterConfig
from drafter.runner import Runner, build_runner
from scheduler.errors import DrafterLost
from scheduler.wire import Draft, DraftAsk, DrafterInfo
from verifier.features import CommittedFeatures

T = TypeVar("T")


class DrafterWorker:
    """Implements scheduler.ports.Drafter.

    executor: one-thread pool shared by everything that computes in this process (two OpenMP teams on the same cores slow
    each other down); None makes one.
    """

    def __init__(self, config: DrafterConfig, executor: ThreadPoolExecutor | None = None) -> None:
        self._config = config
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="drafter")
        self._owns_executor = executor is None
        self._runner: Runner | None = None

    async def start(self) -> None:
        """Loads the drafter; raises SettingsError when it cannot."""
        self._runner = await self._compute(lambda: build_runner(self._config))

    async def describe(self) -> DrafterInfo:
        return self._loaded().describe()

    async def progress(self) -> int:
        return self._loaded().progress

    async def propose(self, asks: Sequence[DraftAsk], width: int, features: Sequence[CommittedFeatures]) -> list[Draft]:
        runner = self._loaded()
        try:
            return await self._compute(lambda: runner.propose(asks, width, features))
        except Exception as error:
            # whatever went wrong, requests can go on without drafts
            raise DrafterLost(f"the drafter failed: {type(error).__name__}: {error}") from error

    async def measure(self, num_requests: Sequence[int], widths: Sequence[int]) -> list[list[float]]:
        runner = self._loaded()
        return await self._compute(lambda: runner.measure(num_requests, widths))

    async def stop(self) -> None:
        self._runner = None
        if self._owns_executor:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _loaded(self) -> Runner:
        if self._runner is None:
            raise DrafterLost("the drafter has not been started")
        return self._runner

    async def _compute(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
