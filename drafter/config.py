"""Settings that the serving drafter owns. The architecture of a checkpoint is in drafter/checkpoint.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """checkpoint: a folder in the DeepSpec format (or our lighter one), or `ngram`, or `none`.

    candidates: the K of the sparse proposal (DESIGN 4.2); 0 proposes over the whole draft vocabulary.
    num_blocks, block_size: the verifier's, since both caches share one block table.
    max_width: draft at most this many tokens a round; 0 is the checkpoint's own γ. An MTP module may be run more often than that.
    calibrated: state confidence as calibration.json corrects it; False states the head's own (to calibrate, to evaluate).
    """

    checkpoint: str
    target: str
    dtype: str = "auto"
    device: str = "auto"
    candidates: int = 64
    max_width: int = 0
    num_blocks: int = 0
    block_size: int = 16
    num_threads: int = 0
    cache_dir: str = ""
    seed: int | None = None
    calibrated: bool = True
