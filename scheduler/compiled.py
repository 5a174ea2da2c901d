"""C sources of ours, compiled once per machine into the cache folder and loaded as shared libraries.

Must not know what a source computes. A library is kept by its source, headers, flags, compiler, the libraries it is linked to, C
library and processor, for a cache folder outlives them and may be shared; it is built beside its place and renamed, so that
processes that start together may all build it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

# No -ffast-math: a library linked with it makes the whole process flush subnormal numbers to zero.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fPIC")

_SAYS_WHICH_CPU = ("model name", "flags", "Features", "CPU implementer", "CPU part")


def home_path(text: str) -> Path:
    """With the home directory in place of `~`; that of a user who does not exist stays as it is."""
    return Path(os.path.expanduser(text))


def default_cache_dir() -> Path:
    return home_path("~/.cache/dspark")


def find_compiler() -> str | None:
    return next((c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c)), None)


def build(source: Path, compiler: str, *, flags: Sequence[str] = (), link: Sequence[str] = ()) -> Path:
    """The library file of a source. Headers lie beside it or in folders that flags name. Raises OSError or SubprocessError."""
    folders = [source.parent, *(Path(flag[2:]) for flag in flags if flag.startswith("-I"))]
    headers = sorted({path for folder in folders for path in folder.glob("*.h")})
    # folders aside: an environment that was moved, or has a twin, needs no library of its own
    options = [option for option in (*_FLAGS, *flags, *link) if not option.startswith(("-I", "-L"))]
    cpu = "".join(line for line in _cpu_lines() if line.startswith(_SAYS_WHICH_CPU))
    machine = f"{platform.machine()} {' '.join(platform.libc_ver())} {cpu}"
    parts = [*(path.read_text() for path in (source, *headers)), compiler, " ".join(options), machine]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = default_cache_dir() / "native"
    target = folder / f"native-{key}.so"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / "native.so"
        command = [compiler, *_FLAGS, *flags, "-shared", str(source), *link, "-lm", "-o", str(built)]
        logger.info(
            "compiling %s with %s, once on this machine: some seconds, on a busy one more", source.name, compiler
        )
        # a compiler may speak in another encoding than ours
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120, check=False)
        if result.returncode:
            raise OSError(f"{compiler}: {(result.stderr.strip().splitlines() or ['failed'])[0]}")
        with built.open("rb") as written:
            os.fsync(written.fileno())  # a power cut must not leave an empty library under its name
        os.replace(built, target)
    return target


def _cpu_lines() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines(keepends=True)
    except OSError:
        return []
    return lines[: lines.index("\n")] if "\n" in lines else lines
