"""`dspark bench` and `dspark bench sweep`: planners as arms, interleaved in rounds over the same prompts in the same order.

At each place (kind of text, temperature, load) every round runs every arm once, each round beginning with another arm, from an
idle engine. Before an arm is measured its prompts are run once, briefly, so that every prompt is in the prefix cache for all arms
alike (another planner begins with an empty one).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from scheduler.admit import parse_planner
from scheduler.errors import SettingsError
from services.bench.arms import AS_CONFIGURED, Subject, subject_of
from services.bench.load import Answers, Ask, closed_loop, open_loop
from services.bench.pictures import Ramp, draw
from services.bench.prompts import load_prompts
from services.bench.ramp import course, ramp_load
from services.bench.record import Tape
from services.bench.report import LEGEND, Arm, Limits, Place, points, rows, sustained, table
from services.bench.steps import StepClock
from services.generate import Tally
from services.settings import Settings
from services.whole_file import write_whole

_WARM_TOKENS = 2
_WARM_CLIENTS = 4
MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Sweep:
    """planners: `server` is a running server as it is. num_prompts: of each kind, 0 is all. kinds: none is all; `mixed` takes
    them in turn. rates: arrivals per second of the open loop, `arrivals` of them a run. answers_per_client: least number in a
    closed-loop run. rounds: how often each arm is run at each place. ramp: clients by stages of stage_s seconds, run once an arm.
    """

    planners: tuple[str, ...] = ("off", "auto")
    concurrency: tuple[int, ...] = (1, 4, 16)
    rates: tuple[float, ...] = ()
    arrivals: int = 60
    kinds: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (0.0,)
    prompt_files: tuple[str, ...] = ()
    num_prompts: int = 0
    max_tokens: int = 96
    answers_per_client: int = 3
    rounds: int = 3
    ramp: tuple[int, ...] = ()
    stage_s: float = 8.0
    limits: Limits = field(default_factory=Limits)

    def check(self) -> None:
        """Raises SettingsError for what cannot be run, before anything is loaded."""
        for planner in self.planners:
            if planner != AS_CONFIGURED:
                parse_planner(planner)
        if len(set(self.planners)) < len(self.planners):
            raise SettingsError(f"--planners {','.join(self.planners)}: each arm once")
        for flag, least, value in (
            ("--rounds", 1, self.rounds),
            ("--max-tokens", 2, self.max_tokens),
            ("--num-prompts", 0, self.num_prompts),
            ("--arrivals", 5, self.arrivals),
            ("--answers-per-client", 1, self.answers_per_client),
        ):
            if value < least:
                raise SettingsError(f"{flag} {value}: must be at least {least}")
        if not 0.1 <= self.stage_s <= 86_400.0:
            raise SettingsError(f"--stage-seconds {self.stage_s:g}: must be from 0.1 to 86400")
        if not self.concurrency and not self.rates and not self.ramp:
            raise SettingsError("--concurrency none, no --poisson and no --ramp: nothing to run")

    def prompts(self) -> dict[str, list[str]]:
        """By kind; raises SettingsError."""
        kinds = load_prompts(self.prompt_files, self.num_prompts)
        everyone = itertools.chain.from_iterable(itertools.zip_longest(*kinds.values()))
        kinds[MIXED] = [prompt for prompt in everyone if prompt is not None]
        wanted = self.kinds or [kind for kind in kinds if kind != MIXED]
        if unknown := [kind for kind in wanted if kind not in kinds]:
            raise SettingsError(f"--kinds {','.join(unknown)}: there are {', '.join(kinds)}")
        return {kind: kinds[kind] for kind in wanted}

    def places(self, kinds: Sequence[str]) -> list[Place]:
        return [
            Place(kind, temperature, concurrency, rate)
            for temperature in self.temperatures
            for kind in kinds
            for concurrency, rate in [*((n, 0.0) for n in self.concurrency), *((0, r) for r in self.rates)]
        ]

    def asked(self, place: Place, prompts: Sequence[str]) -> list[str]:
        """The prompts of one run, in order."""
        count = max(len(prompts), self.answers_per_client * place.concurrency) if place.concurrency else self.arrivals
        return list(itertools.islice(itertools.cycle(prompts), count))

    def body(self, model: str, prompt: str, temperature: float, max_tokens: int) -> dict[str, Any]:
        return {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": temperature,
        }


@dataclass(frozen=True, slots=True)
class Files:
    """Where results go beside the terminal; empty is nowhere."""

    out: str = ""
    plot: str = ""
    record: str = ""


class Runner:
    """Runs a sweep against a subject; `results` grows as it goes."""

    def __init__(
        self,
        sweep: Sweep,
        subject: Subject,
        prompts: dict[str, list[str]],
        tape: Tape | None = None,
        clock: StepClock | None = None,
    ) -> None:
        self.results: dict[Place, dict[str, Arm]] = {}
        self.ramps: dict[str, dict[str, Ramp]] = {}
        self.model = subject.model
        self._sweep = sweep
        self._subject = subject
        self._prompts = prompts
        self._tape = tape
        self._clock = clock or StepClock()
        places = sweep.places(list(prompts))
        self._progress = Progress(len(places) * len(sweep.planners) * sweep.rounds)
        self._places = places

    async def run(self) -> None:
        for place in self._places:
            arms = self.results[place] = {planner: Arm(place, planner) for planner in self._sweep.planners}
            for round_number in range(self._sweep.rounds):
                for planner in rotated(self._sweep.planners, round_number):
                    answers = await self._run_arm(place, planner, round_number)
                    steps = self._clock.take(answers.began, answers.ended)
                    arms[planner].add(answers, self._sweep.limits, steps)
                    self._progress.report(arms[planner], round_number, answers)
        if self._sweep.ramp:
            for kind, temperature in itertools.product(self._prompts, self._sweep.temperatures):
                await self._run_ramp(kind, temperature)

    async def _run_ramp(self, kind: str, temperature: float) -> None:
        sweep = self._sweep
        panel = f"{kind}, T={temperature:g}, {'-'.join(map(str, sweep.ramp))} clients"
        arms = self.ramps[panel] = {}
        for planner in sweep.planners:
            ask = await self._begin_arm(kind, temperature, planner)
            began, tallies = await ramp_load(self._prompts[kind], sweep.ramp, sweep.stage_s, ask)
            ramp = arms[planner] = course(began, tallies, sweep.ramp, sweep.stage_s)
            said = "; ".join(
                f"{clients}: {speed:.0f} tok/s, budget {budget:.2f}"
                for clients, (speed, budget) in zip(
                    sweep.ramp, ramp.by_stage(sweep.stage_s, len(sweep.ramp)), strict=True
                )
            )
            print(f"ramp {panel} {planner}: {len(tallies)} answers; {said}", file=sys.stderr, flush=True)

    async def _begin_arm(self, kind: str, temperature: float, planner: str) -> Ask:
        """The arm is in use, and warm."""
        sweep, prompts = self._sweep, self._prompts[kind]
        if self._tape is not None:
            self._tape.kind = kind
        await self._subject.use(planner)

        def ask_with(max_tokens: int) -> Ask:
            async def ask(prompt: str) -> Tally:
                return await self._subject.ask(sweep.body(self._subject.model, prompt, temperature, max_tokens))

            return ask

        await closed_loop(prompts, min(_WARM_CLIENTS, len(prompts)), ask_with(_WARM_TOKENS))
        return ask_with(sweep.max_tokens)

    async def _run_arm(self, place: Place, planner: str, round_number: int) -> Answers:
        ask = await self._begin_arm(place.kind, place.temperature, planner)
        asked = self._sweep.asked(place, self._prompts[place.kind])
        if place.concurrency:
            return await closed_loop(asked, place.concurrency, ask)
        return await open_loop(asked, place.rate, ask, seed=round_number)


class Progress:
    """A line per run, on stderr, as it ends."""

    def __init__(self, num_runs: int) -> None:
        self._num_runs = num_runs
        self._num_done = 0
        self._began = time.monotonic()

    def report(self, arm: Arm, round_number: int, answers: Answers) -> None:
        self._num_done += 1
        left_s = (time.monotonic() - self._began) / self._num_done * (self._num_runs - self._num_done)
        where = f"{arm.place.kind} T={arm.place.temperature:g} load {arm.place.load} round {round_number + 1}"
        what = f"{arm.tokens_per_s[-1]:.1f} tok/s, accept {arm.accept_length:.2f}, budget {arm.budget:.2f}"
        print(
            f"[{self._num_done}/{self._num_runs}] {where} {arm.planner}: {what}, {answers.seconds:.1f} s; "
            f"about {left_s / 60:.1f} min left",
            file=sys.stderr,
            flush=True,
        )


def rotated(planners: Sequence[str], by: int) -> Iterator[str]:
    """A different arm goes first in each round: what drifts, drifts for all."""
    return itertools.islice(itertools.cycle(planners), by % len(planners), by % len(planners) + len(planners))


def bench(settings: Settings, sweep: Sweep, *, url: str | None, files: Files) -> None:
    sweep.check()
    prompts = sweep.prompts()
    if url is not None and files.record:
        raise SettingsError("--record needs the engine in this process; leave --url out")
    load_before = os.getloadavg()[0]
    runner = asyncio.run(_run(settings, sweep, prompts, url, files))
    document = {
        "bench": rows(runner.results),
        "model": runner.model,
        "url": url,
        "sweep": asdict(sweep),
        "load_average": round(load_before, 2),
        "sustained": sustained(runner.results),
        "ramps": {panel: {name: asdict(ramp) for name, ramp in arms.items()} for panel, arms in runner.ramps.items()},
    }
    if runner.results:
        print("\n".join(table(runner.results)))
        print(LEGEND)
    try:
        if files.out:
            write_whole(files.out, json.dumps(document, indent=1))
            print(f"numbers: {files.out}")
        if files.plot:
            draw(points(runner.results), files.plot, runner.model, ramps=runner.ramps)
            print(f"plot: {files.plot}")
    finally:
        # a file that cannot be written must not cost the numbers
        print(json.dumps(document))


async def _run(
    settings: Settings, sweep: Sweep, prompts: dict[str, list[str]], url: str | None, files: Files
) -> Runner:
    tape, clock = Tape() if files.record else None, StepClock()
    async with subject_of(settings, url, [clock, tape] if tape is not None else [clock]) as subject:
        runner = Runner(sweep, subject, prompts, tape, clock)
        await runner.run()
    if tape is not None:
        print(f"traces: {files.record}, {tape.write(files.record)} requests")
    return runner
