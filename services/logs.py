"""Log lines of every process: when, how bad, which process of which engine, which requests, what. As text or as JSON.

No line holds a prompt or an answer. What clients send is handled by a few modules only; exceptions that these log are told by
class and place, their message left out, because a message may quote what was being worked on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import os
import sys
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from scheduler.errors import SettingsError

PACKAGES = ("services", "drafter", "verifier", "scheduler")
# Loggers of code that holds clients' words: the gateway, grammars, and servers that report what the gateway raised.
_HOLD_WORDS = ("services.gateway", "verifier.automata", "verifier.grammar", "uvicorn", "asyncio", "concurrent")
_HARMLESS = (OSError, SettingsError, TimeoutError)
_MOST_BYTES, _NUM_FILES = 64 * 1024 * 1024, 4

_about: ContextVar[tuple[str, ...]] = ContextVar("about", default=())


@dataclass(frozen=True, slots=True)
class LogConfig:
    """engine: which engine group the lines are of."""

    format: Literal["text", "json"] = "text"
    level: str = "info"
    engine: str = ""


DEFAULT_LOG = LogConfig()


@contextlib.contextmanager
def about(*request_ids: str) -> Iterator[None]:
    """Lines written inside, and by tasks begun inside, are about these requests too."""
    token = _about.set((*_about.get(), *request_ids))
    try:
        yield
    finally:
        _about.reset(token)


def configure(process: str, config: LogConfig, folder: str | Path | None = None) -> None:
    """From now on this process's lines go to stderr, or to a file of its own in `folder`, and to nothing else."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if folder is not None:
        path = Path(folder) / f"dspark_{process}_{os.getpid()}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(path, maxBytes=_MOST_BYTES, backupCount=_NUM_FILES)
    handler.setFormatter((_Json if config.format == "json" else _Text)(process, config.engine))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(config.level.upper())


class _Lines(logging.Formatter):
    def __init__(self, process: str, engine: str) -> None:
        super().__init__()
        self._process, self._engine = process, engine

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """request_ids: HTTP requests' and the engine's ids of them, whichever the line knows."""
        named, message = getattr(record, "request_ids", ()), record.getMessage()
        if record.name == "asyncio":
            message = message.partition("\n")[0]  # what follows shows a task, and its exception
        return {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "engine": self._engine,
            "request_ids": list(dict.fromkeys((*_about.get(), *named))),
            "logger": record.name,
            "message": message,
        }

    def trace(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        return _told(error, withhold=record.name.startswith(_HOLD_WORDS)) if error is not None else ""


class _Json(_Lines):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        fields = self.fields(record)
        if trace := self.trace(record):
            fields["exception"] = trace
        return json.dumps(fields, ensure_ascii=True)


class _Text(_Lines):
    """One line a line: a message or traceback of several repeats what comes before it."""

    def format(self, record: logging.LogRecord) -> str:
        fields = self.fields(record)
        requests = ",".join(fields["request_ids"]) or "-"
        head = f"{fields['time']} {record.levelname} {self._process} engine={self._engine or '-'} request={requests} "
        lines = f"{record.name}: {fields['message']}\n{self.trace(record)}".strip().splitlines()
        return "\n".join(head + line for line in lines)


def _told(error: BaseException, *, withhold: bool) -> str:
    """The traceback with everything that led to it; with `withhold`, messages only of errors that quote no client."""
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in chain:
        chain.append(at)
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return "\n".join(_told_alone(each, withhold and not isinstance(each, _HARMLESS)) for each in reversed(chain))


def _told_alone(error: BaseException, withhold: bool) -> str:
    message = "(message withheld: it may quote a request)" if withhold else str(error)
    where = "".join(traceback.format_tb(error.__traceback__))
    return f"Traceback (most recent call last):\n{where}{type(error).__module__}.{type(error).__qualname__}: {message}"
