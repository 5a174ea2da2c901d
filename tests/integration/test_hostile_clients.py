"""Clients that send nonsense, clients that vanish, and our own API document held against the server that wrote it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.hostile import fuzz, odd_http, small_server, vanish
from tests.running_server import RunningServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with small_server(tmp_path_factory.mktemp("hostile")) as running:
        yield running


@pytest.fixture(scope="module")
def api_schema(server: RunningServer):
    return schemathesis.openapi.from_url(server.url.removesuffix("/v1") + "/openapi.json")


def test_nonsense_gets_a_documented_refusal_or_a_good_answer(server):
    before = server.ask(server.books())
    kinds = asyncio.run(fuzz(server.url, count=250, seed=20))
    assert kinds["200"] > 30 and kinds["stream"] > 10 and kinds["400"] > 50 and kinds["404"] > 2, kinds
    after = server.quiet_within(before, 1.0)
    assert {**after, "tasks": 0} == {**before, "tasks": 0}


def test_http_that_no_library_sends_is_answered_or_cut_off_and_leaves_nothing_behind(server):
    """Pipelined requests get their answers in order; a body without end gets its 413 or is cut off; no answer is a 500."""
    before = server.ask(server.books())
    limit = server.app.state.gateway.config.max_body_bytes
    found = asyncio.run(odd_http(server.port, limit))
    assert found[:5] == [b"200"] * 5 and found[5] in (b"413", b""), found
    assert all(status in (b"400", b"413", b"200", b"") for status in found[6:]), found
    after = server.quiet_within(before, 1.0)
    assert {**after, "tasks": 0} == {**before, "tasks": 0} and after["tasks"] <= before["tasks"] + 1


def test_clients_that_vanish_leave_nothing_behind(server):
    """Every block, place, inbox and task is given back within a second."""
    before = server.ask(server.books())
    asyncio.run(vanish(server.port, count=60, seed=1, at_once=20))
    after = server.quiet_within(before, 1.0)
    assert {**after, "tasks": 0} == {**before, "tasks": 0}
    assert after["tasks"] <= before["tasks"] + 1, "one more than before is the standing subscription"


# What a schema cannot say (either of two fields, the vocabulary's size) makes good-looking bodies wrong.
NOT_HELD = [positive_data_acceptance]
BOUNDED = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_the_server_answers_as_its_document_says(api_schema, mode):
    """No 500, no status, type or body that the document does not have; bodies it calls wrong are refused."""
    labels = []
    for operation in (found.ok() for found in api_schema.get_all_operations()):

        @BOUNDED
        @given(case=operation.as_strategy(generation_mode=mode))
        def hold(case):
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = "tiny"
            case.call_and_validate(excluded_checks=NOT_HELD, timeout=30)

        try:
            hold()
        except Unsatisfiable:
            assert operation.method == "get" and mode is GenerationMode.NEGATIVE, "nothing to get wrong"
        labels.append(operation.label)
    assert len(labels) == 9 and "POST /v1/chat/completions" in labels
