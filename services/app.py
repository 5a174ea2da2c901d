"""The Ray Serve application: which process runs what, on how many devices, and how each starts, stops and is watched.

    Gateway (FastAPI, N replicas, CPU) -> PrefixScheduler (one replica, owns the loop) -> verifier and drafter

`colocated`: the scheduler's replica computes both models itself, on one thread. `split`: the two are Ray actors that the
replica owns, in its placement group, one device each. Import path of the builder: `services.app:build`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from scheduler.errors import SettingsError
from scheduler.stats import SchedulerStats
from scheduler.wire import Draft, DraftAsk, DrafterInfo, Plan, Request, Verdict, VerifierInfo
from services.engine import NO_DRAFTER, Engine, Workers
from services.gateway.app import create_app
from services.gateway.config import GatewayConfig
from services.handles import RemoteScheduler, drafter_port, verifier_port
from services.model_card import ModelCard
from services.settings import Settings, load_settings

logger = logging.getLogger(__name__)

# One subscription per gateway and short calls: no bound of Serve's may refuse what the engine would take.
_SCHEDULER_ONGOING = 100_000
_SHUTDOWN_MARGIN_S = 15.0


class VerifierProcess:
    """The body of the verifier's Ray actor: plain classes inside, started by `start` so that errors have a name."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def start(self) -> None:
        from services.workers import start_verifier

        self._worker = await start_verifier(self._settings)

    async def describe(self) -> VerifierInfo:
        return await self._worker.describe()

    async def verify(self, plan: Plan) -> tuple[list[Verdict], Any]:
        """Two Ray results. Features leave the device here: the drafter's process may have another one."""
        verdicts, features = await self._worker.verify(plan)
        return verdicts, features if features is None else _on_host(features)

    async def measure(self, num_tokens: Sequence[int], context_lens: Sequence[int]) -> list[list[float]]:
        return await self._worker.measure(num_tokens, context_lens)

    async def card(self, drafter: DrafterInfo | None) -> ModelCard:
        """Read where the model's files are."""
        from services.workers import model_card

        return await model_card(self._settings, await self._worker.describe(), drafter)


def _on_host(features: Any) -> Any:
    tensors = {field.name: getattr(features, field.name).cpu() for field in dataclasses.fields(features)}
    return dataclasses.replace(features, **tensors)


class DrafterProcess:
    """The body of the drafter's Ray actor."""

    def __init__(self, settings: Settings, verifier: VerifierInfo) -> None:
        self._settings = settings
        self._verifier = verifier

    async def start(self) -> None:
        from services.workers import start_drafter

        worker = await start_drafter(self._settings, self._verifier)
        assert worker is not None
        self._worker = worker

    async def describe(self) -> DrafterInfo:
        return await self._worker.describe()

    async def propose(self, asks: Sequence[DraftAsk], width: int, *features: Any) -> list[Draft]:
        return await self._worker.propose(asks, width, [each for each in features if each is not None])

    async def measure(self, num_requests: Sequence[int], widths: Sequence[int]) -> list[list[float]]:
        return await self._worker.measure(num_requests, widths)


class PrefixScheduler:
    """The scheduler's replica: an engine behind Serve's calls. Serve restarts it when `check_health` fails, and gives it
    `drain_s` to finish what runs when it has to go."""

    async def __init__(self, settings: Settings, placement: str) -> None:  # type: ignore[misc]
        self._drain_s = settings.gateway.drain_s
        launch = _launch_split if placement == "split" else _launch_here
        self._engine = Engine(settings, launch)
        await self._engine.start()

    async def card(self) -> ModelCard:
        return await self._engine.card()

    async def submit(self, request: Request) -> None:
        await self._engine.submit(request)

    async def cancel(self, request_id: str) -> None:
        await self._engine.cancel(request_id)

    async def subscribe(self, subscriber: str) -> Any:
        async for deltas in self._engine.subscribe(subscriber):
            yield deltas

    async def snapshot(self) -> SchedulerStats:
        return await self._engine.snapshot()

    async def check_health(self) -> None:
        await self._engine.check_health()

    async def __del__(self) -> None:
        await self._engine.drain(self._drain_s)
        await self._engine.stop()


class Gateway:
    """The gateway's replica: the FastAPI application over a handle. Imports no torch."""

    def __init__(self, scheduler: DeploymentHandle, config: GatewayConfig) -> None:
        self._scheduler, self._config = scheduler, config

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(RemoteScheduler(self._scheduler), self._config, request_ids=False)


async def _launch_here(settings: Settings) -> Workers:
    from services.workers import launch_colocated

    return await launch_colocated(settings)


async def _launch_split(settings: Settings) -> Workers:
    """Two Ray actors in bundles 1 and 2 of this replica's placement group. They die with the replica."""
    resources, gpus = settings.resources, gpu_shares(settings, "split")
    spawn = _spawner(VerifierProcess, settings, 1, resources.verifier_cpus, gpus["verifier"], settings)
    verifier = verifier_port(spawn, resources.start_timeout_s)
    info = await verifier.describe()
    if settings.drafter_checkpoint() == NO_DRAFTER:
        return Workers(verifier, None, await verifier.card(None), _no_stop)
    spawn = _spawner(DrafterProcess, settings, 2, resources.drafter_cpus, gpus["drafter"], settings, info)
    drafter = drafter_port(spawn, resources.start_timeout_s)
    return Workers(verifier, drafter, await verifier.card(await drafter.describe()), _no_stop)


async def _no_stop() -> None:
    """Ray ends the actors with the replica that owns them."""


def _spawner(
    body: type, settings: Settings, bundle: int, num_cpus: float, num_gpus: float, *args: Any
) -> Callable[[], Any]:
    group = get_current_placement_group()
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle) if group else "DEFAULT"
    options = {
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "scheduling_strategy": strategy,
        "runtime_env": {"env_vars": thread_environment(settings)},
    }
    return lambda: ray.remote(body).options(**options).remote(*args)


def thread_environment(settings: Settings) -> dict[str, str]:
    """OpenMP of one computing process. Ray would set one thread per reserved core, which here is a fraction. Waiting
    threads sleep at once instead of spinning: the event loop, the gateway and Ray need the cores between two steps."""
    num_threads = settings.threads or len(os.sched_getaffinity(0))
    return {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


def visible_gpus() -> float:
    return float(ray.cluster_resources().get("GPU", 0)) if ray.is_initialized() else 0.0


def resolve_placement(placement: str, num_gpus: float) -> str:
    """`auto`: a device each where there are two, else one process for both."""
    if placement != "auto":
        return placement
    return "split" if num_gpus >= 2 else "colocated"


def gpu_shares(settings: Settings, placement: str) -> dict[str, float]:
    """GPUs of each process that computes; two workers on a cluster with one GPU share it."""
    available = visible_gpus()
    fair = min(1.0, available / 2) if placement == "split" else min(1.0, available)
    wanted = settings.resources
    shares = {"verifier": fair if wanted.verifier_gpus is None else wanted.verifier_gpus}
    if placement == "split":
        shares["drafter"] = fair if wanted.drafter_gpus is None else wanted.drafter_gpus
    return shares


def build(args: Mapping[str, Any] | Settings) -> Application:
    """The application. `args`: the settings tree, as `args:` of a Serve config file; the environment wins over it."""
    settings = args if isinstance(args, Settings) else load_settings(args=args)
    placement = resolve_placement(settings.placement, visible_gpus())
    scheduler = _scheduler_deployment(settings, placement).bind(settings, placement)
    return _gateway_deployment(settings).bind(scheduler, settings.gateway_config())


def _scheduler_deployment(settings: Settings, placement: str) -> Any:
    resources, gpus = settings.resources, gpu_shares(settings, placement)
    options: dict[str, Any] = {
        "num_replicas": 1,
        "max_ongoing_requests": _SCHEDULER_ONGOING,
        "graceful_shutdown_timeout_s": settings.gateway.drain_s + _SHUTDOWN_MARGIN_S,
        "health_check_period_s": 10.0,
        "health_check_timeout_s": 30.0,
    }
    actor: dict[str, Any] = {"num_cpus": resources.scheduler_cpus, "num_gpus": 0}
    if placement == "colocated":
        actor |= {"num_cpus": resources.scheduler_cpus + resources.verifier_cpus, "num_gpus": gpus["verifier"]}
        actor["runtime_env"] = {"env_vars": thread_environment(settings)}
    else:
        options["placement_group_strategy"] = "PACK"
        bundles = [_bundle(resources.scheduler_cpus, 0), _bundle(resources.verifier_cpus, gpus["verifier"])]
        if settings.drafter_checkpoint() != NO_DRAFTER:
            bundles.append(_bundle(resources.drafter_cpus, gpus["drafter"]))
        options["placement_group_bundles"] = bundles
    return serve.deployment(PrefixScheduler).options(**options, ray_actor_options=actor)


def _bundle(num_cpus: float, num_gpus: float) -> dict[str, float]:
    bundle = {"CPU": num_cpus} | ({"GPU": num_gpus} if num_gpus else {})
    if not any(bundle.values()):
        raise SettingsError("resources: a process of the split placement needs some CPU or GPU; set its *_cpus above 0")
    return bundle


def _gateway_deployment(settings: Settings) -> Any:
    gateway = settings.gateway
    return serve.deployment(serve.ingress()(Gateway)).options(
        name="Gateway",
        num_replicas=gateway.replicas,
        max_ongoing_requests=gateway.max_ongoing_requests,
        graceful_shutdown_timeout_s=gateway.drain_s,
        ray_actor_options={"num_cpus": settings.resources.gateway_cpus, "num_gpus": 0},
    )
