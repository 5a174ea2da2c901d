"""RMS norm, SwiGLU and the vocabulary terms of the loss with their gradients, by native.c where the machine can run it.

Owns the autograd functions around the kernels and their torch twins, which are what every other machine and number format
uses; tests hold the two together. Must not know networks.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verifier import native as step_kernels

_SOURCE = Path(__file__).with_name("native.c")
_SIGNATURES = {"vocabulary_terms": "ppppppppiifff!", "swiglu_backward": "pppii", "rms_norm_backward": "pppppiif!"}


@cache
def load() -> ctypes.CDLL | None:
    """The compiled kernels, or None where this machine cannot build or run them."""
    return step_kernels.compiled(_SOURCE, _SIGNATURES) if step_kernels.load() is not None else None


def usable(x: Tensor) -> bool:
    """Whether the kernels compute rows like these."""
    return x.dtype is torch.bfloat16 and x.device.type == "cpu" and load() is not None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [N, d], weight [d] float32 -> [N, d]."""
    if usable(x) and x.dim() == 2 and x.shape[1] % 16 == 0:
        return _RmsNorm.apply(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [N, 2 f] -> silu(gate) * up [N, f]."""
    if usable(gate_up) and gate_up.shape[1] % 32 == 0:
        return _SwiGlu.apply(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, narrow = x.contiguous(), weight.to(x.dtype)
        ctx.save_for_backward(x, narrow)
        ctx.eps = eps
        out = step_kernels.rms_norm(x, narrow, eps)
        assert out is not None, "ask usable() first"
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        library, grad = load(), grads[0].contiguous()
        assert library is not None
        grad_x, grad_weight = torch.empty_like(x), torch.zeros(x.shape[1])
        pointers = (t.data_ptr() for t in (x, weight, grad, grad_x, grad_weight))
        if library.dspark_rms_norm_backward(*pointers, x.shape[0], x.shape[1], ctx.eps):
            raise MemoryError("rms norm")
        return grad_x, grad_weight, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        out = step_kernels.swiglu(gate_up)
        assert out is not None, "ask usable() first"
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        library, grad, out = load(), grads[0].contiguous(), torch.empty_like(gate_up)
        assert library is not None
        library.dspark_swiglu_backward(gate_up.data_ptr(), grad.data_ptr(), out.data_ptr(), len(grad), grad.shape[1])
        return out


def vocabulary_terms(
    logits: Tensor,
    law_logits: Tensor,
    law_lse: Tensor,
    law_rows: Tensor,
    labels: Tensor,
    weights: Tensor,
    factors: tuple[float, float, float],
) -> tuple[Tensor, Tensor]:
    """logits [n, Vd] bfloat16 contiguous, overwritten with the loss's gradient. law_logits [T, Vd], law_lse [T]: the
    target's. labels [n] columns, -1 outside. weights [n] sum to 1 over the batch. factors: of ce, tv, kl.
    Returns ce, tv, kl of each slot [n, 3] and the column of each largest logit [n]."""
    library = load()
    assert library is not None, "ask usable() first"
    num_rows, num_columns = logits.shape
    terms, best = torch.empty(num_rows, 3), torch.empty(num_rows, dtype=torch.int64)
    tensors = (logits, law_logits, law_lse, law_rows, labels, weights, terms, best)
    assert all(t.is_contiguous() for t in tensors)
    if library.dspark_vocabulary_terms(*(t.data_ptr() for t in tensors), num_rows, num_columns, *factors):
        raise MemoryError(f"two rows of {num_columns} numbers")
    return terms, best
