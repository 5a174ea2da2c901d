"""`dspark serve` as a process of its own: what it says, its address, its end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping

import httpx


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """environment: beside this process's own."""

    def __init__(self, flags: list[str], environment: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "services.cli", "serve", *flags, "--port", str(self.port)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)

    def wait_ready(self) -> str:
        return self.wait_for("ready: ")

    def wait_for(self, words: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(words):
                return line
        raise AssertionError(f"ended with {self.process.wait()}")

    def rest(self) -> str:
        """What it still said, without the access log."""
        assert self.process.stdout is not None
        return "".join(line for line in self.process.stdout if not line.startswith("{"))

    def kill(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()
