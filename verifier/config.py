"""Settings that the verifier owns, and the architecture numbers it reads from a model folder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """model: a Hugging Face folder, a hub id or a GGUF file.

    dtype: `auto` (bfloat16 where the device computes in it, else float32), `bfloat16`, `float32`, `float64` (tests).
    device: `auto`, `cpu`, `cuda`, `cuda:N`.
    capture_layers: decoder layers whose raw outputs the drafter wants (0-based; -1 is the embedding output).
    num_blocks: KV blocks; 0: as many as kv_cache_bytes holds, and where that is 0 too, room for max_model_len, but at most
        1,024 tokens, for each of max_live requests, and for one of max_model_len at least.
    num_threads: torch threads of this process; 0 is one per usable core.
    cache_dir: where weights converted from GGUF are kept; empty is ~/.cache/dspark.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    capture_layers: tuple[int, ...] = ()
    block_size: int = 16
    num_blocks: int = 0
    kv_cache_bytes: int = 0
    max_model_len: int = 0
    max_live: int = 64
    num_threads: int = 0
    cache_dir: str = ""
    seed: int | None = None
