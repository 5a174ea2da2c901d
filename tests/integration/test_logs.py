"""A real server's lines from start to stop, JSON on stderr: each has its ids, none has a word of a prompt or an answer."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.integration.character_tokenizer import save_tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MARKER = "zebraquilt"


def bodies() -> list[tuple[str, object]]:
    """What is answered, what is refused at each layer, what fails."""
    said = [{"role": "user", "content": f"tell me of the {MARKER}"}]
    chat = {"model": "tiny", "messages": said, "max_tokens": 8}
    schema = {"type": "object", "properties": {MARKER: {"type": MARKER}}}
    odd = [
        {"n": MARKER},
        {"temperature": 99},
        {"max_tokens": 10_000},
        {"stop_token_ids": [10_000]},
        {"guided_regex": f"[{MARKER}"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"messages": [{"role": MARKER, "content": MARKER}]},
        {"messages": [{"role": "user", "content": {MARKER: MARKER}}]},
        {"messages": MARKER},
        {"tools": [{"type": MARKER}]},
        {"timeout": 0.001, "max_tokens": 200},
        {"speculation": {"mode": MARKER}},
        {MARKER: 1},
    ]
    texts = [{"prompt": MARKER}, {"prompt": [MARKER, 3]}, {"prompt": MARKER, "logprobs": MARKER}]
    return [
        (CHAT, chat),
        (CHAT, chat | {"stream": True}),
        *((CHAT, chat | each) for each in odd),
        *((TEXT, {"model": "tiny", "max_tokens": 4} | each) for each in texts),
        ("/tokenize", {"prompt": MARKER}),
        ("/tokenize", {"prompt": 3, "x": MARKER}),
        (f"/v1/{MARKER[:0]}nowhere", chat),
    ]


def test_a_server_says_nothing_of_what_it_was_asked(golden: Path, tmp_path: Path):
    target = save_tokenizer(Path(shutil.copytree(golden / "target", tmp_path / "target")), 48)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [
        "--model",
        str(target),
        "--name",
        "tiny",
        "--drafter",
        str(golden / "dspark_vanilla"),
        "--dtype",
        "float32",
    ]
    for setting in (
        "drafter.dtype=float32", "scheduler.max_live=4", "scheduler.prefill_chunk=32", "threads=1",
        f"cache_dir={tmp_path / 'cache'}",
        "log.format=json", "log.level=debug", "log.engine=blue", "gateway.access_log.to=stderr",
    ):  # fmt: skip
        flags += ["--set", setting]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("DSPARK_", "OTEL_"))}
    command = [sys.executable, "-m", "services.cli", "serve", "--no-ray", "--port", str(port), *flags]
    answers: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=variables) as server:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
                await_ready(client, server)
                for number, (path, body) in enumerate(bodies()):
                    answers.append(client.post(path, json=body, headers={"x-request-id": f"r-{number}"}).text)
                client.post(CHAT, content=b'{"messages": "' + MARKER.encode(), headers={"x-request-id": "cut"})
                client.post(CHAT, content=b"\xff" + MARKER.encode(), headers={"x-request-id": "bytes"})
                with contextlib.suppress(httpx.TimeoutException):
                    gone = {"model": "tiny", "prompt": MARKER, "max_tokens": 200, "ignore_eos": True}
                    client.post(TEXT, json=gone, headers={"x-request-id": "gone"}, timeout=0.1)
        finally:
            server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=300)
    assert server.returncode == 0, err.decode()
    assert MARKER.encode() not in out + err
    lines = [json.loads(line) for line in err.decode().splitlines()]
    assert lines and all(line["engine"] == "blue" for line in lines)
    logged = [line for line in lines if "logger" in line]
    assert all({"process", "request_ids", "level", "time"} <= line.keys() for line in logged)
    accesses = {line["request_id"]: line for line in lines if "path" in line}
    assert {"r-0", "r-1", "cut", "bytes", "gone"} <= accesses.keys()
    served = json.loads(answers[0])
    assert accesses["r-0"]["answer_id"] == served["id"]
    (handed,) = [line for line in logged if "r-0" in line["request_ids"] and "handed" in line["message"]]
    assert handed["request_ids"] == ["r-0", served["id"]]
    ended = [line for line in logged if line["logger"] == "scheduler.actor" and served["id"] in line["request_ids"]]
    assert [line["message"].partition(":")[0] for line in ended] == ["queued", "ended"]


def await_ready(client: httpx.Client, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if client.get("/ready").status_code == 200:
                return
        time.sleep(0.2)
    raise AssertionError("the server did not become ready")
