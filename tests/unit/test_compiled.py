"""Libraries compiled once per machine: what they are kept by, and compilers that fail. The compilers are shell scripts."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from scheduler.compiled import build

# Writes its arguments where the library should be.
WORKS = 'for last in "$@"; do :; done; echo "$@" > "$last"'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = tmp_path / "sum.c"
    path.write_text("int sum(int a, int b) { return a + b; }")
    return path


def compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_bytes(b"#!/bin/sh\n" + script.encode("latin-1") + b"\n")
    path.chmod(0o755)
    return str(path)


def test_a_compiler_that_speaks_another_encoding_fails_like_any_other(source: Path) -> None:
    """Its message ended the scheduler's start with a UnicodeDecodeError, instead of leaving the work to numpy."""
    with pytest.raises(OSError, match=r"op.ration impossible"):
        build(source, compiler(source.parent, "printf 'op\xe9ration impossible\\n' >&2; exit 1"))


def test_a_library_is_built_once(source: Path) -> None:
    command = compiler(source.parent, WORKS)
    built = build(source, command, link=["-L/first", "-l:libgomp.so.1"])
    command = compiler(source.parent, "exit 1")
    assert build(source, command, link=["-L/second", "-l:libgomp.so.1"]) == built
    source.write_text("int sum(int a, int b) { return b + a; }")
    with pytest.raises(OSError, match="failed"):
        build(source, command)


def test_another_runtime_to_link_to_is_another_library(source: Path) -> None:
    """The one linked to an earlier torch's OpenMP runtime would not load any more, or bring a second runtime with it."""
    command = compiler(source.parent, WORKS)
    names = "-l:libgomp.so.1", "-l:libgomp-24e2ab19.so.1"
    libraries = [build(source, command, link=["-L/torch/lib", name]) for name in names]
    assert [name in library.read_text() for name, library in zip(names, libraries, strict=True)] == [True, True]


def test_another_c_library_is_another_library(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers may share a cache folder, and a library built with a newer one does not load with an older."""
    command, built = compiler(source.parent, WORKS), set()
    for version in ("2.36", "2.31"):
        monkeypatch.setattr(platform, "libc_ver", lambda version=version: ("glibc", version))
        built.add(build(source, command))
    assert len(built) == 2
