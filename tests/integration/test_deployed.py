"""The chart's Serve config on a real Ray: it starts, answers, is redeployed under load and loses nothing."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import itertools
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from services.operations.alerts import rules
from services.operations.dashboards import DASHBOARDS
from tests.deployed_application import Cluster, local_cluster, rendered_serve_config
from tests.integration.character_tokenizer import save_tokenizer
from tests.mixed_traffic import asking
from tests.running_prometheus import RunningPrometheus, needs_prometheus, until

KEY = "sk-2f7c0d9a4be14c55"
CHAT = "/v1/chat/completions"
MINUTE_S = 0.4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with local_cluster(num_cpus=6) as running:
        yield running


@pytest.fixture(scope="module")
def values(golden: Path, tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> dict[str, Any]:
    """Over the example: a small target and its drafter, and a port that is free."""
    folder = tmp_path_factory.mktemp("deployed")
    target = Path(shutil.copytree(golden / "target", folder / "target"))
    save_tokenizer(target, json.loads((target / "config.json").read_text())["vocab_size"])
    settings = {
        "model": {"path": str(target), "name": "golden", "dtype": "float32"},
        "drafter": {"checkpoint": str(golden / "dspark_vanilla"), "dtype": "float32"},
        "scheduler": {"max_live": 2},
        "gateway": {"port": cluster.port, "drain_s": 30, "idle_s": 1, "connect_timeout_s": 90},
        "threads": 1,
        "cache_dir": str(folder / "cache"),
    }
    return {"settings": settings}


@pytest.fixture(scope="module")
def config(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """As rendered, but for where the Secret with the keys is mounted and which interface a test may listen on."""
    rendered = rendered_serve_config("cpu", values)
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(f"alice: {KEY}\n")
    rendered["applications"][0]["args"]["gateway"]["auth"]["keys_file"] = str(keys)
    rendered["http_options"]["host"] = "127.0.0.1"
    return rendered


@pytest.fixture(scope="module")
def http(cluster: Cluster, config: dict[str, Any]) -> Iterator[httpx.Client]:
    cluster.put(config)
    cluster.await_running()
    with httpx.Client(base_url=cluster.url, headers={"authorization": f"Bearer {KEY}"}, timeout=90) as client:
        until(lambda: client.get("/ready").status_code == 200)
        yield client


def body(**changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hello"}]
    return {"model": "golden", "messages": messages, "max_tokens": 60, "temperature": 0, **changes}


def streamed(client: httpx.Client, **changes: Any) -> tuple[str, list[str]]:
    """The text, and the data lines."""
    with client.stream("POST", CHAT, json=body(stream=True, **changes)) as response:
        if response.status_code != 200:
            response.read()
        assert response.status_code == 200, response.text
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    assert not [chunk for chunk in chunks if "error" in chunk], chunks[-1]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]), lines


def test_the_rendered_cpu_example_starts_and_streams(http, config):
    assert config["applications"][0]["import_path"] == "services.app:build"
    text, lines = streamed(http)
    assert text and lines[-1] == "[DONE]"
    assert http.get("/v1/models").json()["data"][0]["id"] == "golden"
    assert "dspark_verify_rounds_total" in http.get("/metrics").text
    refused = httpx.post(f"{http.base_url}{CHAT}", json=body())
    assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"


def test_a_redeploy_under_load_loses_no_request(http, cluster, config):
    """From one engine group to two in the split placement. Streams that run when it begins are finished by the old replicas;
    those that come meanwhile wait for the new ones."""
    expected, _ = streamed(http, max_tokens=300)
    before = set(cluster.replicas("PrefixScheduler") + cluster.replicas("Gateway"))
    changed = copy.deepcopy(config)
    changed["applications"][0]["args"] |= {"groups": 2, "placement": "split"}
    done = threading.Event()
    answers: list[tuple[float, float, str]] = []

    def client() -> None:
        with httpx.Client(base_url=cluster.url, headers=http.headers, timeout=150) as own:
            while not done.is_set():
                began = time.monotonic()
                text, lines = streamed(own, max_tokens=300)
                assert lines[-1] == "[DONE]"
                answers.append((began, time.monotonic(), text))

    def replaced() -> bool:
        now = set(cluster.replicas("PrefixScheduler") + cluster.replicas("Gateway"))
        return bool(now) and not now & before

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client) for _ in range(4)]
        until(lambda: answers)
        put_at = time.monotonic()
        cluster.put(changed)
        until(replaced)
        cluster.await_running()
        replaced_at = time.monotonic()
        until(lambda: any(ended > replaced_at for _, ended, _ in answers))
        done.set()
        for each in clients:
            each.result()
    assert {text for _, _, text in answers} == {expected}
    assert any(began < put_at < ended for began, ended, _ in answers), "a stream ran when it began"
    assert any(put_at < began < replaced_at for began, _, _ in answers), "a request came while replicas were replaced"


@needs_prometheus
def test_two_groups_have_their_series_and_a_killed_worker_fires_its_alerts(http, cluster, tmp_path):
    assert set(cluster.application()["deployments"]) == {"Gateway", "PrefixScheduler", "PrefixScheduler-1"}
    questions = itertools.cycle("abcdefghijklmnopqrstuvwxyz")

    def ask(client: httpx.Client) -> int:
        messages = [{"role": "user", "content": next(questions)}]
        return client.post(CHAT, json=body(messages=messages, max_tokens=20), headers=http.headers).status_code

    with RunningPrometheus(tmp_path, {"dspark": f"127.0.0.1:{cluster.port}"}, rules(MINUTE_S), "500ms") as prometheus:

        def groups(expression: str) -> set[str]:
            return {sample["metric"]["group"] for sample in prometheus.query(expression)}

        def in_one_group_only() -> list[str]:
            return [expression for expression in fleet() if groups(expression) != {"0", "1"}]

        with asking(cluster.url, ask, at_once=2):
            until(lambda: not in_one_group_only(), what=in_one_group_only)
            verifiers = processes("ray::VerifierProcess")
            assert len(verifiers) == 2
            os.kill(verifiers[0], signal.SIGKILL)
            fired = {"DsparkWorkerLost": set(), "DsparkVerifierDown": set()}

            def both_fired() -> bool:
                for alert, hit in fired.items():
                    hit |= groups(f'ALERTS{{alertname="{alert}", alertstate="firing"}}')
                return all(fired.values())

            until(both_fired, what=lambda: fired)
            until(lambda: not prometheus.query("dspark_verifier_up == 0"))
    (group,) = fired["DsparkWorkerLost"]
    assert fired["DsparkVerifierDown"] == {group}
    assert streamed(http)[1][-1] == "[DONE]"


def fleet() -> list[str]:
    """What the Fleet dashboard asks, but for faults that a group which is well does not have."""
    panels = DASHBOARDS["fleet"]["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    return [filled_in(each) for each in asked if not re.search("rejections|failed_requests", each)]


def filled_in(expression: str) -> str:
    for name, value in (("$__rate_interval", "6s"), ("$job", ".*"), ("$group", ".*"), ("$model", ".*")):
        expression = expression.replace(name, value)
    return expression


def processes(name: str) -> list[int]:
    """Of our own Ray, by title."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found += [process.pid] if name in " ".join(process.cmdline()) else []
    return found
