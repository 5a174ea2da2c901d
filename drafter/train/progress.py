"""How a long job tells where it is: a bar on a terminal, JSON lines anywhere else.

Must not know what the job does.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from typing import IO, Any

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_DRAWINGS = 0.2


class Progress:
    """total: of `done`, 0 when unknown. Lines go to `stream` (standard error unless given), at most one in ten seconds."""

    def __init__(self, name: str, total: int, stream: IO[str] | None = None) -> None:
        self.name, self.total = name, total
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self._due = 0.0

    def show(self, done: int, **values: Any) -> None:
        """values: numbers beside the bar, such as a rate."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + (_SECONDS_BETWEEN_DRAWINGS if self._terminal else _SECONDS_BETWEEN_LINES)
        self._write(done, values)

    def finish(self, done: int, **values: Any) -> None:
        """The last word, whenever the one before was."""
        self._write(done, values)
        if self._terminal:
            self._stream.write("\n")
            self._stream.flush()

    def _write(self, done: int, values: dict[str, Any]) -> None:
        if not self._terminal:
            row = {"job": self.name, "done": done, "of": self.total, **values}
            print(json.dumps(row), file=self._stream, flush=True)
            return
        width = shutil.get_terminal_size().columns
        numbers = "  ".join(f"{key} {value}" for key, value in values.items())
        text = f"{self.name} {done}/{self.total}  {numbers}"
        room = max(10, min(40, width - len(text) - 6))
        filled = round(room * min(1.0, done / max(1, self.total)))
        line = f"{self.name} [{'#' * filled}{'.' * (room - filled)}] {done}/{self.total}  {numbers}"
        self._stream.write("\r" + line[: width - 1].ljust(width - 1))
        self._stream.flush()
