"""OpenTelemetry at the gateway's door: one trace per request, sent to an OTLP receiver by a thread of its own.

The span of the request is a child of the client's (W3C traceparent). Below it: `queue`, `prefill` and `decode` of each choice,
and below these the four verbs of the engine's loop, one span each with the seconds of all steps together; each verify round
is an event of `decode`. A receiver that is slow or away costs spans, never a request: what does not fit the queue is dropped.

The only module that imports OpenTelemetry; imported only where tracing is on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scheduler.errors import SettingsError
from services.gateway.exchange import Exchange
from services.gateway.request_trace import VERBS, ChoiceTrace, Phase, RequestTrace, TracingConfig

logger = logging.getLogger(__name__)

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
_QUEUE_SPANS, _BATCH_SPANS = 8192, 512
_DELAY_MS, _EXPORT_S = 1000, 5.0
_STOP_S = 2.0
_TALKATIVE = (
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
)
_GATEWAY_ERROR = 500

Attributes = dict[str, Any]


def open_provider(config: TracingConfig, *, engine: str = "") -> TracerProvider:
    """engine: of which group this gateway is. OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES and
    OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE and _COMPRESSION are read by the library."""
    named = {"service.name": "dspark-serve", "service.version": version("dspark-serve")}
    resource = Resource(named | ({"dspark.engine": engine} if engine else {}))
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(config.ratio)),
        resource=Resource.create().merge(resource).merge(OTELResourceDetector().detect()),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(
        BatchSpanProcessor(
            _exporter(config),
            max_queue_size=_QUEUE_SPANS,
            max_export_batch_size=_BATCH_SPANS,
            schedule_delay_millis=_DELAY_MS,
        )
    )
    # These say of every span that it was dropped, and of every try that it failed.
    for name in _TALKATIVE:
        logging.getLogger(name).addFilter(_Seldom(60.0))
    return provider


def close_provider(provider: TracerProvider) -> None:
    """Sends what is left, unless that takes too long."""
    thread = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
    thread.start()
    thread.join(_STOP_S)


def _exporter(config: TracingConfig) -> SpanExporter:
    if config.protocol == "grpc":
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
        except ImportError:
            raise SettingsError(
                "tracing.protocol: grpc needs `pip install opentelemetry-exporter-otlp-proto-grpc`, or use http/protobuf"
            ) from None
        return GrpcExporter(endpoint=config.endpoint, timeout=_EXPORT_S)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    path = "" if config.endpoint.rstrip("/").endswith("/v1/traces") else "/v1/traces"
    return HttpExporter(endpoint=config.endpoint.rstrip("/") + path, timeout=_EXPORT_S)


class _Seldom(logging.Filter):
    """Lets a line of each kind through once in `period_s`."""

    def __init__(self, period_s: float) -> None:
        super().__init__()
        self._period_s = period_s
        self._last_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        now, kind = time.monotonic(), str(record.msg)
        with self._lock:
            if now - self._last_s.get(kind, -self._period_s) < self._period_s:
                return False
            self._last_s[kind] = now
        return True


class Tracing:
    """Middleware. A request that is not sampled costs its sampling decision and nothing else."""

    def __init__(self, app: ASGIApp, provider: TracerProvider) -> None:
        self._app = app
        self._tracer = provider.get_tracer("dspark-serve", version("dspark-serve"))
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = _OPERATIONS.get(scope["path"]) if scope["type"] == "http" else None
        if operation is None:
            return await self._app(scope, receive, send)
        began_ns, began_s = time.time_ns(), time.monotonic()
        span = self._tracer.start_span(
            operation, context=self._client_context(scope), kind=SpanKind.SERVER, start_time=began_ns
        )
        if not span.is_recording():
            return await self._app(scope, receive, send)
        exchange, status = Exchange.of(scope), 0
        exchange.trace = RequestTrace(format(span.get_span_context().trace_id, "032x"))

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            return await self._app(scope, receive, noting_send)
        finally:
            ended_s = time.monotonic()
            try:
                clock = _Clock(began_ns, began_s, ended_s)
                _tell_request(span, operation, scope, exchange, status or 499)
                for choice in exchange.trace.choices:
                    _tell_choice(self._tracer, span, choice, clock, alone=len(exchange.trace.choices) == 1)
                span.end(clock.ns(ended_s))
            except Exception:
                logger.exception("a trace could not be told")

    def _client_context(self, scope: Scope) -> Context:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        # without a base, a span that happens to be current here would become the parent
        return self._propagator.extract(headers, context=Context())


class _Clock:
    """Monotonic seconds of this process as nanoseconds since 1970, kept within the request."""

    def __init__(self, began_ns: int, began_s: float, ended_s: float) -> None:
        self._began_ns, self._began_s, self._ended_s = began_ns, began_s, ended_s

    def ns(self, at_s: float) -> int:
        within_s = min(max(at_s, self._began_s), self._ended_s)
        return self._began_ns + int((within_s - self._began_s) * 1e9)


def _tell_request(span: Span, operation: str, scope: Scope, exchange: Exchange, status: int) -> None:
    asked: RequestTrace = exchange.trace  # type: ignore[assignment]
    model = exchange.model if asked.requests else ""
    span.update_name(f"{operation} {model}" if model else operation)
    span.set_attributes(
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "dspark",
            "http.request.method": scope["method"],
            "http.route": scope["path"],
            "http.response.status_code": status,
            "dspark.request_id": exchange.request_id,
            "dspark.outcome": exchange.outcome or "failed",
        }
    )
    if exchange.api_key:
        span.set_attribute("dspark.api_key", exchange.api_key)
    if exchange.error:
        span.set_attribute("error.type", exchange.error)
    if status >= _GATEWAY_ERROR or exchange.outcome == "failed":
        span.set_status(Status(StatusCode.ERROR, exchange.error))
    if asked.requests:
        span.set_attributes(_asked(asked, exchange))
    if len(asked.choices) == 1:
        span.set_attributes(_speculated(asked.choices[0]))


def _asked(asked: RequestTrace, exchange: Exchange) -> Attributes:
    request = asked.requests[0]
    params = request.params
    found: Attributes = {
        "gen_ai.request.model": exchange.model,
        "gen_ai.response.model": exchange.model,
        "gen_ai.request.stream": exchange.stream,
        "gen_ai.request.choice.count": len(asked.requests),
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.usage.input_tokens": exchange.num_prompt_tokens,
        "gen_ai.usage.output_tokens": exchange.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": exchange.num_cached_tokens,
        "gen_ai.response.finish_reasons": [choice.finish_reason for choice in asked.choices],
        "dspark.text_class": request.text_class or "unknown",
    }
    if params.seed is not None:
        found["gen_ai.request.seed"] = params.seed
    if exchange.first_token_s:
        found["gen_ai.response.time_to_first_chunk"] = exchange.first_token_s
    if request.speculation is not None and request.speculation.planner:
        found["dspark.planner"] = request.speculation.planner
    return found


def _speculated(choice: ChoiceTrace) -> Attributes:
    found: Attributes = {
        "gen_ai.response.id": choice.request_id,
        "dspark.rounds": choice.num_rounds,
        "dspark.tokens.drafted": choice.num_drafted,
        "dspark.tokens.verified": choice.num_verified,
        "dspark.tokens.accepted": choice.num_accepted,
    }
    if (length := choice.accept_length) is not None:
        found["dspark.accept_length"] = length
    return found


def _tell_choice(tracer: trace.Tracer, above: Span, choice: ChoiceTrace, clock: _Clock, *, alone: bool) -> None:
    """Its phases, below a span of its own where an answer has several choices."""
    first = choice.prefill.first or choice.decode.first
    if first is None:
        return
    arrived_s = choice.arrived_s
    span = above
    if not alone:
        span = _start(tracer, "choice", above, clock.ns(arrived_s), _speculated(choice) | {
            "gen_ai.usage.output_tokens": choice.num_tokens,
            "gen_ai.response.finish_reasons": [choice.finish_reason],
        })  # fmt: skip
    _start(tracer, "queue", span, clock.ns(arrived_s)).end(clock.ns(arrived_s + first.began_s))
    _tell_phase(tracer, span, "prefill", choice.prefill, arrived_s, clock)
    _tell_phase(tracer, span, "decode", choice.decode, arrived_s, clock, choice)
    if not alone:
        span.end(clock.ns(arrived_s + max(choice.prefill.ended_s, choice.decode.ended_s)))


def _tell_phase(
    tracer: trace.Tracer,
    above: Span,
    name: str,
    phase: Phase,
    arrived_s: float,
    clock: _Clock,
    choice: ChoiceTrace | None = None,
) -> None:
    """choice: whose rounds become events."""
    if phase.first is None:
        return
    began_s = arrived_s + phase.first.began_s
    span = _start(tracer, name, above, clock.ns(began_s), {"dspark.steps": phase.num_steps})
    if choice is not None:
        span.set_attribute("dspark.rounds", choice.num_rounds)
        for each in choice.rounds:
            counts = {"tokens": each.num_tokens, "drafted": each.num_drafted, "verified": each.num_verified}
            counts["accepted"] = each.num_accepted
            seconds = {f"{verb}_s": getattr(each.times, f"{verb}_s") for verb in VERBS}
            span.add_event("round", counts | seconds, clock.ns(arrived_s + each.times.ended_s))
    verb_began_s = began_s
    for verb in VERBS:
        seconds_s = phase.seconds[verb]
        told = {"dspark.phase": name, "dspark.steps": phase.num_steps, "dspark.seconds": seconds_s}
        if seconds_s > 0.0:
            _start(tracer, verb, span, clock.ns(verb_began_s), told).end(clock.ns(verb_began_s + seconds_s))
        verb_began_s += getattr(phase.first, f"{verb}_s")
    span.end(clock.ns(arrived_s + phase.ended_s))


def _start(
    tracer: trace.Tracer, name: str, above: Span, at_ns: int, attributes: Mapping[str, Any] | None = None
) -> Span:
    return tracer.start_span(
        name, context=trace.set_span_in_context(above, Context()), start_time=at_ns, attributes=attributes
    )
