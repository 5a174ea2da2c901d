"""One engine group: settings -> workers -> scheduler, and what a gateway asks of it.

The workers may live in this process (services/workers.py) or behind ports that call Ray actors (services/handles.py); the
engine does not know which. Used by the Ray Serve replica, by `dspark serve --no-ray`, `generate`, `measure`, `bench` and
the tests. Knows neither Ray nor HTTP nor torch.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import logging
import os
import platform
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from scheduler.actor import SchedulerActor
from scheduler.errors import InternalFault, SchedulerLost, ServingError
from scheduler.ports import Drafter, Verifier
from scheduler.stats import SchedulerStats
from scheduler.wire import Delta, Request
from services.model_card import ModelCard
from services.settings import Settings

logger = logging.getLogger(__name__)

NO_DRAFTER = "none"


@dataclass(frozen=True, slots=True)
class Workers:
    """What an engine group consists of besides its scheduler. `drafter` is None where nothing drafts."""

    verifier: Verifier
    drafter: Drafter | None
    card: ModelCard
    stop: Callable[[], Awaitable[None]]


Launch = Callable[[Settings], Awaitable[Workers]]


def machine_key(settings: Settings) -> dict[str, str]:
    """What a cost curve depends on beyond the two models: this machine, its threads, the software that computes."""
    return {
        "machine": platform.node(),
        "processor": _processor(),
        "torch": version("torch"),
        "threads": str(settings.threads or len(os.sched_getaffinity(0))),
        "placement": "split" if settings.placement == "split" else "colocated",
    }


def curve_path(settings: Settings, key: dict[str, str]) -> Path:
    parts = [*key.values(), settings.target_path(), settings.drafter_checkpoint(), settings.model.dtype]
    return settings.cache_path / "curves" / f"{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:24]}.json"


def loading_phase(settings: Settings) -> str:
    """What a start does first; of a GGUF file that was never converted, that this takes its time, once."""
    path = Path(settings.target_path())
    if path.suffix.lower() != ".gguf" or any(settings.cache_path.glob(f"{glob.escape(path.stem)}-*/config.json")):
        return "loading the models"
    return (
        f"loading the models (the weights of {path.name} are converted first, once: a minute, on a busy machine more)"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


class Engine:
    """The scheduler of services.gateway.engine.Scheduler, in this process."""

    def __init__(self, settings: Settings, launch: Launch, tell: Callable[[str], None] = lambda phase: None) -> None:
        """tell: hears what the start is doing, and the empty string when it is done. Why it failed is not told but raised."""
        self._settings = settings
        self._launch = launch
        self._tell = tell
        self._workers: Workers | None = None
        self._actor: SchedulerActor | None = None
        self._reason = "the engine has not been started"

    @property
    def actor(self) -> SchedulerActor:
        """Raises SchedulerLost, with the reason, before the engine is ready."""
        if self._actor is None:
            raise SchedulerLost(self._reason)
        return self._actor

    @property
    def workers(self) -> Workers:
        if self._workers is None:
            raise SchedulerLost(self._reason)
        return self._workers

    async def start(self) -> None:
        """Loads both models, checks or measures the cost curve; raises SettingsError when something cannot work."""
        try:
            self._enter(loading_phase(self._settings))
            workers = self._workers = await self._launch(self._settings)
            key = machine_key(self._settings)
            actor = SchedulerActor(
                self._settings.scheduler_config(),
                workers.verifier,
                workers.drafter,
                curve_path=curve_path(self._settings, key),
                curve_key=key,
                tell=self._enter,
            )
            await actor.start()
            self._actor = actor
            logger.info("the engine is ready: %s", workers.card.name)
            self._tell("")
        except Exception as error:
            self._reason = f"the engine could not start: {error}"
            raise

    def _enter(self, phase: str) -> None:
        self._reason = phase
        self._tell(phase)

    async def card(self) -> ModelCard:
        _ = self.actor
        return self.workers.card

    async def submit(self, request: Request) -> None:
        if not self.actor.is_subscribed(request.subscriber):
            raise SchedulerLost("the request's gateway is not subscribed")
        await self.actor.submit(request)

    async def refusal(self, request: Request) -> ServingError | None:
        """Submits; why it was refused, as a value that can travel with those of others."""
        try:
            await self.submit(request)
        except ServingError as error:
            return error.with_traceback(None)
        except Exception:
            logger.exception("a request could not be queued", extra={"request_ids": (request.request_id,)})
            return InternalFault("the request could not be queued")
        return None

    async def cancel(self, request_id: str) -> None:
        await self.actor.cancel(request_id)

    async def queue_position(self, request_id: str) -> int | None:
        """0: it runs; n: the n-th of those waiting; None: there is no such request."""
        return await self.actor.queue_position(request_id)

    async def subscribe(self, subscriber: str) -> AsyncGenerator[list[Delta], None]:
        async with contextlib.aclosing(self.actor.subscribe(subscriber)) as stream:
            yield []
            async for deltas in stream:
                yield deltas

    def end_subscription(self, subscriber: str) -> None:
        """For a subscriber that went without closing its subscription."""
        self.actor.end_subscription(subscriber)

    async def snapshot(self) -> SchedulerStats:
        return await self.actor.snapshot()

    async def check_health(self) -> None:
        await self.actor.check_health()

    async def set_planner(self, planner: str) -> None:
        await self.actor.set_planner(planner)

    async def drain(self, timeout_s: float) -> None:
        """Finishes what runs, refuses what is new."""
        if self._actor is not None:
            await self._actor.drain(timeout_s)

    async def stop(self) -> None:
        actor, self._actor = self._actor, None
        self._reason = "the engine has been stopped"
        if actor is not None:
            await actor.stop()
        if self._workers is not None:
            await self._workers.stop()
            self._workers = None
