"""What the chart renders for KubeRay, the Prometheus operator and the Gateway API, against their definitions."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from tests.custom_resources import defined_in, differences, faults, main
from tests.rendered_chart import CHART, EVERYTHING, MATRIX, objects, of_kind

CUSTOM = ("ray.io/", "monitoring.coreos.com/", "gateway.networking.k8s.io/")
KINDS = ("RayService", "ServiceMonitor", "PodMonitor", "PrometheusRule", "HTTPRoute")
FOLDER = Path(__file__).resolve().parents[1] / "data" / "custom_resources"
WRITTEN = sorted(path.stem for path in FOLDER.glob("*.yaml"))
# Mappings whose keys are the user's own.
FREE = {"labels", "annotations", "matchLabels", "rayStartParams", "limits", "requests", "nodeSelector"}
# Everything at once, with Ray's autoscaler and the fields of a pod that only some examples have.
FULL = {
    **EVERYTHING,
    "autoscaling": {"enabled": True},
    "serviceAccount": {"annotations": {"a": "b"}},
    "workerGroups": {
        "workers": {
            "gpus": 1,
            "runtimeClassName": "nvidia",
            "nodeSelector": {"gpu": "h200"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "affinity": {
                "podAntiAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [
                        {"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}}
                    ]
                }
            },
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "matchLabelKeys": ["app"]}
            ],
        }
    },
}


@pytest.fixture(scope="module")
def chart():
    with helm.Chart.load(CHART) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def full(chart):
    return objects(chart, FULL)


@pytest.mark.parametrize("case", MATRIX)
def test_custom_resources_have_only_keys_and_types_of_their_definitions(chart, case):
    found = [each for each in objects(chart, MATRIX[case]) if each["apiVersion"].startswith(CUSTOM)]
    assert found and {each["kind"] for each in found} <= set(KINDS)
    assert [(each["kind"], faults(each)) for each in found if faults(each)] == []


def parts(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every mapping, list and value with its path."""
    yield path, tree
    for key, each in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from parts(each, f"{path}/{key}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_misspelt_key_is_refused_at_every_level(full, kind):
    rendered = copy.deepcopy(of_kind(full, kind))
    assert not faults(rendered)
    wrong = set()
    for path, part in list(parts(rendered)):
        if isinstance(part, dict) and path.rpartition("/")[2] not in FREE:
            wrong |= {f"{path}/{key}x" for key in part}
            part.update({f"{key}x": value for key, value in part.items()})
    assert set(faults(rendered)) == wrong
    assert len(wrong) > {"RayService": 220, "PrometheusRule": 80}.get(kind, 10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_the_wrong_type_is_refused_at_every_leaf(full, kind):
    rendered = copy.deepcopy(of_kind(full, kind))
    leaves = set()
    for path, part in list(parts(rendered)):
        for key, value in list(part.items() if isinstance(part, dict) else ()):
            # apiVersion and kind say which definition it is
            if not isinstance(value, dict | list) and path + key not in ("apiVersion", "kind"):
                leaves.add(f"{path}/{key}")
                part[key] = [value]
    assert set(faults(rendered)) == leaves


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("RayService", "spec/rayClusterConfig/workerGroupSpecs/0/replicas", "2"),
        ("RayService", "spec/rayClusterConfig/authOptions/mode", "tokens"),
        ("RayService", "spec/rayClusterConfig/headGroupSpec/rayStartParams/num-cpus", 0),
        ("RayService", "spec/rayClusterConfig/headGroupSpec/template/spec/containers/0/ports/0/containerPort", "8000"),
        ("RayService", "spec/rayClusterConfig/headGroupSpec/template/metadata/ownerReferences", []),
        ("RayService", "spec/serveConfigV2", {"applications": []}),
        ("RayService", "status", {}),
        ("ServiceMonitor", "spec/endpoints/0/interval", "15"),
        ("PodMonitor", "spec/podMetricsEndpoints/0/honorLabels", "yes"),
        ("PrometheusRule", "spec/groups/0/rules/0/labels/severity", 1),
        ("PrometheusRule", "spec/groups/0/rules/0/for", "ten minutes"),
        ("HTTPRoute", "spec/rules/0/timeouts/request", "never"),
        ("HTTPRoute", "spec/rules/0/backendRefs/0/port", 80000),
        ("HTTPRoute", "spec/rules/0/matches/0/path/type", "Prefix"),
    ],
)
def test_a_wrong_value_is_refused_where_it_stands(full, kind, path, value):
    rendered = copy.deepcopy(of_kind(full, kind))
    part: Any = rendered
    *above, last = path.split("/")
    for step in above:
        part = part[int(step)] if isinstance(part, list) else part[step]
    part[last] = value
    assert set(faults(rendered)) == {f"/{path}"}


def definition(name: str) -> dict[str, Any]:
    """A definition that says what data/custom_resources says, without what it has from Kubernetes."""
    written = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    schema = plain(written, written["$defs"])
    versions = [{"name": "v1alpha1"}, {"name": "v1", "schema": {"openAPIV3Schema": schema}}]
    return {"spec": {"names": {"kind": written["kind"]}, "versions": versions}}


def plain(schema: Any, named: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [plain(each, named) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema and not schema["$ref"].startswith("kubernetes:"):
        return plain(named[schema["$ref"].removeprefix("#/$defs/")], named)
    return {key: plain(each, named) for key, each in schema.items() if key != "$ref"}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_definition_with_another_key_type_or_limit_is_told_apart(name):
    written = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    _, schema = defined_in(definition(name))
    at_first = differences(written, schema)
    # what is Kubernetes' own is missing from a definition that is made of ours
    assert all(line.endswith(": not in the definition") for line in at_first)
    spec = schema["properties"]["spec"]
    spec["properties"]["news"] = {"type": "string"}
    spec["minItems"] = 2
    (changed, other) = ("serveConfigV2", "suspend") if name == "rayservice" else ("hostnames", "parentRefs")
    spec["properties"][changed] = {**spec["properties"][changed], "type": "number"}
    del spec["properties"][other]
    found = sorted(set(differences(written, schema)) - set(at_first))
    assert {line.partition(":")[0] for line in found} == {"/spec", f"/spec/{changed}", "/spec/news", f"/spec/{other}"}
    assert {"/spec: minItems is None here, 2 in the definition", "/spec/news: only in the definition"} <= set(found)


def test_the_command_lists_differences_and_says_how_many(tmp_path, capsys):
    file = tmp_path / "crd.yaml"
    file.write_text(yaml.safe_dump(definition("httproute")))
    assert main([str(file)]) == 0
    assert capsys.readouterr().out == "0 differences\n"
    wrong = definition("httproute")
    wrong["spec"]["versions"][1]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["x"] = {
        "type": "string"
    }
    file.write_text(yaml.safe_dump(wrong))
    assert main([str(file)]) == 1
    assert capsys.readouterr().out == "httproute/spec/x: only in the definition\n1 differences\n"
