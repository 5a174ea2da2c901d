"""What the gateway takes of a processor, in microseconds, per request and per chunk of a stream.

    python -m tests.gateway_cpu

Unlike times on the clock (tests/gateway_cost.py) this hardly depends on what else the machine does. The real application runs
under uvicorn; its engine is a script in the same process that sends all 16 streams a delta each step and in between sleeps
until the gateway is idle, so that the processor time of the event loop's thread between two steps is the gateway's. The
clients are another process.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import uvicorn
import uvloop

from scheduler.stats import SchedulerStats
from scheduler.wire import Delta, FinishReason, Request, Usage
from services.gateway.app import create_app
from services.gateway.config import GatewayConfig
from services.model_card import ModelCard, read_card
from services.settings import load_settings
from tests.answer_connection import AnswerConnection
from tests.gateway_cost import body
from verifier.weights import resolve_model

NUM_CLIENTS = 16
NUM_ROUNDS = 16
STEP_S = 0.025


class ScriptedEngine:
    """services.gateway.subscription.Scheduler. Answers 16 requests in step, and after each such wave has what it cost:

    submit: from idle to the last request's arrival here. first_chunk, chunk: a delta on its way out. ending: the last one.
    """

    def __init__(self, card: ModelCard, num_waves: int) -> None:
        self._card, self._num_waves = card, num_waves
        self._outgoing: asyncio.Queue[list[Delta]] = asyncio.Queue()
        self._waiting: list[Request] = []
        self._playing: asyncio.Task[None] | None = None
        self._idle_at_s = 0.0
        self.costs: list[dict[str, float]] = []
        self.enough = asyncio.Event()

    async def card(self) -> ModelCard:
        return self._card

    async def submit(self, request: Request) -> None:
        self._waiting.append(request)
        if len(self._waiting) == NUM_CLIENTS:
            wave, self._waiting = self._waiting, []
            self._playing = asyncio.create_task(self._play(wave, time.thread_time()))

    async def cancel(self, request_id: str) -> None:
        """The clients take every answer to its end."""

    async def subscribe(self, subscriber: str) -> AsyncGenerator[list[Delta], None]:
        yield []
        while True:
            yield await self._outgoing.get()

    async def queue_position(self, request_id: str) -> int | None:
        return 0

    async def snapshot(self) -> SchedulerStats:
        return SchedulerStats()

    async def check_health(self) -> None:
        """It is well."""

    async def _play(self, wave: list[Request], submitted_s: float) -> None:
        steps = []
        for number in range(NUM_ROUNDS):
            await asyncio.sleep(STEP_S)
            steps.append(time.thread_time())
            self._outgoing.put_nowait([_delta(request, number) for request in wave])
        await asyncio.sleep(2 * STEP_S)
        ended_s, began_s = time.thread_time(), self._idle_at_s
        between = [after - before for before, after in itertools.pairwise(steps)]
        if began_s:
            spent = {
                "submit": submitted_s - began_s,
                "first_chunk": between[0],
                "chunk": statistics.median(between[1:]),
                "ending": ended_s - steps[-1],
            }
            self.costs.append({name: 1e6 * seconds / NUM_CLIENTS for name, seconds in spent.items()})
        self._idle_at_s = ended_s
        if len(self.costs) == self._num_waves:
            self.enough.set()


def _delta(request: Request, number: int) -> Delta:
    ids = (500 + number, 700 + number, 900 + number)
    if number < NUM_ROUNDS - 1:
        return Delta(request.request_id, ids, number > 0, 3, 3, 2)
    usage = Usage(len(request.prompt_ids), 3 * NUM_ROUNDS, 0)
    return Delta(request.request_id, ids, True, 3, 3, 2, FinishReason.LENGTH, usage)


async def serve(listening: socket.socket, model: Path, num_waves: int, clients: Connection) -> dict[str, float]:
    """Medians over the waves."""
    card = read_card(model, name="demo", created=1, max_model_len=2048, draft_width=7)
    engine = ScriptedEngine(card, num_waves)
    server = uvicorn.Server(uvicorn.Config(create_app(engine, GatewayConfig()), log_config=None))
    serving = asyncio.create_task(server.serve([listening]))
    await engine.enough.wait()
    clients.send("that was the last wave")
    server.should_exit = True
    await serving
    return {name: round(statistics.median(cost[name] for cost in engine.costs), 1) for name in engine.costs[0]}


def ask_until_told(port: int, told: Connection) -> None:
    """Waves of 16 requests at once, with a pause between them."""

    async def waves() -> None:
        connections = [AnswerConnection("127.0.0.1", port) for _ in range(NUM_CLIENTS)]
        number = 0
        while not told.poll():
            asked = {"stream": True, "stream_options": {"include_usage": True}}
            wave = [json.dumps(body("demo", number + at, 3 * NUM_ROUNDS) | asked).encode() for at in range(NUM_CLIENTS)]
            with suppress(OSError):  # at the start there is no server yet, at the end none any more
                await asyncio.gather(*(each.ask(one) for each, one in zip(connections, wave, strict=True)))
            number += NUM_CLIENTS
            await asyncio.sleep(4 * STEP_S)

    asyncio.run(waves())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gateway_cpu", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--waves", type=int, default=15)
    args = parser.parse_args()
    settings = load_settings(flags={"model": {"path": args.model}})
    model = resolve_model(settings.target_path(), settings.cache_dir)
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours, theirs = context.Pipe()
        clients = context.Process(target=ask_until_told, args=(listening.getsockname()[1], theirs), daemon=True)
        clients.start()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            cost = runner.run(serve(listening, model, args.waves, ours))
        clients.join(10)
    print(json.dumps({"microseconds": cost}))


if __name__ == "__main__":
    main()
