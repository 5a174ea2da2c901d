"""Paged key/value tensors of one model. Which block belongs to whom is the scheduler's business; here are only tensors.

Layout [layers, num_blocks, block_size, 2 KV, hd]: a token's keys, then its values, in one row, so that a step writes them in
one copy and a request's context is gathered by whole blocks. Slot = block * block_size + offset. Block 0 belongs to nobody:
padding reads it and measuring writes it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scheduler.errors import SettingsError
from verifier import huge_pages


class PagedKV:
    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks, self.block_size, self.num_kv_heads = num_blocks, block_size, num_kv_heads
        # zeros, not empty: padding rows are read (and masked), and 0 * NaN would still be NaN
        shape = (num_layers, num_blocks, block_size, 2 * num_kv_heads, head_dim)
        try:
            self.pool = huge_pages.ask_for(torch.empty(shape, dtype=dtype, device=device)).zero_()
        except RuntimeError:  # torch has no common class for memory that is not there
            gib = math.prod(shape) * dtype.itemsize / 2**30
            raise SettingsError(
                f"the KV cache of {num_blocks} blocks of {block_size} tokens takes {gib:.3g} GiB, more than {device} has; "
                "lower kv.num_blocks, kv.cache_bytes or scheduler.max_live"
            ) from None
        self._slots = self.pool.view(num_layers, num_blocks * block_size, 2 * num_kv_heads, head_dim)

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """slots [N] int64, rows [N, 2 KV, hd] (rotated keys, then values)."""
        self._slots[layer].index_copy_(0, slots, rows)

    def clear_padding(self) -> None:
        """Block 0 as it was at first: padding is read, and must be finite."""
        self.pool[:, 0] = 0

    def gather(
        self, layer: int, blocks: Tensor, num_requests: int, stale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """blocks [R * n] int64 -> keys, values, each a view [R, KV, n * block_size, hd].

        stale: rows among R * n * block_size that come out as zero. A mask alone does not keep out what another request left
        behind there: 0 * NaN is NaN.
        """
        rows = self.pool[layer].index_select(0, blocks)
        if stale is not None:
            rows.flatten(0, 1).index_fill_(0, stale, 0.0)
        rows = rows.view(num_requests, -1, 2 * self.num_kv_heads, rows.shape[-1]).transpose(1, 2)
        return rows[:, : self.num_kv_heads], rows[:, self.num_kv_heads :]


def finite_in_place(rows: Tensor) -> Tensor:
    """Zero where it is not finite: a row that is masked, or left behind in a freed block, must not reach whoever reads past it
    (0 * NaN is NaN). For caches whose rows may be wrong, not for the target's."""
    return rows.nan_to_num_(0.0, 0.0, 0.0)


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    return num_layers * 2 * num_kv_heads * head_dim * dtype.itemsize


def slots_of(block_ids: npt.NDArray[np.int32], start: int, stop: int, block_size: int) -> npt.NDArray[np.int64]:
    """Slots of positions start..stop-1 of a request with this block table."""
    positions = np.arange(start, stop, dtype=np.int64)
    return block_ids[positions // block_size].astype(np.int64) * block_size + positions % block_size


def padded_tables(tables: list[npt.NDArray[np.int32]], num_blocks: int) -> npt.NDArray[np.int64]:
    """[R, num_blocks] block ids; shorter tables are padded with block 0, longer ones cut."""
    padded = np.zeros((len(tables), num_blocks), dtype=np.int64)
    for row, table in enumerate(tables):
        used = table[:num_blocks]
        padded[row, : len(used)] = used
    return padded
