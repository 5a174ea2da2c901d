"""What a starting scheduler does, told to gateways before Serve lets them call it: a line in the cluster's key-value store.

Serve holds back every call to a replica until its constructor has returned, and that is where models load.
"""

from __future__ import annotations

from collections.abc import Callable

from ray.experimental import internal_kv

_NAMESPACE = "dspark"


def teller(application: str, deployment: str) -> Callable[[str], None]:
    """For a scheduler's deployment: tell(phase); an empty phase says that it is ready."""

    def tell(phase: str) -> None:
        internal_kv._internal_kv_put(_key(application, deployment), phase, overwrite=True, namespace=_NAMESPACE)

    return tell


def told(application: str, deployment: str) -> str:
    """For whoever waits: what the scheduler is doing instead of serving; empty when it serves or never began to start."""
    phase: bytes | None = internal_kv._internal_kv_get(_key(application, deployment), namespace=_NAMESPACE)
    return (phase or b"").decode()


def _key(application: str, deployment: str) -> str:
    return f"{application}.{deployment}.phase"
