"""Target states on disk: for every token of an answer, the hidden states the drafter reads and the law it is taught.

Owns the shard format (safetensors, one file per few dozen sequences, each appears whole or not at all) and reading one
sequence without loading the rest. Must not know how answers are written or how they are trained on.

Shapes: n tokens of a sequence (prompt, then answer), m captured layers, d hidden. Bytes per token: 2 d (m + 1) + 8.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from scheduler.errors import SettingsError

_FORMAT = "dspark-states-1"
# (first token, end) of each answer in a sequence.
Spans = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class States:
    """One sequence: a prompt and its answer, or a whole conversation.

    spans: (first token, end) of each answer, ascending, from meta["spans"]; one from prompt_len to the end without that.
    ids: [n] int32. features: [n, m d] raw outputs of the captured layers. last: [n, d] after the final norm (the input of
    the target's head). lse: [n] float32 log of the softmax denominator over the whole vocabulary. Row i belongs to the
    target having read ids[0..i]; features hold for rows 0..n-2, last and lse before answer tokens; the rest is zero.
    """

    ids: Tensor
    features: Tensor
    last: Tensor
    lse: Tensor
    prompt_len: int
    meta: dict[str, Any]

    @property
    def spans(self) -> Spans:
        return [(start, end) for start, end in self.meta.get("spans", [(self.prompt_len, len(self.ids))])]

    @property
    def answer_len(self) -> int:
        return sum(end - start for start, end in self.spans)


def write_shard(path: Path, sequences: Sequence[States]) -> None:
    """Raises SettingsError when the disk is full; nothing half-written is left."""
    lengths = [s.ids.shape[0] for s in sequences]
    tensors = {
        "ids": torch.cat([s.ids.to(torch.int32) for s in sequences]),
        "features": torch.cat([s.features for s in sequences]),
        "last": torch.cat([s.last for s in sequences]),
        "lse": torch.cat([s.lse.float() for s in sequences]),
        "offsets": torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0),
        "prompt_lens": torch.tensor([s.prompt_len for s in sequences], dtype=torch.int32),
    }
    save_atomically(tensors, path, {"format": _FORMAT, "meta": json.dumps([s.meta for s in sequences])})


def save_atomically(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, unfinished, metadata)
        os.replace(unfinished, path)
    except (OSError, SafetensorError) as error:
        raise SettingsError(f"could not write {path}: {error}") from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


class Shard:
    """One file, opened lazily: only the rows of the sequence that is asked for are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(path, framework="pt")
            metadata = self._file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise SettingsError(f"{path} is not a file of target states (format {metadata.get('format')!r})")
            self.offsets = self._file.get_tensor("offsets").tolist()
            self.prompt_lens = self._file.get_tensor("prompt_lens").tolist()
            self.feature_size = self._file.get_slice("features").get_shape()[1]
        except (SafetensorError, OSError) as error:
            raise SettingsError(f"{path} is not a readable file of target states (truncated?): {error}") from None
        self.meta: list[dict[str, Any]] = json.loads(metadata["meta"])

    def __len__(self) -> int:
        return len(self.prompt_lens)

    def spans(self, index: int) -> Spans:
        whole = (self.prompt_lens[index], self.offsets[index + 1] - self.offsets[index])
        return [(start, end) for start, end in self.meta[index].get("spans", [whole])]

    def ids(self, index: int) -> Tensor:
        return self._rows("ids", index)

    def read(self, index: int) -> States:
        return States(
            ids=self._rows("ids", index),
            features=self._rows("features", index),
            last=self._rows("last", index),
            lse=self._rows("lse", index),
            prompt_len=self.prompt_lens[index],
            meta=self.meta[index],
        )

    def _rows(self, name: str, index: int) -> Tensor:
        return self._file.get_slice(name)[self.offsets[index] : self.offsets[index + 1]]


class StatesSource(Protocol):
    """Where training gets its sequences: states kept on disk, or computed when they are asked for."""

    @property
    def where(self) -> str:
        """For messages."""
        ...

    @property
    def feature_size(self) -> int:
        """m d."""
        ...

    def refresh(self) -> int:
        """Number of sequences now known."""
        ...

    def named(self) -> list[tuple[str, dict[str, Any]]]:
        """(name, meta) of every sequence known; a name stays valid for ever."""
        ...

    def spans(self, name: str) -> Spans:
        """Without reading its states."""
        ...

    def upcoming(self, names: Sequence[str]) -> None:
        """These will be read next, in this order."""
        ...

    def read_named(self, name: str) -> States: ...


class StatesFolder:
    """Every shard of a folder. `refresh` picks up shards that a corpus writer has added meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shards: list[Shard] = []
        self._by_name: dict[str, Shard] = {}
        self.refresh()
        if not self.shards:
            raise SettingsError(f"{folder} holds no target states (states-*.safetensors); run prepare first")

    @property
    def where(self) -> str:
        return str(self.folder)

    @property
    def feature_size(self) -> int:
        sizes = {shard.feature_size for shard in self.shards}
        if len(sizes) > 1:
            raise SettingsError(f"{self.folder} holds states of different layers (widths {sorted(sizes)})")
        return int(sizes.pop())

    def upcoming(self, names: Sequence[str]) -> None:
        """They are on disk."""

    def refresh(self) -> int:
        """Number of sequences now known."""
        for path in shard_paths(self.folder):
            if path.name not in self._by_name:
                self.shards.append(Shard(path))
                self._by_name[path.name] = self.shards[-1]
        return sum(len(shard) for shard in self.shards)

    def named(self) -> list[tuple[str, dict[str, Any]]]:
        """(name, meta) of every sequence known; a name stays valid for ever."""
        return [(f"{shard.path.name}:{i}", meta) for shard in self.shards for i, meta in enumerate(shard.meta)]

    def read_named(self, name: str) -> States:
        shard, index = self._place(name)
        return shard.read(index)

    def spans(self, name: str) -> Spans:
        shard, index = self._place(name)
        return shard.spans(index)

    def _place(self, name: str) -> tuple[Shard, int]:
        file, _, index = name.rpartition(":")
        if file not in self._by_name:
            self.refresh()
        if file not in self._by_name:
            raise SettingsError(f"{self.folder} no longer holds {file}, which this run was training on")
        return self._by_name[file], int(index)


def shard_path(folder: Path, part: int, number: int) -> Path:
    """part: which of several writers at once."""
    return folder / f"states-{part:02d}-{number:05d}.safetensors"


def shard_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("states-*.safetensors"))
