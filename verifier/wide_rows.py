"""Wide rows (a vocabulary) seen as blocks: searching one or drawing from it is two short steps instead of a long one.

Owns only shapes and searches; knows no probabilities.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

import numpy as np
import torch
from torch import Tensor

NARROW = 512  # rows up to this wide are handled whole


@lru_cache(maxsize=64)
def _block_width(row_width: int) -> int:
    """The largest divisor of row_width up to its square root; a prime row is one block."""
    return next((d for d in range(isqrt(row_width), 1, -1) if row_width % d == 0), row_width)


def as_blocks(rows: Tensor) -> Tensor:
    """[B, V] -> view [B, V / width, width]."""
    return rows.unflatten(-1, (-1, _block_width(rows.shape[-1])))


def block_of_each(blocks: Tensor, chosen: Tensor) -> Tensor:
    """[B, N, width], int64 [B] -> [B, width]."""
    return blocks[torch.arange(blocks.shape[0], device=blocks.device), chosen]


def columns_of_each(blocks: Tensor, chosen: Tensor) -> Tensor:
    """The columns that `block_of_each` returns, int64 [B, width]."""
    width = blocks.shape[-1]
    return (chosen * width)[:, None] + torch.arange(width, device=blocks.device)


def find_between(values: Tensor, low: Tensor, high: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows and columns, int64 [N] in row-major order, where low <= values < high; values [B, V], bounds [B]."""
    if values.device.type != "cpu":
        inside = values >= low[:, None]
        rows, columns = (inside if high is None else inside & (values < high[:, None])).nonzero(as_tuple=True)
        return rows, columns
    # numpy compares and collects several times faster than torch does on a CPU.
    array = values.numpy()
    found = array >= low.numpy()[:, None]
    if high is not None:
        found &= array < high.numpy()[:, None]
    rows_and_columns = np.divmod(np.flatnonzero(found), values.shape[-1])
    return torch.from_numpy(rows_and_columns[0]), torch.from_numpy(rows_and_columns[1])


def side_by_side(rows: Tensor, columns: Tensor, num_rows: int) -> Tensor:
    """What `find_between` found as one list per row: int64 [B, M], filled up with -1, M >= 1."""
    counts = torch.bincount(rows, minlength=num_rows)
    slots = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    lists = torch.full((num_rows, max(1, int(counts.max()))), -1, device=rows.device)
    return lists.index_put_((rows, slots), columns)


def zero_below(values: Tensor, low: Tensor) -> Tensor:
    """values [B, V] with everything under low [B] set to 0, in place."""
    if values.device.type != "cpu":
        return values.mul_(values >= low[:, None])
    array = values.numpy()
    np.multiply(array, array >= low.numpy()[:, None], out=array)
    return values
