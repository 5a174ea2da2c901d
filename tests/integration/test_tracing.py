"""Traces of a real server, as an OTLP receiver gets them: phases, verbs and rounds with the numbers that the client is told."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from services.gateway.request_trace import MOST_ROUNDS, VERBS
from tests.integration.character_tokenizer import save_tokenizer
from tests.otlp_receiver import OtlpReceiver, attributes
from tests.running_server import RunningServer, small_settings

CHAT = "/v1/chat/completions"
MARKER = "zebraquilt"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SLACK_NS = 2_000_000


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as running:
        yield running


@pytest.fixture(scope="module")
def server(golden: Path, receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("traced")
    target = save_tokenizer(Path(shutil.copytree(golden / "target", folder / "target")), 48)
    sections = {"tracing": {"endpoint": receiver.endpoint}, "scheduler": {"prefill_chunk": 16}}
    with pytest.MonkeyPatch.context() as quickly:
        quickly.setattr("services.gateway.tracing._DELAY_MS", 50)
        with RunningServer(small_settings(target, str(golden / "dspark_vanilla"), folder / "cache", **sections)) as it:
            yield it


def ask(
    server: RunningServer, request_id: str, headers: dict[str, str] | None = None, **changes: Any
) -> httpx.Response:
    messages = [{"role": "user", "content": f"tell me of the {MARKER} and the sea"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **changes}
    url = server.url.removesuffix("/v1") + CHAT
    return httpx.post(url, json=body, headers={"x-request-id": request_id, **(headers or {})}, timeout=60)


def named(spans: list[Span], name: str, above: Span | None = None) -> Span:
    found = [s for s in spans if s.name == name and (above is None or s.parent_span_id == above.span_id)]
    assert len(found) == 1, (name, [s.name for s in spans])
    return found[0]


def test_a_request_is_one_trace_of_phases_and_verbs(server, receiver):
    began_ns = time.time_ns()
    answer = ask(server, "one", stream=False).json()
    ended_ns = time.time_ns()
    root, *spans = receiver.trace_of("one")
    assert root.name == "chat tiny" and root.kind == Span.SPAN_KIND_SERVER and not root.parent_span_id
    assert began_ns <= root.start_time_unix_nano < root.end_time_unix_nano <= ended_ns + 50 * SLACK_NS

    told, usage = attributes(root), answer["usage"]
    measured = answer["metrics"]["speculative_decoding"]
    assert told["gen_ai.operation.name"] == "chat" and told["gen_ai.request.model"] == "tiny"
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 24
    assert told["gen_ai.response.finish_reasons"] == ["length"] and told["http.response.status_code"] == 200
    assert told["dspark.rounds"] == measured["num_spec_steps"] > 3
    assert told["dspark.accept_length"] == pytest.approx(measured["mean_acceptance_length"])
    assert told["dspark.tokens.drafted"] == measured["num_proposed_draft_tokens"]
    assert told["dspark.tokens.verified"] == measured["num_draft_tokens"]
    assert told["dspark.tokens.accepted"] == measured["num_accepted_draft_tokens"]

    queue, prefill, decode = (named(spans, name, root) for name in ("queue", "prefill", "decode"))
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano <= decode.start_time_unix_nano + SLACK_NS
    assert attributes(prefill)["dspark.steps"] >= 3, "a prompt of more than 32 tokens in chunks of 16"
    assert attributes(decode)["dspark.rounds"] == len(decode.events) == measured["num_spec_steps"]
    rounds = [attributes(event) for event in decode.events]
    assert [each["accepted"] for each in rounds] == measured["per_step_accepted"]
    assert [each["verified"] for each in rounds] == measured["per_step_drafted"]
    for verb in VERBS:
        span = named(spans, verb, decode)
        seconds = attributes(span)["dspark.seconds"]
        assert seconds == pytest.approx(sum(each[f"{verb}_s"] for each in rounds))
        assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 == pytest.approx(seconds, abs=2e-3)
        assert decode.start_time_unix_nano <= span.start_time_unix_nano
    assert len(spans) == 3 + len(VERBS) + len([s for s in spans if s.parent_span_id == prefill.span_id])
    (resource,) = {json.dumps(each, sort_keys=True) for each in receiver.resources}
    assert json.loads(resource)["service.name"] == "dspark-serve"


def test_the_clients_trace_goes_on_and_its_decision_holds(server, receiver):
    ask(server, "sampled", {"traceparent": f"00-{TRACE}-{PARENT}-01"})
    root, *spans = receiver.trace_of("sampled")
    assert root.trace_id.hex() == TRACE and root.parent_span_id.hex() == PARENT and spans
    ask(server, "unsampled", {"traceparent": f"00-{TRACE[::-1]}-{PARENT}-00"})
    ask(server, "odd", {"traceparent": "00-nonsense"})
    root, *_ = receiver.trace_of("odd")
    assert not root.parent_span_id
    assert "unsampled" not in {attributes(span).get("dspark.request_id") for span in receiver.spans}


def test_each_choice_has_a_span_with_its_own_phases(server, receiver):
    ask(server, "several", n=2, temperature=1.0, seed=3, stream=True)
    root, *spans = receiver.trace_of("several")
    choices = [span for span in spans if span.name == "choice"]
    assert len(choices) == 2 and all(span.parent_span_id == root.span_id for span in choices)
    for choice in choices:
        assert attributes(choice)["gen_ai.usage.output_tokens"] == 24
        named(spans, "verify", named(spans, "decode", choice))
    assert attributes(root)["gen_ai.response.finish_reasons"] == ["length", "length"]


def test_refused_failed_and_vanished_requests_have_their_trace_too(server, receiver):
    refused = ask(server, "refused", temperature=99)
    assert refused.status_code == 400
    root, *spans = receiver.trace_of("refused")
    told = attributes(root)
    assert told["error.type"] == "invalid_value" and told["dspark.outcome"] == "rejected" and not spans
    assert root.status.code == Status.STATUS_CODE_UNSET, "a client's mistake is no error of the server"

    late = ask(server, "late", max_tokens=150, timeout=0.05)
    assert late.status_code == 504
    root, *_ = receiver.trace_of("late")
    assert attributes(root)["error.type"] == "deadline_exceeded" and root.status.code == Status.STATUS_CODE_ERROR

    with pytest.raises(httpx.ReadTimeout):
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": MARKER}],
            "max_tokens": 200,
            "ignore_eos": True,
        }
        url = server.url.removesuffix("/v1") + CHAT
        httpx.post(url, json=body, headers={"x-request-id": "vanished"}, timeout=0.15)
    root, *_ = receiver.trace_of("vanished")
    assert attributes(root)["dspark.outcome"] == "cancelled"


def test_a_long_answer_has_no_more_round_events_than_the_cap(server, receiver):
    ask(server, "long", max_tokens=150, speculation={"mode": "off"})
    root, *spans = receiver.trace_of("long")
    decode = named(spans, "decode", root)
    assert len(decode.events) == MOST_ROUNDS < attributes(decode)["dspark.rounds"] == 149


def test_no_span_holds_a_word_of_a_prompt_or_an_answer(server, receiver):
    answer = ask(server, "secret").json()["choices"][0]["message"]["content"]
    ask(server, "secret-too", messages=[{"role": MARKER, "content": MARKER}])
    receiver.trace_of("secret")
    assert len(answer) > 10
    for span in receiver.spans:
        assert MARKER.encode() not in span.SerializeToString() and answer.encode() not in span.SerializeToString()
