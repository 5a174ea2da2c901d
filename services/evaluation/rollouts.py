"""Runs prompts through a whole engine in this process (scheduler, drafter, target; no HTTP, no cost curve) and gives back the
answers with their verify rounds."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from drafter.calibration import UNCALIBRATED, Calibration, load_calibration
from drafter.checkpoint import FOLDERLESS, read_drafter, resolve_checkpoint
from drafter.rounds import Round
from scheduler.actor import SchedulerActor
from scheduler.errors import DrafterLost, ServingError, SettingsError, revive
from scheduler.wire import Delta, DrafterInfo, FinishReason, Request, SamplingParams, VerifierInfo
from services.evaluation.recorder import RecordedDrafter, RecordedVerifier, Recorder
from services.gateway.app import LoadedModel
from services.gateway.parsing import parse_chat
from services.gateway.stream import dump
from services.gateway.text import Detokeniser
from services.settings import Settings
from services.workers import launch_colocated

_SUBSCRIBER = "evaluation"
_PROGRESS_S = 10.0
# A busy machine is no lost worker.
_PATIENCE_S = 900.0


@dataclass(slots=True)
class Answer:
    """One turn's answer. prompt: index of its prompt among those asked; rounds: of its verify rounds, in order."""

    prompt: int
    prompt_ids: list[int]
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sampling:
    """seeded: answer n of a run draws with seed + n (DESIGN 4.3); otherwise by rejection sampling. num_turns: user turns asked of
    a prompt that has several; 0 is all."""

    temperature: float
    max_tokens: int
    seed: int = 0
    seeded: bool = False
    num_turns: int = 1


class Rollouts:
    """num_too_long: turns left out because the context does not hold them and their answer."""

    def __init__(
        self,
        actor: SchedulerActor,
        recorder: Recorder,
        model: LoadedModel,
        *,
        target: VerifierInfo,
        drafter: DrafterInfo,
        concurrency: int,
    ) -> None:
        self.recorder = recorder
        self.model = model
        self.target = target
        self.drafter = drafter
        self.num_too_long = 0
        self._actor = actor
        self._concurrency = concurrency
        self._count = 0
        self._arriving: dict[str, asyncio.Queue[Delta]] = {}

    async def run(
        self, prompts: Sequence[Sequence[str]], sampling: Sampling, *, planner: str = "", label: str = ""
    ) -> list[Answer]:
        """prompts: user turns of each. planner: empty verifies every drafted token. Answers in the order of the prompts."""
        await self._actor.set_planner(planner or f"fixed:{self.drafter.width}")
        waiting = iter(enumerate(prompts))
        answers: list[Answer] = []
        progress = _Progress(label, len(prompts))

        async def client() -> None:
            for number, turns in waiting:
                found = await self._converse(number, turns[: sampling.num_turns or None], sampling)
                answers.extend(found)
                progress.add(found)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._concurrency, len(prompts))):
                group.create_task(client())
        if (await self._actor.snapshot()).num_drafter_losses:
            raise DrafterLost("the drafter failed during the evaluation; the lines above say why")
        return sorted(answers, key=lambda answer: answer.prompt)

    async def _converse(self, number: int, turns: Sequence[str], sampling: Sampling) -> list[Answer]:
        messages: list[dict[str, str]] = []
        answers: list[Answer] = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            ids = await self.model.prompt_ids(parse_chat(dump({"model": "", "messages": messages}).encode()))
            if len(ids) + sampling.max_tokens > self.model.card.max_model_len:
                self.num_too_long += 1
                break
            answers.append(await self._ask(Answer(number, ids, self._params(number, sampling))))
            messages.append({"role": "assistant", "content": self._text(answers[-1].token_ids)})
        return answers

    def _params(self, number: int, sampling: Sampling) -> SamplingParams:
        return SamplingParams(
            temperature=sampling.temperature,
            seed=sampling.seed + number if sampling.seeded else None,
            max_tokens=sampling.max_tokens,
            stop_ids=self.model.card.eos_ids,
        )

    def _text(self, token_ids: Sequence[int]) -> str:
        detokeniser = Detokeniser(self.model.tokenizer)
        shown = [detokeniser.push(token) for token in token_ids if token not in self.model.card.eos_ids]
        return "".join(shown) + detokeniser.flush()

    async def _ask(self, answer: Answer) -> Answer:
        self._count += 1
        name = f"{_SUBSCRIBER}-{self._count}"
        deltas = self._arriving[name] = asyncio.Queue()
        await self._actor.submit(Request(name, tuple(answer.prompt_ids), answer.params, _SUBSCRIBER))
        while True:
            delta = await deltas.get()
            answer.token_ids += delta.token_ids
            if delta.finish_reason is FinishReason.ERROR:
                raise revive(*(delta.error or ("InternalFault", "the engine gave no reason")))
            if delta.finish_reason is not None:
                break
        del self._arriving[name]
        answer.rounds = self.recorder.rounds.pop(name, [])
        return answer

    async def listen(self) -> None:
        """Until cancelled: hands each request its deltas."""
        async for deltas in self._actor.subscribe(_SUBSCRIBER):
            for delta in deltas:
                self._arriving[delta.request_id].put_nowait(delta)


class _Progress:
    """A line on stderr every few seconds, and one at the end."""

    def __init__(self, label: str, num_prompts: int) -> None:
        self._label, self._num_prompts = label, num_prompts
        self._num_done = self._num_tokens = 0
        self._began = self._said = time.monotonic()

    def add(self, answers: Sequence[Answer]) -> None:
        self._num_done += 1
        self._num_tokens += sum(len(answer.token_ids) for answer in answers)
        now = time.monotonic()
        if self._label and (now - self._said > _PROGRESS_S or self._num_done == self._num_prompts):
            self._said = now
            speed = self._num_tokens / max(1e-9, now - self._began)
            done = f"{self._num_done} of {self._num_prompts} prompts, {self._num_tokens} tokens, {speed:.0f} tokens/s"
            print(f"{self._label}: {done}", file=sys.stderr, flush=True)


@asynccontextmanager
async def open_rollouts(
    settings: Settings, *, concurrency: int, seed: int, apply_calibration: bool
) -> AsyncIterator[Rollouts]:
    """Loads target and drafter. apply_calibration: planners see confidences as calibration.json corrects them. Raises
    SettingsError where there is no drafter, or not one for this target."""
    settings = _for_rollouts(settings, concurrency, seed)
    if settings.drafter_checkpoint() == "none":
        raise SettingsError("drafter.checkpoint: 'none' drafts nothing, so there is nothing to measure")
    workers = await launch_colocated(settings, calibrated=False)
    try:
        assert workers.drafter is not None
        info = await workers.drafter.describe()
        calibration = calibration_of(settings, info) if apply_calibration else UNCALIBRATED
        recorder = Recorder(calibration, info.width)
        config = replace(
            settings.scheduler_config(), planner="off", default_timeout_s=0.0, worker_timeout_s=_PATIENCE_S
        )
        actor = SchedulerActor(
            config, RecordedVerifier(workers.verifier, recorder), RecordedDrafter(workers.drafter, recorder)
        )
        await actor.start()
        model, target = LoadedModel.from_card(workers.card), await workers.verifier.describe()
        rollouts = Rollouts(actor, recorder, model, target=target, drafter=info, concurrency=concurrency)
        listening = asyncio.create_task(rollouts.listen())
        try:
            yield rollouts
        finally:
            listening.cancel()
            await actor.stop()
    except BaseExceptionGroup as group:
        raise _first_of(group) from None
    finally:
        await workers.stop()


def _first_of(group: BaseExceptionGroup) -> BaseException:
    """What a task of a group failed with; they fail for one reason."""
    errors = [error for error in group.exceptions if isinstance(error, ServingError | SettingsError | OSError)]
    return errors[0] if errors else group.exceptions[0]


def _for_rollouts(settings: Settings, concurrency: int, seed: int) -> Settings:
    """So many requests at once, repeatable draws."""
    scheduler = settings.scheduler.model_copy(update={"max_live": concurrency, "max_waiting": concurrency})
    return settings.model_copy(update={"scheduler": scheduler, "seed": seed})


def calibration_of(settings: Settings, info: DrafterInfo) -> Calibration:
    """The drafter's calibration.json, checked against its weights; UNCALIBRATED where there is none."""
    checkpoint = settings.drafter_checkpoint()
    if checkpoint in FOLDERLESS:
        return UNCALIBRATED
    folder = resolve_checkpoint(checkpoint, settings.cache_dir)
    return load_calibration(folder, read_drafter(folder).block_size, info.fingerprint)
