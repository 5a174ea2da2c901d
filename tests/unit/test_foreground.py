"""The process in the foreground: a stop of the whole group reaches the server once, through it, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.foreground import _Forward

CLOSED = """
import os, sys
from services.foreground import open_closed_streams

open_closed_streams()
print("to nobody", flush=True)
print("to nobody", file=sys.stderr)
assert sys.stdin.read() == ""
with open(sys.argv[1], "w") as file:
    file.write(" ".join(os.readlink(f"/proc/self/fd/{number}") for number in range(3)))
"""


def test_streams_that_the_caller_closed_are_the_null_device(tmp_path: Path) -> None:
    """Without them an event loop's own file got the number of stdout, and its library aborted the process at the end."""
    out = tmp_path / "out"
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", CLOSED, str(out)]
    subprocess.run(closed, check=True, timeout=60)
    assert out.read_text() == "/dev/null /dev/null /dev/null"


SERVER = """
import subprocess, sys, time
from services.foreground import Stopped, run_behind

def server():
    worker = subprocess.Popen(["sleep", "600"], process_group=0)
    try:
        print("worker", worker.pid, flush=True)
        while True:
            time.sleep(0.1)  # a signal just before one long sleep would wait for its end
    except Stopped as stop:
        print("alive" if worker.poll() is None else "dead", stop.name, flush=True)
        return 0 if sys.argv[1] == "drains" else 128 + stop.number
    return 1

sys.exit(run_behind(server))
"""


DEAF = """
import signal, sys, time
from services.foreground import STOP_SIGNALS, run_behind

def server():
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    print("deaf", flush=True)
    time.sleep(600)

sys.exit(run_behind(server))
"""


def start(program: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


@pytest.fixture(params=["drains", "gives up"])
def running(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen, int, str]]:
    """The process in the foreground, a worker of its server, and what the server does when it is stopped."""
    process = start(SERVER, request.param)
    assert process.stdout is not None
    worker = int(process.stdout.readline().split()[1])
    yield process, worker, request.param
    process.kill()
    process.wait()


def test_a_server_that_does_not_listen_is_killed_by_the_third_stop():
    process = start(DEAF)
    process.stdout.readline()
    num_stops = 0
    while process.poll() is None and num_stops < 600:  # two that come before the first is handled are one
        process.terminate()
        num_stops += 1
        time.sleep(0.1)
    assert process.wait(timeout=120) == 128 + signal.SIGKILL and num_stops >= 3


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_of_the_group_reaches_the_server_before_its_workers(running, number):
    process, worker, does = running
    os.killpg(process.pid, number)
    assert process.wait(timeout=120) == (0 if does == "drains" else 128 + number)
    assert process.stdout.read() == f"alive {number.name}\n"
    assert gone(worker)


def test_a_server_whose_foreground_is_killed_is_told_to_stop(running):
    process, worker, _ = running
    process.kill()
    assert process.stdout.read() == "alive SIGTERM\n"
    assert gone(worker)


def test_a_signal_for_a_server_that_has_just_ended_is_nothing():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    _Forward(ended.pid)(signal.SIGTERM, None)
