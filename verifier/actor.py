"""The verifier as a plain async class: one device, one thread that computes, an event loop that is never blocked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from scheduler.errors import BadParams, VerifierLost
from scheduler.ports import ROWS_PER_REQUEST
from scheduler.wire import Grammar, Plan, Verdict, VerifierInfo
from verifier.config import VerifierConfig
from verifier.features import CommittedFeatures
from verifier.measure import product_seconds, step_seconds
from verifier.runner import TargetRunner

T = TypeVar("T")

COMPILE_S = 10.0
_COMPILERS = 2


class VerifierWorker:
    """Implements scheduler.ports.Verifier.

    executor: one-thread pool shared by everything that computes in this process. Each thread that calls torch brings its own
    OpenMP team, and two teams on the same cores make steps ten times slower.
    """

    def __init__(self, config: VerifierConfig, executor: ThreadPoolExecutor | None = None) -> None:
        self._config = config
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="verifier")
        self._owns_executor = executor is None
        self._runner: TargetRunner | None = None
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="grammar")

    async def start(self) -> None:
        """Loads the target; raises SettingsError when it cannot."""
        runner = await self._compute(lambda: TargetRunner(self._config))
        await self._compute(runner.grammars.prepare)
        self._runner = runner

    async def describe(self) -> VerifierInfo:
        return self._loaded().describe()

    async def progress(self) -> int:
        return self._loaded().progress

    async def verify(self, plan: Plan) -> tuple[list[Verdict], CommittedFeatures | None]:
        runner = self._loaded()
        return await self._compute(lambda: runner.verify(plan))

    async def check_grammar(self, grammar: Grammar) -> None:
        """In a thread of its own, so that steps go on; what takes longer than COMPILE_S is refused."""
        compiling = asyncio.get_running_loop().run_in_executor(
            self._compilers, self._loaded().grammars.compile, grammar
        )
        try:
            await asyncio.wait_for(compiling, COMPILE_S)
        except TimeoutError:
            raise BadParams(
                f"the grammar was not compiled within {COMPILE_S:g} s; make it simpler", "response_format"
            ) from None

    async def measure(
        self, num_tokens: Sequence[int], context_lens: Sequence[int], rows_per_request: int = ROWS_PER_REQUEST
    ) -> list[list[float]]:
        runner = self._loaded()
        return await self._compute(lambda: step_seconds(runner, num_tokens, context_lens, rows_per_request))

    async def measure_products(self, num_tokens: Sequence[int]) -> list[float]:
        """Seconds of a step's matrix products alone: what no step can undercut."""
        runner = self._loaded()
        return await self._compute(lambda: product_seconds(runner, num_tokens))

    async def stop(self) -> None:
        self._runner = None
        self._compilers.shutdown(wait=False, cancel_futures=True)
        if self._owns_executor:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _loaded(self) -> TargetRunner:
        if self._runner is None:
            raise VerifierLost("the verifier has not been started")
        return self._runner

    async def _compute(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
