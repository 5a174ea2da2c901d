"""The few layers that the target and the drafters are made of: linear with packed weights, RMS norm, rotary positions.

Shapes: N tokens of a flat batch, d hidden, H query heads, KV key/value heads, hd head dim. Both models lay one token's
projections out as [H + 2 KV, hd]: query heads, then keys, then values, so that one rotation serves all of them (values
rotate by zero) and keys and values are written to the cache in one copy.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from scheduler.errors import SettingsError
from verifier import native
from verifier.architecture import Architecture

# oneDNN's blocked layout is chosen for a row count, but measured here one layout serves 1..512 rows equally well.
_PACK_ROWS = 16


class Linear:
    """y = x W^T + b with W [out, in].

    On CPU in bfloat16 the weight is packed once: for native.c where that runs, else into oneDNN's blocked layout, with which a
    step of the demo target takes 13.3 instead of 22.5 ms of products at 8 rows (2 cores with AVX512-BF16; native.c: 8).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.product = native.PackedProduct(weight, bias) if native.packable(weight) else None
        if self.product is not None:
            return
        self.bias = bias
        self.packed = weight.device.type == "cpu" and weight.dtype is torch.bfloat16 and _can_pack()
        if self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        else:
            self.weight = weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]."""
        if self.product is not None:
            return self.product(x)
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + (x W^T + b): one call where the backend fuses it. x [N, in], residual [N, out]."""
        if self.product is not None:
            return self.product(x, residual)
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        return residual + F.linear(x, self.weight, self.bias)


def _can_pack() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [N, d], weight [d]. The mean square is taken in float32."""
    fused = native.rms_norm(x, weight, eps)
    return fused if fused is not None else F.rms_norm(x, (x.shape[-1],), weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """[N, 2 f] (gate, then up) -> silu(gate) * up, [N, f]."""
    fused = native.swiglu(gate_up)
    if fused is not None:
        return fused
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class Rotary:
    """Rotary position embedding (half-split layout, as Llama and Qwen), tables of cos and signed sin by position."""

    def __init__(self, arch: Architecture, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        frequencies, scale = _inverse_frequencies(arch, max_len)
        try:
            angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
            cos, sin = angles.cos() * scale, angles.sin() * scale
        except RuntimeError:  # torch has no common class for memory that is not there
            raise SettingsError(
                f"tables for {max_len} positions do not fit into memory; lower model.max_model_len"
            ) from None
        self.max_len = max_len
        self.tables = (cos.contiguous(), sin.contiguous())
        """cos, sin [max_len, hd / 2] float32 on the CPU, for the native kernel."""
        self._cos = torch.cat((cos, cos), dim=-1).to(device, dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device, dtype)
        self._num_rotated = arch.num_heads + arch.num_kv_heads
        self._num_values = arch.num_kv_heads
        self._half = arch.head_dim // 2

    def at(self, positions: Tensor, num_heads: int | None = None) -> tuple[Tensor, Tensor]:
        """positions [N] -> cos, sin [N, heads, hd] for rows laid out as rotated heads, then values (cos 1, sin 0).

        num_heads: rotated heads of the rows; default is query and key heads, the drafter's context rows have keys only.
        """
        heads = self._num_rotated if num_heads is None else num_heads
        n, hd = positions.shape[0], 2 * self._half
        cos = self._cos.new_ones(n, heads + self._num_values, hd)
        sin = self._sin.new_zeros(n, heads + self._num_values, hd)
        cos[:, :heads] = self._cos.index_select(0, positions).unsqueeze(1)
        sin[:, :heads] = self._sin.index_select(0, positions).unsqueeze(1)
        return cos, sin

    def rotate(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """x [N, heads, hd] -> rotated; x cos + (x2, x1) (-sin, sin)."""
        cos, sin = cos_sin
        swapped = x.roll(self._half, dims=-1).mul_(sin)
        return torch.addcmul(swapped, x, cos)


def _inverse_frequencies(arch: Architecture, max_len: int) -> tuple[Tensor, float]:
    """[hd / 2] inverse frequencies and the factor on cos and sin."""
    if arch.rope["rope_type"] == "default":
        exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.float32) / arch.head_dim
        return 1.0 / (arch.rope_theta**exponents), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        head_dim=arch.head_dim,
        max_position_embeddings=arch.max_position_embeddings,
        rope_parameters=dict(arch.rope),
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[arch.rope["rope_type"]](config, torch.device("cpu"), seq_len=max_len)
    return frequencies.float(), float(scale)


def split_heads_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over hd of each head with one weight row per head. x [N, heads, hd], weight [heads, hd]."""
    return F.rms_norm(x, (x.shape[-1],), None, eps) * weight
