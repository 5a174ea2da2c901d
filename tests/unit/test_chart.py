"""The Helm chart by Helm's own engine: what it renders is what Ray and the server read, and what is misspelt is refused."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from scheduler.errors import SettingsError
from services.access import check_exposure
from services.gateway.proxy_answers import ENVIRONMENT as PROXY_ENVIRONMENT
from services.operations.__main__ import generated
from services.settings import load_settings
from tests.rendered_chart import (
    CHART,
    EVERYTHING,
    KEYS,
    MATRIX,
    OPEN_TO_ALL,
    ROOT,
    arguments,
    objects,
    of_kind,
    pods,
    render,
    serve_config,
)

GENERATED = generated(ROOT)


@pytest.fixture(scope="module")
def chart():
    with helm.Chart.load(CHART) as loaded:
        yield loaded


@pytest.mark.parametrize("case", MATRIX)
def test_serve_config_is_what_ray_and_the_server_read(chart, case, tmp_path):
    found = objects(chart, MATRIX[case])
    config = ServeDeploySchema.model_validate(serve_config(found), extra="forbid")
    for application in config.applications:
        module, _, name = application.import_path.partition(":")
        assert callable(getattr(importlib.import_module(module), name))
        args = copy.deepcopy(application.args)
        if "auth" in args["gateway"]:
            keys = tmp_path / "keys.yaml"
            keys.write_text("alice: sk-2f7c0d9a4be14c55\n")
            args["gateway"]["auth"]["keys_file"] = str(keys)
        settings = load_settings(args=args)
        assert settings.gateway.port == config.http_options.port
        assert settings.gateway.host == config.http_options.host == "0.0.0.0"
        gateway = settings.gateway
        check_exposure(gateway.host, settings.gateway_config().auth, allowed=gateway.allow_public_without_keys)
        names = {"PrefixScheduler", "Gateway"}
        assert {deployment.name for deployment in application.deployments} <= names


@pytest.mark.parametrize("case", MATRIX)
def test_every_pod_keeps_to_the_security_contexts_and_mounts_only_volumes_it_has(chart, case):
    for pod in pods(objects(chart, MATRIX[case])):
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 1000
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        volumes = [volume["name"] for volume in spec["volumes"]]
        assert len(volumes) == len(set(volumes))
        assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
        assert all(len(port["name"]) <= 15 for port in container["ports"])
        assert not any(variable["name"].startswith("DSPARK_") for variable in container["env"])
        assert {(variable["name"], variable.get("value")) for variable in container["env"]} >= PROXY_ENVIRONMENT.items()


@pytest.mark.parametrize("case", MATRIX)
def test_lint_finds_nothing(case):
    found = helm.lint(CHART, values=MATRIX[case], strict=True)
    assert not [each for each in json.loads(json.dumps(found, default=vars))["messages"] if each["severity"] > 1], found


@pytest.mark.parametrize("case", MATRIX)
def test_objects_are_what_kubernetes_knows(chart, case):
    found = objects(chart, MATRIX[case])
    custom = ("ray.io/", "monitoring.coreos.com/", "gateway.networking.k8s.io/")
    checked = [each for each in found if not each["apiVersion"].startswith(custom)]
    names = [f"pod-{number}" for number in range(len(pods(found)))]
    for name, pod in zip(names, pods(found), strict=True):
        metadata = {**pod["metadata"], "name": name}
        checked.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]})
    for each in checked:
        kubernetes_validate.validate(each, "1.33", strict=True)


def test_values_reach_the_settings_with_their_types(chart):
    values = {
        **KEYS,
        "settings": {
            "kv": {"cache_bytes": 34359738368},
            "scheduler": {"planner": False, "priority_aging_s": 1e6},
            "gateway": {"max_body_bytes": 8388608, "served_names": ["a", "b"], "drain_s": 0.5},
        },
    }
    settings = load_settings(args={**arguments(objects(chart, values)), "gateway": {}})
    assert settings.kv.cache_bytes == 34359738368
    assert settings.scheduler.planner == "off"
    assert settings.scheduler.priority_aging_s == 1e6
    assert arguments(objects(chart, values))["gateway"]["served_names"] == ["a", "b"]


@pytest.mark.parametrize(
    ("gpus", "settings", "placement", "shares"),
    [
        (0, {}, "colocated", (0.0, 0.0)),
        (1, {}, "colocated", (1.0, 1.0)),
        (2, {}, "split", (1.0, 1.0)),
        (1, {"placement": "split"}, "split", (0.5, 0.5)),
        (1, {"placement": "split", "resources": {"verifier_gpus": 0.75, "drafter_gpus": 0.25}}, "split", (0.75, 0.25)),
        (4, {"placement": "colocated"}, "colocated", (1.0, 1.0)),
    ],
)
def test_devices_decide_placement_and_shares(chart, gpus, settings, placement, shares):
    found = objects(chart, {**KEYS, "settings": settings, "workerGroups": {"workers": {"gpus": gpus}}})
    args = arguments(found)
    assert args["placement"] == placement
    assert (args["resources"]["verifier_gpus"], args["resources"]["drafter_gpus"]) == shares
    limits = pods(found)[1]["spec"]["containers"][0]["resources"]["limits"]
    assert limits.get("nvidia.com/gpu", 0) == gpus
    assert limits["memory"] == "6Gi"


@pytest.mark.parametrize(
    ("gpus", "groups", "placement", "shares"),
    [(2, 2, "colocated", (1.0, 1.0)), (4, 2, "split", (1.0, 1.0)), (0, 2, "colocated", (0.0, 0.0))],
)
def test_devices_are_shared_out_among_engine_groups(chart, gpus, groups, placement, shares):
    found = objects(chart, {**KEYS, "settings": {"groups": groups}, "workerGroups": {"workers": {"gpus": gpus}}})
    args = arguments(found)
    assert (args["groups"], args["placement"]) == (groups, placement)
    assert (args["resources"]["verifier_gpus"], args["resources"]["drafter_gpus"]) == shares


def test_models_come_from_a_claim_an_image_or_a_bucket_and_cannot_be_written_while_serving(chart):
    head, worker = (pod["spec"] for pod in pods(objects(chart, EVERYTHING)))
    volumes = {volume["name"]: volume for volume in worker["volumes"]}
    assert volumes["model-target"]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert volumes["model-drafter"]["image"]["reference"] == "registry.example/drafter:1"
    assert volumes["model-bucket"]["emptyDir"] == {"sizeLimit": "40Gi"}
    mounts = {mount["name"]: mount for mount in worker["containers"][0]["volumeMounts"]}
    for name, path in (("target", "/models"), ("drafter", "/checkpoints"), ("bucket", "/bucket")):
        assert mounts[f"model-{name}"]["mountPath"] == path and mounts[f"model-{name}"]["readOnly"]
    fetch, further = worker["initContainers"]
    assert fetch["command"] == ["rclone", "copy", "models:chat", "/bucket"] and further["name"] == "warm"
    assert fetch["envFrom"] == [{"secretRef": {"name": "bucket-keys"}}]
    assert {"name": "model-bucket", "mountPath": "/bucket"} in fetch["volumeMounts"]
    assert fetch["securityContext"] == worker["containers"][0]["securityContext"]
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    assert token in worker["containers"][0]["env"]
    assert "initContainers" not in head and not any(each["name"].startswith("model-") for each in head["volumes"])


def test_streams_may_finish_before_a_pod_is_gone(chart):
    found = objects(chart, {**KEYS, "settings": {"gateway": {"drain_s": 300.5}}})
    worker = pods(found)[1]["spec"]
    assert worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "301"]
    assert worker["terminationGracePeriodSeconds"] == 361
    assert of_kind(found, "RayService")["spec"]["rayClusterDeletionDelaySeconds"] == 361


def variables(pod: dict[str, Any]) -> dict[str, str]:
    (container,) = pod["spec"]["containers"]
    return {each["name"]: each.get("value", "") for each in container["env"]}


@pytest.mark.parametrize(
    ("values", "draining"),
    [
        ({}, "35"),
        ({"probes": {"periodSeconds": 5, "failureThreshold": 2}}, "15"),
        ({"probes": {"periodSeconds": 60, "failureThreshold": 5}, "settings": {"gateway": {"drain_s": 30}}}, "90"),
        ({"serveProxy": {"minDrainingSeconds": 100}}, "100"),
    ],
)
def test_a_proxy_goes_on_until_its_pod_gets_no_requests_and_not_longer_than_that_lives(chart, values, draining):
    for pod in pods(objects(chart, {**KEYS, **values})):
        assert variables(pod)["RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S"] == draining


@pytest.mark.parametrize(("drain_s", "stopped_after"), [(30, "120"), (300.5, "301")])
def test_haproxy_takes_the_place_of_serves_proxy_on_all_pods_and_cuts_no_stream_before_the_drain_does(
    chart, drain_s, stopped_after
):
    from ray.serve._private import constants

    read = Path(constants.__file__).read_text()
    usual = variables(pods(objects(chart, KEYS))[0])
    values = {**KEYS, "serveProxy": {"haproxy": True}, "settings": {"gateway": {"drain_s": drain_s}}}
    head, worker = pods(objects(chart, values))
    assert variables(head) == variables(worker)
    added = {name: value for name, value in variables(head).items() if name not in usual}
    assert added == {
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": stopped_after,
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
    }
    assert all(f'"{name}"' in read for name in added)


PLANNERS = ("auto", "algorithm1", "off", False, "fixed:1", "fixed:12", "threshold:0", "threshold:0.35", "threshold:1")


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_planner_that_the_server_knows_may_stand_in_values(chart, planner):
    chart.validate_schema({**KEYS, "settings": {"scheduler": {"planner": planner}}})
    assert load_settings(args={"scheduler": {"planner": planner}}).scheduler.planner == (planner or "off")


@pytest.mark.parametrize(
    "planner",
    ["best", "Auto", "auto:1", "fixed", "fixed:0", "fixed:1.5", "threshold", "threshold:2", "threshold:x", True],
)
def test_a_planner_that_nobody_knows_is_refused_before_anything_is_deployed_with_the_forms_that_there_are(
    chart, planner
):
    with pytest.raises(helm.HelmError, match=r"auto\|algorithm1\|off\|fixed:.*\|threshold:|want string") as refused:
        chart.validate_schema({**KEYS, "settings": {"scheduler": {"planner": planner}}})
    assert "/settings/scheduler/planner" in str(refused.value)
    with pytest.raises(SettingsError, match=r"scheduler\.planner"):
        load_settings(args={"scheduler": {"planner": planner}})


def test_pods_have_the_variables_that_dspark_serve_sets_and_this_ray_reads_them(chart):
    from ray._private.ray_constants import RAY_WORKER_NICENESS
    from ray.serve._private import constants

    from services.cluster import QUIET_ENVIRONMENT, SERVE_ENVIRONMENT

    read = Path(constants.__file__).read_text()
    for pod in pods(objects(chart, KEYS)):
        set_here = {name: value for name, value in variables(pod).items() if name.startswith("RAY_SERVE_")}
        assert set_here.items() >= SERVE_ENVIRONMENT.items() and len(set_here) == 7
        assert variables(pod).items() >= QUIET_ENVIRONMENT.items() and RAY_WORKER_NICENESS in QUIET_ENVIRONMENT
        assert all(f'"{name}"' in read for name in set_here)
    given = {"healthCheckPeriodSeconds": 0.5, "healthCheckTimeoutSeconds": 3, "readyCheckTimeoutSeconds": 60}
    changed = variables(pods(objects(chart, {**KEYS, "serveProxy": given}))[0])
    names = ("HEALTH_CHECK_PERIOD_S", "HEALTH_CHECK_TIMEOUT_S", "READY_CHECK_TIMEOUT_S")
    assert [changed[f"RAY_SERVE_PROXY_{name}"] for name in names] == ["0.5", "3", "60"]
    with pytest.raises(helm.HelmError, match="healthCheckPeriodSeconds"):
        chart.validate_schema({**KEYS, "serveProxy": {"healthCheckPeriodSeconds": 0}})


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_more_or_fewer_engine_groups_change_nothing_but_their_number_in_the_serve_config(chart, groups):
    before = MATRIX["autoscaling"]
    after = {**before, "settings": {**before["settings"], "groups": groups}}
    was, is_now = objects(chart, before), objects(chart, after)
    assert arguments(is_now) == {**arguments(was), "groups": groups}
    for found in (was, is_now):
        of_kind(found, "RayService")["spec"]["serveConfigV2"] = ""
    assert was == is_now


def test_nothing_but_the_gateway_is_open_to_clients(chart):
    found = objects(chart, EVERYTHING)
    rules = of_kind(found, "NetworkPolicy")["spec"]["ingress"]
    open_rules = [
        rule
        for rule in rules
        if rule.get("from", [{}])[0].get("namespaceSelector") == {"matchLabels": {"team": "chat"}}
    ]
    assert [rule["ports"] for rule in open_rules] == [[{"port": 8000}]]
    assert all("from" in rule for rule in rules)
    paths = of_kind(found, "Ingress")["spec"]["rules"][0]["http"]["paths"]
    assert [path["backend"]["service"] for path in paths] == [{"name": "chat-serve-svc", "port": {"number": 8000}}]
    route = of_kind(found, "HTTPRoute")["spec"]
    assert route["rules"][0]["backendRefs"] == [{"name": "chat-serve-svc", "port": 8000}]
    assert route["parentRefs"] == EVERYTHING["httpRoute"]["parentRefs"]
    cluster = of_kind(found, "RayService")["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"


def test_a_head_without_replicas_and_an_account_without_a_token(chart):
    found = objects(chart, KEYS)
    cluster = of_kind(found, "RayService")["spec"]["rayClusterConfig"]
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    assert [pod["spec"]["automountServiceAccountToken"] for pod in pods(found)] == [False, False]
    scaled = objects(chart, MATRIX["autoscaling"])
    assert [pod["spec"]["automountServiceAccountToken"] for pod in pods(scaled)] == [True, False, False]


def test_monitors_and_budget_select_the_pods_of_this_release(chart):
    found = objects(chart, EVERYTHING)
    labels = pods(found)[1]["metadata"]["labels"]
    for kind, path in (
        ("PodDisruptionBudget", "selector"),
        ("PodMonitor", "selector"),
        ("NetworkPolicy", "podSelector"),
    ):
        wanted = of_kind(found, kind)["spec"][path]["matchLabels"]
        assert wanted and wanted.items() <= labels.items()
    service = of_kind(found, "RayService")["spec"]["serveService"]["metadata"]["labels"]
    assert of_kind(found, "ServiceMonitor")["spec"]["selector"]["matchLabels"].items() <= service.items()


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_generated_files_are_current(path):
    assert path.read_text(encoding="utf-8") == GENERATED[path], "run python -m services.operations"


def test_notes_tell_how_to_reach_the_server_and_warn_of_missing_keys(chart):
    (notes,) = [text for name, text in render(chart, KEYS).items() if name.endswith("NOTES.txt")]
    assert "service/chat-dspark-serve-serve-svc 8000:8000" in notes and "Bearer KEY" in notes and "WARNING" not in notes
    (notes,) = [text for name, text in render(chart, OPEN_TO_ALL).items() if name.endswith("NOTES.txt")]
    assert "WARNING: there are no API keys" in notes


def test_alerts_and_dashboards_are_rendered_as_they_lie_in_the_chart(chart):
    values = {**EVERYTHING, "prometheusRule": {"enabled": True, "runbookBase": "https://docs.example/runbooks/"}}
    found = objects(chart, values)
    rules = of_kind(found, "PrometheusRule")["spec"]["groups"]
    shipped = yaml.safe_load((CHART / "rules" / "dspark.yaml").read_text())["groups"]
    assert [rule["expr"] for rule in rules[0]["rules"]] == [rule["expr"] for rule in shipped[0]["rules"]]
    links = {rule["annotations"]["runbook_url"] for rule in rules[0]["rules"]}
    assert all(link.startswith("https://docs.example/runbooks/") for link in links)
    assert "{{ $labels.model }}" in json.dumps(rules)
    boards = [each for each in found if each["kind"] == "ConfigMap"]
    assert len(boards) == 4
    for each in boards:
        ((name, text),) = each["data"].items()
        assert json.loads(text) == json.loads((CHART / "dashboards" / name).read_text())
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_an_upgrade_says_that_changed_pods_wait_for_the_cluster_to_go(chart):
    for strategy, told in (("None", True), ("NewCluster", False)):
        files = chart.render({**KEYS, "upgradeStrategy": strategy}, name="chat", namespace="models", is_upgrade=True)
        (notes,) = [text for name, text in files.items() if name.endswith("NOTES.txt")]
        assert ("delete raycluster" in notes) == told
