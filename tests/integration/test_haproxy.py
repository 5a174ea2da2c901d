"""`dspark serve` behind HAProxy, with Serve's fast settings: a stream goes through it as it is written, ends in the engine when
its client goes, and is finished when the server is told to stop."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray.serve._private.haproxy import get_haproxy_binary

from tests.integration.character_tokenizer import save_tokenizer
from tests.running_command import Server, free_port
from tests.running_prometheus import until

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    try:
        get_haproxy_binary()
    except FileNotFoundError as error:
        pytest.skip(f"Ray finds no HAProxy here: {error}")
    folder = tmp_path_factory.mktemp("haproxy")
    target = save_tokenizer(Path(shutil.copytree(golden / "target", folder / "target")), 48)
    flags = ["--model", str(target), "--drafter", str(golden / "dspark_vanilla"), "--name", "golden", "--threads", "1"]
    # Without a cost curve there is none to measure.
    for setting in (
        "scheduler.planner=fixed:3",
        "scheduler.max_live=4",
        "gateway.idle_s=1",
        f"cache_dir={folder / 'cache'}",
    ):
        flags += ["--set", setting]
    environment = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
    }
    running = Server([*flags, "--placement", "colocated"], environment)
    try:
        running.wait_for("http: HAProxy, straight to the gateway")
        running.wait_ready()
        yield running
    finally:
        running.kill()


def body(**changes: object) -> dict[str, object]:
    messages = [{"role": "user", "content": "hello"}]
    return {"model": "golden", "messages": messages, "max_tokens": 400, "temperature": 0, "ignore_eos": True, **changes}


def metric(server: Server, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


@contextlib.contextmanager
def begun(server: Server, **changes: object) -> Iterator[Iterator[str]]:
    """The lines of a stream whose first text has come."""
    with server.client.stream("POST", CHAT, json=body(stream=True, **changes)) as response:
        assert response.status_code == 200
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        next(lines)
        yield lines


def test_haproxy_listens_and_a_stream_goes_through_it_as_it_is_written(server):
    listening = [each for each in psutil.net_connections("tcp") if each.laddr and each.laddr.port == server.port]
    owners = {psutil.Process(each.pid).name() for each in listening if each.status == psutil.CONN_LISTEN}
    assert owners == {"haproxy"}

    def read_while_written() -> list[str]:
        with begun(server) as lines:
            runs = metric(server, "dspark_requests_running") == 1
            rest = list(lines)
        return rest if runs else []

    # Tried again where this process was so slow that the whole answer was written before it looked.
    *chunks, done = until(read_while_written)
    assert done == "[DONE]"
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in json.loads(chunk)["choices"])
    whole = server.client.post(CHAT, json=body()).json()["choices"][0]["message"]["content"]
    assert text and whole.endswith(text) and len(chunks) >= 400 / 4, "a chunk for every round of at most 4 tokens"


def test_a_refusal_keeps_its_envelope(server):
    refused = server.client.post(CHAT, json=body(max_tokens=100_000))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_client_that_goes_ends_its_request_in_the_engine(server):

    def drop() -> bool:
        before = metric(server, "dspark_finished_requests_total", reason="cancelled")
        with begun(server):
            pass
        until(lambda: metric(server, "dspark_requests_running") == 0)
        return metric(server, "dspark_finished_requests_total", reason="cancelled") == before + 1

    # Tried again where the answer ended before its client went.
    until(drop)
    for name in ("dspark_requests_running", "dspark_kv_blocks_used", "dspark_gateway_open_requests"):
        assert metric(server, name) == 0


def test_a_server_that_is_told_to_stop_finishes_its_stream(server):
    """Last: it is gone afterwards."""
    with begun(server) as lines:
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("draining")
        *_, done = lines
    assert done == "[DONE]"
    assert server.process.wait(timeout=60) == 0 and server.rest() == "stopped\n"
    with pytest.raises(httpx.TransportError):
        server.client.get("/health")
