"""A real Prometheus on a loopback port that scrapes what a test runs, with the shipped rules."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest
import yaml

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus on PATH (Debian package prometheus); .ci/run fetches it"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any], timeout_s: float = 180.0, what: Callable[[], Any] = lambda: "") -> Any:
    """The first true answer. `what`: said when there was none in time."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"waited too long: {what()}"
        time.sleep(0.1)
    return answer


class RunningPrometheus:
    """`with RunningPrometheus(folder, {"job": "127.0.0.1:8000"}, rules()) as prometheus:` scrapes /metrics of each target."""

    def __init__(
        self, folder: Path, targets: Mapping[str, str], rules: Mapping[str, Any], scrape: str = "250ms"
    ) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rules.yaml").write_text(yaml.safe_dump(dict(rules)))
        (folder / "prometheus.yaml").write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": scrape, "scrape_timeout": scrape, "evaluation_interval": scrape},
                    "rule_files": ["rules.yaml"],
                    "scrape_configs": [
                        {"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in targets.items()
                    ],
                }
            )
        )
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{free_port()}", timeout=60)

    def __enter__(self) -> RunningPrometheus:
        address = f"{self._http.base_url.host}:{self._http.base_url.port}"
        command = ["prometheus", "--config.file=prometheus.yaml", "--storage.tsdb.path=data", "--log.level=warn"]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--web.listen-address={address}"], cwd=self._folder, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            until(self._ready, what=(self._folder / "log").read_text)
        except BaseException:
            self._process.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._http.close()

    def _ready(self) -> bool:
        assert self._process.poll() is None, (self._folder / "log").read_text()
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of now."""
        answer = self._http.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", (expression, answer)
        return list(answer["data"]["result"])

    def rules(self) -> list[dict[str, Any]]:
        groups = self._http.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def firing(self) -> set[tuple[str, str]]:
        """(alert, job) of what fires now."""
        alerts = self._http.get("/api/v1/alerts").json()["data"]["alerts"]
        fired = [alert for alert in alerts if alert["state"] == "firing"]
        return {(alert["labels"]["alertname"], alert["labels"].get("job", "")) for alert in fired}
