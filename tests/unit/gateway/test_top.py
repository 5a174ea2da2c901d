"""`dspark top` before a real gateway: what it shows, rates across a restart, servers that go away, terminals and pipes."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from scheduler.errors import Failed
from scheduler.stats import SchedulerStats
from services.cli import main
from services.scrape import Scrape, parse_page
from services.top import watch
from tests.served_gateway import ServedGateway

EARLY = SchedulerStats(
    num_steps=100, num_rounds=200, num_round_tokens=400, num_emitted_tokens=500, num_drafted_tokens=1000,
    num_verified_tokens=600, num_accepted_tokens=200, verified_at=(200, 150), accepted_at=(150, 50),
    verify_budget_sum=800, verify_budget_count=200, num_step_tokens=900, num_prefill_tokens=300,
    draft_s=1.0, plan_s=0.1, verify_s=3.0, apply_s=0.1, predicted_s=4.0, measured_s=4.0,
    num_live=3, num_waiting=1, planner="auto", gate_state="open", draft_width=2, curve_loaded=True,
    drafter_alive=True, verifier_alive=True, kv_blocks_used=25, kv_blocks_cached=50, kv_blocks_total=100,
)  # fmt: skip
LATER = replace(
    EARLY, num_steps=200, num_rounds=300, num_round_tokens=700, num_emitted_tokens=900, num_drafted_tokens=1500,
    num_verified_tokens=800, num_accepted_tokens=400, verified_at=(300, 200), accepted_at=(240, 90),
    verify_budget_sum=1100, verify_budget_count=300, draft_s=1.5, verify_s=4.0, predicted_s=5.0, measured_s=5.25,
    verify_cost_factor=1.4, prefix_query_tokens=100, prefix_hit_tokens=40, num_gate_shut_steps=25,
)  # fmt: skip


@pytest.fixture
def gateway(bench, make_script) -> Iterator[ServedGateway]:
    with ServedGateway(bench.scheduler(make_script(bench.rounds("Hello there")))) as running:
        running.stats = EARLY
        yield running


def shown(gateway: ServedGateway, *stats: SchedulerStats | None, count: int | None = None) -> list[dict[str, str]]:
    """The pages, while the engine's numbers go through `stats`: row -> text."""
    out, following = io.StringIO(), iter(stats)

    def pause(seconds: float) -> None:
        time.sleep(0.05)
        gateway.stats = next(following)

    with httpx.Client() as client:
        watch(client, gateway.url, 0.05, count or len(stats), out, pause)
    blocks = out.getvalue().strip("\n").split("\n\n")
    return [{line[:12].strip(): line[12:] for line in block.splitlines()[1:]} for block in blocks]


def test_a_page_shows_what_happened_since_the_one_before(gateway):
    (rows,) = shown(gateway, LATER)
    assert rows["requests"].startswith("3 running, 1 waiting")
    assert rows["drafts"] == "accept length 3.00, verify budget 3.00; a round drafts 5.00, verifies 2.00, accepts 2.00"
    assert rows["by position"] == "1: 0.90  2: 0.80"
    refined = "(predicted by the refined curve: 1.40 times the measured one)"
    assert rows["planner"] == f"auto; real over predicted seconds 1.25 {refined}"
    assert rows["gate"] == "open; shut in 25 % of steps, 0 probes"
    assert rows["KV"] == "25 % of 100 blocks held, 50 % kept for hits; prefix hits 40 % of prompt tokens, 0 preemptions"
    assert rows["s per s"].endswith("of 15.0 ms")
    assert rows["workers"] == "verifier up, drafter up"


def test_rates_are_per_second_of_the_interval():
    rose = Scrape({"a": {frozenset(): 10.0}}).since(Scrape({"a": {frozenset(): 4.0}}))
    assert rose.value("a") == 6.0


def test_a_restart_between_two_pages_makes_no_negative_rate(gateway):
    fresh = replace(
        EARLY, num_steps=8, num_rounds=10, num_round_tokens=20, num_emitted_tokens=30, verified_at=(), accepted_at=()
    )
    (rows,) = shown(gateway, fresh)
    assert "-" not in rows["tokens/s"] and rows["drafts"].startswith("accept length 2.00")


def test_an_idle_server_shows_dashes_not_numbers_while_it_is_watched(gateway):
    rows, _ = shown(gateway, EARLY, EARLY)
    assert rows["by position"] == "-" and rows["drafts"].startswith("accept length -")
    assert rows["requests"].endswith("0.00/s ended")


def test_the_only_page_of_an_idle_server_shows_what_it_has_done_so_far(gateway):
    (rows,) = shown(gateway, EARLY)
    assert rows["requests"] == "3 running, 1 waiting; 0 ended"
    assert rows["tokens"] == "500 written, 300 of prompts computed, 900 through the target"
    assert rows["drafts"] == "accept length 2.00, verify budget 4.00; a round drafts 5.00, verifies 3.00, accepts 1.00"
    assert rows["by position"] == "1: 0.75  2: 0.33"
    assert rows["seconds"] == "draft 1.00, plan 0.10, verify 3.00, apply 0.10; 100 steps of 42.0 ms"


def test_the_only_page_says_that_its_numbers_are_sums(gateway):
    out = io.StringIO()
    with httpx.Client() as client:
        watch(client, gateway.url, 0.05, 1, out)
        assert "idle: sums since it started" in out.getvalue().splitlines()[0]
        watch(client, gateway.url, 0.05, 1, out, lambda seconds: setattr(gateway, "stats", LATER))
    assert " over 0." in out.getvalue().split("\n\n")[1].splitlines()[0]


def test_lost_workers_and_a_lost_scheduler_are_said(gateway):
    pages = shown(gateway, replace(EARLY, drafter_alive=False, trim_off_reason="no cost curve"), None, EARLY)
    assert pages[0]["workers"] == "verifier up, drafter LOST"
    assert pages[0]["planner"].endswith("trims nothing: no cost curve")
    assert any("does not answer its gateway" in name + text for name, text in pages[1].items())
    assert pages[2]["workers"] == "verifier up, drafter up"


def test_requests_through_the_gateway_are_in_it(gateway, body):
    out = io.StringIO()

    def ask(seconds: float) -> None:
        httpx.post(f"{gateway.url}/v1/chat/completions", json=body())
        httpx.post(f"{gateway.url}/v1/chat/completions", json=body(temperature=99))

    with httpx.Client() as client:
        watch(client, gateway.url, 1.0, 1, out, ask)
    (row,) = [line for line in out.getvalue().splitlines() if line.startswith("requests")]
    told = re.search(r"; ([\d.]+)/s ended \(rejected ([\d.]+)/s, stop ([\d.]+)/s\)$", row)
    assert told, row
    ended, *ways = map(float, told.groups())
    assert ended == pytest.approx(sum(ways), abs=0.02) and min(ways) > 0, "it is the sum of what stands in brackets"
    assert "first token -" not in out.getvalue()


def test_a_server_that_goes_away_is_waited_for_and_found_again(bench, make_script):
    script = make_script(bench.rounds("Hello"))
    first = ServedGateway(bench.scheduler(script))
    first.__enter__()
    second: list[ServedGateway] = []
    out, steps = io.StringIO(), iter(["stop", "start", ""])

    def pause(seconds: float) -> None:
        step = next(steps)
        if step == "stop":
            first.__exit__(None, None, None)
        elif step == "start":
            second.append(ServedGateway(bench.scheduler(script), port=first.port))
            second[0].__enter__()

    try:
        with httpx.Client() as client:
            watch(client, first.url, 0.01, 3, out, pause)
    finally:
        second[0].__exit__(None, None, None)
    gone, back, again = out.getvalue().strip("\n").split("\n\n")
    assert gone.startswith("no server answers at ") and gone.endswith("waiting for it") and "\n" not in gone
    assert "verifier up" in back and "verifier up" in again


def test_no_server_and_another_server_are_one_clear_line(capsys):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert main(["top", "--once", "--url", url]) == 1
    assert capsys.readouterr().err.startswith(f"dspark: no server answers at {url} (")
    for wrong in ("0", "-1", "nan", "inf", "1e9"):
        assert main(["top", "--once", "--interval", wrong]) == 2
        assert "--interval" in capsys.readouterr().err
    assert main(["top", "--once", "--key", "schlüssel"]) == 2
    assert "--key" in capsys.readouterr().err


def test_what_is_no_page_of_ours_is_refused(gateway):
    with httpx.Client() as client, pytest.raises(Failed, match="no page of a DSpark server"):
        watch(client, f"{gateway.url}/v1", 0.01, 1, io.StringIO())


def test_a_pipe_gets_blocks_and_a_terminal_is_written_over(gateway):
    command = [sys.executable, "-m", "services.cli", "top", "--url", gateway.url, "--interval", "0.1"]
    piped = subprocess.run([*command, "--count", "2"], capture_output=True, text=True, timeout=300, check=True)
    assert piped.stdout.count("\n\n") == 2 and "\x1b" not in piped.stdout
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL) as live:
        os.close(theirs)
        screen = b""
        while screen.count(b"\x1b[H") < 3:
            screen += os.read(ours, 4096)
        live.send_signal(signal.SIGINT)
        try:
            assert live.wait(120) == 0, "it is left by Ctrl-C"
        finally:
            live.kill()
    os.close(ours)


def test_a_reader_that_has_enough_ends_it_without_a_word(gateway):
    command = f"{sys.executable} -m services.cli top --url {gateway.url} --interval 0.05 --count 40"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -1"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stderr == "" and done.stdout.startswith(gateway.url)


def test_a_page_of_metrics_is_read_back_with_its_labels():
    text = '# TYPE a counter\na_total{k="x"} 2\na_total{k="y"} 3\n# TYPE b gauge\nb{s="off"} 0\nb{s="on"} 1\n'
    page = parse_page(text)
    assert (
        page.value("a_total") == 5 and page.value("a_total", k="y") == 3 and page.by("a_total", "k") == {"x": 2, "y": 3}
    )
    assert page.label("b", "s") == "on" and page.value("missing") == 0 and page.label("missing", "s") == ""
