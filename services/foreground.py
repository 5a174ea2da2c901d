"""The process in the foreground and the server behind it: stop signals, the session of its own, how both end.

Ray starts its processes in the process group of whoever starts it. Ctrl-C in a terminal and a kill of the whole group would
end them before the server could drain, so the server runs in a session of its own, which hears of a stop from here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
KILLING_SIGNAL = 3

Handler = Callable[[int, FrameType | None], None]


class Stopped(BaseException):
    """Told to stop while starting, or again while draining. No Exception: nothing on the way may take it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.name = signal.Signals(number).name


def open_closed_streams() -> None:
    """Where the caller closed stdin, stdout or stderr (`>&-`): the null device. Else the next files that are opened, event loops'
    among them, get these numbers, and with them whatever is printed."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def print_to_nobody() -> None:
    """From now on, once who read stdout is gone (`| head -1`); what is still in the buffer must not be tried again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def on_stop_signals(handler: Handler) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, handler)


@contextlib.contextmanager
def stop_signals_raise() -> Iterator[None]:
    """Inside, a stop signal raises Stopped wherever the program is."""
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    on_stop_signals(raise_stopped)
    try:
        yield
    finally:
        for number, handler in zip(STOP_SIGNALS, before, strict=True):
            signal.signal(number, handler)


def raise_stopped(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


def run_behind(work: Callable[[], int]) -> int:
    """Runs `work` in a child process with its own session; returns its status. Stop signals are passed on, the third one
    kills: a child deep in foreign code hears nothing. When this process is killed, the child is told to stop. Whatever is
    left of the session in the end is killed."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    front = os.getpid()
    server = os.fork()
    if server == 0:
        _be_the_server(front, work)
    on_stop_signals(_Forward(server))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    _, status = os.waitpid(server, 0)
    _kill_session(server)
    return _shell_status(status)


class _Forward:
    def __init__(self, server: int) -> None:
        self._server = server
        self._count = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        with contextlib.suppress(ProcessLookupError):  # it ended, and what is left of its session is being killed
            os.kill(self._server, number if self._count < KILLING_SIGNAL else signal.SIGKILL)


def end_now(status: int) -> NoReturn:
    """Without waiting for threads: one may be in the middle of a long computation."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(status)


def _be_the_server(front: int, work: Callable[[], int]) -> NoReturn:
    status = 1
    try:
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        on_stop_signals(raise_stopped)
        if os.getppid() == front:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            status = work()
    finally:
        _kill_session(os.getpid())
        end_now(status)


def _kill_session(session: int) -> None:
    """All of it but this process. Ray's workers have process groups of their own."""
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        with contextlib.suppress(OSError):
            if pid != os.getpid() and os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)


def _shell_status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
