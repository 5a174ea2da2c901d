"""What the gateway adds to the engine: time to first token and time per output token over HTTP against the same engine code in
this process, interleaved, at one concurrency.

    python -m tests.gateway_cost            # Ray Serve with its fast settings, demo model, 16 at once
    python -m tests.gateway_cost --no-ray   # the server without Ray

The goals: under 5 ms more to the first token, under 5 % more per output token. Run it on an idle machine: both sides share it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import httpx

from scheduler.wire import Request
from services.engine import Engine
from services.gateway.engine import EngineClient
from services.gateway.live_choices import LiveChoices
from services.gateway.loaded_model import LoadedModel
from services.gateway.parsing import parse_chat
from services.gateway.sampling import sampling_params
from services.settings import load_settings
from services.workers import launch_colocated

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


async def ask_http(client: httpx.AsyncClient, wanted: dict[str, object]) -> Timing:
    began = time.perf_counter()
    first = last = 0.0
    num_tokens = 0
    wanted = {**wanted, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/chat/completions", json=wanted) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                last = time.perf_counter()
                first = first or last
            num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
    return first - began, (last - first) / max(1, num_tokens - 1)


async def closed_loop(ask: Ask, bodies: list[dict[str, object]], concurrency: int) -> list[Timing]:
    waiting, timings = iter(bodies), []

    async def client() -> None:
        for wanted in waiting:
            timings.append(await ask(wanted))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return timings


@contextmanager
def server(flags: list[str], *, ray: bool) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "services.cli", "serve", "--port", str(port), *flags]
    environment = {**os.environ, **(FAST if ray else {})}
    with tempfile.NamedTemporaryFile(prefix="gateway-cost-", suffix=".log", delete=False) as log:
        print(f"the server's log is {log.name}", file=sys.stderr)
        process = subprocess.Popen(command if ray else [*command, "--no-ray"], env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, process)
        yield url
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


async def measure(args: argparse.Namespace, url: str) -> dict[str, object]:
    chosen = {"model": {"path": args.model}, "drafter": {"checkpoint": args.drafter}}
    settings = load_settings(flags={**chosen, "scheduler": {"planner": args.planner}})
    engine = Engine(settings, launch_colocated)
    await engine.start()
    timings: dict[str, list[Timing]] = {"engine": [], "http": []}
    client = EngineClient(engine, settings.gateway_config())
    try:
        async with httpx.AsyncClient(base_url=url, timeout=600) as http:
            model = LoadedModel.from_card(await engine.card())
            asks: dict[str, Ask] = {
                "engine": lambda wanted: ask_engine(client, model, wanted),
                "http": lambda wanted: ask_http(http, wanted),
            }
            for number in range(args.rounds + 1):
                for arm in sorted(asks, reverse=number % 2 == 1):
                    count = 2 * args.concurrency
                    bodies = [body(model.card.name, number * count + at, args.max_tokens) for at in range(count)]
                    found = await closed_loop(asks[arm], bodies, args.concurrency)
                    timings[arm] += found if number else []
    finally:
        await client.stop()
        await engine.stop()
    return report(timings, args)


def report(timings: dict[str, list[Timing]], args: argparse.Namespace) -> dict[str, object]:
    medians = {
        arm: tuple(statistics.median(column) for column in zip(*each, strict=True)) for arm, each in timings.items()
    }
    (engine_first, engine_per), (http_first, http_per) = medians["engine"], medians["http"]
    return {
        "concurrency": args.concurrency,
        "rounds": args.rounds,
        "planner": args.planner,
        "ray": not args.no_ray,
        "first_token_ms": {"engine": 1000 * engine_first, "http": 1000 * http_first},
        "per_token_ms": {"engine": 1000 * engine_per, "http": 1000 * http_per},
        "added_first_token_ms": 1000 * (http_first - engine_first),
        "added_per_token_ratio": http_per / engine_per - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gateway_cost", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="auto")
    # Of a fixed width, both sides do the same work a step, whatever each measured of this machine.
    parser.add_argument("--planner", default="fixed:3")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--no-ray", action="store_true")
    args = parser.parse_args()
    # An end that someone asks for still ends the server.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    flags = ["--model", args.model, "--drafter", args.drafter, "--set", f"scheduler.planner={args.planner}"]
    with server(flags, ray=not args.no_ray) as url:
        print(json.dumps(asyncio.run(measure(args, url))))


if __name__ == "__main__":
    main()
