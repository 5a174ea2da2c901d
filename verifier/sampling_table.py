"""The sampling parameters of many rows as arrays, with flags that make the common cases free.

Owns no law: sampling.py and truncation.py read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scheduler.errors import BadParams
from scheduler.wire import SamplingParams
from verifier.noise import seed_key


@dataclass(frozen=True)
class SamplingTable:
    """Sampling parameters of B rows, on the host with their tensors made on first use; the flags cost nothing.

    top_k: 0 is off. seed_keys: int64, 0 where the row has no seed. A greedy row is neither seeded nor truncated.
    """

    device: torch.device
    temperature: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    seed_keys: npt.NDArray[np.int64]
    greedy: npt.NDArray[np.bool_]
    seeded: npt.NDArray[np.bool_]

    @classmethod
    def build(cls, params: Sequence[SamplingParams], device: torch.device | str) -> SamplingTable:
        greedy = np.array([p.greedy for p in params], dtype=bool)
        table = cls(
            device=torch.device(device),
            temperature=np.where(greedy, 1.0, np.array([p.temperature for p in params], dtype=np.float64)),
            top_k=np.array([p.top_k for p in params], dtype=np.int64),
            top_p=np.array([p.top_p for p in params], dtype=np.float64),
            min_p=np.array([p.min_p for p in params], dtype=np.float64),
            seed_keys=np.array([0 if p.seed is None else seed_key(p.seed) for p in params], dtype=np.int64),
            greedy=greedy,
            seeded=np.array([p.seed is not None for p in params], dtype=bool) & ~greedy,
        )
        table._refuse_nonsense()
        return table

    def _refuse_nonsense(self) -> None:
        _require("temperature", self.temperature, np.isfinite(self.temperature), "a finite number")
        _require("top_k", self.top_k, self.top_k >= 0, "0 (off) or more")
        _require("top_p", self.top_p, (self.top_p > 0) & (self.top_p <= 1), "above 0 and at most 1")
        _require("min_p", self.min_p, (self.min_p >= 0) & (self.min_p <= 1), "from 0 to 1")

    def take(self, rows: npt.NDArray[np.int64]) -> SamplingTable:
        """The table whose row i is this one's row rows[i]; rows may repeat."""
        return SamplingTable(
            device=self.device,
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed_keys=self.seed_keys[rows],
            greedy=self.greedy[rows],
            seeded=self.seeded[rows],
        )

    def __len__(self) -> int:
        return len(self.greedy)

    @cached_property
    def all_greedy(self) -> bool:
        return bool(self.greedy.all())

    @cached_property
    def any_greedy(self) -> bool:
        return bool(self.greedy.any())

    @cached_property
    def all_seeded(self) -> bool:
        return bool(self.seeded.all())

    @cached_property
    def any_seeded(self) -> bool:
        return bool(self.seeded.any())

    @cached_property
    def any_unseeded(self) -> bool:
        """Some row is sampled with fresh noise, so that its draft law matters."""
        return not bool((self.greedy | self.seeded).all())

    @cached_property
    def plain_temperature(self) -> bool:
        return bool((self.temperature == 1.0).all())

    @cached_property
    def truncated(self) -> npt.NDArray[np.bool_]:
        return ~self.greedy & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))

    @cached_property
    def any_truncated(self) -> bool:
        return bool(self.truncated.any())

    def tensor(self, column: npt.NDArray[np.generic]) -> Tensor:
        """A per-row array on the table's device."""
        return torch.from_numpy(np.ascontiguousarray(column)).to(self.device)

    @cached_property
    def temperature_tensor(self) -> Tensor:
        return self.tensor(self.temperature)

    @cached_property
    def seed_key_tensor(self) -> Tensor:
        return self.tensor(self.seed_keys)

    @cached_property
    def greedy_rows(self) -> Tensor:
        return self.tensor(np.flatnonzero(self.greedy))

    @cached_property
    def seeded_rows(self) -> Tensor:
        return self.tensor(np.flatnonzero(self.seeded))

    @cached_property
    def seeded_table(self) -> SamplingTable:
        return self.take(np.flatnonzero(self.seeded))


def _require(name: str, values: npt.NDArray[np.generic], good: npt.NDArray[np.bool_], rule: str) -> None:
    if not good.all():
        raise BadParams(f"{name} must be {rule}; got {values[~good][0]}", param=name)
