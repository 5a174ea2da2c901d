"""Libraries compiled once per machine: what they are kept by, and compilers that fail. The compilers are shell scripts."""

from __future__ import annotations

import ctypes
import logging
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from drafter import native_walk
from drafter.train import native as native_training
from scheduler import kernels
from scheduler.compiled import find_compiler, load
from verifier import native, native_rejection

SIGNATURES = {"sum": "pp!"}
EACH = 'for last in "$@"; do case "$last" in *.c) source="$last";; esac; done;'
# What it is told to link to is not here.
WORKS = f'{EACH} {find_compiler()} -shared -fPIC "$source" -o "$last"'
NO_LIBRARY = f'{EACH} echo "no library" > "$last"'
NOT_OURS = f'{EACH} echo "int other;" | {find_compiler()} -shared -fPIC -x c - -o "$last"'

compiles = pytest.mark.skipif(find_compiler() is None, reason="no C compiler here")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = tmp_path / "sum.c"
    path.write_text("int dspark_sum(void *a, void *b) { return (long)a + (long)b; }")
    return path


def compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_bytes(b"#!/bin/sh\n" + script.encode("latin-1") + b"\n")
    path.chmod(0o755)
    return str(path)


def kept() -> list[Path]:
    return sorted((Path.home() / ".cache/dspark/native").iterdir())


def test_a_compiler_that_speaks_another_encoding_fails_like_any_other(source: Path) -> None:
    """Its message ended the scheduler's start with a UnicodeDecodeError, instead of leaving the work to numpy."""
    with pytest.raises(OSError, match=r"op.ration impossible"):
        load(source, compiler(source.parent, "printf 'op\xe9ration impossible\\n' >&2; exit 1"), SIGNATURES)


@compiles
def test_a_library_is_built_once(source: Path) -> None:
    command = compiler(source.parent, WORKS)
    assert load(source, command, SIGNATURES, link=["-L/first", "-l:libgomp.so.1"]).dspark_sum(2, 3) == 5
    command = compiler(source.parent, "exit 1")
    assert load(source, command, SIGNATURES, link=["-L/second", "-l:libgomp.so.1"]).dspark_sum(2, 3) == 5
    source.write_text("int dspark_sum(void *a, void *b) { return (long)b + (long)a; }")
    with pytest.raises(OSError, match="failed"):
        load(source, command, SIGNATURES)


@compiles
def test_a_library_that_was_cut_off_is_built_anew(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By a full disk or a copy that was broken off. The loader takes half of one, and the process dies of SIGBUS."""
    command = compiler(source.parent, WORKS)
    load(source, command, SIGNATURES)
    (library,) = kept()
    whole = library.read_bytes()
    for size in (len(whole) // 2, len(whole) - 1, 40, 0):
        library.unlink()
        library.write_bytes(whole[:size])
        caplog.clear()
        assert load(source, command, SIGNATURES).dspark_sum(2, 3) == 5
        assert "does not work and is built anew" in caplog.text
        assert library.read_bytes() == whole


@compiles
def test_another_runtime_to_link_to_is_another_library(source: Path) -> None:
    """The one linked to an earlier torch's OpenMP runtime would not load any more, or bring a second runtime with it."""
    command = compiler(source.parent, WORKS)
    for name in ("-l:libgomp.so.1", "-l:libgomp-24e2ab19.so.1"):
        load(source, command, SIGNATURES, link=["-L/torch/lib", name])
    assert len(kept()) == 2


@compiles
def test_another_c_library_is_another_library(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers may share a cache folder, and a library built with a newer one does not load with an older."""
    command = compiler(source.parent, WORKS)
    for version in ("2.36", "2.31"):
        monkeypatch.setattr(platform, "libc_ver", lambda version=version: ("glibc", version))
        load(source, command, SIGNATURES)
    assert len(kept()) == 2


@pytest.mark.parametrize("script", [NO_LIBRARY, "exit 0", pytest.param(NOT_OURS, marks=compiles)])
def test_what_does_not_load_is_not_kept(source: Path, script: str) -> None:
    with pytest.raises(OSError, match="built no library of ours"):
        load(source, compiler(source.parent, script), SIGNATURES)
    assert not kept()


@compiles
@pytest.mark.parametrize("script", [NO_LIBRARY, NOT_OURS])
def test_a_broken_library_in_the_cache_is_replaced_once(
    source: Path, script: str, caplog: pytest.LogCaptureFixture
) -> None:
    command = compiler(source.parent, WORKS)
    load(source, command, SIGNATURES)
    (library,) = kept()
    library.unlink()
    subprocess.run([compiler(source.parent, script), library], check=True)
    compiler(source.parent, WORKS)
    assert load(source, command, SIGNATURES).dspark_sum(2, 3) == 5
    assert "sum.c in the cache folder does not work and is built anew" in caplog.text
    assert kept() == [library] and b"dspark_sum" in library.read_bytes()


@pytest.mark.parametrize("script", [NO_LIBRARY, pytest.param(NOT_OURS, marks=compiles)])
@pytest.mark.parametrize(
    "loader", [kernels.load, native.load, native_rejection._load, native_walk._load, native_training.load]
)
def test_without_a_library_of_ours_there_is_one_warning_and_the_twin(
    source: Path,
    loader: Callable[[], ctypes.CDLL | None],
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A compiler that reports success and yields something else ended the start with an AttributeError."""
    monkeypatch.setenv("CC", compiler(source.parent, script))
    load_anew = loader.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(native, "applies", lambda: True)
    monkeypatch.setattr(native, "load", lambda: ctypes.CDLL(None))
    assert load_anew() is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "could not be built or loaded" in caplog.text
