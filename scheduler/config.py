"""Settings that the scheduler owns. Built once at the edge (services/settings.py), frozen inside."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.admit import parse_planner
from scheduler.errors import SettingsError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """planner: `auto`, `algorithm1`, `fixed:k`, `threshold:x` or `off`.

    max_live: requests that hold KV blocks at once. max_waiting: queue length beyond which requests are refused.
    prefill_chunk: most prompt tokens computed in one step, over all requests.
    longest_step_s: prompt chunks are cut so that a step in which others decode takes no longer, by the cost curve; 0 is no limit.
    priority_aging_s: seconds of waiting that are worth one level of priority: among requests that wait, one of priority p comes
        before those of priority 0 that arrived up to p times so long before it. 0 ignores priorities.
    max_wait_s: a request that has waited so long for its first place fails as overloaded; 0 lets it wait until its deadline.
    pipeline_depth: 2 lets one half of the requests draft while the other half is verified, where that pays; for workers on
        devices of their own.
    default_timeout_s: deadline of requests that bring none; 0 is none.
    worker_timeout_s: a worker that makes no progress for so long during a call counts as lost; a slow one does not.
    recover_timeout_s: how long requests wait for a lost verifier before they fail.
    stall_timeout_s: without progress for so long while work is queued, the health check fails. Above the sum of the other
    two, so that a worker is given up before the scheduler is.
    """

    planner: str = "auto"
    max_live: int = 64
    max_waiting: int = 256
    prefill_chunk: int = 256
    longest_step_s: float = 0.0
    pipeline_depth: int = 1
    prefix_cache: bool = True
    priority_aging_s: float = 30.0
    max_wait_s: float = 0.0
    default_timeout_s: float = 600.0
    check_integrity: bool = False
    worker_timeout_s: float = 60.0
    recover_timeout_s: float = 120.0
    stall_timeout_s: float = 300.0


_LEAST = {
    "max_live": 1,
    "max_waiting": 0,
    "prefill_chunk": 1,
    "longest_step_s": 0,
    "priority_aging_s": 0,
    "max_wait_s": 0,
    "pipeline_depth": 1,
    "default_timeout_s": 0,
    "worker_timeout_s": 0.1,
    "recover_timeout_s": 0,
    "stall_timeout_s": 0.1,
}


def check_config(config: SchedulerConfig) -> None:
    """Raises SettingsError naming the first setting that cannot work."""
    parse_planner(config.planner)
    for name, least in _LEAST.items():
        value = getattr(config, name)
        if not value >= least:
            raise SettingsError(f"scheduler.{name} is {value} and must be at least {least}")
