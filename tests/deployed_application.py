"""What KubeRay does with a rendered chart, on a local Ray: the Serve config goes to the dashboard's REST interface."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import helm_python as helm
import ray
import yaml
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from tests.running_prometheus import free_port, until

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "dspark-serve"


def rendered_serve_config(example: str, values: dict[str, Any]) -> dict[str, Any]:
    """`serveConfigV2` of an example with further values over it, by Helm's own engine."""
    over = _merged(yaml.safe_load((CHART / "examples" / f"{example}.yaml").read_text()), values)
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(over)
        files = chart.render(over, name="chat", namespace="models")
    (service,) = [text for name, text in files.items() if name.endswith("rayservice.yaml")]
    return yaml.safe_load(yaml.safe_load(service)["spec"]["serveConfigV2"])


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merged(under[key], over[key]) for key in under.keys() & over.keys() if isinstance(over[key], dict)}
    return {**under, **over, **both}


class Cluster:
    """A local Ray with its dashboard. `put` deploys as `serve deploy` and KubeRay's operator do."""

    def __init__(self, dashboard: str, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._dashboard = ServeSubmissionClient(f"http://{dashboard}")

    def put(self, config: dict[str, Any]) -> None:
        """Gives the config to Serve, which takes it over after this has returned."""
        self._dashboard.deploy_applications(config)

    def application(self) -> dict[str, Any]:
        return dict(self._dashboard.get_serve_details()["applications"].get("dspark", {}))

    def await_running(self, timeout_s: float = 300.0) -> None:
        def running() -> bool:
            found = self.application()
            assert found.get("status") not in ("DEPLOY_FAILED", "UNHEALTHY"), json.dumps(found, indent=1)[:6000]
            return found.get("status") == "RUNNING"

        until(running, timeout_s, lambda: json.dumps(self.application(), indent=1)[:3000])

    def replicas(self, deployment: str) -> list[int]:
        """Process ids."""
        found = self.application().get("deployments", {}).get(deployment, {"replicas": []})
        return [each["pid"] for each in found["replicas"] if each["state"] == "RUNNING"]


@contextmanager
def local_cluster(num_cpus: int) -> Iterator[Cluster]:
    """Workers find the packages as this process does."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), before]))
    context = ray.init(
        address="local",
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        dashboard_port=free_port(),
        num_cpus=num_cpus,
        object_store_memory=200 * 1024 * 1024,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        yield Cluster(context.dashboard_url, free_port())
    finally:
        ray.shutdown()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
