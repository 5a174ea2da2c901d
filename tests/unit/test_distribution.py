"""What is installed is exactly our four packages, and nobody else owns their names."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACKAGES = {"services", "drafter", "verifier", "scheduler"}
ROOT = Path(__file__).resolve().parents[2]


def test_the_wheel_holds_the_four_packages_their_sources_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("helm", "docker", "tests"):
        (source / name).mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(source),
    ]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("dspark_serve-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    assert "verifier/native.c" in names and "scheduler/py.typed" in names


def test_make_runs_what_is_no_file_also_where_a_file_has_its_name() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    targets = {found[1] for line in lines if (found := re.match(r"([\w-]+):(?!=)", line))}
    (phony,) = (line.removeprefix(".PHONY:").split() for line in lines if line.startswith(".PHONY:"))
    assert "train-demo" in targets and set(phony) == targets


def test_make_tells_of_every_step_that_installs_before_it_runs(tmp_path: Path) -> None:
    """pip is quiet for minutes."""
    command = ["make", "--dry-run", "--always-make", f"VENV={tmp_path / 'venv'}", "lint"]
    steps = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    installs = [number for number, step in enumerate(steps) if "pip " in step and " install" in step]
    assert len(installs) == 4
    assert all(steps[number - 1].startswith('echo "[') for number in installs)
    told = [step.split('"')[1] for step in steps if step.startswith("echo")]
    assert [line.partition("]")[0] for line in told] == ["[1/4", "[2/4", "[3/4", "[4/4", "[dev"]


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_no_other_distribution_owns_a_package_of_ours(package: str) -> None:
    assert set(importlib.metadata.packages_distributions()[package]) == {"dspark-serve"}
