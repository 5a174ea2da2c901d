"""The target decoder: Llama, Qwen2 and Qwen3, with fused projections and hidden-state taps at any layer.

It computes one flat batch of N tokens. What attention each token has is not its business: it calls `attend(layer, qkv)`,
which writes keys and values where they belong and returns what the queries see (verifier/attention.py). An attention whose
`rotates` is true applies the rotary embedding itself (the native kernel does it while it writes the cache); others get
rotated projections.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from verifier import native_step
from verifier.architecture import Architecture
from verifier.layers import Linear, Rotary, rms_norm, split_heads_norm, swiglu

# (layer, projections [N, H + 2 KV, hd]) -> attention output [N, H * hd]
Attend = Callable[[int, Tensor], Tensor]


class DecoderLayer:
    """Pre-norm attention and SwiGLU MLP. Weight names are those of a Hugging Face checkpoint."""

    def __init__(self, arch: Architecture, weights: Mapping[str, Tensor], prefix: str) -> None:
        def get(name: str) -> Tensor:
            return weights[f"{prefix}.{name}"]

        def fused(names: Sequence[str], bias: bool) -> Linear:
            weight = torch.cat([get(f"{name}.weight") for name in names])
            return Linear(weight, torch.cat([get(f"{name}.bias") for name in names]) if bias else None)

        self.eps = arch.rms_norm_eps
        self.num_heads, self.head_dim = arch.num_qkv_heads, arch.head_dim
        self.num_normed = arch.num_heads + arch.num_kv_heads
        self.input_norm = get("input_layernorm.weight")
        self.mlp_norm = get("post_attention_layernorm.weight")
        self.qkv = fused(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], arch.qkv_bias)
        self.out = fused(["self_attn.o_proj"], arch.output_bias)
        self.gate_up = fused(["mlp.gate_proj", "mlp.up_proj"], arch.mlp_bias)
        self.down = fused(["mlp.down_proj"], arch.mlp_bias)
        self.qk_norm: Tensor | None = None
        if arch.qk_norm:
            self.qk_norm = torch.cat(
                [
                    get("self_attn.q_norm.weight").expand(arch.num_heads, -1),
                    get("self_attn.k_norm.weight").expand(arch.num_kv_heads, -1),
                ]
            )

    def project(self, hidden: Tensor) -> Tensor:
        """hidden [N, d] -> query, key and value heads [N, H + 2 KV, hd], normed where the family norms, not rotated."""
        qkv = self.qkv(rms_norm(hidden, self.input_norm, self.eps)).view(-1, self.num_heads, self.head_dim)
        if self.qk_norm is not None:
            rotated = qkv[:, : self.num_normed]
            rotated.copy_(split_heads_norm(rotated, self.qk_norm, self.eps))
        return qkv

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Residual stream after attention output [N, H * hd] and MLP."""
        hidden = self.out.add_to(hidden, attended)
        return self.down.add_to(hidden, swiglu(self.gate_up(rms_norm(hidden, self.mlp_norm, self.eps))))


class LayerStack:
    """Decoder layers one after the other, with rotary positions: by native.c in one call where it applies."""

    def __init__(self, layers: Sequence[DecoderLayer], rotary: Rotary) -> None:
        self.layers, self.rotary = layers, rotary
        self._native = native_step.Layers(layers, layers[0].eps) if native_step.Layers.usable(layers) else None

    def run(
        self,
        hidden: Tensor,
        positions: Tensor,
        attend: Attend,
        capture: Sequence[int] = (),
        progress: ctypes.c_int64 | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden [N, d] (may be overwritten), positions [N] -> the last layer's output [N, d], and features [N, m d] or None.

        capture: layer ids whose outputs are concatenated in the order given, -1 the input. progress grows with every layer.
        """
        progress = ctypes.c_int64() if progress is None else progress
        n, d = hidden.shape
        features = hidden.new_empty(n, len(capture) * d)
        columns = {layer: i * d for i, layer in enumerate(capture)}
        if -1 in columns:
            features[:, columns[-1] : columns[-1] + d] = hidden
        if self._native is not None and isinstance(attend, native_step.AttentionStep):
            self._native.run(hidden, attend, progress, features, columns)
            return hidden, features if capture else None
        cos_sin = None if getattr(attend, "rotates", False) else self.rotary.at(positions)
        for index, layer in enumerate(self.layers):
            qkv = layer.project(hidden)
            if cos_sin is not None:
                qkv = self.rotary.rotate(qkv, cos_sin)
            hidden = layer.finish(hidden, attend(index, qkv))
            if index in columns:
                features[:, columns[index] : columns[index] + d] = hidden
            progress.value += 1
        return hidden, features if capture else None

    def products(self, num_rows: int) -> Callable[[], None]:
        """Something to call that does the matrix products of all layers for so many rows, and nothing else."""
        if self._native is not None:
            return self._native.multiply_only(num_rows)
        linears = [linear for layer in self.layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        norm = self.layers[0].input_norm
        work = [(linear, norm.new_ones(num_rows, linear.in_features)) for linear in linears]

        def run() -> None:
            for linear, rows in work:
                linear(rows)

        return run


class Decoder:
    """weights: Hugging Face names. max_len: positions that the rotary tables cover."""

    def __init__(
        self,
        arch: Architecture,
        weights: Mapping[str, Tensor],
        *,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.arch, self.dtype, self.device = arch, dtype, device
        self.embed_tokens = weights["model.embed_tokens.weight"]
        self.layers = [DecoderLayer(arch, weights, f"model.layers.{i}") for i in range(arch.num_layers)]
        self.norm = weights["model.norm.weight"]
        head = self.embed_tokens if arch.tie_word_embeddings else weights["lm_head.weight"]
        self.lm_head = Linear(head)
        self.rotary = Rotary(arch, max_len, dtype, device)
        self.stack = LayerStack(self.layers, self.rotary)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        capture: Sequence[int] = (),
        progress: ctypes.c_int64 | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """ids, positions [N] -> final hidden states before the last norm [N, d], and features [N, m d] or None.

        capture: layer ids whose raw outputs are concatenated in the order given (DeepSpec: id i is the output of decoder
        layer i, -1 the embedding). progress grows with every layer computed.
        """
        return self.stack.run(self.embed_tokens.index_select(0, ids), positions, attend, capture, progress)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden states [S, d] (before the last norm) -> logits [S, V] in the model's dtype."""
        return self.lm_head(rms_norm(hidden, self.norm, self.arch.rms_norm_eps))
