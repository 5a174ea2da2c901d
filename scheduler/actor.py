"""The scheduler as a plain async class: takes requests, runs the loop, streams deltas, answers for its health.

Owns the loop's task, the cost curve's file and the mailboxes. Knows neither how its workers are reached nor who wraps it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from scheduler.admit import parse_planner
from scheduler.config import SchedulerConfig, check_config
from scheduler.core import PrefixScheduler
from scheduler.errors import Cancelled, InternalFault, ServingError, ShuttingDown
from scheduler.links import Patience
from scheduler.loop import ServingLoop
from scheduler.mailbox import Mailbox, Subscription
from scheduler.ports import Drafter, Verifier
from scheduler.stats import SchedulerStats
from scheduler.throughput import CostCurve, CurveRejected, load_curve, measure_curve, save_curve, still_holds
from scheduler.validation import check_request
from scheduler.wire import Delta, DrafterInfo, Request, VerifierInfo

logger = logging.getLogger(__name__)

_UNREAD_S = 60.0


class SchedulerActor:
    """curve_path: where the cost curve is kept; None measures it at each start, if the planner uses one.

    curve_key: what this curve depends on beyond the workers' own descriptions (machine, threads, versions).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        verifier: Verifier,
        drafter: Drafter | None,
        *,
        curve_path: str | os.PathLike[str] | None = None,
        curve_key: Mapping[str, str] | str | None = None,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] = lambda phase: None,
    ) -> None:
        """tell: hears what `start` does with the cost curve, when that takes its time."""
        check_config(config)
        self._config = config
        self._verifier = verifier
        self._drafter = drafter
        self._curve_path = curve_path
        self._curve_key = {"machine": curve_key} if isinstance(curve_key, str) else dict(curve_key or {})
        self._curve_note = "none was measured at start"
        self._clock = clock
        self._tell = tell
        self._loop: ServingLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._refusal: ServingError | None = ShuttingDown("the scheduler has not been started")
        self._subscriber_of: dict[str, str] = {}
        self._mailboxes: dict[str, Mailbox] = {}
        self._subscriptions: dict[str, int] = {}
        self._num_subscriptions = 0
        self._unread_since_s: dict[str, float] = {}
        self._quiet = asyncio.Event()

    async def start(self) -> None:
        """Asks the workers what they are, gets the cost curve (measuring it takes some seconds), begins to serve."""
        verifier = await self._verifier.describe()
        drafter = await self._drafter.describe() if self._drafter is not None else None
        curve = await self._find_curve(verifier, drafter)
        core = PrefixScheduler(self._config, verifier, drafter, curve)
        self._loop = ServingLoop(core, self._verifier, self._drafter, self, self._config, self._clock)
        self._task = asyncio.create_task(self._loop.run(), name="scheduler loop")
        self._refusal = None

    async def submit(self, request: Request) -> None:
        """Queues the request; raises Rejected kinds, or ShuttingDown. One with a grammar is queued once that is compiled."""
        self._check(request)
        if request.params.grammar is not None:
            awaited = self.is_subscribed(request.subscriber)
            await self._verifier.check_grammar(request.params.grammar)
            if awaited and not self.is_subscribed(request.subscriber):
                raise Cancelled("the client went away while its grammar was compiled")
        loop = self._running()
        now = self._clock()
        if not loop.core.has_work:
            loop.progress_s = now
        loop.core.add(request, now)
        if request.timed:
            loop.times.begin(request.request_id, now)
        self._subscriber_of[request.request_id] = request.subscriber
        logger.debug("queued: %d prompt tokens", len(request.prompt_ids), extra={"request_ids": (request.request_id,)})
        self._quiet.clear()
        loop.wake()

    async def cancel(self, request_id: str) -> None:
        """Ends the request, at once or after the step it is in; nothing if there is none."""
        self._cancel_now(request_id)

    async def queue_position(self, request_id: str) -> int | None:
        """0 when the request has a place, 1 when it is the next to get one; None when there is no such request."""
        return self._started().core.queue_position(request_id)

    def subscribe(self, subscriber: str) -> Subscription:
        """The deltas of this subscriber's requests, one list per step, from now on and those kept for it.

        Closing it, or cancelling whoever waits for it, cancels its requests. A second subscription of the same name takes
        over from the first, which ends without cancelling anything.
        """
        if subscriber in self._subscriptions:
            self._mailboxes.pop(subscriber).close()
        self._num_subscriptions += 1
        number = self._subscriptions[subscriber] = self._num_subscriptions
        self._unread_since_s.pop(subscriber, None)
        return Subscription(self._mailbox(subscriber), lambda: self._unsubscribe(subscriber, number))

    def end_subscription(self, subscriber: str) -> None:
        """Ends it as if its reader had closed it, for a reader that died: its requests are cancelled."""
        if subscriber in self._subscriptions:
            mailbox = self._mailboxes[subscriber]
            self._unsubscribe(subscriber, self._subscriptions[subscriber])
            mailbox.close()

    def is_subscribed(self, subscriber: str) -> bool:
        return subscriber in self._subscriptions

    async def snapshot(self) -> SchedulerStats:
        loop = self._started()
        refined = loop.core.drafting.prices.curve
        curve = refined.base if refined is not None else None
        now = self._clock()
        stats = loop.core.stats()
        return dataclasses.replace(
            stats,
            trim_off_reason=f"{stats.trim_off_reason}: {self._curve_note}" if stats.trim_off_reason else "",
            curve_loaded=curve is not None,
            curve_from_file=curve is not None and curve.from_file,
            curve_age_s=max(0.0, time.time() - curve.measured_at) if curve is not None else 0.0,
            verifier_alive=not loop.verifier.lost,
            last_step_age_s=now - loop.last_step_s if loop.last_step_s is not None else 0.0,
        )

    async def set_planner(self, planner: str) -> None:
        """Changes the planner between two steps; raises SettingsError."""
        parse_planner(planner)
        loop = self._started()
        await loop.between_steps(lambda: loop.core.set_planner(planner))

    async def check_health(self) -> None:
        """Raises InternalFault when work is queued and no step completes, or the loop has died."""
        loop = self._started()
        if self._task is not None and self._task.done():
            raise InternalFault("the scheduler's loop has ended")
        idle_s = self._clock() - loop.progress_s
        if loop.core.has_work and idle_s > self._config.stall_timeout_s:
            raise InternalFault(f"requests are queued and no step has completed for {idle_s:.0f} s")

    async def drain(self, timeout_s: float) -> bool:
        """Refuses what is new and waits for what runs; whether everything ended in time."""
        self._refusal = ShuttingDown("the server is shutting down; send the request to another one")
        if self._loop is None or not self._loop.core.has_work:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Ends what still runs with ShuttingDown, then every subscription."""
        self._refusal = self._refusal or ShuttingDown("the server is shutting down; send the request to another one")
        if self._loop is not None and self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            await self._loop.stop()
            self.emit(self._loop.core.fail_all(ShuttingDown("the server shut down before the request ended")))
        for mailbox in self._mailboxes.values():
            mailbox.close()

    def emit(self, deltas: Sequence[Delta]) -> None:
        """Sorts a step's deltas into the mailboxes."""
        by_subscriber: defaultdict[str, list[Delta]] = defaultdict(list)
        for delta in self._started().times.stamp(deltas):
            by_subscriber[self._subscriber_of[delta.request_id]].append(delta)
            if delta.finish_reason is not None:
                logger.debug("ended: %s", delta.finish_reason.value, extra={"request_ids": (delta.request_id,)})
                del self._subscriber_of[delta.request_id]
        for subscriber, its_deltas in by_subscriber.items():
            self._mailbox(subscriber).put(its_deltas)
            if subscriber not in self._subscriptions:
                self._unread_since_s.setdefault(subscriber, self._clock())
        if not self._subscriber_of:
            self._quiet.set()
            self._discard_unread()

    def _check(self, request: Request) -> None:
        check_request(request, self._running().core.verifier.vocab_size)

    def _started(self) -> ServingLoop:
        if self._loop is None:
            raise ShuttingDown("the scheduler has not been started")
        return self._loop

    def _running(self) -> ServingLoop:
        if self._refusal is not None:
            raise self._refusal
        return self._started()

    def _cancel_now(self, request_id: str) -> None:
        if self._loop is not None and (delta := self._loop.core.cancel(request_id)) is not None:
            self.emit([delta])

    def _mailbox(self, subscriber: str) -> Mailbox:
        return self._mailboxes.setdefault(subscriber, Mailbox())

    def _unsubscribe(self, subscriber: str, number: int) -> None:
        if self._subscriptions.get(subscriber) != number:
            return
        del self._subscriptions[subscriber]
        for request_id in [r for r, owner in self._subscriber_of.items() if owner == subscriber]:
            self._cancel_now(request_id)
        self._mailboxes.pop(subscriber, None)

    def _discard_unread(self) -> None:
        """Deltas for subscribers that never came; nothing of theirs runs any more."""
        now = self._clock()
        for subscriber, since_s in list(self._unread_since_s.items()):
            if now - since_s > _UNREAD_S:
                del self._unread_since_s[subscriber]
                self._mailboxes.pop(subscriber, None)

    async def _find_curve(self, verifier: VerifierInfo, drafter: DrafterInfo | None) -> CostCurve | None:
        """The saved curve or a fresh one; None, and a note why, when neither can be had: then nothing is trimmed."""
        if self._curve_path is None and not parse_planner(self._config.planner).adaptive:
            return None
        key = self._curve_key | _worker_key(verifier, drafter)
        try:
            if (saved := await self._saved_curve(key, drafter)) is not None:
                return saved
            self._tell("measuring the cost curve")
            curve = await self._measure_curve(verifier, drafter)
        except Exception as error:
            logger.warning("no cost curve, so no draft is trimmed: %s: %s", type(error).__name__, error)
            self._curve_note = f"{type(error).__name__}: {error}"
            return None
        self._save_curve(curve, key)
        return curve

    async def _saved_curve(self, key: Mapping[str, str], drafter: DrafterInfo | None) -> CostCurve | None:
        if self._curve_path is None:
            return None
        try:
            curve = load_curve(self._curve_path, key, width=drafter.width if drafter else 0)
        except CurveRejected as error:
            logger.info("measuring the cost curve: %s", error)
            return None
        self._tell("checking the saved cost curve")
        timed_drafter = self._patient(self._drafter) if self._drafter is not None else None
        if await still_holds(curve, self._patient(self._verifier), timed_drafter):
            return curve
        logger.info("measuring the cost curve: steps take another time now than when it was saved")
        return None

    async def _measure_curve(self, verifier: VerifierInfo, drafter: DrafterInfo | None) -> CostCurve:
        width = drafter.width if drafter else 0
        return await measure_curve(
            self._patient(self._verifier),
            self._patient(self._drafter) if self._drafter is not None else None,
            verifier_info=verifier,
            drafter_info=drafter,
            max_live=self._config.max_live,
            max_step_tokens=self._config.prefill_chunk + self._config.max_live * (width + 1),
        )

    def _patient(self, worker: Verifier | Drafter) -> Patience:
        return Patience(worker, self._config.worker_timeout_s, lambda: None)

    def _save_curve(self, curve: CostCurve, key: Mapping[str, str]) -> None:
        if self._curve_path is None:
            return
        try:
            save_curve(self._curve_path, curve, key)
        except OSError as error:
            logger.warning("the cost curve could not be saved: %s", error)


def _worker_key(verifier: VerifierInfo, drafter: DrafterInfo | None) -> dict[str, str]:
    return {
        "target": verifier.fingerprint,
        "dtype": verifier.dtype,
        "device": verifier.device,
        "drafter": f"{drafter.fingerprint} width {drafter.width}" if drafter else "none",
    }
