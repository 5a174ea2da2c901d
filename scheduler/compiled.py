"""C sources of ours, compiled once per machine into the cache folder and loaded as shared libraries.

Must not know what a source computes. A library is kept by its source, headers, flags, compiler, the libraries it is linked to, C
library and processor, for a cache folder outlives them and may be shared; it is built beside its place, loaded and then renamed:
processes that start together may all build it, and what does not load is not kept.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

# No -ffast-math: a library linked with it makes the whole process flush subnormal numbers to zero.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fPIC")

_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}

_SAYS_WHICH_CPU = ("model name", "flags", "Features", "CPU implementer", "CPU part")


def home_path(text: str) -> Path:
    """With the home directory in place of `~`; that of a user who does not exist stays as it is."""
    return Path(os.path.expanduser(text))


def default_cache_dir() -> Path:
    return home_path("~/.cache/dspark")


def find_compiler() -> str | None:
    return next((c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c)), None)


def load(
    source: Path,
    compiler: str,
    signatures: Mapping[str, str],
    *,
    flags: Sequence[str] = (),
    link: Sequence[str] = (),
    keeps_lock: bool = False,
) -> ctypes.CDLL:
    """The library of a source, built where there is none that works. Headers lie beside the source or in folders that flags name.

    signatures: of each function the arguments in order, p pointer, i int64, f float, d double; `!` at the end: it returns an
    int, else nothing. In C its name begins with dspark_. keeps_lock: calls keep the interpreter's lock.
    Raises OSError or SubprocessError.
    """
    target = _place(source, compiler, flags, link)
    if target.is_file():
        try:
            return _open(target, signatures, keeps_lock)
        except OSError as error:
            logger.warning(
                "the library of %s in the cache folder does not work and is built anew: %s", source.name, error
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / "native.so"
        _compile(source, built, compiler, flags, link)
        try:
            # not by the name it is kept by: of a name that it knows, the loader gives what it has
            library = _open(built, signatures, keeps_lock)
        except OSError as error:
            raise OSError(f"{compiler} reported success and built no library of ours: {error}") from error
        with built.open("rb") as written:
            os.fsync(written.fileno())  # a power cut must not leave an empty library under its name
        os.replace(built, target)
    return library


def _place(source: Path, compiler: str, flags: Sequence[str], link: Sequence[str]) -> Path:
    folders = [source.parent, *(Path(flag[2:]) for flag in flags if flag.startswith("-I"))]
    headers = sorted({path for folder in folders for path in folder.glob("*.h")})
    # folders aside: an environment that was moved, or has a twin, needs no library of its own
    options = [option for option in (*_FLAGS, *flags, *link) if not option.startswith(("-I", "-L"))]
    cpu = "".join(line for line in _cpu_lines() if line.startswith(_SAYS_WHICH_CPU))
    machine = f"{platform.machine()} {' '.join(platform.libc_ver())} {cpu}"
    parts = [*(path.read_text() for path in (source, *headers)), compiler, " ".join(options), machine]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return default_cache_dir() / "native" / f"native-{key}.so"


def _compile(source: Path, built: Path, compiler: str, flags: Sequence[str], link: Sequence[str]) -> None:
    command = [compiler, *_FLAGS, *flags, "-shared", str(source), *link, "-lm", "-o", str(built)]
    logger.info("compiling %s with %s, once on this machine: some seconds, on a busy one more", source.name, compiler)
    # a compiler may speak in another encoding than ours
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120, check=False)
    if result.returncode:
        raise OSError(f"{compiler}: {(result.stderr.strip().splitlines() or ['failed'])[0]}")


def _open(path: Path, signatures: Mapping[str, str], keeps_lock: bool) -> ctypes.CDLL:
    """Raises OSError, also for a library that was cut off or lacks one of the functions."""
    _check_whole(path)
    library = ctypes.PyDLL(str(path)) if keeps_lock else ctypes.CDLL(str(path))
    for name, signature in signatures.items():
        try:
            function = getattr(library, f"dspark_{name}")
        except AttributeError as error:
            raise OSError(str(error)) from None
        function.argtypes = [_KINDS[kind] for kind in signature.rstrip("!")]
        function.restype = ctypes.c_int if signature.endswith("!") else None
    return library


def _check_whole(path: Path) -> None:
    """Raises OSError for an ELF file that ends before its section headers, which lie at its end: of such a one the loader maps
    pages that are not there, and whoever touches them is killed by SIGBUS."""
    with path.open("rb") as file:
        header = file.read(64)
        size = file.seek(0, os.SEEK_END)
    if header[:6] != b"\x7fELF\x02\x01":  # none of 64 bits, lowest byte first: the loader says what it thinks of it
        return
    if len(header) < 64:
        raise OSError(f"{path.name}: cut off after {size} bytes")
    (sections,) = struct.unpack_from("<Q", header, 0x28)
    entry, number = struct.unpack_from("<HH", header, 0x3A)
    if size < sections + entry * number:
        raise OSError(f"{path.name}: cut off after {size} of {sections + entry * number} bytes")


def _cpu_lines() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines(keepends=True)
    except OSError:
        return []
    return lines[: lines.index("\n")] if "\n" in lines else lines
