"""How computing threads share the cores: with each other, while OpenMP's wait (read once by the runtime, when torch is first
imported), and with the threads that accept, stream and plan."""

from __future__ import annotations

import os
import sys
import threading

# A step is two hundred short parallel regions. Threads that sleep between them (0) take 23 ms for a step of the demo target
# where threads that spin take 16; but a thread that spins for long (30000 is about 2 ms) holds a core that somebody else
# needs, and waits for the one that lost it. 5000 is about 0.4 ms: longer than the gaps within a step, shorter than what
# hurts between steps. Measured on 2 cores.
SPIN_COUNT = "5000"


def openmp_environment(num_threads: int) -> dict[str, str]:
    """num_threads 0 is one per core that this process may use (Ray would set one per reserved core, here a fraction)."""
    return {"OMP_NUM_THREADS": str(num_threads or len(os.sched_getaffinity(0))), "GOMP_SPINCOUNT": SPIN_COUNT}


# Added to the process's own. On Linux each thread has one, and those it starts, OpenMP's, inherit it.
_COMPUTE_NICENESS = 5


def let_others_first() -> None:
    """For the first moment of a computing thread: it is rarely without work, the others never have much."""
    if sys.platform == "linux":
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + _COMPUTE_NICENESS
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
