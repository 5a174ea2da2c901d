"""The `split` placement: verifier and drafter as Ray actors, a device each, owned by whoever launched them.

The scheduler's process needs no torch here: model files are read where the models are.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from scheduler.ports import ROWS_PER_REQUEST
from scheduler.wire import Draft, DraftAsk, DrafterInfo, Grammar, Plan, Verdict, VerifierInfo
from services.cluster import gpu_shares, log_here, start_ray
from services.engine import NO_DRAFTER, Workers
from services.handles import drafter_port, verifier_port
from services.model_card import ModelCard
from services.settings import Settings
from services.threads import openmp_environment

logger = logging.getLogger(__name__)

VERIFIER_BUNDLE, DRAFTER_BUNDLE = 1, 2


class VerifierProcess:
    """The body of the verifier's actor. Loading is a call of its own, so that its errors arrive as themselves."""

    def __init__(self, settings: Settings) -> None:
        log_here("verifier", settings.log_config())
        self._settings = settings

    async def start(self) -> None:
        from services.workers import start_verifier

        self._worker = await start_verifier(self._settings)
        logger.info("loaded: %s", await self._worker.describe())

    async def describe(self) -> VerifierInfo:
        return await self._worker.describe()

    async def progress(self) -> int:
        return await self._worker.progress()

    async def verify(self, plan: Plan) -> tuple[list[Verdict], Any]:
        """Two Ray results. Features leave the device here: the drafter's process may have another one."""
        try:
            verdicts, features = await self._worker.verify(plan)
        except Exception:
            logger.exception("a step failed", extra={"request_ids": [each.request_id for each in plan.extensions]})
            raise
        return verdicts, features if features is None else _on_host(features)

    async def check_grammar(self, grammar: Grammar) -> None:
        await self._worker.check_grammar(grammar)

    async def measure(
        self, num_tokens: Sequence[int], context_lens: Sequence[int], rows_per_request: int = ROWS_PER_REQUEST
    ) -> list[list[float]]:
        return await self._worker.measure(num_tokens, context_lens, rows_per_request)

    async def card(self, drafter: DrafterInfo | None) -> ModelCard:
        from services.workers import model_card

        return await model_card(self._settings, await self._worker.describe(), drafter)


def _on_host(features: Any) -> Any:
    tensors = {field.name: getattr(features, field.name).cpu() for field in dataclasses.fields(features)}
    return dataclasses.replace(features, **tensors)


class DrafterProcess:
    """The body of the drafter's actor."""

    def __init__(self, settings: Settings, verifier: VerifierInfo) -> None:
        log_here("drafter", settings.log_config())
        self._settings = settings
        self._verifier = verifier

    async def start(self) -> None:
        from services.workers import start_drafter

        worker = await start_drafter(self._settings, self._verifier)
        assert worker is not None
        self._worker = worker
        logger.info("loaded: %s", await worker.describe())

    async def describe(self) -> DrafterInfo:
        return await self._worker.describe()

    async def progress(self) -> int:
        return await self._worker.progress()

    async def propose(self, asks: Sequence[DraftAsk], width: int, *features: Any) -> list[Draft]:
        try:
            return await self._worker.propose(asks, width, [each for each in features if each is not None])
        except Exception:
            logger.exception("a draft failed", extra={"request_ids": [each.request_id for each in asks]})
            raise

    async def measure(self, num_requests: Sequence[int], widths: Sequence[int]) -> list[list[float]]:
        return await self._worker.measure(num_requests, widths)


async def launch_split(settings: Settings) -> Workers:
    """Two actors, in bundles 1 and 2 of the caller's placement group where it has one. They end with the caller, or
    earlier by `stop`. Starts Ray where nobody has."""
    start_ray(settings)
    resources, gpus = settings.resources, gpu_shares(settings, "split")
    spawn = _spawner(VerifierProcess, VERIFIER_BUNDLE, resources.verifier_cpus, gpus["verifier"], settings)
    verifier = verifier_port(spawn, resources.start_timeout_s)
    info = await verifier.describe()
    if settings.drafter_checkpoint() == NO_DRAFTER:
        return Workers(verifier, None, await verifier.card(None), verifier.stop)
    spawn = _spawner(DrafterProcess, DRAFTER_BUNDLE, resources.drafter_cpus, gpus["drafter"], settings, info)
    drafter = drafter_port(spawn, resources.start_timeout_s)
    card = await verifier.card(await drafter.describe())

    async def stop() -> None:
        await drafter.stop()
        await verifier.stop()

    return Workers(verifier, drafter, card, stop)


def _spawner(
    body: type, bundle: int, num_cpus: float, num_gpus: float, settings: Settings, *args: Any
) -> Callable[[], Any]:
    group = get_current_placement_group()
    strategy: Any = "DEFAULT"
    if group is not None:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    options = {
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "scheduling_strategy": strategy,
        "runtime_env": {"env_vars": openmp_environment(settings.threads)},
    }
    return lambda: ray.remote(body).options(**options).remote(settings, *args)
