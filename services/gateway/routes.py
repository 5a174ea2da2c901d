"""The endpoints: chat and text completions, tokens, models, alive, ready, metrics."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from scheduler.errors import ServingError
from services.gateway import openapi
from services.gateway.answer import AnswerResponse
from services.gateway.docs_page import docs_page
from services.gateway.errors import ModelNotFound, answer_to, error_body, outcome_of
from services.gateway.exchange import Exchange
from services.gateway.fields import GenerationFields
from services.gateway.jobs import Job, chat_job, completion_job
from services.gateway.parsing import parse_chat, parse_completion
from services.gateway.request_body import read_body
from services.gateway.short_way import Endpoint
from services.gateway.speculation import HEADER as SPECULATION_HEADER
from services.gateway.tokens import detokenize, parse_detokenize, parse_tokenize, tokenize
from services.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from services.gateway.app import Gateway

router = APIRouter(default_response_class=Response)


def _gateway(request: Request) -> Gateway:
    return request.app.state.gateway


@router.post("/v1/chat/completions", **openapi.CHAT)
async def chat_completions(request: Request) -> Response:
    """A chat completion, streamed or not; the dialect of the OpenAI API."""
    return await _answer(request, parse_chat, chat_job)


@router.post("/v1/completions", **openapi.COMPLETION)
async def completions(request: Request) -> Response:
    """Completions of texts or token ids, streamed or not; the dialect of the OpenAI API."""
    return await _answer(request, parse_completion, completion_job)


async def _answer(
    request: Request, parse: Callable[[bytes], Any], make_job: Callable[..., Awaitable[Job]]
) -> AnswerResponse:
    gateway, arrived_s = _gateway(request), time.monotonic()
    try:
        model = await gateway.await_model()
        fields: GenerationFields = await read_body(request, gateway.config, parse)
        exchange = Exchange.of(request.scope)
        exchange.model, exchange.stream = fields.model, bool(fields.stream)
        _check_model(fields.model, gateway)
        header = request.headers.get(SPECULATION_HEADER)
        job = await make_job(fields, model, gateway.config, speculation_header=header, arrived_s=arrived_s)
    except ServingError as error:
        answer = answer_to(error)
        outcome = gateway.metrics.failed(outcome_of(error), answer.code)
        gateway.metrics.request_ended(outcome, answer.status, time.monotonic() - arrived_s)
        exchange = Exchange.of(request.scope)
        exchange.outcome, exchange.error = outcome, answer.code
        raise
    exchange.answer_id = job.answer_id
    if exchange.trace is not None:
        job = job.timed()
        exchange.trace.begin(job.requests)
    return AnswerResponse(job, gateway.client, gateway.config, gateway.metrics, exchange.trace)


# Past FastAPI's routing too (short_way.py).
GENERATING: dict[str, Endpoint] = {"/v1/chat/completions": chat_completions, "/v1/completions": completions}


@router.post("/tokenize", **openapi.TOKENIZE)
async def tokenize_text(request: Request) -> Response:
    """The token ids of a text, or of a conversation as the chat template renders it."""
    gateway = _gateway(request)
    model = gateway.model
    asked = await read_body(request, gateway.config, parse_tokenize)
    _check_optional_model(asked.model, gateway)
    return JSONResponse(await tokenize(asked, model))


@router.post("/detokenize", **openapi.DETOKENIZE)
async def detokenize_ids(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    gateway = _gateway(request)
    model = gateway.model
    asked = await read_body(request, gateway.config, parse_detokenize)
    _check_optional_model(asked.model, gateway)
    return JSONResponse(await detokenize(asked, model))


def _check_optional_model(name: str | None, gateway: Gateway) -> None:
    if name is not None:
        _check_model(name, gateway)


def _check_model(name: str, gateway: Gateway) -> None:
    if name not in gateway.served_names:
        served = ", ".join(repr(each) for each in gateway.served_names)
        raise ModelNotFound(f"the model {name[:100]!r} does not exist; this server serves {served}", param="model")


@router.get("/v1/models", **openapi.MODELS)
async def list_models(request: Request) -> Response:
    """Every name under which the model is served."""
    gateway = _gateway(request)
    return JSONResponse({"object": "list", "data": [_model_body(name, gateway) for name in gateway.served_names]})


@router.get("/v1/models/{name:path}", **openapi.MODEL)
async def get_model(name: str, request: Request) -> Response:
    """One served name."""
    gateway = _gateway(request)
    _check_model(name, gateway)
    return JSONResponse(_model_body(name, gateway))


def _model_body(name: str, gateway: Gateway) -> dict[str, Any]:
    """`max_model_len` is an extra field that other servers have too."""
    card = gateway.model.card
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "dspark",
        "max_model_len": card.max_model_len,
    }


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """/openapi.json for people."""
    return HTMLResponse(docs_page(request.app.openapi()))


@router.head("/health", include_in_schema=False)
@router.get("/health", **openapi.HEALTH)
async def health() -> Response:
    """Alive: this process answers."""
    return JSONResponse({"status": "alive"})


@router.head("/ready", include_in_schema=False)
@router.get("/ready", **openapi.READY)
async def ready(request: Request) -> Response:
    """200 once the models are loaded, the cost curve is measured and the scheduler makes progress; else 503 and why."""
    gateway = _gateway(request)
    try:
        card = gateway.model.card
        await gateway.client.check_health()
    except ServingError as error:
        # final: waiting does not help
        final = gateway.refusal is not None
        body = {"status": "not ready", "reason": str(error), "final": final, **error_body(error)}
        return JSONResponse(body, 503, {"retry-after": "2"})
    return JSONResponse({"status": "ready", "model": card.name})


@router.get("/metrics", **openapi.METRICS)
async def metrics(request: Request) -> Response:
    """Prometheus metrics of this gateway and of the scheduler."""
    gateway = _gateway(request)
    stats, num_open = await gateway.client.snapshots(), gateway.client.num_open()
    return Response(gateway.metrics.render(stats, num_open), media_type=CONTENT_TYPE)
