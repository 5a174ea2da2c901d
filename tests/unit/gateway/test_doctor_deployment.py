"""`dspark doctor --url` before a real gateway: every warning and failure, caused by what the server says of itself."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import httpx
import pytest

from scheduler.drift import DriftRow
from scheduler.errors import SchedulerLost
from scheduler.stats import SchedulerStats
from services.cli import main
from services.doctor.deployment import check_deployment
from services.doctor.findings import Finding
from services.doctor.findings import found as found_by
from services.doctor.machine import check_port
from services.gateway.auth import ApiKey, AuthConfig, digest_of
from services.settings import Settings, load_settings
from tests.served_gateway import ServedGateway

WELL = SchedulerStats(
    num_steps=900,
    num_draft_rounds=1000,
    num_accepted_tokens=1500,
    num_admitted=100,
    num_live=2,
    planner="auto",
    gate_state="open",
    draft_width=7,
    curve_loaded=True,
    curve_age_s=3600.0,
    drafter_alive=True,
    verifier_alive=True,
    kv_blocks_used=10,
    kv_blocks_total=100,
    drift=(DriftRow("code", (600, 400), (500, 250), (480.0, 240.0), (490.0, 250.0)),),
)


@pytest.fixture
def gateway(bench, make_script) -> Iterator[ServedGateway]:
    with ServedGateway(bench.scheduler(make_script(bench.rounds("Hello there")))) as running:
        running.stats = WELL
        yield running


def found(url: str, key: str = "") -> dict[str, Finding]:
    return {each.check: each for each in check_deployment(url, key)}


def test_a_server_that_is_well_has_no_warning_and_status_0(gateway, capsys):
    assert main(["doctor", "--url", f"{gateway.url}/v1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10 and all(line.startswith("ok ") for line in lines[:-1])
    assert lines[-1] == f"{len(lines) - 1} ok, 0 warn, 0 fail"
    assert any("2.50 tokens per round" in line for line in lines)


@pytest.mark.parametrize(
    ("check", "state", "changes", "words"),
    [
        ("workers", "fail", {"verifier_alive": False}, "verifier is lost"),
        ("workers", "warn", {"drafter_alive": False}, "drafter is lost"),
        ("workers", "warn", {"num_drafter_losses": 2}, "2 losses"),
        ("progress", "fail", {"last_step_age_s": 90.0}, "no step ended for 90 s"),
        ("queue", "warn", {"num_waiting": 5}, "5 requests wait"),
        ("memory", "warn", {"kv_blocks_used": 99}, "99%"),
        ("memory", "warn", {"num_preemptions": 20}, "20 preemptions"),
        ("curve", "warn", {"trim_off_reason": "no cost curve: it failed", "curve_loaded": False}, "it failed"),
        ("curve", "warn", {"verify_cost_factor": 2.5}, "2.50 times as long"),
        ("curve", "warn", {"verify_cost_factor": 2.5, "curve_age_s": 300.0}, "measured, 5 minutes ago"),
        ("curve", "warn", {"curve_age_s": 40 * 86400.0}, "40 days ago"),
        ("acceptance", "warn", {"num_accepted_tokens": 30}, "1.03 tokens"),
        (
            "calibration",
            "warn",
            {"drift": (DriftRow("", (1000,), (300,), (600.0,), (310.0,)),)},
            "states 0.60 and 0.30 are accepted",
        ),
    ],
)
def test_what_is_not_well_is_said_with_what_to_do(gateway, check, state, changes, words):
    gateway.stats = replace(WELL, **changes)
    findings = found(gateway.url)
    assert findings[check].state == state and words in findings[check].said and findings[check].todo
    assert {each.check for each in findings.values() if each.state != "ok"} == {check}, "and nothing else"


def test_how_far_the_curve_moved_is_told_from_how_well_it_now_predicts_as_top_does(gateway):
    gateway.stats = replace(WELL, verify_cost_factor=1.4, predicted_s=100.0, measured_s=103.0)
    said = found(gateway.url)["curve"].said
    assert "a step of 16 tokens takes 1.40 times as long as when the cost curve was measured, 60 minutes ago" in said
    assert said.endswith("real over predicted seconds 1.03")
    gateway.stats = WELL
    assert "predicted" not in found(gateway.url)["curve"].said


def test_what_a_restart_does_to_a_curve_is_said_as_it_is(gateway):
    gateway.stats = replace(WELL, verify_cost_factor=2.5, curve_age_s=300.0)
    assert "measures the curve anew where they disagree" in found(gateway.url)["curve"].todo
    gateway.stats = replace(WELL, curve_age_s=40 * 86400.0)
    assert "a restart keeps it" in found(gateway.url)["curve"].todo


def settings_for(gateway: ServedGateway) -> Settings:
    return load_settings(args={"gateway": {"port": gateway.port}})


def test_a_port_that_a_server_of_ours_holds_is_ok_and_says_whose_it_is(gateway):
    finding = check_port(settings_for(gateway))
    assert finding.state == "ok" and "held by a DSpark server" in finding.said and "(serves " in finding.said


def test_a_port_that_a_starting_server_of_ours_holds_is_ok_and_says_what_it_waits_for(bench, make_script):
    scheduler = bench.scheduler(make_script(bench.rounds("Hello")))
    scheduler.ready = False
    with ServedGateway(scheduler) as starting:
        finding = check_port(settings_for(starting))
    assert finding.state == "ok" and "(not ready" in finding.said


@pytest.mark.parametrize("text", ["[]", "null", '{"status": "fine"}', "<html>", '{"status": ["ready"]}'])
def test_a_port_that_another_server_holds_is_a_failure(text):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        Thread(target=other.handle_request, daemon=True).start()
        settings = load_settings(args={"gateway": {"port": other.server_port}})
        finding = found_by("port", lambda: check_port(settings))
    assert finding.state == "fail" and "in use" in finding.said


def test_a_server_without_a_drafter_or_a_curve_may_be_well(gateway):
    gateway.stats = replace(WELL, draft_width=0, drafter_alive=False, curve_loaded=False, planner="off")
    assert {each.state for each in found(gateway.url).values()} == {"ok"}


def test_failed_requests_are_counted_by_code(gateway, body):
    with httpx.Client() as client:
        for number in range(60):
            changes = {"temperature": 99} if number % 2 else {}
            client.post(f"{gateway.url}/v1/chat/completions", json=body(**changes))
    assert found(gateway.url)["requests"].state == "ok", "refusals are the clients'"


def test_requests_that_fail_are_a_warning(bench, make_script, body):
    from scheduler.errors import VerifierLost

    with ServedGateway(bench.scheduler(make_script(failure=VerifierLost("gone"), late=True))) as broken:
        broken.stats = WELL
        with httpx.Client() as client:
            for _ in range(50):
                client.post(f"{broken.url}/v1/chat/completions", json=body())
        finding = found(broken.url)["requests"]
    assert finding.state == "warn" and "50 of 50 failed (engine_unavailable 50)" in finding.said


def test_a_lost_scheduler_is_a_failure_and_status_1(gateway, capsys):
    gateway.stats = None
    assert main(["doctor", "--url", gateway.url, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["status"] == 1
    assert [each["check"] for each in told["checks"] if each["state"] == "fail"] == ["scheduler"]


def test_a_server_that_is_not_ready_says_why(bench, make_script):
    scheduler = bench.scheduler(make_script(bench.rounds("Hello")))
    scheduler.ready = False
    with ServedGateway(scheduler) as starting:
        findings = found(starting.url)
    assert findings["ready"].state == "fail" and findings["ready"].said
    assert findings["models"].state == "fail"


def test_a_server_with_keys_asks_for_them(bench, make_script):
    keys = (
        ApiKey("ann", digest_of("sk-0123456789abcdef"), frozenset({"api"})),
        ApiKey("prom", digest_of("pm-0123456789abcdef"), frozenset({"metrics"})),
    )
    config = replace(bench.config, auth=AuthConfig(keys, metrics_need_key=True))
    with ServedGateway(bench.scheduler(make_script(bench.rounds("Hello"))), config) as locked:
        assert found(locked.url)["models"].state == "fail" and "--key" in found(locked.url)["models"].todo
        findings = found(locked.url, "sk-0123456789abcdef")
        assert findings["models"].state == "ok"
        assert findings["metrics"].state == "warn" and "metrics" in findings["metrics"].todo


@contextmanager
def other_server(answer: Callable[[str], tuple[int, bytes]]) -> Iterator[str]:
    """A server that is not ours: path -> status and body. Body b"" breaks the connection."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answer(self.path)
            if text:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


STRANGERS = {
    "nothing": lambda path: (404, b"no"),
    "a page": lambda path: (200, b"<html>alive</html>"),
    "json": lambda path: (200, b'{"status": "alive"}'),
    "a list": lambda path: (200, b'["alive"]'),
    "bytes": lambda path: (200, b"alive" + bytes(range(256))),
    "errors": lambda path: (200 if path == "/health" else 500, b"alive"),
    "other metrics": lambda path: (200, b"up 1" if path == "/metrics" else b'{"status": "alive", "data": []}'),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_whatever_another_server_answers_is_one_failure_and_status_1(kind, capsys):
    with other_server(STRANGERS[kind]) as url:
        assert main(["doctor", "--url", url]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("fail  reach") and "DSpark server" in first and first.endswith("-> correct --url")
    assert last == "0 ok, 0 warn, 1 fail"


def test_a_server_that_goes_while_it_is_asked_is_one_failure():
    with other_server(lambda path: (200, b'{"status": "alive"}' if path == "/health" else b"")) as url:
        findings = found(url)
    assert list(findings) == ["reach"] and "does not answer" in findings["reach"].said


def test_an_empty_address_is_not_taken_for_this_machine_and_a_key_no_header_carries_is_said(gateway, capsys):
    assert main(["doctor", "--url", ""]) == 2
    assert "--url is empty" in capsys.readouterr().err
    assert "--key has characters" in found(gateway.url, "schlüssel☃")["reach"].said


def test_each_engine_group_is_looked_at_by_itself(bench, make_script):
    """A sum over groups says of two that are well that there is no scheduler, and hides one that is not."""
    script = make_script(bench.rounds("Hello"))
    others = {name: bench.scheduler(script) for name in ("1", "2")}
    told: dict[str, SchedulerStats] = {"1": WELL, "2": WELL}
    for name, scheduler in others.items():

        async def snapshot(name: str = name) -> SchedulerStats:
            if name not in told:
                raise SchedulerLost("it is gone")
            return told[name]

        scheduler.snapshot = snapshot
    with ServedGateway(bench.scheduler(script), others=others) as several:
        several.stats = WELL
        assert {each.state for each in check_deployment(several.url)} == {"ok"}
        told["1"] = replace(WELL, verify_cost_factor=2.5, num_waiting=9)
        del told["2"]
        unwell = [each for each in check_deployment(several.url) if each.state != "ok"]
    said = {(each.check, each.said.partition(":")[0]) for each in unwell}
    assert said == {("queue", "group 1"), ("curve", "group 1"), ("scheduler", "group 2")}


def test_nobody_and_somebody_else_are_told_apart():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = found(f"http://127.0.0.1:{closed.getsockname()[1]}")
    assert list(nobody) == ["reach"] and nobody["reach"].state == "fail" and "does not answer" in nobody["reach"].said
