"""Values that are wrong or strange: refused by name while rendering, or rendered as what they say."""

from __future__ import annotations

import json
import re
from typing import Any

import helm_python as helm
import pytest
import yaml

from services.operations.chart import OWNED
from services.settings import Settings, known_keys
from tests.rendered_chart import CHART, EVERYTHING, KEYS, arguments, objects, of_kind, pods, render

HOSTILE = (
    "123",
    "true",
    "null",
    "~",
    "1e3",
    "0x1",
    "a: b",
    'say "q"',
    "it's",
    "#x",
    "x #y",
    "*.example.com",
    "@x",
    "[x",
    "{x",
)
# Mappings of anybody's keys: null is none of them.
FREE_OF_SHAPE = ("podSecurityContext", "containerSecurityContext", "podLabels", "podAnnotations")


@pytest.fixture(scope="module")
def chart():
    with helm.Chart.load(CHART) as loaded:
        yield loaded


def volume(**changes: Any) -> dict[str, Any]:
    return {"name": "m", "mountPath": "/m", "claim": "c", **changes}


def shared(gpus: int = 1, **shares: float) -> dict[str, Any]:
    """A split placement on one pod's devices."""
    settings = {"placement": "split", "resources": shares}
    return {**KEYS, "settings": settings, "workerGroups": {"workers": {"gpus": gpus}}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "apiKeys.existingSecret"),
        ({**KEYS, "settings": {"resources": {"verifier_gpus": 1}}}, "settings.resources.verifier_gpus is 1"),
        ({**KEYS, "workerGroups": {"workers": {"replicas": 2}}}, "modelCache.accessModes"),
        ({**KEYS, "workerGroups": {"workers": None}}, "workerGroups: at least one group"),
        ({**KEYS, "fullnameOverride": "x" * 48}, "longer than KubeRay's 47"),
        ({**KEYS, "fullnameOverride": "4you"}, "begins with a letter"),
        (
            {**KEYS, "modelVolumes": [{"name": "m", "mountPath": "/m"}]},
            "modelVolumes: m needs a claim, an image or a fetch",
        ),
        (
            {**KEYS, "modelVolumes": [{"name": "m", "mountPath": "/m", "claim": "c", "image": "i"}]},
            "modelVolumes: m needs a claim, an image or a fetch, and one of them only",
        ),
        ({**KEYS, "modelVolumes": [volume(subPath="a", claim="", image="i")]}, "modelVolumes: m has a subPath"),
        ({**KEYS, "modelVolumes": [volume(), volume(mountPath="/n")]}, "modelVolumes: two have the name m"),
        ({**KEYS, "modelVolumes": [volume(mountPath="/cache/")]}, "modelVolumes: m is mounted at /cache/, where"),
        ({**KEYS, "modelVolumes": [volume(), volume(name="n")]}, "modelVolumes: n is mounted at /m, where"),
        ({**KEYS, "modelVolumes": [volume(name="m" * 58)]}, "maxLength: got 58, want 57"),
        ({**KEYS, "workerGroups": {"w" * 64: {}}}, "maxLength: got 64, want 63"),
        ({**KEYS, "workerGroups": {"workers": {"replicas": 0, "minReplicas": 0}}}, "workerGroups: at least one group"),
        (
            {**KEYS, "workerGroups": {"workers": {"minReplicas": 3, "maxReplicas": 4}}},
            "workerGroups.workers: replicas is 1 and minReplicas 3",
        ),
        (
            {**KEYS, "settings": {"groups": 4}, "workerGroups": {"workers": {"gpus": 1, "maxReplicas": 4}}},
            "settings.groups is 4 and the worker groups have 1 GPUs",
        ),
        (shared(verifier_gpus=1, drafter_gpus=1), "verifier_gpus and drafter_gpus are 2 together"),
        (shared(verifier_gpus=0.6, drafter_gpus=0.6), "verifier_gpus and drafter_gpus are 1.2 together"),
        (shared(gpus=2, verifier_gpus=1.5, drafter_gpus=0.5), "verifier_gpus is 1.5; above 1 Ray takes whole"),
        (
            {
                **shared(verifier_gpus=2, drafter_gpus=0),
                "workerGroups": {"workers": {"gpus": 1, "replicas": 2}},
                "modelCache": {"enabled": False},
            },
            "verifier_gpus is 2 and no worker pod has so many",
        ),
        (
            {**KEYS, "podLabels": {"app.kubernetes.io/name": "x"}},
            "podLabels: app.kubernetes.io/name is set by the chart",
        ),
        ({**KEYS, "extraEnv": [{"name": "HOME", "value": "/x"}]}, "extraEnv: HOME is set by the chart"),
        ({**KEYS, "extraEnv": [{"name": "A", "value": "1"}] * 2}, "extraEnv: A is set by the chart, or twice"),
        ({**KEYS, "settings": {"gateway": {"port": 8265}}}, "settings.gateway.port: 8265 is a port of Ray"),
        (
            {**KEYS, "settings": {"gateway": {"port": 30001}}, "serveProxy": {"haproxy": True}},
            "settings.gateway.port: 30001 is a port of HAProxy",
        ),
        ({**KEYS, "autoscaling": {"gateway": {"maxReplicas": 4}}}, "maxReplicas is 4 and minReplicas 0"),
        ({**KEYS, "autoscaling": {"gateway": {"minReplicas": 3}}}, "minReplicas is 3 and maxReplicas 0"),
        ({**KEYS, "autoscaling": None}, "autoscaling: is null"),
        ({**KEYS, "settings": None}, "settings: is null"),
        ({**KEYS, "ingress": {"enabled": True, "tlsSecret": "tls"}}, "ingress.host"),
        ({**KEYS, "httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
        ({**KEYS, "settings": {"groups": 3}, "workerGroups": {"workers": {"gpus": 2}}}, "settings.groups is 3"),
        (
            {
                **KEYS,
                "settings": {"groups": 3, "resources": {"verifier_gpus": 1, "drafter_gpus": 0}},
                "workerGroups": {"workers": {"gpus": 2}},
            },
            "settings.resources.verifier_gpus is 1 for each of 3 engine groups",
        ),
        (
            {**KEYS, "serveProxy": {"minDrainingSeconds": 200}},
            "minDrainingSeconds is 200 and a pod is killed after 180 seconds",
        ),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(chart, values, message):
    with pytest.raises(helm.HelmError, match=message):
        render(chart, values)


def test_every_key_that_the_chart_merges_is_held_against_null(chart):
    """Helm takes the chart's own values away for a key that is null, and templates that read them say nothing to people."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for key in [key for key, value in values.items() if isinstance(value, dict) and key not in FREE_OF_SHAPE]:
        with pytest.raises(helm.HelmError, match=f"{key}: is null"):
            chart.render({**KEYS, key: None}, name="chat", namespace="models")


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_string_of_any_kind_stays_the_string_that_it_is(chart, hostile):
    """What YAML reads as a number, a truth, nothing, an alias or its own grammar."""
    found = objects(
        chart,
        {
            **EVERYTHING,
            "apiKeys": {"existingSecret": hostile, "key": hostile},
            "hfToken": {"existingSecret": hostile, "key": hostile},
            "ingress": {"enabled": True, "host": hostile, "tlsSecret": hostile, "className": hostile},
            "image": {"repository": hostile, "tag": hostile},
            "modelCache": {"storageClass": hostile, "size": hostile},
            "modelVolumes": [volume(claim=hostile, subPath=hostile, mountPath=f"/{hostile}")],
            "priorityClassName": hostile,
            "serviceAccount": {"name": hostile},
            "serviceMonitor": {"enabled": True, "authorization": {"secretName": hostile, "key": hostile}},
            "sharedMemory": hostile,
            "workerGroups": {"workers": {"runtimeClassName": hostile}},
        },
    )
    worker = pods(found)[1]["spec"]
    container = worker["containers"][0]
    assert container["image"] == f"{hostile}:{hostile}"
    assert worker["priorityClassName"] == worker["runtimeClassName"] == worker["serviceAccountName"] == hostile
    volumes = {each["name"]: each for each in worker["volumes"]}
    assert volumes["api-keys"]["secret"]["secretName"] == volumes["api-keys"]["secret"]["items"][0]["key"] == hostile
    assert volumes["model-m"]["persistentVolumeClaim"]["claimName"] == hostile
    assert volumes["shared-memory"]["emptyDir"]["sizeLimit"] == hostile
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == "model-m"]
    assert (mount["mountPath"], mount["subPath"]) == (f"/{hostile}", hostile)
    (token,) = [each for each in container["env"] if each["name"] == "HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": hostile, "key": hostile}
    ingress = of_kind(found, "Ingress")["spec"]
    assert ingress["ingressClassName"] == ingress["rules"][0]["host"] == hostile
    assert ingress["tls"] == [{"hosts": [hostile], "secretName": hostile}]
    claim = of_kind(found, "PersistentVolumeClaim")["spec"]
    assert claim["storageClassName"] == claim["resources"]["requests"]["storage"] == hostile
    (endpoint,) = of_kind(found, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": hostile, "key": hostile}


@pytest.mark.parametrize("name", ["123", "1e3", "true", "null"])
def test_names_that_look_like_something_else_are_labels_all_the_same(chart, name):
    group = {name: {}} if name.isalpha() else {}
    values = {**EVERYTHING, "workerGroups": group, "nameOverride": name, "modelCache": {"enabled": False}}
    files = chart.render(values, name=name, namespace="models")
    found = [
        each for file, text in files.items() if file.endswith(".yaml") for each in yaml.safe_load_all(text) if each
    ]
    for each in [*found, *pods(found)]:
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == labels["app.kubernetes.io/name"] == name
    groups = of_kind(found, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert {each["groupName"] for each in groups} == {"workers", *group}


def test_a_group_without_pods_is_one_and_grows_from_there(chart):
    sizes = {"replicas": 0, "minReplicas": 0, "maxReplicas": 4, "gpus": 1}
    values = {**KEYS, "workerGroups": {"workers": {"gpus": 0}, "engines": sizes}, "modelCache": {"enabled": False}}
    found = objects(chart, {**values, "autoscaling": {"enabled": True}, "settings": {"groups": 4}})
    engines = of_kind(found, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert [engines[key] for key in ("groupName", "replicas", "minReplicas", "maxReplicas")] == ["engines", 0, 0, 4]
    assert arguments(found)["resources"] == {"verifier_gpus": 1.0, "drafter_gpus": 1.0}


def test_a_share_that_is_null_is_one_that_is_not_given(chart):
    assert arguments(objects(chart, shared(gpus=2, verifier_gpus=None)))["resources"]["verifier_gpus"] == 1.0


def _with_misspelt(tree: dict[str, Any], free: set[str], above: str = "") -> dict[str, Any]:
    """The tree, and beside each key the same with a letter too much. `free`: mappings whose keys are anybody's."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{above}/{key}"
        result[key] = _with_misspelt(value, free, path) if isinstance(value, dict) and path not in free else value
        result[f"{key}x"] = value
    return result


def _paths(tree: dict[str, Any], free: set[str], above: str = "") -> set[str]:
    found = {f"{above}/{key}x" for key in tree}
    for key, value in tree.items():
        if isinstance(value, dict) and f"{above}/{key}" not in free:
            found |= _paths(value, free, f"{above}/{key}")
    return found


def test_every_misspelt_key_of_values_and_settings_is_refused(chart):
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    values["settings"] = json.loads(Settings().model_dump_json())
    gateway = values["settings"]["gateway"]
    del gateway["host"], gateway["auth"]["keys"], gateway["auth"]["keys_file"]
    group = values["workerGroups"].pop("workers")
    free = {
        *("/workerGroups", "/podSecurityContext", "/containerSecurityContext", "/grafanaDashboards/labels"),
        *("/networkPolicy/operatorNamespace", "/networkPolicy/monitoringNamespace"),
    }
    wrong = _with_misspelt(values, free)
    wrong["workerGroups"] = {"workers": _with_misspelt(group, set())}
    with pytest.raises(helm.HelmError) as refusal:
        chart.validate_schema(wrong)
    lines = re.findall(r"at '(.*)': additional properties (.*) not allowed", str(refusal.value))
    refused = {f"{place}/{key}" for place, keys in lines for key in re.findall(r"'(\w+)'", keys)}
    expected = _paths(values, free) | _paths(group, set(), "/workerGroups/workers")
    assert refused == expected
    assert len(expected) > 130


def test_the_schema_has_the_settings_by_name_and_refuses_what_the_chart_owns(chart):
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["settings"]
    for path in known_keys():
        part: Any = schema
        for key in path:
            part = part.get("properties", {}).get(key)
            if part is None:
                break
        assert (part is None) == (".".join(path) in OWNED), path
    for secret in ({"keys": {"alice": "sk-2f7c0d9a4be14c55"}}, {"keys_file": "/x"}):
        with pytest.raises(helm.HelmError, match="dditional propert"):
            chart.validate_schema({"settings": {"gateway": {"auth": secret}}})


def test_settings_cannot_come_by_a_variable_beside_the_tree(chart):
    with pytest.raises(helm.HelmError, match="extraEnv"):
        chart.validate_schema({"extraEnv": [{"name": "DSPARK_GATEWAY__PORT", "value": "1"}]})
