"""The application on a real local Ray, in both placements, with a small real target and a DSpark drafter that helps.

One Ray for the module. What is served must be the text that the same engine writes in this process without drafting.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve._private.logging_utils import get_serve_logs_dir

from scheduler.actor import SchedulerActor
from scheduler.config import SchedulerConfig
from scheduler.errors import BadParams, SchedulerLost
from scheduler.wire import Request, SamplingParams
from services import phase
from services.app import SCHEDULER, build
from services.cluster import SERVE_ENVIRONMENT
from services.engine import Engine, Workers
from services.gateway.app import create_app
from services.handles import RemoteScheduler
from services.launch import remove_application
from services.local_link import Link
from services.settings import Settings, load_settings
from services.split import launch_split
from services.workers import launch_colocated
from tests.integration.character_tokenizer import save_tokenizer

CHAT = "/v1/chat/completions"
PROMPTS = ["hello", "a longer prompt with many words", "xyz", "the cat sat on the mat"]
NUM_TOKENS = 60
IDLE_S = 1.0


@pytest.fixture(scope="module")
def tree(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("served")
    target = Path(shutil.copytree(golden / "target", folder / "target"))
    save_tokenizer(target, json.loads((target / "config.json").read_text())["vocab_size"])
    return {
        "model": {"path": str(target), "name": "golden", "dtype": "float32", "device": "cpu"},
        "drafter": {"checkpoint": str(golden / "dspark_vanilla"), "dtype": "float32", "device": "cpu"},
        "scheduler": {"planner": "fixed:7", "max_live": 8, "prefill_chunk": 32, "check_integrity": True},
        "gateway": {"drain_s": 20, "connect_timeout_s": 60, "idle_s": IDLE_S},
        "threads": 1,
        "cache_dir": str(folder / "cache"),
        "log": {"format": "json", "level": "debug"},
    }


def settings_for(tree: dict, **changes: object) -> Settings:
    return load_settings(args={**tree, **changes})


def body(prompt: str, **changes: object) -> dict:
    messages = [{"role": "user", "content": prompt}]
    return {"model": "golden", "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0, **changes}


@pytest.fixture(scope="module")
def expected(tree: dict) -> dict[str, str]:
    """Prompt -> text, by plain decoding in this process."""

    async def answers() -> dict[str, str]:
        engine = Engine(settings_for(tree, scheduler={"planner": "off", "max_live": 1}), launch_colocated)
        await engine.start()
        app = create_app(engine, settings_for(tree).gateway_config())
        transport = httpx.ASGITransport(app)
        texts = {}
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://t") as http,
        ):
            await app.state.gateway.loaded.wait()
            for prompt in PROMPTS:
                answer = (await http.post(CHAT, json=body(prompt), timeout=60)).json()
                texts[prompt] = answer["choices"][0]["message"]["content"]
        await engine.stop()
        return texts

    return asyncio.run(answers())


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A local Ray with Serve's proxy on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SERVE_ENVIRONMENT.items():
            patch.setenv(name, value)
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=4,
            object_store_memory=200 * 1024 * 1024,
            log_to_driver=False,
            logging_level="ERROR",
        )
    serve.start(http_options={"host": "127.0.0.1", "port": number})
    yield number
    ray.shutdown()


@pytest.fixture(scope="module", params=["colocated", "split"])
def served(request: pytest.FixtureRequest, tree: dict, expected: dict, port: int) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        client.before, client.is_first = client.get("/v1/models"), not DEPLOYED
        DEPLOYED.append(request.param)
        serve.run(build(settings_for(tree, placement=request.param)), name="dspark", route_prefix="/")
        until(lambda: client.get("/ready").status_code == 200)
        client.placement = request.param
        yield client
    serve.delete("dspark")


DEPLOYED: list[str] = []
"""Placements that this Ray has served."""


def until(condition, timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def streamed(client: httpx.Client, prompt: str, **changes: object) -> tuple[str, list]:
    text, events = "", []
    with client.stream("POST", CHAT, json=body(prompt, stream=True, **changes)) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                events.append(data if data == "[DONE]" else json.loads(data))
    for event in events:
        if event != "[DONE]" and event.get("choices"):
            text += event["choices"][0]["delta"].get("content") or ""
    return text, events


def leave_unanswered(url: httpx.URL, request: dict) -> None:
    """A client that asks and goes a moment later. It reads nothing, so it is not kept by an answer that came meanwhile."""
    content = json.dumps(request).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: {url.host}\r\ncontent-length: {len(content)}\r\n\r\n"
    with socket.create_connection((url.host, url.port)) as asking:
        asking.sendall(head.encode() + content)
        time.sleep(0.1)


def metric(client: httpx.Client, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    raise AssertionError(f"no sample {name} {labels}")


def processes(name: str) -> list[int]:
    """Processes of our own Ray whose title holds `name`."""
    parents: dict[int, int] = {}
    titles: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
                titles[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])

    def ours(pid: int) -> bool:
        while pid > 1 and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid == os.getpid()

    return [pid for pid, title in titles.items() if name in title and ours(pid)]


def test_unary_and_streamed_text_is_that_of_plain_decoding(served, expected):
    for prompt, text in expected.items():
        answer = served.post(CHAT, json=body(prompt))
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == text
        assert answer.headers["x-request-id"]
        shown, events = streamed(served, prompt, stream_options={"include_usage": True})
        assert shown == text and events[-1] == "[DONE]"
        assert events[-2]["usage"]["completion_tokens"] == NUM_TOKENS


def test_many_clients_at_once_get_their_own_text(served, expected):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: streamed(served, prompt)[0], PROMPTS * 4))
    assert answers == [expected[prompt] for prompt in PROMPTS * 4]


def test_metrics_show_the_schedulers_exact_sums(served):
    rounds, accepted = metric(served, "dspark_verify_rounds_total"), metric(served, "dspark_accepted_tokens_total")
    assert rounds > 0 and accepted > 0
    assert metric(served, "vllm:spec_decode_num_accepted_tokens_total") == accepted
    assert metric(served, "dspark_round_tokens_total") >= rounds + accepted - metric(
        served, "dspark_finished_requests_total", reason="length"
    )
    assert metric(served, "dspark_scheduler_up") == 1


def test_errors_are_enveloped_through_serve(served):
    for method, path, content, status, code in (
        ("GET", "/nope", None, 404, "unknown_url"),
        ("GET", CHAT, None, 405, "method_not_allowed"),
        ("POST", CHAT, b"{", 400, "invalid_value"),
        ("POST", CHAT, json.dumps(body("x", n=0)).encode(), 400, "invalid_value"),
        ("POST", CHAT, json.dumps(body("x", max_tokens=10_000)).encode(), 400, "context_length_exceeded"),
    ):
        response = served.request(method, path, content=content)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert served.get("/v1/models").json()["data"][0]["id"] == "golden"
    assert served.get("/health").status_code == 200


def check_nobody_serves(response: httpx.Response, code: str) -> None:
    assert response.status_code == 503 and response.json()["error"]["code"] == code
    assert int(response.headers["retry-after"]) > 0 and response.headers["x-request-id"]


def test_without_a_deployment_the_answer_is_an_envelope(served):
    """To a proxy that has served, the one that went is a server that shuts down."""
    check_nobody_serves(served.before, "engine_unavailable" if served.is_first else "shutting_down")


def test_readiness_says_what_a_starting_scheduler_does(served):
    tell = phase.teller("dspark", SCHEDULER)
    tell("measuring the cost curve")
    answer = served.get("/ready")
    tell("")
    assert answer.status_code == 503 and answer.json()["reason"] == "measuring the cost curve"
    assert served.get("/ready").status_code == 200


def test_choices_logprobs_and_request_ids_go_through_serve(served):
    wanted = {"model": "golden", "prompt": ["abc", "hello"], "n": 2, "seed": 3, "max_tokens": 6, "logprobs": 1}
    answer = served.post("/v1/completions", json=wanted, headers={"X-Request-Id": "mine-1"})
    assert answer.status_code == 200 and answer.headers["x-request-id"] == "mine-1"
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert all(len(choice["logprobs"]["tokens"]) == 6 for choice in choices)
    alone = served.post("/v1/completions", json=wanted | {"prompt": "hello", "n": 1, "seed": 4}).json()
    assert alone["choices"][0]["text"] == choices[3]["text"]


def test_a_stop_id_beyond_the_vocabulary_is_refused_by_the_scheduler_with_its_reason(served):
    response = served.post(CHAT, json=body("x", stop_token_ids=[10_000]))
    assert response.status_code == 400 and response.json()["error"]["param"] == "stop_token_ids"


def test_an_answer_follows_its_grammar_in_both_placements(served):
    """The verifier compiles it before the request is queued: a call of its own where it is another process."""
    response = served.post(CHAT, json=body("x", guided_regex="[ab]{2}[0-9]{3}", stop_token_ids=[10]))
    choice = response.json()["choices"][0]
    assert re.fullmatch("[ab]{2}[0-9]{3}", choice["message"]["content"]) and choice["finish_reason"] == "stop"
    refused = served.post(CHAT, json=body("x", guided_regex="[ab", stop_token_ids=[10]))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "guided_regex"


def test_clients_that_drop_leave_nothing_behind(served, expected):
    url = served.base_url

    def drop(number: int) -> None:
        with httpx.Client(base_url=url, timeout=30) as client:
            request = body(PROMPTS[number % 4], stream=number % 2 == 0, max_tokens=300)
            with client.stream("POST", CHAT, json=request) as response:
                if number % 2 == 0:
                    next(response.iter_raw())

    def drop_unary(number: int) -> None:
        leave_unanswered(url, body(PROMPTS[number % 4], max_tokens=300))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: drop_unary(n) if n % 2 else drop(n), range(24)))
    names = (
        "dspark_requests_running",
        "dspark_requests_waiting",
        "dspark_kv_blocks_used",
        "dspark_gateway_open_requests",
    )
    until(lambda: all(metric(served, name) == 0 for name in names), timeout_s=60)
    assert streamed(served, "xyz")[0] == expected["xyz"]


def test_a_client_that_drops_ends_its_own_request_and_no_other(served):
    """Also when it was the one for whom the gateway subscribed."""
    url = served.base_url

    def drop() -> None:
        with httpx.Client(base_url=url, timeout=0.1) as client, contextlib.suppress(httpx.TimeoutException):
            client.post(CHAT, json=body("hello", max_tokens=400))

    for _ in range(2):
        time.sleep(IDLE_S + 0.3)
        with concurrent.futures.ThreadPoolExecutor(5) as pool:
            pool.submit(drop)
            time.sleep(0.03)
            others = [pool.submit(streamed, served, prompt, max_tokens=150) for prompt in PROMPTS]
        assert [other.result()[1][-1] for other in others] == ["[DONE]"] * len(PROMPTS)


def test_a_gateway_without_a_link_to_the_scheduler_gets_its_deltas_and_refusals_by_ray(served):
    """As on another machine. Here it is one that cannot reach the scheduler's folder: it is told so once."""
    gateway = ray.remote(_gateway()).remote(SCHEDULER)
    prompt, params = tuple(range(1, 30)), SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    linked = ray.get(gateway.ask.remote(Request("r1", prompt, params, subscriber="near")), timeout=60)
    ray.get(gateway.lose_the_way.remote(), timeout=60)
    by_ray = ray.get(gateway.ask.remote(Request("r2", prompt, params, subscriber="far")), timeout=60)
    assert linked == (by_ray[0], True) and by_ray[1] is False and len(by_ray[0]) == NUM_TOKENS
    with pytest.raises(BadParams, match="not in the vocabulary"):
        ray.get(gateway.ask.remote(Request("r3", prompt, replace(params, stop_ids=(10_000,)), subscriber="far")))
    ray.get(gateway.begin.remote(Request("r4", prompt, replace(params, max_tokens=400), subscriber="leaves")))
    ray.kill(gateway)
    until(lambda: metric(served, "dspark_requests_running") == metric(served, "dspark_kv_blocks_used") == 0)


def _gateway() -> type:
    """A class that Ray copies: its workers cannot import this module."""

    class GatewayProcess:
        def __init__(self, deployment: str) -> None:
            self.scheduler = RemoteScheduler(serve.get_deployment_handle(deployment, "dspark"))

        async def begin(self, request: Request) -> None:
            self.stream = self.scheduler.subscribe(request.subscriber)
            assert await anext(self.stream) == []
            await self.scheduler.submit(request)

        async def ask(self, request: Request) -> tuple[list[int], bool]:
            """The answer, and whether it came by a link."""
            await self.begin(request)
            ids, ended = [], False
            while not ended:
                for delta in await anext(self.stream):
                    ids += delta.token_ids
                    ended = delta.finish_reason is not None
            is_linked = bool(self.scheduler._links)
            await self.stream.aclose()
            return ids, is_linked

        async def lose_the_way(self) -> None:
            async def connect(path: str, subscriber: str) -> None:
                raise FileNotFoundError(path)

            Link.connect = connect
            with contextlib.suppress(SchedulerLost):
                await anext(self.scheduler.subscribe("lost"))
                raise AssertionError

    return GatewayProcess


def test_torch_is_where_something_computes_and_nowhere_else(served):
    def has_torch(pid: int) -> bool:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()

    assert [has_torch(pid) for pid in processes("dspark:Gateway")] == [False]
    (scheduler,) = processes("dspark:PrefixScheduler")
    assert has_torch(scheduler) == (served.placement == "colocated")
    workers = processes("ray::VerifierProcess") + processes("ray::DrafterProcess")
    assert [has_torch(pid) for pid in workers] == ([True, True] if served.placement == "split" else [])


def test_lost_workers_come_back_and_running_requests_do_not_notice(served, expected):
    if served.placement != "split":
        pytest.skip("in one process there is no worker to lose")
    for name in ("ray::DrafterProcess", "ray::VerifierProcess"):
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = pool.map(lambda prompt: streamed(served, prompt)[0], PROMPTS)
            (pid,) = processes(name)
            os.kill(pid, signal.SIGKILL)
            assert list(answers) == [expected[prompt] for prompt in PROMPTS]
        until(lambda name=name, old=pid: processes(name) not in ([], [old]))
        assert streamed(served, "hello")[0] == expected["hello"]
    until(lambda: streamed(served, "hello") and metric(served, "dspark_drafter_up") == 1)
    (pid,) = processes("ray::DrafterProcess")
    os.kill(pid, signal.SIGKILL)
    until(lambda: processes("ray::DrafterProcess") not in ([], [pid]))  # noticed though nobody asks
    until(lambda: metric(served, "dspark_drafter_up") == 1)


def rest_of_a_stream_after_killing(served, pid: int) -> list[str]:
    """The data lines that still come when the process is killed after the first one."""
    with served.stream("POST", CHAT, json=body("hello", stream=True, max_tokens=400)) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(pid, signal.SIGKILL)
        return [line for line in lines if line.startswith("data: ")]


def test_a_scheduler_that_dies_ends_streams_with_an_error_event_and_comes_back(served, expected):
    if served.placement != "colocated":
        pytest.skip("the same in both placements")
    (pid,) = processes("dspark:PrefixScheduler")
    rest = rest_of_a_stream_after_killing(served, pid)
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert error["code"] == "engine_unavailable" and "data: [DONE]" not in rest
    until(lambda: served.get("/ready").status_code == 200)
    assert streamed(served, "hello")[0] == expected["hello"]


def test_lines_of_every_process_have_ids_and_none_has_a_word_of_a_prompt(served):
    """Ray's and Serve's own files included; for answers, refusals of gateway and engine, broken bodies, clients that drop."""
    marker = "zebraquilt"
    logs = Path(get_serve_logs_dir())
    asked = {"x-request-id": "asked-1"}
    assert served.post(CHAT, json=body(marker), headers=asked).status_code == 200
    for content in (
        b'{"messages": "' + marker.encode(),
        json.dumps(body(marker, n=marker)).encode(),
        json.dumps(body(marker, max_tokens=10_000)).encode(),
        json.dumps(body(marker, stop_token_ids=[10_000])).encode(),
        json.dumps(body("x", guided_regex=f"[{marker}", stop_token_ids=[10])).encode(),
        json.dumps({"model": "golden", "messages": [{"role": "user", "content": {marker: marker}}]}).encode(),
    ):
        assert served.post(CHAT, content=content).status_code == 400
    leave_unanswered(served.base_url, body(marker, max_tokens=400))
    names = ["gateway", "scheduler", *(("verifier", "drafter") if served.placement == "split" else ())]
    lines: dict[str, list[dict]] = {}
    for name in names:
        files = sorted(logs.glob(f"dspark_{name}_*.log"), key=lambda path: path.stat().st_mtime)
        lines[name] = [json.loads(line) for line in files[-1].read_text().splitlines()]
    for name, each in lines.items():
        assert each and {line["process"] for line in each} == {name}
        assert all({"time", "level", "engine", "request_ids", "logger", "message"} <= line.keys() for line in each)
    assert len({line["engine"] for each in lines.values() for line in each}) == 1
    (known,) = [line["request_ids"] for line in lines["gateway"] if "asked-1" in line["request_ids"]]
    assert any(known[1] in line["request_ids"] for line in lines["scheduler"]), "the same request in both processes"
    for path in (path for path in logs.parent.rglob("*") if path.is_file()):
        assert marker.encode() not in path.read_bytes(), path


def num_ongoing(deployment: str) -> int:
    """Calls that its replica would wait for in a drain."""
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if deployment in each["name"]]
    replicas = [ray.get_actor(name, namespace="serve") for name in names]
    return sum(ray.get([replica.get_num_ongoing_requests.remote() for replica in replicas]))


def test_a_gateway_that_dies_ends_its_streams_with_an_error_event_and_its_requests_in_the_engine(served, expected):
    if served.placement != "colocated":
        pytest.skip("the same in both placements")
    (pid,) = processes("dspark:Gateway")
    rest = rest_of_a_stream_after_killing(served, pid)
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_unavailable"
    until(lambda: served.get("/ready").status_code == 200)
    assert streamed(served, "hello")[0] == expected["hello"]
    until(lambda: num_ongoing("PrefixScheduler") == 0)
    assert metric(served, "dspark_requests_running") == metric(served, "dspark_kv_blocks_used") == 0


async def trace(workers: Workers) -> list[tuple[int, int]]:
    """(verified, accepted) of each round of one greedy request, without a cost curve: every round drafts."""
    actor = SchedulerActor(SchedulerConfig(planner="fixed:7"), workers.verifier, workers.drafter)
    await actor.start()
    stream = actor.subscribe("test")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    await actor.submit(Request("r", tuple(range(1, 30)), params, subscriber="test"))
    rounds = []
    async for deltas in stream:
        rounds += [(delta.num_verified, delta.num_accepted) for delta in deltas]
        if deltas[-1].finish_reason is not None:
            break
    await actor.stop()
    await workers.stop()
    return rounds


@pytest.mark.parametrize("drafter", ["dspark_vanilla", "eagle3"])
def test_drafts_of_two_processes_are_those_of_one(port, tree, golden: Path, drafter: str):
    """The captured features travel by reference from worker to worker; a wrong or late one changes the drafts."""

    async def both() -> list[list[tuple[int, int]]]:
        checkpoint = {**tree["drafter"], "checkpoint": str(golden / drafter)}
        settings = settings_for(tree, placement="split", drafter=checkpoint)
        return [await trace(await launch(settings)) for launch in (launch_colocated, launch_split)]

    one, two = asyncio.run(both())
    assert one == two and sum(accepted for _, accepted in one) > 0


def test_a_running_stream_is_finished_when_the_application_is_removed(served, expected, monkeypatch):
    """Last: the application is gone afterwards. Serve's own wait, a minute at most, is over at once the first time."""
    late = itertools.chain([0.0, 3600.0], iter(time.time, None))
    monkeypatch.setattr("ray.serve._private.client.time", SimpleNamespace(time=late.__next__, sleep=time.sleep))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with served.stream("POST", CHAT, json=body("hello", stream=True, max_tokens=400)) as response:
            lines = response.iter_lines()
            next(lines)
            removing = pool.submit(remove_application, wait=True)
            until(lambda: served.post(CHAT, json=body("xyz")).status_code != 200)
            late = served.post(CHAT, json=body("xyz"))
            rest = [line for line in lines if line.startswith("data: ")]
        removing.result()
    assert "dspark" not in serve.status().applications
    check_nobody_serves(late, "shutting_down")
    assert rest[-1] == "data: [DONE]"
    text = "".join(
        (json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or "") for line in rest[:-1]
    )
    assert expected["hello"].startswith(text[:NUM_TOKENS]) or text.startswith(expected["hello"][1:NUM_TOKENS])
