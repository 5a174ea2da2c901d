"""A closed-loop load generator: planners as arms, interleaved in rounds over the same prompts in the same order.

Each of `concurrency` clients asks, waits for the whole answer, asks again. Against the engine in this process (the planner
is switched between arms; no HTTP, so what differs is the planner) or a running server (one arm, as it is configured).
Every prompt is in the prefix cache after the warm-up, for all arms alike. Loopback or own servers only.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from scheduler.wire import Request
from services.bench.prompts import load_prompts
from services.bench.report import Arm, print_report
from services.bench.server import ask_server, served_model
from services.engine import Engine
from services.gateway.engine import EngineClient
from services.gateway.live_choices import LiveChoices
from services.gateway.loaded_model import LoadedModel
from services.gateway.parsing import parse_chat
from services.gateway.sampling import sampling_params
from services.gateway.stream import dump
from services.generate import Tally
from services.settings import Settings
from services.workers import launch_colocated

Ask = Callable[[str], Awaitable[Tally]]
SetPlanner = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Load:
    """num_prompts: of each kind, 0 is all. rounds: how often each arm is run."""

    planners: tuple[str, ...] = ("off", "algorithm1")
    concurrency: tuple[int, ...] = (1, 4, 16)
    prompt_files: tuple[str, ...] = ()
    num_prompts: int = 0
    max_tokens: int = 96
    temperature: float = 0.0
    rounds: int = 3

    def body(self, model: str, prompt: str) -> dict[str, object]:
        return {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }


def bench(settings: Settings, load: Load, *, url: str | None) -> None:
    prompts = load_prompts(load.prompt_files, load.num_prompts)
    print_report(asyncio.run(_bench(settings, load, prompts, url)), load.planners if url is None else ("server",))


async def _bench(settings: Settings, load: Load, prompts: dict[str, list[str]], url: str | None) -> list[Arm]:
    if url is not None:
        model = settings.model.name or await served_model(url)
        return await run_arms(load, ("server",), prompts, lambda p: ask_server(url, load.body(model, p)), _keep)
    async with _engine(settings) as engine, _client(engine, settings) as client:
        model_ = LoadedModel.from_card(await engine.card())
        return await run_arms(
            load, load.planners, prompts, lambda p: _ask_engine(client, model_, load, p), engine.set_planner
        )


async def _keep(planner: str) -> None:
    """A running server keeps its planner."""


@asynccontextmanager
async def _engine(settings: Settings) -> AsyncIterator[Engine]:
    engine = Engine(settings, launch_colocated)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


@asynccontextmanager
async def _client(engine: Engine, settings: Settings) -> AsyncIterator[EngineClient]:
    client = EngineClient(engine, settings.gateway_config())
    try:
        yield client
    finally:
        await client.stop()


async def _ask_engine(client: EngineClient, model: LoadedModel, load: Load, prompt: str) -> Tally:
    chat = parse_chat(dump(load.body(model.card.name, prompt)).encode())
    prompt_ids = await model.prompt_ids(chat)
    params = sampling_params(chat, model.card, len(prompt_ids))
    tally = Tally()
    async with LiveChoices(client, [Request(uuid.uuid4().hex, tuple(prompt_ids), params)]) as live:
        while True:
            for delta in [delta for _, deltas in await live.take() for delta in deltas]:
                tally.add(delta)
                if delta.finish_reason is not None:
                    return tally


async def run_arms(
    load: Load, planners: Sequence[str], prompts: dict[str, list[str]], ask: Ask, set_planner: SetPlanner
) -> list[Arm]:
    arms = []
    for kind, texts in prompts.items():
        for planner in planners:
            await set_planner(planner)
            await _closed_loop(texts, min(4, len(texts)), ask)
        for concurrency in load.concurrency:
            asked = list(itertools.islice(itertools.cycle(texts), max(len(texts), 2 * concurrency)))
            runs: dict[str, list[Arm]] = {planner: [] for planner in planners}
            for round_number in range(load.rounds):
                for planner in _rotated(planners, round_number):
                    await set_planner(planner)
                    began = time.monotonic()
                    tallies = await _closed_loop(asked, concurrency, ask)
                    seconds = time.monotonic() - began
                    runs[planner].append(Arm.of_run(kind, concurrency, planner, tallies, seconds))
            arms += [Arm.merged(each) for each in runs.values()]
    return arms


def _rotated(planners: Sequence[str], by: int) -> list[str]:
    """A different arm goes first in each round: what drifts, drifts for all."""
    shift = by % len(planners)
    return [*planners[shift:], *planners[:shift]]


async def _closed_loop(prompts: Sequence[str], concurrency: int, ask: Ask) -> list[Tally]:
    waiting = iter(prompts)
    tallies: list[Tally] = []

    async def client() -> None:
        for prompt in waiting:
            tallies.append(await ask(prompt))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return tallies
