"""What each process of a server has used of the processors, from /proc."""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def processor_seconds(root: int) -> dict[str, float]:
    """By name, of `root` and all that descend from it or live in its children's sessions; `clients` is the caller's own."""
    seconds: Counter[str] = Counter()
    parents, sessions, used = _processes()
    ours = {root}
    while grown := {pid for pid in parents if pid not in ours and (parents[pid] in ours or sessions[pid] in ours)}:
        ours |= grown
    for pid in ours & used.keys():
        seconds[_name(pid)] += used[pid]
    seconds["clients"] = used[os.getpid()]
    return dict(seconds)


def _processes() -> tuple[dict[int, int], dict[int, int], dict[int, float]]:
    """Of each process: its parent, its session, its seconds in user and system mode."""
    parents, sessions, used = {}, {}, {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            pid, fields = int(entry.parent.name), entry.read_text().rpartition(")")[2].split()
            parents[pid], sessions[pid] = int(fields[1]), int(fields[3])
            used[pid] = (int(fields[11]) + int(fields[12])) * _TICK_S
    return parents, sessions, used


def _name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").split()
    except OSError:
        words = []
    if not words:
        return "gone"
    if words[0].startswith("ray::"):
        return re.sub(r"ray::(ServeReplica:)?", "", words[0]).partition(".")[0]
    script = next((word for word in words[1:] if word.endswith(".py") or word.startswith("services.")), words[0])
    return script.rpartition("/")[2]
