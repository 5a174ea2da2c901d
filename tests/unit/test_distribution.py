"""What is installed is exactly our four packages, and nobody else owns their names."""

from __future__ import annotations

import importlib.metadata
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


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_no_other_distribution_owns_a_package_of_ours(package: str) -> None:
    assert set(importlib.metadata.packages_distributions()[package]) == {"dspark-serve"}
