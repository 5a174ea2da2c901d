"""Settings that the scheduler owns. Built once at the edge (services/settings.py), frozen inside."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """planner: `algorithm1`, `fixed:k`, `threshold:x` or `off`.

    max_live: requests that hold KV blocks at once. max_waiting: queue length beyond which requests are refused.
    prefill_chunk: most prompt tokens computed in one step, over all requests.
    default_timeout_s: deadline of requests that bring none; 0 is none.
    """

    planner: str = "algorithm1"
    max_live: int = 64
    max_waiting: int = 256
    prefill_chunk: int = 256
    prefix_cache: bool = True
    default_timeout_s: float = 600.0
    check_integrity: bool = False
