"""What a run says of itself: metrics.jsonl, and TensorBoard where asked.

Must not know what the numbers mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scheduler.errors import SettingsError

METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """tensorboard: also write event files into run/tensorboard. Raises SettingsError where the package is missing."""

    def __init__(self, run: Path, *, tensorboard: bool) -> None:
        self.run = run
        self._board = _summary_writer(run / "tensorboard") if tensorboard else None

    def write(self, row: Mapping[str, Any]) -> None:
        """row: has `step`. Raises SettingsError when the disk is full."""
        path = self.run / METRICS_FILE
        try:
            self.run.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            for name, value in _numbers("", row):
                if self._board is not None and name != "step":
                    self._board.add_scalar(name, value, row["step"])
            if self._board is not None:
                self._board.flush()
        except OSError as error:
            raise SettingsError(f"could not write {path}: {error}") from None


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise SettingsError("tensorboard: the package is missing; pip install 'dspark-serve[train]'") from None
    return SummaryWriter(str(folder))


def _numbers(prefix: str, row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Leaves of nested mappings and lists, as slash-separated names."""
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _numbers(f"{name}/", value)
        elif isinstance(value, list):
            yield from _numbers(f"{name}/", {str(i + 1): x for i, x in enumerate(value)})
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, float(value)
