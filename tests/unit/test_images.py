"""The Dockerfiles and the compose file as far as they can be held without building: what they copy, mount and pin exists."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from services.operations.dashboards import DASHBOARDS
from services.settings import known_keys, variable_name

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
PINS = dict(
    line.split("==")
    for line in (ROOT / "docker" / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
)


def instructions(path: Path) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#")))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())]


def let_in(name: str) -> bool:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = [line[1:] for line in lines if line.startswith("!")]
    return any(fnmatch.fnmatch(name, pattern) for pattern in allowed)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_copy_what_exists_and_is_let_in(path):
    sources = [
        source
        for name, rest in instructions(path)
        if name == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    ]
    assert {"scheduler", "verifier", "drafter", "services"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists() and let_in(source), source


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_run_as_a_numbered_user_with_what_kuberay_needs(path):
    last_stage = instructions(path)
    last_stage = last_stage[max(index for index, (name, _) in enumerate(last_stage) if name == "FROM") :]
    found = dict(last_stage)
    assert found["USER"] == "1000:100"
    assert "wget" in found["RUN"]
    assert "/health" in found["HEALTHCHECK"]
    assert "ENTRYPOINT" not in found and not any("DSPARK_" in rest for name, rest in last_stage if name == "ENV")
    assert found["CMD"].startswith('["dspark", "serve"')


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path):
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([str(hadolint), str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_dependency_is_pinned_to_a_version_that_is_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, project["dependencies"]):
        assert PINS[requirement.name] in requirement.specifier, requirement
    for path in DOCKERFILES:
        for name, version in re.findall(r"([a-z0-9-]+)==([0-9.]+)", path.read_text()):
            assert PINS[name] == version
    chart = yaml.safe_load((ROOT / "helm" / "dspark-serve" / "values.yaml").read_text())
    assert chart["rayVersion"] == PINS["ray"]


def test_compose_mounts_what_exists_and_publishes_on_loopback_only():
    for name, service in COMPOSE["services"].items():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            found = (ROOT / "docker" / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
            assert found, f"{name}: {volume}"
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert "build" in service or re.search(r":v?\d+\.\d+\.\d+$", service["image"])
    known = {variable_name(keys) for keys in known_keys()}
    variables = COMPOSE["services"]["server"]["environment"]
    assert {name for name in variables if name.startswith("DSPARK_")} <= known


def test_grafana_is_given_the_boards_and_the_source_that_the_compose_file_mounts():
    grafana = COMPOSE["services"]["grafana"]
    (provider,) = yaml.safe_load((ROOT / "docker/grafana/provisioning/dashboards/dspark.yaml").read_text())["providers"]
    mounts = {volume.split(":")[1]: volume.split(":")[0] for volume in grafana["volumes"]}
    boards = ROOT / "docker" / mounts[provider["options"]["path"]]
    assert {path.stem for path in boards.glob("*.json")} == set(DASHBOARDS)
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (boards / home.name).is_file() and str(home.parent) == provider["options"]["path"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed")
def test_promtool_accepts_the_configuration(tmp_path):
    shutil.copy(ROOT / "docker" / "prometheus.yaml", tmp_path / "prometheus.yaml")
    shutil.copytree(ROOT / "helm" / "dspark-serve" / "rules", tmp_path / "rules")
    done = subprocess.run(
        ["promtool", "check", "config", "prometheus.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "1 rule files found" in done.stdout, done.stdout + done.stderr
