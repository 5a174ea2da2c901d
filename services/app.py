"""The Ray Serve application: which process runs what, on how many devices, and how each starts, stops and is watched.

    Gateway (FastAPI, N replicas, CPU) -> PrefixScheduler (one replica, owns the loop) -> verifier and drafter

A scheduler with its two workers is an engine group; there are `groups` of them, each a deployment of its own, behind the gateway.

`colocated`: the scheduler's replica computes both models itself, on one thread. `split`: the two are Ray actors that the
replica owns, in its placement group, one device each. Import path of the builder: `services.app:build`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.exceptions import ActorDiedError, RayError
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from scheduler.errors import ServingError, SettingsError
from scheduler.stats import SchedulerStats
from scheduler.wire import Request
from services import phase
from services.access import check_exposure
from services.cluster import gpu_shares, log_here, resolve_placement, visible_gpus
from services.engine import NO_DRAFTER, Engine, Workers
from services.gateway.app import create_app
from services.gateway.config import GatewayConfig
from services.handles import RemoteScheduler
from services.local_link import Door
from services.model_card import ModelCard
from services.settings import Settings, load_settings
from services.split import launch_split
from services.threads import openmp_environment

logger = logging.getLogger(__name__)

# One subscription per gateway and short calls: no bound of Serve's may refuse what the engine would take.
_SCHEDULER_ONGOING = 100_000
_SHUTDOWN_MARGIN_S = 15.0
SCHEDULER = "PrefixScheduler"
# How often Serve looks whether a replica lives: so long a dead one goes unnoticed.
_LOOK_S = 1.0


class PrefixScheduler:
    """The scheduler's replica: an engine behind Serve's calls. Serve restarts it when `check_health` fails, and gives it
    `drain_s` to finish what runs when it has to go."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]
        log_here("scheduler", settings.log_config())
        self._drain_s = settings.gateway.drain_s
        launch = launch_split if settings.placement == "split" else _launch_here
        here = serve.get_replica_context()
        tell = phase.teller(here.app_name, here.deployment)
        self._engine = Engine(settings, launch, tell)
        try:
            await self._engine.start()
        except Exception as error:
            tell(f"the engine could not start: {error}")
            raise
        self._node_id = ray.get_runtime_context().get_node_id()
        self._door = await self._open_door()

    async def _open_door(self) -> Door | None:
        """For the gateways of this machine; None leaves them to Ray."""
        door = Door(self._engine.refusal, self._engine.cancel)
        try:
            await door.open()
        except OSError as error:
            logger.warning("no link for gateways of this machine, theirs will be Ray's calls: %s", error)
            await door.close()
            return None
        return door

    async def card(self) -> ModelCard:
        return await self._engine.card()

    async def submit(self, request: Request) -> None:
        await self._engine.submit(request)

    async def submit_all(self, requests: Sequence[Request]) -> list[ServingError | None]:
        """Of each request why it was refused; None: it was taken."""
        return [await self._engine.refusal(request) for request in requests]

    async def cancel(self, request_id: str) -> None:
        await self._engine.cancel(request_id)

    async def subscribe(self, subscriber: str, gateway: Any, node_id: str) -> Any:
        """Deltas, a list per step; or, to a gateway on this node, the path of the door they come through, and nothing more
        until the subscription ends. `gateway`: the subscriber's actor. When its process is killed nobody closes this stream,
        so it is watched; a door closes by itself."""
        if self._door is not None and node_id == self._node_id:
            yield self._door.path
            await self._deliver(subscriber, self._door)
            return
        watch = asyncio.create_task(self._end_with(gateway, subscriber))
        try:
            async for deltas in self._engine.subscribe(subscriber):
                yield deltas
        finally:
            watch.cancel()

    async def _deliver(self, subscriber: str, door: Door) -> None:
        """Until the subscription ends or the gateway is gone; then its requests are cancelled."""
        async with door.visit(subscriber) as visitor, contextlib.aclosing(self._engine.subscribe(subscriber)) as lists:
            visitor.when_ended(lambda: self._engine.end_subscription(subscriber))
            async for deltas in lists:
                if visitor.ended.is_set():
                    break
                visitor.send(deltas)
                await visitor.when_writable()

    async def _end_with(self, gateway: Any, subscriber: str) -> None:
        """Otherwise its requests would run on, and the stream would count as one that a drain has to wait for."""
        alive = True
        while alive:
            await asyncio.sleep(_LOOK_S)
            try:
                await gateway.__ray_ready__.remote()
            except ActorDiedError:
                alive = False
            except RayError as error:
                logger.info("the gateway of %s does not answer at present: %s", subscriber, error)
        logger.warning("a gateway died; its requests are cancelled")
        self._engine.end_subscription(subscriber)

    async def queue_position(self, request_id: str) -> int | None:
        return await self._engine.queue_position(request_id)

    async def snapshot(self) -> SchedulerStats:
        return await self._engine.snapshot()

    async def check_health(self) -> None:
        await self._engine.check_health()

    async def __del__(self) -> None:
        await self._engine.drain(self._drain_s)
        await self._engine.stop()
        if self._door is not None:
            await self._door.close()


class Gateway:
    """The gateway's replica: the FastAPI application over a handle. Imports no torch."""

    def __init__(self, schedulers: dict[str, DeploymentHandle], config: GatewayConfig) -> None:
        self._schedulers, self._config = schedulers, config

    def __serve_build_asgi_app__(self) -> Any:
        log_here("gateway", self._config.log)
        schedulers = {name: RemoteScheduler(handle) for name, handle in self._schedulers.items()}
        return create_app(schedulers, self._config, request_ids=False)


async def _launch_here(settings: Settings) -> Workers:
    from services.workers import launch_colocated

    return await launch_colocated(settings)


def build(args: Mapping[str, Any] | Settings) -> Application:
    """The application. `args`: the settings tree, as `args:` of a Serve config file; the environment wins over it."""
    settings = args if isinstance(args, Settings) else load_settings(args=args)
    config = settings.gateway_config()
    check_exposure(settings.gateway.host, config.auth, allowed=settings.gateway.allow_public_without_keys)
    placement = resolve_placement(settings.placement, visible_gpus() / settings.groups)
    # A scheduler is not told how many there are: it need not start anew when that changes.
    own = settings.model_copy(update={"placement": placement, "groups": 1})
    gpus = gpu_shares(settings, placement)
    schedulers = {
        str(group): _scheduler_deployment(own, gpus).options(name=deployment_name(group)).bind(own)
        for group in range(settings.groups)
    }
    return _gateway_deployment(settings).bind(schedulers, config)


def deployment_name(group: int) -> str:
    return f"{SCHEDULER}-{group}" if group else SCHEDULER


def _scheduler_deployment(settings: Settings, gpus: dict[str, float]) -> Any:
    resources = settings.resources
    options: dict[str, Any] = {
        "num_replicas": 1,
        "max_ongoing_requests": _SCHEDULER_ONGOING,
        "graceful_shutdown_timeout_s": settings.gateway.drain_s + _SHUTDOWN_MARGIN_S,
        "health_check_period_s": _LOOK_S,
        "health_check_timeout_s": 30.0,
    }
    actor: dict[str, Any] = {"num_cpus": resources.scheduler_cpus, "num_gpus": 0}
    if settings.placement == "colocated":
        actor |= {"num_cpus": resources.scheduler_cpus + resources.verifier_cpus, "num_gpus": gpus["verifier"]}
        actor["runtime_env"] = {"env_vars": openmp_environment(settings.threads)}
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
        health_check_period_s=_LOOK_S,
        ray_actor_options={"num_cpus": settings.resources.gateway_cpus, "num_gpus": 0},
    )
