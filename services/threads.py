"""How OpenMP's threads of a computing process wait for each other. Read once by the runtime, when torch is first imported."""

from __future__ import annotations

import os

# A step is two hundred short parallel regions. Threads that sleep between them (0) take 23 ms for a step of the demo target
# where threads that spin take 16; but a thread that spins for long (30000 is about 2 ms) holds a core that somebody else
# needs, and waits for the one that lost it. 5000 is about 0.4 ms: longer than the gaps within a step, shorter than what
# hurts between steps. Measured on 2 cores.
SPIN_COUNT = "5000"


def openmp_environment(num_threads: int) -> dict[str, str]:
    """num_threads 0 is one per core that this process may use (Ray would set one per reserved core, here a fraction)."""
    return {"OMP_NUM_THREADS": str(num_threads or len(os.sched_getaffinity(0))), "GOMP_SPINCOUNT": SPIN_COUNT}
