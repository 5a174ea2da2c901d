"""The loop: draft -> plan -> verify -> apply, then emit. Owns the order of things, time, and what happens when a worker fails.

A lost drafter means plain decoding until it is back. A lost verifier means that everyone is recomputed once it is back, or
fails when it stays away too long. A fault of our own fails the requests it touched, and the loop goes on. Must not know what a
plan is made of.

With pipeline_depth 2, and where it pays, the requests are two cohorts: while one is verified (in flight) the other drafts. Only
the draft overlaps; a cohort is planned after the other one's step was applied, so there is one plan at a time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from scheduler.config import SchedulerConfig
from scheduler.core import PrefixScheduler
from scheduler.errors import InternalFault, ServingError, VerifierLost
from scheduler.links import DrafterLink, VerifierLink
from scheduler.ports import Drafter, Sink, Verifier
from scheduler.proposals import DraftCall
from scheduler.timing import StepSeconds, Timekeeper
from scheduler.wire import Delta, Draft, Plan, Verdict

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_STRIKES = 3
_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 2.0


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that is being verified; began_s: on the clock; draft_s and plan_s: what it took so far."""

    verify: asyncio.Task[tuple[list[Verdict] | None, float]]
    plan: Plan
    began_s: float
    draft_s: float
    plan_s: float


class ServingLoop:
    def __init__(
        self,
        core: PrefixScheduler,
        verifier: Verifier,
        drafter: Drafter | None,
        sink: Sink,
        config: SchedulerConfig,
        clock: Callable[[], float],
    ) -> None:
        self.core = core
        timeout_s = config.worker_timeout_s
        self.verifier = VerifierLink(verifier, timeout_s=timeout_s, on_progress=self._progressed)
        self._something = asyncio.Event()
        self.drafter = DrafterLink(
            drafter, timeout_s=timeout_s, clock=clock, wake=self.wake, on_progress=self._progressed
        )
        self.last_step_s: float | None = None
        self.progress_s = clock()
        self.times = Timekeeper()
        self._sink = sink
        self._config = config
        self._clock = clock
        self._strikes: Counter[str] = Counter()
        self._cohort = 0
        self._flight: _Flight | None = None
        self._changes: list[tuple[Callable[[], None], asyncio.Future[None]]] = []

    async def run(self) -> None:
        """Until cancelled."""
        self.drafter.start()
        while True:
            try:
                await self._wait_for_work()
                if self._overlaps():
                    await self._overlapped_step()
                    continue
                await self._land()
                self._begin()
                if self.core.has_work:
                    await self._step()
            except Exception as fault:
                residents = [live.request.request_id for live in self.core.residency.live.values()]
                logger.exception("a step failed", extra={"request_ids": residents})
                await self._abandon_flight()
                self._emit(self.core.reset(InternalFault(f"the scheduler failed: {fault}")))
            finally:
                await asyncio.sleep(0)

    async def _step(self) -> None:
        """draft -> plan -> verify -> apply, then emit."""
        core, clock = self.core, self._clock
        began = clock()
        call = core.choose_drafts()
        chosen = clock()
        drafts = await self._draft(call)
        drafted = clock()
        plan = core.plan(drafts, drafted)
        planned = clock()
        verdicts = await self._verify(plan)
        verified = clock()
        if verdicts is None:
            return
        self._finish(
            plan,
            core.apply(verdicts),
            StepSeconds(
                began_s=began,
                ended_s=clock(),
                draft_s=drafted - chosen,
                plan_s=chosen - began + planned - drafted,
                verify_s=verified - planned,
                apply_s=clock() - verified,
            ),
        )

    def _overlaps(self) -> bool:
        return self._config.pipeline_depth > 1 and self.core.overlap_pays()

    async def _overlapped_step(self) -> None:
        """One cohort drafts while the other one's step is verified and applied; then it is planned and sent off."""
        core, clock = self.core, self._clock
        self._cohort = 1 - self._cohort
        began = clock()
        call = core.choose_drafts(self._cohort)
        chosen = clock()
        draft = asyncio.create_task(_timed(lambda: self._draft(call), clock))
        try:
            await self._land()
        except asyncio.CancelledError:
            draft.cancel()
            raise
        finally:
            await asyncio.wait({draft})
        drafts, draft_s = draft.result()
        self._begin()
        planning = clock()
        plan = core.plan(drafts, planning, self._cohort)
        if not plan.extensions:
            core.drop_plan()
            if core.has_work:
                await self._step()  # everyone belongs to the other cohort, or has just come
            return
        plan_s = chosen - began + clock() - planning
        verify = asyncio.create_task(_timed(lambda: self._verify(plan), clock))
        self._flight = _Flight(verify, plan, began, draft_s, plan_s)

    async def _land(self) -> None:
        """Waits for the step in flight, if any, and applies it."""
        if self._flight is None:
            return
        flight = self._flight
        verdicts, verify_s = await flight.verify
        self._flight = None
        if verdicts is None:
            return
        began = self._clock()
        deltas = self.core.apply(verdicts)
        applied = self._clock()
        seconds = StepSeconds(flight.began_s, applied, flight.draft_s, flight.plan_s, verify_s, applied - began)
        self._finish(flight.plan, deltas, seconds)

    async def _abandon_flight(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.verify.cancel()
            await asyncio.wait({flight.verify})

    def wake(self) -> None:
        """There may be something to do."""
        self._something.set()

    async def between_steps(self, change: Callable[[], None]) -> None:
        """Runs `change` when no step is under way; raises what it raises."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes.append((change, done))
        self.wake()
        await done

    async def stop(self) -> None:
        """After `run` was cancelled."""
        for _, done in self._changes:
            done.cancel()
        await self._abandon_flight()
        await self.drafter.stop()

    async def _wait_for_work(self) -> None:
        """Returns at once while there is work; when there is none, puts things in order first, then sleeps."""
        if self.core.has_work or self._something.is_set():
            self._something.clear()
            return
        if self.drafter.holds_features or self.drafter.is_due:
            await self._draft(DraftCall())
        self.core.check_integrity()
        self._strikes.clear()
        await self._something.wait()
        self._something.clear()
        self.progress_s = self._clock()

    def _begin(self) -> None:
        """What must happen between steps."""
        for change, done in self._changes:
            _settle(change, done)
        self._changes.clear()
        if (info := self.drafter.take_return()) is not None:
            logger.info("the drafter is back")
            self.core.drafter_back(info)
        self._emit(self.core.expire(self._clock()))

    async def _draft(self, call: DraftCall) -> list[Draft]:
        """The drafts asked for. Features are absorbed with them; without asks, when there is nothing else to do or when many
        have piled up."""
        if not call.asks and not self.drafter.is_due and (self.core.has_work or not self.drafter.holds_features):
            return []
        try:
            drafts = await self.drafter.propose(call)
            self.core.check_drafts(call, drafts)
        except Exception as error:
            self._lose_drafter(error, [ask.request_id for ask in call.asks])
            return []
        return drafts

    async def _verify(self, plan: Plan) -> list[Verdict] | None:
        """None when there are no verdicts to apply, everything having been put right."""
        if not plan.extensions:
            self.core.drop_plan()
            if self.core.has_work:
                raise InternalFault("nothing could be scheduled")
            return None
        try:
            verdicts, features = await self.verifier.verify(plan)
        except Exception as error:
            await self._recover(plan, error)
            return None
        if plan.capture and not self.drafter.lost:
            if features is None:
                self._lose_drafter(InternalFault("the verifier returned no features"), _ids(plan))
            else:
                self.drafter.hold(features, plan.num_tokens)
        return verdicts

    def _lose_drafter(self, error: Exception, request_ids: Sequence[str]) -> None:
        extra = {"request_ids": request_ids}
        logger.warning("decoding without drafts: %s: %s", type(error).__name__, error, extra=extra)
        self.core.drafter_lost()
        self.drafter.lose()

    async def _recover(self, plan: Plan, error: Exception) -> None:
        """After a failed verify: no row can be relied on. Waits for the verifier, at most recover_timeout_s."""
        about = {"request_ids": _ids(plan)}
        logger.warning("the verify step failed: %s: %s", type(error).__name__, error, exc_info=error, extra=about)
        self.verifier.lost = True
        self._emit(self.core.verifier_lost())
        self.drafter.drop_features()
        self._strikes.update(_ids(plan))
        if blamed := [request_id for request_id in _ids(plan) if self._strikes[request_id] >= _MAX_STRIKES]:
            # The worker answers but the same requests fail again and again: they may be the cause.
            for request_id in blamed:
                del self._strikes[request_id]
            self._emit(self.core.fail(blamed, _blame(error)))
        deadline_s = self._clock() + self._config.recover_timeout_s
        delay_s = _FIRST_RETRY_S
        while (left_s := deadline_s - self._clock()) > 0:
            info = await self.verifier.ask(within_s=left_s)
            if info is not None:
                self._emit(self.core.verifier_back(info))
                return
            await asyncio.sleep(min(delay_s, max(0.0, deadline_s - self._clock())))
            delay_s = min(2 * delay_s, _LONGEST_RETRY_S)
            self._emit(self.core.expire(self._clock()))
        waited = f"the target is lost and did not come back within {self._config.recover_timeout_s:g} s"
        self._emit(self.core.fail_all(VerifierLost(waited)))

    def _progressed(self) -> None:
        self.progress_s = self._clock()

    def _forgive(self, deltas: Sequence[Delta]) -> None:
        """Who got a token is past where it failed. A step alone says nothing: a long prompt is computed anew chunk by chunk, and
        the chunks before the one that fails succeed every time."""
        if self._strikes:
            for delta in deltas:
                if delta.token_ids or delta.finish_reason is not None:
                    self._strikes.pop(delta.request_id, None)

    def _emit(self, deltas: Sequence[Delta]) -> None:
        if deltas:
            self._sink.emit(deltas)

    def _finish(self, plan: Plan, deltas: Sequence[Delta], seconds: StepSeconds) -> None:
        """Emits an applied step's deltas and records it."""
        assert self.core.last_step is not None
        self.times.note(plan, seconds)
        self._emit(deltas)
        self._forgive(deltas)
        self.last_step_s = self.progress_s = self._clock()
        stats = dataclasses.replace(
            self.core.last_step,
            draft_s=seconds.draft_s,
            plan_s=seconds.plan_s,
            verify_s=seconds.verify_s,
            apply_s=seconds.apply_s + self.last_step_s - seconds.ended_s,
        )
        self.core.record(stats)
        if self._config.check_integrity:
            self.core.check_integrity()


async def _timed(work: Callable[[], Awaitable[T]], clock: Callable[[], float]) -> tuple[T, float]:
    """The result, and the seconds it took."""
    began = clock()
    return await work(), clock() - began


def _ids(plan: Plan) -> list[str]:
    return [extension.request_id for extension in plan.extensions]


def _blame(error: Exception) -> ServingError:
    if isinstance(error, VerifierLost):
        return error
    return InternalFault(f"the target failed on this request's step: {type(error).__name__}: {error}")


def _settle(change: Callable[[], None], done: asyncio.Future[None]) -> None:
    if done.cancelled():
        return
    try:
        change()
    except Exception as error:
        done.set_exception(error)
    else:
        done.set_result(None)
