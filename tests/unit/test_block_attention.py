"""The native kernel's block attention against torch operators."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drafter.block_attention import BlockStart, TorchBlockAttention, block_attention
from verifier import native
from verifier.architecture import parse_architecture
from verifier.kv import PagedKV
from verifier.layers import Rotary


@pytest.mark.skipif(native.load() is None, reason="no AVX512-BF16 or no C compiler")
@pytest.mark.parametrize("width", [1, 3, 7])
def test_native_block_attention_equals_torch_for_any_mix_of_context_lengths(width: int) -> None:
    heads, kv_heads, head_dim = 6, 2, 64
    generator = torch.Generator().manual_seed(width)
    pool = PagedKV(
        num_layers=1, num_blocks=80, block_size=16, num_kv_heads=kv_heads, head_dim=head_dim,
        dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    pool.pool.copy_(torch.randn(pool.pool.shape, generator=generator))
    config = {
        "model_type": "llama", "vocab_size": 8, "hidden_size": heads * head_dim, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
    }  # fmt: skip
    rotary = Rotary(parse_architecture(config, "test"), 512, torch.bfloat16, torch.device("cpu"))
    order = torch.randperm(79, generator=generator).add(1).numpy().astype(np.int32)
    starts = [
        BlockStart(0, n, order[20 * i : 20 * i + -(-n // 16)], context_from)
        for i, (n, context_from) in enumerate([(1, 0), (300, 0), (16, 16), (33, 16)])
    ]
    qkv = torch.randn(len(starts) * width, heads + 2 * kv_heads, head_dim, generator=generator).bfloat16()
    positions = torch.cat([torch.arange(s.start, s.start + width) for s in starts])
    exact = TorchBlockAttention(pool, starts, width, num_heads=heads)(0, rotary.rotate(qkv, rotary.at(positions)))
    got = block_attention(pool, rotary, starts, width, positions, num_heads=heads)(0, qkv.clone())
    torch.testing.assert_close(got.float(), exact.float(), atol=3e-2, rtol=3e-2)
