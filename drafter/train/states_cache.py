"""A bounded cache of target states on disk, for several epochs over the same answers.

Owns its files (one per sequence, each appears whole or not at all), their format and which of them go when it is full. Must not
know where states come from.

Formats, in bytes per token (m captured layers, d hidden; DeepSpec's cache takes 2 d (m + 1) + 6):
  bf16   2 d (m + 1) + 8
  int8   d (m + 2) + 12, and 4 m d a sequence: features are divided by their root mean square in the sequence, then each row
         by its largest value / 127; raw residual streams have a few dimensions a thousand times the rest, which would take all
         the levels of a row. `last`, of which the target's law is made, stays in bfloat16.
Policies: `lru` drops what was not used for longest; `one-pass` keeps what the first pass brings until it is full, and
drops nothing: over a shuffled epoch its share of hits is its share of the data, where lru's is below.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafter.train.answers import record_settings
from drafter.train.states import States, save_atomically
from scheduler.errors import SettingsError

FORMATS = ("bf16", "int8")
POLICIES = ("one-pass", "lru")
_LEVELS = 127


class StatesCache:
    """identity: of target and captured layers; a folder that holds others is refused. limit_bytes: of all files together."""

    def __init__(self, folder: Path, identity: dict[str, Any], *, limit_bytes: int, form: str, policy: str) -> None:
        if form not in FORMATS:
            raise SettingsError(f"cache format: {form!r} is not one of {', '.join(FORMATS)}")
        if policy not in POLICIES:
            raise SettingsError(f"cache policy: {policy!r} is not one of {', '.join(POLICIES)}")
        record_settings(folder, {**identity, "format": form})
        self.folder, self.limit_bytes, self.form, self.policy = folder, limit_bytes, form, policy
        self.hits, self.misses = 0, 0
        # least recently used first
        self._sizes: OrderedDict[str, int] = OrderedDict()
        files = [(path.stat(), path.stem) for path in folder.glob("*.safetensors")]
        for stat, key in sorted(files, key=lambda found: found[0].st_mtime):
            self._sizes[key] = stat.st_size

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    def __len__(self) -> int:
        return len(self._sizes)

    def get(self, name: str) -> States | None:
        key = _key(name)
        if key not in self._sizes:
            self.misses += 1
            return None
        path = self._path(key)
        try:
            with safe_open(path, framework="pt") as file:
                meta = json.loads((file.metadata() or {})["meta"])
                tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, KeyError):
            # another process may have dropped it, or the machine went down while it was written
            self._drop(key)
            self.misses += 1
            return None
        self._sizes.move_to_end(key)
        self.hits += 1
        features = _unpacked(tensors) if self.form == "int8" else tensors["features"]
        return States(tensors["ids"], features, tensors["last"], tensors["lse"], meta.pop("prompt_len"), meta)

    def put(self, name: str, states: States) -> None:
        """Does nothing when there is no room and the policy drops nothing. Raises SettingsError when the disk is full."""
        key = _key(name)
        tensors = {"ids": states.ids, "last": states.last.bfloat16(), "lse": states.lse}
        tensors |= _packed(states.features) if self.form == "int8" else {"features": states.features.bfloat16()}
        on_host = {n: tensor.cpu().contiguous() for n, tensor in tensors.items()}
        num_bytes = sum(tensor.nbytes for tensor in on_host.values())
        if key in self._sizes or not self._make_room(num_bytes):
            return
        meta = {"meta": json.dumps({**states.meta, "prompt_len": states.prompt_len})}
        save_atomically(on_host, self._path(key), meta)
        self._sizes[key] = self._path(key).stat().st_size

    def _make_room(self, num_bytes: int) -> bool:
        # a file has a header of a few hundred bytes
        needed = num_bytes + 1024
        if needed > self.limit_bytes:
            return False
        if self.policy == "lru":
            while self.num_bytes + needed > self.limit_bytes:
                self._drop(next(iter(self._sizes)))
        return self.num_bytes + needed <= self.limit_bytes

    def _drop(self, key: str) -> None:
        self._sizes.pop(key, None)
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"


def _key(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:24]


def _packed(features: Tensor) -> dict[str, Tensor]:
    """[n, m d] -> int8 levels, scale per row [n, 1], scale per column [1, m d]."""
    wide = features.float()
    columns = wide.square().mean(0, keepdim=True).sqrt().clamp_min(1e-6)
    scaled = wide / columns
    rows = (scaled.abs().amax(1, keepdim=True) / _LEVELS).clamp_min(1e-9)
    return {"levels": (scaled / rows).round().to(torch.int8), "rows": rows, "columns": columns}


def _unpacked(tensors: dict[str, Tensor]) -> Tensor:
    return (tensors["levels"].float() * tensors["rows"] * tensors["columns"]).bfloat16()
