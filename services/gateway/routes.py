"""The endpoints: chat completions, models, alive, ready, metrics."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from scheduler.errors import Cancelled, ServingError
from scheduler.stats import SchedulerStats
from scheduler.wire import Request as EngineRequest
from services.gateway.answer import ChatResponse, Job
from services.gateway.errors import BodyTooLarge, ModelNotFound, answer_to, error_body, outcome_of
from services.gateway.openai import ChatRequest, parse_chat, sampling_params
from services.metrics import CONTENT_TYPE
from services.model_card import ModelCard

if TYPE_CHECKING:
    from services.gateway.app import Gateway

router = APIRouter()

CHAT_SCHEMA = "#/components/schemas/ChatRequest"
_CHAT_DOCS: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": CHAT_SCHEMA}}}}
}
_LARGE_BODY_BYTES = 64 * 1024


def _gateway(request: Request) -> Gateway:
    return request.app.state.gateway


@router.post("/v1/chat/completions", openapi_extra=_CHAT_DOCS)
async def chat_completions(request: Request) -> Response:
    """A chat completion, streamed or not; the dialect of the OpenAI API."""
    gateway, arrived_s = _gateway(request), time.monotonic()
    try:
        job = await _job(gateway, request, arrived_s)
    except ServingError as error:
        answer = answer_to(error)
        outcome = gateway.metrics.failed(outcome_of(error), answer.code)
        gateway.metrics.request_ended(outcome, answer.status, time.monotonic() - arrived_s)
        raise
    return ChatResponse(job, gateway.client, gateway.config, gateway.metrics)


async def _job(gateway: Gateway, request: Request, arrived_s: float) -> Job:
    model = gateway.model
    chat = await _parse(await _body(request, gateway.config.max_body_bytes))
    _check_model(chat.model, model.card)
    prompt_ids = await model.prompt_ids(chat)
    params = sampling_params(chat, model.card, len(prompt_ids))
    engine_request = EngineRequest(f"chatcmpl-{uuid.uuid4().hex}", tuple(prompt_ids), params)
    return Job(engine_request, chat, model.card, model.tokenizer, arrived_s)


async def _body(request: Request, max_bytes: int) -> bytes:
    """The whole body, refused as soon as it is known to be too large."""
    declared = request.headers.get("content-length", "")
    body = bytearray()
    too_large = declared.isdigit() and int(declared) > max_bytes
    try:
        async for piece in request.stream():
            too_large = too_large or len(body) + len(piece) > max_bytes
            if too_large:
                raise BodyTooLarge(f"the request body is larger than the {max_bytes} bytes allowed")
            body += piece
    except ClientDisconnect:
        raise Cancelled("the client closed the connection") from None
    return bytes(body)


async def _parse(body: bytes) -> ChatRequest:
    return parse_chat(body) if len(body) <= _LARGE_BODY_BYTES else await asyncio.to_thread(parse_chat, body)


def _check_model(name: str, card: ModelCard) -> None:
    if name != card.name:
        raise ModelNotFound(f"the model {name!r} does not exist; this server serves {card.name!r}", param="model")


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_model_body(_gateway(request).model.card)]})


@router.get("/v1/models/{name:path}")
async def get_model(name: str, request: Request) -> Response:
    card = _gateway(request).model.card
    _check_model(name, card)
    return JSONResponse(_model_body(card))


def _model_body(card: ModelCard) -> dict[str, Any]:
    """`max_model_len` is an extra field that other servers have too."""
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "dspark",
        "max_model_len": card.max_model_len,
    }


@router.get("/health")
async def health() -> Response:
    """Alive: this process answers."""
    return JSONResponse({"status": "alive"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 once the models are loaded, the cost curve is measured and the scheduler makes progress; else 503 and why."""
    gateway = _gateway(request)
    try:
        card = gateway.model.card
        await gateway.client.check_health()
    except ServingError as error:
        body = {"status": "not ready", "reason": str(error), **error_body(error)}
        return JSONResponse(body, 503, {"retry-after": "2"})
    return JSONResponse({"status": "ready", "model": card.name})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    gateway = _gateway(request)
    stats: SchedulerStats | None
    try:
        stats = await gateway.client.snapshot()
    except ServingError:
        stats = None
    return Response(gateway.metrics.render(stats, gateway.client.num_live), media_type=CONTENT_TYPE)
