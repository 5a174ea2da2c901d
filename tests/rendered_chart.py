"""The Helm chart rendered by Helm's own engine, and the matrix of values that its tests render."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "dspark-serve"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
KEYS = {"apiKeys": {"existingSecret": "keys"}}
OPEN_TO_ALL = {"settings": {"gateway": {"allow_public_without_keys": True}}}
EVERYTHING = {
    **KEYS,
    "fullnameOverride": "chat",
    "hfToken": {"existingSecret": "hub"},
    "ingress": {"enabled": True, "host": "chat.example", "tlsSecret": "tls", "className": "nginx"},
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    "serviceMonitor": {"enabled": True, "authorization": {"secretName": "scrape"}},
    "podMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True},
    "grafanaDashboards": {"enabled": True, "annotations": {"folder": "dspark"}},
    "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"team": "chat"}}}]},
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "initContainers": [{"name": "warm", "image": "warm:1"}],
    "httpRoute": {
        "enabled": True,
        "parentRefs": [{"name": "public", "namespace": "gateways", "sectionName": "https"}],
        "hostnames": ["chat.example"],
    },
    "modelVolumes": [
        {"name": "target", "mountPath": "/models", "claim": "models", "subPath": "chat"},
        {"name": "drafter", "mountPath": "/checkpoints", "image": "registry.example/drafter:1"},
        {
            "name": "bucket",
            "mountPath": "/bucket",
            "fetch": {
                "image": "rclone/rclone:1.71",
                "command": ["rclone", "copy", "models:chat", "/bucket"],
                "secret": "bucket-keys",
                "size": "40Gi",
            },
        },
    ],
    "imagePullSecrets": [{"name": "registry"}],
    "priorityClassName": "high",
    "podLabels": {"team": "chat"},
    "podAnnotations": {"note": "x"},
}
MATRIX: dict[str, dict[str, Any]] = {
    **{path.stem: yaml.safe_load(path.read_text()) for path in EXAMPLES},
    "keys only": KEYS,
    "open to all": OPEN_TO_ALL,
    "everything": EVERYTHING,
    "little": {
        **KEYS,
        "modelCache": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
        "serviceAccount": {"create": False},
        "rayAuth": {"enabled": False},
    },
}


def render(chart: helm.Chart, values: dict[str, Any]) -> dict[str, str]:
    """By template; after the schema, as `helm install` does it."""
    chart.validate_schema(values)
    return chart.render(values, name="chat", namespace="models")


def objects(chart: helm.Chart, values: dict[str, Any]) -> list[dict[str, Any]]:
    files = render(chart, values)
    return [each for name, text in files.items() if name.endswith(".yaml") for each in yaml.safe_load_all(text) if each]


def of_kind(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (one,) = [each for each in found if each["kind"] == kind]
    return one


def serve_config(found: list[dict[str, Any]]) -> dict[str, Any]:
    return yaml.safe_load(of_kind(found, "RayService")["spec"]["serveConfigV2"])


def arguments(found: list[dict[str, Any]]) -> dict[str, Any]:
    return serve_config(found)["applications"][0]["args"]


def pods(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    cluster = of_kind(found, "RayService")["spec"]["rayClusterConfig"]
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
