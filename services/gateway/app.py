"""The FastAPI application of one gateway replica. It runs the same under Ray Serve and under a bare uvicorn.

Owns the replica's state (engine client, model card, metrics) and the two promises that hold for every path: an error is
always an OpenAI envelope, and a request is served only when the model is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, TypeAlias

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from scheduler.errors import SchedulerLost, ServingError, SettingsError
from services.gateway.access_log import AccessLog, open_writer
from services.gateway.auth import Authentication
from services.gateway.config import GatewayConfig
from services.gateway.errors import error_response, plain_error
from services.gateway.groups import EngineGroups
from services.gateway.guard import Guard
from services.gateway.loaded_model import LoadedModel
from services.gateway.openapi import document
from services.gateway.rate_limiting import RateLimiting
from services.gateway.request_trace import check_tracing
from services.gateway.routes import GENERATING, router
from services.gateway.short_way import ShortWay
from services.gateway.subscription import Scheduler
from services.metrics import GatewayMetrics
from services.model_card import ModelCard

logger = logging.getLogger(__name__)

_ABOUT = (
    "An OpenAI-compatible server whose requests are drafted by a DSpark drafter and verified by the target model. "
    "A parameter that would change an answer is honoured exactly or refused with a 400 that names it."
)


# One engine, or the engine groups by name.
Schedulers: TypeAlias = Scheduler | Mapping[str, Scheduler]


class Gateway:
    """`model` raises SchedulerLost with the reason until the engine is ready. loaded: it is, or there is a `refusal`, of a
    template or tokenizer that no later look finds better."""

    def __init__(self, schedulers: Mapping[str, Scheduler], config: GatewayConfig) -> None:
        self.config = config
        self.client = EngineGroups(schedulers, config)
        self.metrics = GatewayMetrics()
        self.loaded = asyncio.Event()
        self._model: LoadedModel | None = None
        self._reason = "the gateway is starting"
        self.refusal: SettingsError | None = None
        self._loading: asyncio.Task[None] | None = None

    @property
    def served_names(self) -> tuple[str, ...]:
        """The model's own name first. Raises SchedulerLost."""
        return tuple(dict.fromkeys((self.model.card.name, *self.config.served_names)))

    @property
    def model(self) -> LoadedModel:
        if self._model is None:
            raise SchedulerLost(f"not ready: {self._reason}")
        return self._model

    async def await_model(self) -> LoadedModel:
        """The model, waiting a while for an engine that starts: a replica that takes over in a redeploy has none yet. Raises
        SchedulerLost after `connect_timeout_s`."""
        if self._model is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.loaded.wait(), self.config.connect_timeout_s)
        return self.model

    def start(self) -> None:
        self._loading = asyncio.create_task(self._load())

    async def stop(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.wait({self._loading})
        await self.client.stop()

    def _loaded(self, card: ModelCard) -> LoadedModel:
        return LoadedModel.from_card(card, tool_format=self.config.tool_format, reasoning=self.config.reasoning)

    async def _load(self, pause_s: float = 0.25) -> None:
        while self._model is None:
            try:
                card = await self.client.card()
                self._model = await asyncio.to_thread(self._loaded, card)
                self.metrics.model_name = card.name
                self.loaded.set()
                logger.info("serving %s", card.name)
            except SettingsError as error:
                # no later look at the same files finds others
                logger.info("the model cannot be served: %s", error)
                self._reason, self.refusal = str(error), error
                self.loaded.set()
                return
            except ServingError as error:
                self._reason = str(error)
                await asyncio.sleep(pause_s)
            except Exception as error:
                logger.exception("loading the model card failed")
                self._reason = str(error)
                await asyncio.sleep(pause_s * 8)


def create_app(scheduler: Schedulers, config: GatewayConfig, *, request_ids: bool = True) -> FastAPI:
    """`request_ids`: answer with an x-request-id header; Ray Serve adds one itself."""
    gateway = Gateway(scheduler if isinstance(scheduler, Mapping) else {"0": scheduler}, config)

    log = open_writer(config.access_log)
    stop_tracing: Callable[[], None] = lambda: None  # noqa: E731

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gateway.start()
        yield
        await gateway.stop()
        await asyncio.to_thread(stop_tracing)
        if log is not None:
            await asyncio.to_thread(log.close)

    app = FastAPI(
        title="DSpark Serve",
        description=_ABOUT,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.openapi = lambda: _openapi(app, gateway)  # type: ignore[method-assign]
    app.state.gateway = gateway
    app.include_router(router)
    app.add_exception_handler(ServingError, _on_serving_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    # The last one added is the first that a request meets.
    app.add_middleware(ShortWay, endpoints=GENERATING)
    app.add_middleware(RateLimiting, anonymous=config.anonymous_limits, metrics=gateway.metrics)
    app.add_middleware(Authentication, config=config.auth, metrics=gateway.metrics)
    if config.tracing.endpoint:
        stop_tracing = _trace(app, config)
    if log is not None:
        app.add_middleware(AccessLog, write=log.write, prompts=config.access_log.prompts, engine=config.log.engine)
    app.add_middleware(Guard, answers_id=request_ids, stalled_s=config.stalled_s)
    return app


def _trace(app: FastAPI, config: GatewayConfig) -> Callable[[], None]:
    """Returns what sends the last spans."""
    check_tracing(config.tracing)
    from services.gateway.tracing import Tracing, close_provider, open_provider

    provider = open_provider(config.tracing, engine=config.log.engine)
    app.add_middleware(Tracing, provider=provider)
    return lambda: close_provider(provider)


def _openapi(app: FastAPI, gateway: Gateway) -> dict[str, Any]:
    """Examples in it use the model's name, so it is kept once that is known."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    name = gateway.served_names[0] if gateway.loaded.is_set() else "MODEL"
    found = document(app, version("dspark-serve"), name)
    if gateway.loaded.is_set():
        app.openapi_schema = found
    return found


async def _on_serving_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return plain_error(404, f"unknown request URL: {where}", "unknown_url", headers)
    if error.status_code == 405:
        return plain_error(405, f"method not allowed: {where}", "method_not_allowed", headers)
    return plain_error(error.status_code, str(error.detail), "http_error", headers)
