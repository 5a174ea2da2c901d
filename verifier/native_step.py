"""A bfloat16 step by native.c: the attention of its rows, and all decoder layers in one call.

Knows no weights' names and no vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from verifier import native
from verifier.layers import Linear


class _Step(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_int64) for name in ("num_rows", "num_heads", "num_kv_heads", "head_dim", "block_size")]
        + [(name, ctypes.c_int64) for name in ("table_stride", "num_items", "extra")]
        + [("scale", ctypes.c_float)]
        + [(name, ctypes.c_void_p) for name in ("cos", "sin", "positions", "slots", "limits", "extra_first")]
        + [(name, ctypes.c_void_p) for name in ("row_tables", "tables", "items")]
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("input_norm", "mlp_norm", "qk_norm")]
        + [(name, native.Product) for name in ("qkv", "out", "gate_up", "down")]
        + [("tap", ctypes.c_int64)]
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("layers", "step")]
        + [(name, ctypes.c_int64) for name in ("num_layers", "hidden_size", "pool_stride", "taps_stride")]
        + [("eps", ctypes.c_float)]
        + [(name, ctypes.c_void_p) for name in ("hidden", "pool", "taps", "normed", "qkv", "attended", "inner")]
        + [("progress", ctypes.c_void_p)]
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive flat rows of one request. limits: cached positions that each row sees; extra_first: see native.c."""

    first_row: int
    num_rows: int
    table: int


class AttentionStep:
    """Attention of one step by native.c: `attend(layer, qkv)` rotates, writes the cache and attends in one call.

    It keeps the step's arguments alive while layers run.
    """

    rotates = True

    def __init__(
        self,
        *,
        pool: Tensor,
        rows: Sequence[Rows],
        tables: np.ndarray,
        limits: np.ndarray,
        positions: Tensor,
        slots: Tensor | None,
        cos_sin: tuple[Tensor, Tensor],
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        extra: int = 0,
        extra_first: np.ndarray | None = None,
    ) -> None:
        """pool [L, blocks, block_size, 2 KV, hd]; tables [R, n] block ids; limits [N]: cached positions that a row sees;
        positions, slots [N] int64; cos_sin [max_len, hd / 2] float32 each.

        extra, extra_first: each row also sees that many rows of the batch itself from its extra_first on (drafts).
        """
        library = native.load()
        assert library is not None, "ask native.usable() first"
        self._attend, self.pool = library.dspark_attend, pool
        group = num_heads // num_kv_heads
        per_item = max(1, min(8, native.MAX_QUERIES // group))
        items = [
            (first, min(per_item, r.first_row + r.num_rows - first))
            for r in rows
            for first in range(r.first_row, r.first_row + r.num_rows, per_item)
        ]
        row_tables = np.repeat([r.table for r in rows], [r.num_rows for r in rows]).astype(np.int32)
        self._alive = (
            np.array(items, dtype=np.int32),
            row_tables,
            np.ascontiguousarray(tables, dtype=np.int32),
            limits.astype(np.int32),
            None if extra_first is None else extra_first.astype(np.int32),
            positions,
            slots,
            cos_sin,
        )
        item_array, _, table_array, limit_array, extra_array = self._alive[:5]
        self._step = _Step(
            num_rows=len(positions),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            table_stride=table_array.shape[1],
            num_items=len(items),
            extra=extra,
            scale=head_dim**-0.5,
            cos=cos_sin[0].data_ptr(),
            sin=cos_sin[1].data_ptr(),
            positions=positions.data_ptr(),
            slots=None if slots is None else slots.data_ptr(),
            limits=limit_array.ctypes.data,
            extra_first=None if extra_array is None else extra_array.ctypes.data,
            row_tables=row_tables.ctypes.data,
            tables=table_array.ctypes.data,
            items=item_array.ctypes.data,
        )
        self.address = ctypes.addressof(self._step)
        # every layer reads its output before the next one writes it
        self._out = pool.new_empty(len(positions), num_heads * head_dim)

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """qkv [N, H + 2 KV, hd] contiguous, rotated in place -> [N, H * hd]."""
        self._attend(self.address, qkv.data_ptr(), self.pool[layer].data_ptr(), self._out.data_ptr())
        return self._out


class Weights(Protocol):
    """A decoder layer, as verifier/model.py has it."""

    input_norm: Tensor
    mlp_norm: Tensor
    qk_norm: Tensor | None
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear


class Layers:
    """All decoder layers of a model in one call of native.c, from residual stream to residual stream.

    Why: op by op, 30 small layers spend longer between their operations than in them. Its threads meet awake.
    """

    def __init__(self, layers: Sequence[Weights], eps: float) -> None:
        library = native.load()
        assert library is not None, "ask Layers.usable() first"
        self._library, self._eps = library, eps
        products = [[_packed(linear) for linear in (w.qkv, w.out, w.gate_up, w.down)] for w in layers]
        norms = [[None if t is None else t.contiguous() for t in (w.input_norm, w.mlp_norm, w.qk_norm)] for w in layers]
        self._alive = (products, norms)
        self._layers = (_Layer * len(layers))(
            *(
                _Layer(*(None if t is None else t.data_ptr() for t in tensors), *(p.arguments for p in packed), tap=-1)
                for packed, tensors in zip(products, norms, strict=True)
            )
        )
        qkv, out, _, down = products[0]
        self._widths = (qkv.in_features, qkv.out_features, out.in_features, down.in_features)

    @staticmethod
    def usable(layers: Sequence[Weights]) -> bool:
        """Whether native.c computes layers of these shapes."""
        linears = [linear for w in layers for linear in (w.qkv, w.out, w.gate_up, w.down)]
        return all(linear.product is not None for linear in linears) and all(
            w.qkv.in_features % 32 == 0 and w.down.in_features % 32 == 0 and w.qkv.in_features == w.out.out_features
            for w in layers
        )

    def run(
        self, hidden: Tensor, step: AttentionStep, progress: ctypes.c_int64, taps: Tensor, columns: Mapping[int, int]
    ) -> None:
        """hidden [N, d] in place. taps [N, m d]: from columns[i] on it gets the output of layer i. progress: of layers."""
        for index, layer in enumerate(self._layers):
            layer.tap = columns.get(index, -1)
        work = self._working_memory(hidden)
        arguments = _Pass(
            step=step.address,
            pool_stride=step.pool.stride(0),
            taps_stride=taps.shape[1],
            pool=step.pool.data_ptr(),
            taps=taps.data_ptr(),
            progress=ctypes.addressof(progress),
            **self._shared_arguments(hidden, work),
        )
        self._library.dspark_run_layers(ctypes.addressof(arguments))

    def multiply_only(self, num_rows: int) -> Callable[[], None]:
        """Something to call that does the matrix products of all layers for so many rows, and nothing else."""
        hidden = torch.ones(num_rows, self._widths[0], dtype=torch.bfloat16)
        work, step = self._working_memory(hidden), _Step(num_rows=num_rows)
        for tensor in work:
            tensor.fill_(1)
        arguments = _Pass(step=ctypes.addressof(step), **self._shared_arguments(hidden, work))
        alive = (hidden, work, step)

        def run() -> None:
            assert alive
            self._library.dspark_run_products(ctypes.addressof(arguments))

        return run

    def _working_memory(self, hidden: Tensor) -> list[Tensor]:
        return [hidden.new_empty(hidden.shape[0], width) for width in self._widths]

    def _shared_arguments(self, hidden: Tensor, work: Sequence[Tensor]) -> dict[str, Any]:
        return {
            "layers": ctypes.addressof(self._layers),
            "num_layers": len(self._layers),
            "hidden_size": hidden.shape[1],
            "eps": self._eps,
            "hidden": hidden.data_ptr(),
            **dict(zip(("normed", "qkv", "attended", "inner"), (t.data_ptr() for t in work), strict=True)),
        }


def _packed(linear: Linear) -> native.PackedProduct:
    assert linear.product is not None, "ask Layers.usable() first"
    return linear.product
