"""The FastAPI application of one gateway replica. It runs the same under Ray Serve and under a bare uvicorn.

Owns the replica's state (engine client, model card, metrics) and the two promises that hold for every path: an error is
always an OpenAI envelope, and a request is served only when the model is known.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scheduler.errors import BadParams, SchedulerLost, ServingError
from services.gateway.config import GatewayConfig
from services.gateway.engine import EngineClient, Scheduler
from services.gateway.errors import error_response, plain_error
from services.gateway.openai import ChatRequest
from services.gateway.routes import router
from services.gateway.template import ChatTemplate
from services.gateway.text import Tokenizer
from services.metrics import GatewayMetrics
from services.model_card import ModelCard

logger = logging.getLogger(__name__)

_LONG_CHARS = 8192


@dataclass(frozen=True, slots=True)
class LoadedModel:
    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate

    @classmethod
    def from_card(cls, card: ModelCard) -> LoadedModel:
        return cls(card, Tokenizer(card.tokenizer_json), ChatTemplate(card.chat_template, card.special_tokens))

    async def prompt_ids(self, chat: ChatRequest) -> list[int]:
        """Long prompts are tokenised in a thread: other streams must not wait for them."""
        messages = [message.for_template() for message in chat.messages]
        if sum(len(message["content"]) for message in messages) <= _LONG_CHARS:
            return self._encode(messages)
        return await asyncio.to_thread(self._encode, messages)

    def _encode(self, messages: list[dict[str, object]]) -> list[int]:
        text = self.template.render(messages)
        try:
            text.encode()
        except UnicodeEncodeError:
            # JSON can say it ("\\ud83d"), UTF-8 cannot.
            raise BadParams("the messages have half of a surrogate pair, which is no character", "messages") from None
        return self.tokenizer.encode(text)


class Gateway:
    """`model` raises SchedulerLost with the reason until the engine is ready."""

    def __init__(self, scheduler: Scheduler, config: GatewayConfig) -> None:
        self.config = config
        self.client = EngineClient(scheduler, config)
        self.metrics = GatewayMetrics()
        self.loaded = asyncio.Event()
        self._model: LoadedModel | None = None
        self._reason = "the gateway is starting"
        self._loading: asyncio.Task[None] | None = None

    @property
    def model(self) -> LoadedModel:
        if self._model is None:
            raise SchedulerLost(f"not ready: {self._reason}")
        return self._model

    def start(self) -> None:
        self._loading = asyncio.create_task(self._load())

    async def stop(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.wait({self._loading})
        await self.client.stop()

    async def _load(self, pause_s: float = 0.25) -> None:
        while self._model is None:
            try:
                card = await self.client.card()
                self._model = await asyncio.to_thread(LoadedModel.from_card, card)
                self.metrics.model_name = card.name
                self.loaded.set()
            except ServingError as error:
                self._reason = str(error)
                await asyncio.sleep(pause_s)
            except Exception as error:
                logger.exception("loading the model card failed")
                self._reason = str(error)
                await asyncio.sleep(pause_s * 8)


def create_app(scheduler: Scheduler, config: GatewayConfig, *, request_ids: bool = True) -> FastAPI:
    """`request_ids`: answer with an x-request-id header; Ray Serve adds one itself."""
    gateway = Gateway(scheduler, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gateway.start()
        yield
        await gateway.stop()

    app = FastAPI(title="DSpark Serve", lifespan=lifespan)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    app.state.gateway = gateway
    app.include_router(router)
    app.add_exception_handler(ServingError, _on_serving_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_middleware(Guard, request_ids=request_ids)
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The document at /openapi.json. The chat body is read by hand, so its schema is put in by hand."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=version("dspark-serve"), routes=app.routes)
        schema = ChatRequest.model_json_schema(ref_template="#/components/schemas/{model}")
        parts = {**schema.pop("$defs", {}), "ChatRequest": schema}
        document.setdefault("components", {}).setdefault("schemas", {}).update(parts)
        app.openapi_schema = document
    return app.openapi_schema


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


class Guard:
    """Outermost: whatever nobody handled becomes a 500 envelope, and every answer carries a request id."""

    def __init__(self, app: ASGIApp, request_ids: bool) -> None:
        self._app = app
        self._request_ids = request_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = False

        async def guarded_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._request_ids:
                    MutableHeaders(scope=message)["x-request-id"] = f"req_{uuid.uuid4().hex}"
            await send(message)

        try:
            await self._app(scope, receive, guarded_send)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if started:
                raise
            await plain_error(500, "internal error", "internal_error")(scope, receive, guarded_send)
        return None
