"""A draft layer as trainable modules, with the biases and head norms of the target's family, under checkpoint names.

Must not know where attention looks. Shapes: N block rows, C context rows, d hidden, H query heads, KV key heads, hd head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafter.train.heads import Weight, linear
from drafter.train.native import rms_norm, swiglu
from verifier.architecture import Architecture


class Attention(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        d, q_dim, kv_dim = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        self.q_proj = Weight(q_dim, d, bias=arch.qkv_bias)
        self.k_proj, self.v_proj = (Weight(kv_dim, d, bias=arch.qkv_bias) for _ in range(2))
        self.o_proj = Weight(d, q_dim, bias=arch.output_bias)
        if arch.qk_norm:
            self.q_norm, self.k_norm = Weight(arch.head_dim), Weight(arch.head_dim)


class Mlp(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        d, f, bias = arch.hidden_size, arch.intermediate_size, arch.mlp_bias
        self.gate_proj, self.up_proj = Weight(f, d, bias=bias), Weight(f, d, bias=bias)
        self.down_proj = Weight(d, f, bias=bias)


class DraftLayer(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.eps, self.head_dim, self.qk_norm = arch.rms_norm_eps, arch.head_dim, arch.qk_norm
        self.num_heads, self.num_kv_heads = arch.num_heads, arch.num_kv_heads
        self.input_layernorm, self.post_attention_layernorm = Weight(arch.hidden_size), Weight(arch.hidden_size)
        self.self_attn, self.mlp = Attention(arch), Mlp(arch)

    def project(self, hidden: Tensor) -> Tensor:
        """Block rows [N, d] -> [N, H + 2 KV, hd], not rotated."""
        return self.project_entered(rms_norm(hidden, self.input_layernorm.weight, self.eps))

    def project_entered(self, entered: Tensor) -> Tensor:
        """As `project`, of rows that need no input norm any more."""
        attn = self.self_attn
        qkv = _joined_linear(entered, attn.q_proj, attn.k_proj, attn.v_proj)
        heads = qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        if not self.qk_norm:
            return heads
        query, key, value = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        return torch.cat((self._normed(query, attn.q_norm), self._normed(key, attn.k_norm), value), dim=1)

    def project_context(self, context: Tensor) -> Tensor:
        """Context rows [C, d] -> keys and values [C, 2 KV, hd]; no input norm here."""
        attn = self.self_attn
        rows = _joined_linear(context, attn.k_proj, attn.v_proj).view(-1, 2 * self.num_kv_heads, self.head_dim)
        if not self.qk_norm:
            return rows
        key, value = rows.split(self.num_kv_heads, dim=1)
        return torch.cat((self._normed(key, attn.k_norm), value), dim=1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Residual stream after attention output [N, H * hd] and MLP."""
        hidden = hidden + linear(attended, self.self_attn.o_proj.weight, self.self_attn.o_proj.bias)
        normed = rms_norm(hidden, self.post_attention_layernorm.weight, self.eps)
        gated = swiglu(_joined_linear(normed, self.mlp.gate_proj, self.mlp.up_proj))
        return hidden + linear(gated, self.mlp.down_proj.weight, self.mlp.down_proj.bias)

    def _normed(self, heads: Tensor, norm: Weight) -> Tensor:
        return rms_norm(heads.reshape(-1, self.head_dim), norm.weight, self.eps).view_as(heads)


def _joined_linear(x: Tensor, *parts: Weight) -> Tensor:
    """One product for linears that read the same rows."""
    biases = tuple(part.bias for part in parts if part.bias is not None)
    return linear(x, torch.cat(tuple(part.weight for part in parts)), torch.cat(biases) if biases else None)
