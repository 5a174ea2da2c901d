"""Who is traced, where the settings come from, and receivers that are bad, which no request and no stop may notice."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from scheduler.errors import SettingsError
from services.gateway.request_trace import TracingConfig, check_tracing
from services.settings import load_settings
from tests.otlp_receiver import OtlpReceiver, attributes

CHAT = "/v1/chat/completions"
SAMPLED, UNSAMPLED = ({"traceparent": f"00-{'4bf92f35' * 4}-00f067aa0ba902b7-0{flag}"} for flag in "10")


@pytest.fixture
def patient(monkeypatch) -> None:
    """A stop that waits for the last spans however slow the machine is."""
    monkeypatch.setattr("services.gateway.tracing._STOP_S", 60.0)


@pytest.fixture
def impatient(monkeypatch) -> None:
    """Whoever waits for a receiver that hangs waits for a minute, but a stop, which soon has enough."""
    monkeypatch.setattr("services.gateway.tracing._EXPORT_S", 60.0)
    monkeypatch.setattr("services.gateway.tracing._STOP_S", 0.2)


@pytest.fixture
def receiver(patient) -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as running:
        yield running


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An endpoint that refuses connections."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{closed.getsockname()[1]}"


@pytest.mark.parametrize(
    ("ratio", "headers", "timed"),
    [(1.0, {}, True), (0.0, {}, False), (0.0, SAMPLED, True), (1.0, UNSAMPLED, False)],
)
async def test_only_sampled_requests_are_timed_by_the_engine(bench, make_script, body, receiver, ratio, headers, timed):
    config = replace(bench.config, tracing=TracingConfig(receiver.endpoint, ratio=ratio))
    async with bench.serve(make_script(bench.rounds("Hello there")), config) as (client, scheduler):
        answer = await client.post(CHAT, json=body(), headers={"x-request-id": "it", **headers})
        assert answer.status_code == 200
    assert [request.timed for request in scheduler.requests] == [timed]
    assert {attributes(s).get("dspark.request_id") for s in receiver.spans} == ({"it"} if timed else set())


async def test_without_an_endpoint_nothing_is_timed_and_no_layer_is_added(bench, make_script, body):
    async with bench.serve(make_script(bench.rounds("Hello there"))) as (client, scheduler):
        assert (await client.post(CHAT, json=body(), headers=SAMPLED)).status_code == 200
        layers = [layer.cls.__name__ for layer in client._transport.app.user_middleware]  # type: ignore[attr-defined]
    assert not scheduler.requests[0].timed and "Tracing" not in layers


@pytest.mark.parametrize("manner", ["hangs", "fails", "refuses"])
async def test_a_bad_receiver_is_noticed_by_no_request_and_no_stop(
    bench, make_script, body, nowhere, impatient, manner
):
    """Far more spans than the queue holds, while whoever should take them does not."""
    with OtlpReceiver(manner) as bad:
        endpoint = nowhere if manner == "refuses" else bad.endpoint
        script = make_script(bench.rounds("Hello there"))
        config = replace(bench.config, tracing=TracingConfig(endpoint))
        loop = asyncio.get_running_loop()
        async with bench.serve(script, config) as (client, _):
            took_s = []
            for _ in range(60):
                began_s = loop.time()
                answers = await asyncio.gather(*(client.post(CHAT, json=body()) for _ in range(5)))
                took_s.append(loop.time() - began_s)
                assert {answer.status_code for answer in answers} == {200}
                if manner == "refuses" or bad.num_requests:
                    break
                await asyncio.sleep(0.05)
            assert manner == "refuses" or bad.num_requests, "spans were on their way"
            assert (await client.post(CHAT, json=body())).status_code == 200
            assert max(took_s) < 20.0, "the receiver takes 60 s"
            stopping_s = loop.time()
        assert loop.time() - stopping_s < 20.0


async def test_spans_beyond_the_queue_are_dropped_and_said_once(
    bench, make_script, body, impatient, monkeypatch, caplog
):
    monkeypatch.setattr("services.gateway.tracing._QUEUE_SPANS", 8)
    monkeypatch.setattr("services.gateway.tracing._BATCH_SPANS", 8)
    with OtlpReceiver("hangs") as bad:
        config = replace(bench.config, tracing=TracingConfig(bad.endpoint))
        async with bench.serve(make_script(bench.rounds("Hello there")), config) as (client, _):
            with caplog.at_level(logging.WARNING):
                for _ in range(30):
                    assert (await client.post(CHAT, json=body())).status_code == 200
    said = [record for record in caplog.records if "Queue full" in record.getMessage()]
    assert len(said) == 1


def test_a_receiver_that_is_away_is_said_once_and_not_for_every_try(caplog, monkeypatch):
    from services.gateway import tracing

    for name in tracing._TALKATIVE:
        monkeypatch.setattr(logging.getLogger(name), "filters", [])  # an earlier gateway's, which has just said it
    with OtlpReceiver("fails") as bad, caplog.at_level(logging.WARNING):
        provider = tracing.open_provider(TracingConfig(bad.endpoint))
        for _ in range(30):
            provider.get_tracer("t").start_span("s").end()
            provider.force_flush(1000)
            if bad.num_requests >= 3:
                break
        tracing.close_provider(provider)
    said = [record.msg for record in caplog.records if "otlp" in record.name]
    assert bad.num_requests >= 3 and said and len(said) == len(set(said)), said


def test_a_stop_waits_for_a_receiver_no_longer_than_its_bound(impatient):
    from services.gateway.tracing import close_provider, open_provider

    with OtlpReceiver("hangs") as bad:
        provider = open_provider(TracingConfig(bad.endpoint))
        provider.get_tracer("t").start_span("s").end()
        began_s = time.monotonic()
        close_provider(provider)
        assert 0.2 <= time.monotonic() - began_s < 20.0


def test_the_last_spans_are_sent_when_the_gateway_stops(receiver):
    from services.gateway.tracing import close_provider, open_provider

    provider = open_provider(TracingConfig(receiver.endpoint))
    provider.get_tracer("t").start_span("last").end()
    close_provider(provider)
    assert [span.name for span in receiver.spans] == ["last"]


def test_spans_go_out_by_grpc_too(patient):
    from services.gateway.tracing import close_provider, open_provider

    arrived: list[str] = []

    class Service(TraceServiceServicer):
        def Export(self, request, context):
            arrived.extend(span.name for r in request.resource_spans for s in r.scope_spans for span in s.spans)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    provider = open_provider(TracingConfig(f"http://127.0.0.1:{port}", protocol="grpc"))
    provider.get_tracer("t").start_span("by grpc").end()
    close_provider(provider)
    server.stop(0)
    assert arrived == ["by grpc"]


def test_the_standard_variables_stand_in_for_the_settings(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    tracing = load_settings(args={}).gateway_config().tracing
    assert (tracing.endpoint, tracing.protocol, tracing.ratio) == ("http://collector:4318", "grpc", 1.0)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces:4318/v1/traces")
    assert load_settings(args={}).tracing.endpoint == "http://traces:4318/v1/traces"
    assert load_settings(args={"tracing": {"endpoint": ""}}).tracing.endpoint == "", "a setting of ours wins"
    monkeypatch.setenv("DSPARK_TRACING__ENDPOINT", "http://ours:4318")
    assert load_settings(args={"tracing": {"endpoint": "http://file:1"}}).tracing.endpoint == "http://ours:4318"
    monkeypatch.delenv("DSPARK_TRACING__ENDPOINT")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert load_settings(args={}).tracing.endpoint == ""


@pytest.mark.parametrize(
    ("args", "variable", "message"),
    [
        ({"endpoint": "collector:4318"}, None, r"^tracing\.endpoint: .*from application args"),
        ({"endpoint": "http://collector:99999"}, None, r"^tracing\.endpoint: .*[Pp]ort out of range"),
        ({"endpoint": "http://collector:0"}, None, r"^tracing\.endpoint: .*no host or port"),
        ({"endpoint": "http://[::1"}, None, r"^tracing\.endpoint: .*IPv6"),
        ({"endpoint": "http:///v1/traces"}, None, r"^tracing\.endpoint: .*no host"),
        ({"ratio": 1.5}, None, r"^tracing\.ratio: "),
        ({}, "collector", r"^tracing\.endpoint: .*from environment variable OTEL_EXPORTER_OTLP_ENDPOINT"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_their_key(monkeypatch, args, variable, message):
    if variable:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", variable)
    with pytest.raises(SettingsError, match=message):
        load_settings(args={"tracing": args})


def test_an_endpoint_without_the_extra_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr("services.gateway.request_trace.find_spec", lambda name: None)
    check_tracing(TracingConfig())
    with pytest.raises(SettingsError, match=r"dspark-serve\[tracing\]"):
        check_tracing(TracingConfig("http://collector:4318"))
