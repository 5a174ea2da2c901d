"""What the gateway adds to the engine: time to first token and time per output token over HTTP against the same engine code in
this process, interleaved, at one concurrency.

    python -m tests.gateway_cost            # Ray Serve with its fast settings, demo model, 16 at once
    python -m tests.gateway_cost --no-ray   # the server without Ray
    python -m tests.gateway_cost --threads 0    # the model computes on all cores, those that the gateway needs too

Before each request a client pauses for up to --pause-ms, longer than a step. Without it the two sides do not meet the engine
alike: in this process the end of an answer and the next request are one moment, just before a step is planned; over HTTP the
request is some milliseconds late for that step and waits for all of it. Clients do not come in step with the engine.

The goals: under 5 ms more to the first token, under 5 % more per output token. Run it on an idle machine: both sides share it.
`cpu_ms_per_token` says which process of the server the processors worked for; `clients` is this one while it asks over HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import httpx
import uvloop

from scheduler.wire import Request
from services.engine import Engine
from services.gateway.engine import EngineClient
from services.gateway.live_choices import LiveChoices
from services.gateway.loaded_model import LoadedModel
from services.gateway.parsing import parse_chat
from services.gateway.sampling import sampling_params
from services.settings import load_settings
from services.threads import SPIN_COUNT
from services.workers import launch_colocated
from tests.answer_connection import AnswerConnection
from tests.processor_time import processor_seconds

FAST = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_HA_PROXY": "1"}
Timing = tuple[float, float]
Ask = Callable[[dict[str, object]], Awaitable[Timing]]


def body(model: str, number: int, max_tokens: int) -> dict[str, object]:
    text = f"Tell me {number % 7 + 2} facts about the number {number}."
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


async def ask_engine(client: EngineClient, model: LoadedModel, wanted: dict[str, object]) -> Timing:
    """Seconds to the first token and per later token, from the moment the ids are there."""
    chat = parse_chat(json.dumps(wanted).encode())
    prompt_ids = await model.prompt_ids(chat)
    params = sampling_params(chat, model.card, len(prompt_ids))
    began = time.perf_counter()
    first = last = 0.0
    num_tokens, ended = 0, False
    async with LiveChoices(client, [Request(uuid.uuid4().hex, tuple(prompt_ids), params)]) as live:
        while not ended:
            for _, deltas in await live.take():
                num_tokens += sum(len(delta.token_ids) for delta in deltas)
                ended = deltas[-1].finish_reason is not None
                last = time.perf_counter()
                first = first or last
    return first - began, (last - first) / max(1, num_tokens - 1)


async def ask_http(connection: AnswerConnection, wanted: dict[str, object]) -> Timing:
    """The same over HTTP, from the moment the request is sent."""
    wanted = {**wanted, "stream": True, "stream_options": {"include_usage": True}}
    answer = await connection.ask(json.dumps(wanted).encode())
    return answer.first_s - answer.began_s, (answer.last_s - answer.first_s) / max(1, answer.num_tokens - 1)


async def closed_loop(clients: list[Ask], bodies: list[dict[str, object]], pause_s: float = 0.0) -> list[Timing]:
    """Each client pauses for up to `pause_s` before each request, the same times for the same bodies."""
    waiting, timings = iter(bodies), []
    pauses = random.Random(json.dumps(bodies))

    async def run(ask: Ask) -> None:
        for wanted in waiting:
            await asyncio.sleep(pauses.uniform(0, pause_s))
            timings.append(await ask(wanted))

    await asyncio.gather(*(run(ask) for ask in clients))
    return timings


@contextmanager
def server(flags: list[str], *, ray: bool) -> Iterator[tuple[str, int]]:
    """Its URL and the process that was started for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "services.cli", "serve", "--port", str(port), *flags]
    environment = {**(FAST if ray else {}), **os.environ}
    with tempfile.NamedTemporaryFile(prefix="gateway-cost-", suffix=".log", delete=False) as log:
        print(f"the server's log is {log.name}", file=sys.stderr)
        process = subprocess.Popen(command if ray else [*command, "--no-ray"], env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, process)
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(90)
        process.kill()


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    with httpx.Client(base_url=url) as client:
        while process.poll() is None:
            with suppress(httpx.HTTPError):
                if client.get("/ready").status_code == 200:
                    return
            time.sleep(0.2)
    raise SystemExit("the server did not start")


async def measure(args: argparse.Namespace, url: str, server_pid: int) -> dict[str, object]:
    chosen = {"model": {"path": args.model}, "drafter": {"checkpoint": args.drafter}, "threads": args.threads}
    settings = load_settings(flags={**chosen, "scheduler": {"planner": args.planner}})
    engine = Engine(settings, launch_colocated)
    await engine.start()
    timings: dict[str, list[Timing]] = {"engine": [], "http": []}
    spent: Counter[str] = Counter()
    client = EngineClient(engine, settings.gateway_config())
    connections = [AnswerConnection("127.0.0.1", httpx.URL(url).port or 80) for _ in range(args.concurrency)]
    try:
        model = LoadedModel.from_card(await engine.card())
        asks: dict[str, list[Ask]] = {
            "engine": [lambda wanted: ask_engine(client, model, wanted)] * args.concurrency,
            "http": [partial(ask_http, connection) for connection in connections],
        }
        for number in range(args.rounds + 1):
            for arm in sorted(asks, reverse=number % 2 == 1):
                count = 2 * args.concurrency
                bodies = [body(model.card.name, number * count + at, args.max_tokens) for at in range(count)]
                before = processor_seconds(server_pid)
                found = await closed_loop(asks[arm], bodies, args.pause_ms / 1000)
                if number:
                    timings[arm] += found
                if number and arm == "http":
                    spent.update({name: s - before.get(name, 0) for name, s in processor_seconds(server_pid).items()})
    finally:
        for connection in connections:
            connection.close()
        await client.stop()
        await engine.stop()
    num_tokens = len(timings["http"]) * args.max_tokens
    return report(timings, args) | {
        "cpu_ms_per_token": {name: 1000 * s / num_tokens for name, s in spent.most_common() if s / num_tokens > 1e-6}
    }


def report(timings: dict[str, list[Timing]], args: argparse.Namespace) -> dict[str, object]:
    medians = {
        arm: tuple(statistics.median(column) for column in zip(*each, strict=True)) for arm, each in timings.items()
    }
    (engine_first, engine_per), (http_first, http_per) = medians["engine"], medians["http"]
    return {
        "concurrency": args.concurrency,
        "pause_ms": args.pause_ms,
        "rounds": args.rounds,
        "planner": args.planner,
        "ray": not args.no_ray,
        "threads": args.threads,
        "first_token_ms": {"engine": 1000 * engine_first, "http": 1000 * http_first},
        "per_token_ms": {"engine": 1000 * engine_per, "http": 1000 * http_per},
        "added_first_token_ms": 1000 * (http_first - engine_first),
        "added_per_token_ratio": http_per / engine_per - 1,
    }


def main() -> None:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # as the server sets it for its own engine
    parser = argparse.ArgumentParser(prog="python -m tests.gateway_cost", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="auto")
    # Of a fixed width, both sides do the same work a step, whatever each measured of this machine.
    parser.add_argument("--planner", default="fixed:3")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--pause-ms", type=float, default=100.0)
    # One core is left to gateway, Ray and clients: with all computing, what is measured is how they take turns with the model.
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=max(1, cores - 1), help="that compute; 0 is one per core")
    parser.add_argument("--no-ray", action="store_true")
    args = parser.parse_args()
    # An end that someone asks for still ends the server.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    flags = ["--model", args.model, "--drafter", args.drafter, "--threads", str(args.threads)]
    flags += ["--set", f"scheduler.planner={args.planner}"]
    with server(flags, ray=not args.no_ray) as (url, pid), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(measure(args, url, pid))))


if __name__ == "__main__":
    main()
