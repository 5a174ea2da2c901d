"""Log lines: their fields, as text and as JSON, and what they must not say."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator

import pytest

from scheduler.errors import BadParams, InternalFault
from services.logs import PACKAGES, LogConfig, about, configure
from services.settings import load_settings

MARKER = "zebraquilt"


@pytest.fixture(autouse=True)
def as_in_our_server(monkeypatch) -> None:
    """uvicorn's own configuration of its loggers, which our server does without and other tests leave behind."""
    for name in ("uvicorn", "uvicorn.error"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    logging.getLogger().manager._clear_cache()  # type: ignore[attr-defined]


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Callable[[], str]]]:
    """start(format) configures this process's lines; gives what reads them."""
    root = logging.getLogger()
    before, levels = list(root.handlers), {name: logging.getLogger(name).level for name in ("", *PACKAGES)}

    def begin(form: str, level: str = "info") -> Callable[[], str]:
        configure("gateway", LogConfig(form, level, "eng-1"), tmp_path)  # type: ignore[arg-type]
        (file,) = tmp_path.glob("dspark_gateway_*.log")
        return file.read_text

    yield begin
    for handler in list(root.handlers):
        root.removeHandler(handler)
    for handler in before:
        root.addHandler(handler)
    for name, number in levels.items():
        logging.getLogger(name).setLevel(number)
    logging.captureWarnings(False)


def fail() -> None:
    try:
        raise ValueError(f"cannot parse {MARKER}")
    except ValueError as error:
        raise InternalFault(f"no way with {MARKER}") from error


def log_failure(name: str) -> None:
    try:
        fail()
    except InternalFault:
        logging.getLogger(name).exception("it failed", extra={"request_ids": ("chatcmpl-1",)})


def test_a_json_line_has_who_when_and_which_requests(start):
    read = start("json")
    with about("req-1"):
        logging.getLogger("services.gateway.answer").info("handed on %d", 3, extra={"request_ids": ("chatcmpl-1",)})
    logging.getLogger("scheduler.loop").debug("not at this level")
    logging.getLogger("httpx").info("not from others")
    (line,) = map(json.loads, read().splitlines())
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "INFO",
        "process": "gateway",
        "engine": "eng-1",
        "request_ids": ["req-1", "chatcmpl-1"],
        "logger": "services.gateway.answer",
        "message": "handed on 3",
    }


def test_every_line_of_a_text_traceback_has_the_ids(start):
    read = start("text")
    log_failure("scheduler.loop")
    lines = read().splitlines()
    assert len(lines) > 6 and all(" ERROR gateway engine=eng-1 request=chatcmpl-1 " in line for line in lines)
    assert f"cannot parse {MARKER}" in read(), "the scheduler knows token ids only: its messages are shown"


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("logger", ["services.gateway.guard", "verifier.automata", "uvicorn.error", "asyncio"])
def test_where_words_of_clients_are_handled_exceptions_are_told_without_their_message(start, form, logger):
    read = start(form)
    log_failure(logger)
    said = read()
    assert MARKER not in said and "builtins.ValueError" in said and "scheduler.errors.InternalFault" in said
    assert "in fail" in said, "the place is shown"
    try:
        raise OSError(28, "No space left on device")
    except OSError:
        logging.getLogger(logger).exception("cannot write")
    assert "No space left on device" in read()


async def test_a_task_that_nobody_awaited_does_not_tell_its_exception(start):
    read = start("text")

    async def break_off() -> None:
        raise BadParams(f"{MARKER} is wrong")

    task = asyncio.ensure_future(break_off())
    await asyncio.wait({task})
    del task
    assert "Task exception was never retrieved" in read() and MARKER not in read()


def test_requests_side_by_side_keep_their_ids_apart(start):
    read = start("json")

    async def one(name: str) -> None:
        with about(name):
            await asyncio.sleep(0)
            logging.getLogger("services.gateway.answer").info(name)

    async def both() -> None:
        await asyncio.gather(one("a"), one("b"))

    asyncio.run(both())
    assert [(line["request_ids"], line["message"]) for line in map(json.loads, read().splitlines())] == [
        (["a"], "a"),
        (["b"], "b"),
    ]


def test_an_engine_has_a_name_that_stays_and_can_be_given():
    first, again, other = (load_settings(args={"model": {"path": path}}).log_config().engine for path in "aab")
    assert first == again != other and first.startswith("engine-")
    assert load_settings(args={"log": {"engine": "blue"}}).gateway_config().log.engine == "blue"
