"""How HTTP reaches the gateway under Ray Serve: through Serve's own proxy, which copies every chunk of every stream in Python, or
through HAProxy, straight to the gateway's replicas. Serve decides by its environment; this says what goes with each.

HAProxy is not chosen by us: it opens two ports of its own on all interfaces, whatever gateway.host says. Knows no Ray.
"""

from __future__ import annotations

import os
import re

_HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
_FAST = "RAY_SERVE_THROUGHPUT_OPTIMIZED"

# Where replicas take HTTP themselves, one that stops waits 30 seconds for load balancers to hear of it, and a stop of the server
# with it. HAProxy, the only one here, hears of it within a second.
_DIRECT = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1"}

_NO_BIND = re.compile(r"cannot bind socket \((?P<why>[^)]*)\) for \[(?P<where>[^\]]*)\]")


def behind_haproxy() -> bool:
    return _is_set(_HAPROXY)


def ingress_environment() -> dict[str, str]:
    """What Serve's processes are to be told beside what its user set; never against it."""
    direct = behind_haproxy() or _is_set(_FAST)
    return {name: os.environ.get(name, value) for name, value in _DIRECT.items()} if direct else {}


def described() -> str:
    """One line for whoever starts the server."""
    if behind_haproxy() and _is_set(_FAST):
        return "http: HAProxy, straight to the gateway"
    through = "HAProxy" if behind_haproxy() else "Serve's own proxy"
    return f"http: {through}; for a faster way see docs/operating.md, What HTTP costs"


def why_haproxy_failed(text: str) -> str | None:
    """What of HAProxy's words in a failed start is for people."""
    found = _NO_BIND.search(text)
    if found is None:
        return None
    return (
        f"HAProxy cannot listen on {found['where']}: {found['why']}; beside --port it needs two ports that no other HAProxy "
        "has: set RAY_SERVE_HAPROXY_METRICS_PORT and RAY_SERVE_HAPROXY_STATS_PORT"
    )


def _is_set(name: str) -> bool:
    return os.environ.get(name) == "1"
