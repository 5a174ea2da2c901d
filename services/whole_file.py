"""Result files of tools: there whole or not at all, and a disk that is full is one line with the file's name."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from scheduler.errors import Failed


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Raises Failed, and leaves what was there before. A pipe or a device is written as it is."""
    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        unfinished = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, target)
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise Failed(f"could not write {target}: {error.strerror or error}") from None
