"""`dspark` as a person uses it: answers, servers without Ray that drain, and refusals of one line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import pytest

from services.cli import main
from tests.integration.character_tokenizer import save_tokenizer
from tests.running_command import Server, free_port
from tests.running_prometheus import until

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    for name in [name for name in os.environ if name.startswith("DSPARK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DSPARK_THREADS", "1")
    monkeypatch.setenv("DSPARK_SCHEDULER__MAX_LIVE", "4")
    monkeypatch.setenv("DSPARK_SCHEDULER__PREFILL_CHUNK", "32")
    monkeypatch.setenv("DSPARK_MODEL__DTYPE", "float32")
    monkeypatch.setenv("DSPARK_DRAFTER__DTYPE", "float32")


@pytest.fixture(scope="module")
def folder(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("commands") / "target"
    shutil.copytree(golden / "target", target)
    return save_tokenizer(target, 48)


@pytest.fixture
def flags(folder: Path, golden: Path) -> list[str]:
    drafter = str(golden / "dspark_vanilla")
    return ["--model", str(folder), "--drafter", drafter, "--set", f"cache_dir={folder.parent / 'cache'}"]


def test_generate_prints_the_same_text_with_and_without_drafts(flags, capsys):
    texts = []
    for planner in ("off", "fixed:3"):
        arguments = ["generate", *flags, "--planner", planner, "--max-tokens", "40", "--temperature", "0", "hello"]
        assert main(arguments) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len(texts[0].strip()) > 10


def test_generate_shows_where_tokens_came_from(flags, capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    arguments = [
        "generate",
        *flags,
        "--planner",
        "fixed:7",
        "--max-tokens",
        "80",
        "--temperature",
        "0",
        "--show-drafts",
    ]
    assert main([*arguments, "a longer prompt"]) == 0
    shown = capsys.readouterr()
    assert main(["generate", *flags, "--max-tokens", "80", "--temperature", "0", "a longer prompt"]) == 0
    assert shown.out.replace("«", "").replace("»", "") == capsys.readouterr().out
    for words in ("accept length", "tokens/s", "first token after"):
        assert words in shown.err
    rounds, verified = (
        int(re.search(text, shown.err)[1]) for text in (r"in (\d+) verify rounds", r"of (\d+) verified")
    )
    assert f"verify budget {1 + verified / rounds:.2f} " in shown.err, (
        "as the metrics have it: the target's own token too"
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("make", [Terminal, io.StringIO])
def test_generate_says_what_it_waits_for_and_on_a_terminal_leaves_nothing_of_it(
    flags, capsys, monkeypatch, tmp_path, make
):
    monkeypatch.setattr(sys, "stderr", shown := make())
    monkeypatch.setattr("services.generate._SILENT_S", 0.0)
    fresh = ["--set", f"cache_dir={tmp_path}"]
    assert main(["generate", *flags, *fresh, "--max-tokens", "4", "hello"]) == 0
    if not shown.isatty():
        assert shown.getvalue() == "loading the models ...\nmeasuring the cost curve ...\n"
        return
    phases = shown.getvalue().split("\r\x1b[K")
    assert phases[1:3] == ["loading the models ...", "measuring the cost curve ..."] and not phases[-1]
    assert "..." not in capsys.readouterr().out


def test_generate_with_a_seed_repeats_itself(flags, capsys):
    for _ in range(2):
        assert main(["generate", *flags, "--seed", "3", "--temperature", "1.2", "--max-tokens", "30", "hello"]) == 0
    first, second = capsys.readouterr().out.strip().split("\n")
    assert first == second


def test_measure_ends_in_one_json_line_and_draws(flags, capsys, tmp_path):
    plot = tmp_path / "curve.png"
    assert main(["measure", *flags, "--plot", str(plot)]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    report = json.loads(lines[-1])
    assert report["tokens"] == sorted(report["tokens"]) and len(report["verify_s"][0]) == len(report["tokens"])
    assert report["widths"] and set(report["step_over_products"]) >= {"1", "8"}
    for table in (report["verify_s"], report["draft_s"]):
        assert all(row == sorted(row) for row in table), "the planner's times never fall"
    assert len(report["verify_raw_s"]) == len(report["contexts"]) and len(report["draft_raw_s"]) == len(
        report["requests"]
    )
    assert sum(line.count(" raw") for line in lines[:-1]) >= 2
    assert 0 < report["host_share"]["1"] < 1
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_recorded_rounds_feed_the_simulator(flags, capsys, tmp_path):
    traces = tmp_path / "traces.jsonl"
    few = ["--concurrency", "none", "--poisson", "50", "--arrivals", "6", "--rounds", "1", "--max-tokens", "24"]
    arguments = ["bench", "sweep", *flags, "--planners", "fixed:7", "--kinds", "code", "--num-prompts", "2", *few]
    assert main([*arguments, "--temperature", "0", "--record", str(traces), "--out", str(tmp_path / "x.json")]) == 0
    assert "traces: " in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "x.json").read_text())["bench"]
    lines = [json.loads(line) for line in traces.read_text().splitlines()]
    assert len(lines) == 6 and row["rate"] == 50 and {line["kind"] for line in lines} == {"code"}
    assert all(round_["verified"] <= len(round_["confidence"]) <= 7 for line in lines for round_ in line["rounds"])
    study = ["--curve", "cpu", "--loads", "2", "--planners", "off,fixed:7", "--seconds", "5"]
    assert main(["simulate", "--workloads", str(traces), *study]) == 0
    simulated = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert abs(simulated[1]["accept_length"] - row["accept_length"]) < 0.3


def test_bench_compares_planners_side_by_side(flags, capsys):
    arguments = ["bench", *flags, "--planners", "off,fixed:7", "--concurrency", "1,2", "--rounds", "2"]
    assert main([*arguments, "--num-prompts", "2", "--max-tokens", "12"]) == 0
    rows = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["bench"]
    assert [(row["kind"], row["concurrency"], row["planner"]) for row in rows] == [
        (kind, concurrency, planner)
        for kind in ("code", "math", "chat")
        for concurrency in (1, 2)
        for planner in ("off", "fixed:7")
    ]
    for row in rows:
        assert row["steady_tokens_per_s"] > 0 and row["steady_over_best_fixed"] <= 1
        assert row["tokens_per_s"] > 0 and len(row["tokens_per_s_runs"]) == 2 and row["accept_length"] >= 1
        assert row["tokens"] == 2 * 12 * 3 * row["concurrency"]
        assert row["verify_budget"] == 1 or row["planner"] == "fixed:7"


@pytest.fixture(scope="module")
def serve_flags(folder: Path, golden: Path) -> list[str]:
    drafter = str(golden / "dspark_vanilla")
    few = ["--threads", "1", "--set", "scheduler.max_live=4", "--set", "scheduler.prefill_chunk=32"]
    where = ["--model", str(folder), "--drafter", drafter, "--set", f"cache_dir={folder.parent / 'cache'}"]
    return [*where, *few, "--dtype", "float32", "--set", "drafter.dtype=float32", "--name", "golden"]


@pytest.fixture
def endless_flags(serve_flags: list[str], folder: Path, tmp_path: Path) -> list[str]:
    """Of a target with room for answers that are not over before a test wants to end them."""
    long = Path(shutil.copytree(folder, tmp_path / "long"))
    config = json.loads((long / "config.json").read_text())
    (long / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return [*serve_flags, "--model", str(long), "--set", "scheduler.planner=off"]


@pytest.fixture(scope="module")
def server(serve_flags: list[str]) -> Iterator[Server]:
    running = Server(["--no-ray", *serve_flags])
    yield running
    running.kill()


def test_a_server_without_ray_tells_its_url_when_it_is_ready_and_streams(server):
    assert f"http://127.0.0.1:{server.port}/v1" in server.wait_ready()
    assert server.client.get("/ready").json()["status"] == "ready"
    body = {"model": "golden", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "stream": True}
    assert server.client.post(CHAT, json=body).text.rstrip().endswith("data: [DONE]")
    assert "dspark_emitted_tokens_total" in server.client.get("/metrics").text


def test_a_port_in_use_is_one_clear_line(server, flags, capsys):
    with httpx.Client(transport=httpx.HTTPTransport(retries=8)) as patient:
        patient.get(f"http://127.0.0.1:{server.port}/health")
    assert main(["serve", *flags, "--port", str(server.port)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "gateway.port" in error and str(server.port) in error


def test_a_start_that_fails_says_why_once(serve_flags):
    failing = Server(["--no-ray", *serve_flags, "--drafter", "/nope"])
    try:
        said = own_lines(failing)
        assert failing.process.wait(timeout=120) == 2
    finally:
        failing.kill()
    assert [line for line in said if "/nope" in line] == said[-1:]


def test_the_benchmark_measures_a_running_server(server, capsys, tmp_path):
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"prompt {n}", "ignored"]}) + "\n" for n in range(3)))
    arguments = ["bench", "--url", f"http://127.0.0.1:{server.port}/v1", "--prompts", str(prompts)]
    assert main([*arguments, "--concurrency", "2", "--rounds", "1", "--max-tokens", "10"]) == 0
    (row,) = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["bench"]
    assert row["kind"] == "mine" and row["planner"] == "server" and row["answers"] == 6 and row["accept_length"] >= 1


def test_a_running_server_s_requests_choose_their_own_arm(server, capsys):
    arguments = ["bench", "sweep", "--url", f"http://127.0.0.1:{server.port}/v1", "--planners", "off,fixed:7"]
    few = ["--concurrency", "2", "--rounds", "1", "--max-tokens", "10", "--num-prompts", "2", "--kinds", "mixed"]
    assert main([*arguments, *few, "--temperature", "0"]) == 0
    rows = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["bench"]
    assert [(row["planner"], row["answers"]) for row in rows] == [("off", 6), ("fixed:7", 6)]


def test_a_server_that_is_told_to_stop_finishes_its_streams(server):
    body = {"model": "golden", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 400, "stream": True}
    with server.client.stream("POST", CHAT, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("draining")
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert server.process.wait(timeout=120) == 0
    assert own_lines(server) == ["stopped"], "as with Ray"


def own_lines(running: Server) -> list[str]:
    """What the command still said itself, without log lines."""
    return [line for line in running.rest().splitlines() if " INFO " not in line]


def test_what_still_runs_or_waits_when_the_time_to_drain_is_up_ends_with_an_error_of_its_own(serve_flags):
    running = Server(["--no-ray", *serve_flags, "--set", "scheduler.max_live=1", "--set", "gateway.drain_s=0.5"])
    try:
        running.wait_ready()
        body = {"model": "golden", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 400}
        with ThreadPoolExecutor(40) as clients:
            streams = [clients.submit(running.client.post, CHAT, json={**body, "stream": True}) for _ in range(20)]
            unary = [clients.submit(running.client.post, CHAT, json=body) for _ in range(20)]
            wait([*streams, *unary], return_when=FIRST_COMPLETED)
            until(lambda: sum(each.done() for each in [*streams, *unary]) + num_open(running) >= 40)
            running.process.send_signal(signal.SIGTERM)
            answers = [future.result() for future in [*streams, *unary]]
        assert running.process.wait(timeout=120) == 0
    finally:
        running.kill()
    refused = [answer.json()["error"] for answer in answers if answer.status_code != 200]
    assert refused, "the drain time was to be too short for all of them"
    assert {(error["type"], error["code"]) for error in refused} == {("server_error", "shutting_down")}
    for answer in [each for each in answers[:20] if each.status_code == 200]:
        last = answer.text.rstrip().rpartition("data: ")[2]
        assert last == "[DONE]" or json.loads(last)["error"]["code"] == "shutting_down"


def num_open(running: Server) -> int:
    """Requests that have reached the server and are not answered."""
    page = running.client.get("/metrics").text
    return int(
        sum(float(value) for value in re.findall(r"^dspark_gateway_open_requests{.*} (.*)$", page, re.MULTILINE))
    )


def last_event_after_two_signals(running: Server, body: dict) -> dict:
    """The last event of a stream that is running when the server is told to stop, and told again while it drains."""
    with running.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGTERM)
        running.wait_for("draining")
        running.process.send_signal(signal.SIGINT)
        last = [line for line in lines if line][-1]
    return json.loads(last.removeprefix("data: "))


def test_a_second_signal_cuts_what_runs_and_is_the_exit_status_with_one_line(endless_flags):
    running = Server(["--no-ray", *endless_flags])
    try:
        running.wait_ready()
        body = {"model": "golden", "prompt": "hello", "max_tokens": 7000, "stream": True, "ignore_eos": True}
        assert last_event_after_two_signals(running, body)["error"]["code"] == "shutting_down"
        assert running.process.wait(timeout=120) in (128 + signal.SIGINT, 128 + signal.SIGTERM)
        assert own_lines(running) in (["dspark: stopped by SIGINT"], ["dspark: stopped by SIGTERM"])
    finally:
        running.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_is_stopped_while_it_starts_ends_at_once_with_one_line(serve_flags, tmp_path, number):
    # large steps take long to measure: it is not over before the signal
    long = ["--set", f"cache_dir={tmp_path}", "--set", "scheduler.prefill_chunk=1024"]
    starting = Server(["--no-ray", *serve_flags, *long])
    starting.wait_for("measuring the cost curve")
    reason = starting.client.get("/ready").json()["reason"]
    starting.process.send_signal(number)
    assert starting.process.wait(timeout=120) == 128 + number
    assert own_lines(starting) == [f"dspark: stopped by {number.name}"]
    assert reason.removeprefix("not ready: ") in ("loading the models", "measuring the cost curve")


@pytest.mark.parametrize("where", [["--no-ray"], ["--placement", "colocated"]])
def test_a_chat_template_that_does_not_compile_ends_the_start_with_one_line(serve_flags, tmp_path, where):
    """It asked itself again for ever whether the template had become better."""
    template = tmp_path / "broken.jinja"
    template.write_text("{% for")
    starting = Server([*where, *serve_flags, "--set", f"model.chat_template={template}"])
    try:
        assert starting.process.wait(timeout=120) in (1, 2)
        last = own_lines(starting)[-1]
        assert last.startswith("dspark: ") and "model.chat_template: the template does not compile" in last
    finally:
        starting.kill()


def session(of: int) -> list[tuple[int, str]]:
    """Ids and command lines of the living processes of that session."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            if stat[3] == str(of) and stat[0] != "Z":
                title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if title:  # one that is ending has none any more
                    found.append((int(entry.name), title))
        except (OSError, IndexError):
            continue
    return found


def in_session(of: int) -> list[str]:
    return [title for _, title in session(of)]


def test_a_server_on_ray_says_what_it_waits_for_and_drains_when_its_whole_group_is_told_to_stop(serve_flags, tmp_path):
    running = Server([*serve_flags, "--set", f"cache_dir={tmp_path}", "--placement", "colocated"])
    try:
        running.wait_for("measuring the cost curve")
        while (answer := running.client.get("/ready")).status_code != 200:
            assert "does not answer" not in answer.text
            time.sleep(0.05)
        child = server_of(running)
        assert any("raylet" in line for line in in_session(child))
        running.wait_ready()
        body = {
            "model": "golden",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 400,
            "stream": True,
        }
        with running.client.stream("POST", CHAT, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.killpg(running.process.pid, signal.SIGTERM)
            running.wait_for("draining")
            refused = refusal(running, {**body, "stream": False, "max_tokens": 2})
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert running.process.wait(timeout=120) == 0
        assert running.rest() == "stopped\n" and in_session(child) == []
        assert refused.json()["error"]["code"] == "shutting_down" and int(refused.headers["retry-after"]) > 0
    finally:
        running.kill()


def test_a_second_signal_ends_a_stream_on_ray_with_an_error_event(endless_flags):
    running = Server([*endless_flags, "--placement", "colocated"])
    try:
        running.wait_ready()
        child = server_of(running)
        body = {"model": "golden", "prompt": "hello", "max_tokens": 7000, "stream": True, "n": 4, "ignore_eos": True}
        assert last_event_after_two_signals(running, body)["error"]["code"] == "shutting_down"
        assert running.process.wait(timeout=120) in (128 + signal.SIGINT, 128 + signal.SIGTERM)
        assert running.rest().splitlines()[-1] in ("dspark: stopped by SIGINT", "dspark: stopped by SIGTERM")
        assert in_session(child) == []
    finally:
        running.kill()


def refusal(running: Server, body: dict) -> httpx.Response:
    """The first answer of a draining server that is none: what comes before Serve has taken the route away is served."""
    for _ in range(200):
        answer = httpx.post(f"http://127.0.0.1:{running.port}{CHAT}", json=body, timeout=120)
        if answer.status_code != 200:
            return answer
        time.sleep(0.02)
    raise AssertionError("a draining server takes requests")


def server_of(running: Server) -> int:
    (child,) = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
    return int(child)


@pytest.mark.parametrize("where", [["--placement", "colocated"], ["--no-ray"]])
def test_a_server_whose_lines_nobody_reads_any_more_serves_on_and_drains(serve_flags, where):
    """`dspark serve | head -1`, or a terminal that was closed."""
    running = Server([*serve_flags, *where])
    try:
        assert running.process.stdout is not None and running.process.stdout.readline()
        running.process.stdout.close()
        for _ in range(1200):
            with contextlib.suppress(httpx.TransportError):
                if running.client.get("/ready").status_code == 200:
                    break
            time.sleep(0.1)
        body = {"model": "golden", "prompt": "hello", "max_tokens": 2}
        assert running.client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 2
        time.sleep(1.0)  # what started the server asks it, too, whether it is ready
        os.killpg(running.process.pid, signal.SIGTERM)
        assert running.process.wait(timeout=120) == 0
    finally:
        running.kill()


def test_a_server_on_ray_that_is_stopped_while_it_starts_ends_with_one_line_and_starts_no_other_ray(
    serve_flags, tmp_path
):
    starting = Server([*serve_flags, "--set", f"cache_dir={tmp_path}", "--placement", "colocated"])
    try:
        starting.wait_for("starting ")
        server = server_of(starting)
        os.killpg(starting.process.pid, signal.SIGTERM)
        assert starting.process.wait(timeout=120) == 128 + signal.SIGTERM
        assert starting.rest().removeprefix("loading the models\n") == "dspark: stopped by SIGTERM\n"
        assert in_session(server) == []
    finally:
        starting.kill()


@pytest.mark.parametrize("daemon", ["raylet", "gcs_server"])
def test_a_ray_that_dies_ends_the_server_and_its_streams(serve_flags, tmp_path, daemon):
    running = Server([*serve_flags, "--placement", "colocated"])
    try:
        running.wait_ready()
        server = server_of(running)
        body = {"model": "golden", "prompt": "hello", "max_tokens": 400, "stream": True}
        with running.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            (pid,) = [pid for pid, title in session(server) if f"/{daemon} " in title]
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(httpx.TransportError):
                list(lines)
        assert running.process.wait(timeout=120) == 1
        last = running.rest().splitlines()[-1]
        assert last == f"dspark: Ray's {daemon} process died, and the server with it; start it again"
        assert in_session(server) == []
    finally:
        running.kill()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["serve", "--set", "gateway.prt=1"], 2, "gateway.prt: unknown key (from command line)"),
        (["serve", "--set", "gateway.port"], 2, "KEY=VALUE"),
        (["serve", "--set", "=5"], 2, "--set =5: write KEY=VALUE"),
        (["serve", "--set", "gateway.=5"], 2, "KEY=VALUE"),
        (["serve", "--set", "gateway=5"], 2, "gateway.KEY"),
        (["serve", "--host", "no such host"], 2, "gateway.host"),
        (["serve", "--host", "192.0.2.1"], 2, "gateway.host"),
        (["serve", "--port", "8000", "--set", "gateway.port.x=1"], 2, "gateway.port has a value already"),
        (["serve", "--settings", "/nowhere.yaml"], 2, "No such file"),
        (["serve", "--port", "0"], 2, "gateway.port"),
        (["generate", "--planner", "best", "hi"], 2, "scheduler.planner"),
        (["generate", "--model", "/nowhere/at/all", "hi"], 2, "model.path"),
        (["bench", "--concurrency", "0"], 2, "--concurrency"),
        (["bench", "--prompts", "/nowhere.jsonl"], 2, "--prompts"),
        (["bench", "--url", "http://127.0.0.1:9/v1"], 1, "--url"),
    ],
)
def test_a_refusal_is_one_line_and_no_traceback(arguments, status, words, capsys):
    assert main(arguments) == status
    error = capsys.readouterr().err
    assert error.startswith("dspark: ") and error.count("\n") == 1 and words in error


@pytest.mark.parametrize("change", [["--drafter", "/nowhere/at/all"], ["--max-tokens", "0"], ["--temperature", "9"]])
def test_a_refusal_of_what_was_asked_is_one_line_too(flags, change, capsys):
    assert main(["generate", *flags, *change, "hi"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nonsense", "ray://127.0.0.1:9"])
def test_a_cluster_that_does_not_answer_is_one_line(flags, monkeypatch, capsys, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert main(["serve", *flags, "--port", str(free_port())]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"RAY_ADDRESS {address!r}: no Ray answers there" in error


def test_wrong_usage_shows_the_usage_and_ends_with_2(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["generate"])
    assert ended.value.code == 2 and "usage: dspark generate" in capsys.readouterr().err


def test_start_up_time_of_help_is_short():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "services.cli", "--help"], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert "measure" in done.stdout and took_s < 5, "processor time: a wall clock's would be that of all who compute"


@pytest.mark.parametrize(
    ("arguments", "command", "meant"),
    [
        (["serve", "--prt", "9000"], "serve", "--port"),
        (["generate", "x", "--max-tokns=3"], "generate", "--max-tokens"),
        (["bench", "sweep", "--round", "1", "--plannrs", "off"], "bench sweep", "--planners"),
    ],
)
def test_a_misspelt_flag_is_answered_with_its_commands_usage_and_what_may_be_meant(arguments, command, meant, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert said.startswith(f"usage: dspark {command} ")
    assert said.rstrip().endswith(f"did you mean {meant}?")
