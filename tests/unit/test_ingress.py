"""HTTP through HAProxy: what goes with it, and its own words when it cannot listen."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest
from ray.serve._private.haproxy import get_haproxy_binary

from services.address import hold_address
from services.ingress import behind_haproxy, described, ingress_environment, why_haproxy_failed

HOST = "127.0.0.1"
DRAIN = "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED", DRAIN):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_serves_own_proxy_is_left_as_it_is_and_the_faster_way_is_told(flags):
    assert not behind_haproxy()
    assert ingress_environment() == {}
    assert described().startswith("http: Serve's own proxy; ") and "docs/operating.md" in described()


def test_a_replica_behind_haproxy_need_not_wait_half_a_minute_to_stop_unless_its_user_says_so(flags):
    flags.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    assert behind_haproxy()
    assert ingress_environment() == {DRAIN: "1"}
    flags.setenv(DRAIN, "12")
    assert ingress_environment() == {DRAIN: "12"}


@pytest.mark.parametrize("fast", [False, True])
def test_the_line_names_the_way_and_a_faster_one_where_there_is_one(flags, fast):
    flags.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    if fast:
        flags.setenv("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1")
    assert described().startswith("http: HAProxy")
    assert ("docs/operating.md" in described()) is not fast


def test_haproxy_as_serve_starts_it_shares_its_port_with_nobody_and_what_it_says_becomes_one_line(tmp_path: Path):
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    config = tmp_path / "haproxy.cfg"
    config.write_text(f"defaults\n  mode http\n  timeout client 1s\nfrontend here\n  bind {HOST}:{port}\n")
    with hold_address(HOST, port):
        failed = subprocess.run(
            [get_haproxy_binary(), "-db", "-f", str(config), "-dR"], capture_output=True, text=True, timeout=120
        )
    assert failed.returncode != 0
    line = why_haproxy_failed(f"RuntimeError: HAProxy crashed during startup: {failed.stderr}\n  at somewhere")
    assert line is not None and line.startswith(f"HAProxy cannot listen on {HOST}:{port}: Address already in use;")
    assert "\n" not in line


def test_other_failures_are_not_taken_for_haproxys():
    assert why_haproxy_failed("RuntimeError: out of memory") is None
