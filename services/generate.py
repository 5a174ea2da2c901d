"""`dspark generate`: one prompt, the whole engine in this process, text as it comes; where each token came from on demand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
import uuid
from dataclasses import dataclass, field
from typing import TextIO

from scheduler.errors import ServingError, revive
from scheduler.wire import Delta, FinishReason, Request
from services.engine import Engine
from services.gateway.chat_request import ChatRequest
from services.gateway.loaded_model import LoadedModel
from services.gateway.parsing import parse_chat
from services.gateway.sampling import sampling_params
from services.gateway.text import Detokeniser
from services.settings import Settings
from services.workers import launch_colocated

ACCEPTED, OWN, RESET = "\033[30;42m", "\033[33m", "\033[0m"
_SILENT_S = 2.0
_ERASED = "\r\033[K"


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    system: str = ""
    max_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None

    def chat(self, model: str) -> ChatRequest:
        """Checked as the HTTP API checks it."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        wanted = {
            "model": model,
            "messages": [*messages, {"role": "user", "content": self.text}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
        }
        return parse_chat(json.dumps(wanted).encode())


@dataclass(slots=True)
class Tally:
    """What one answer cost. Times are seconds since the request was submitted."""

    first_token_s: float = 0.0
    last_token_s: float = 0.0
    num_tokens: int = 0
    num_rounds: int = 0
    num_round_tokens: int = 0
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    began: float = field(default_factory=time.monotonic)

    def add(self, delta: Delta) -> None:
        now = time.monotonic() - self.began
        self.num_tokens += len(delta.token_ids)
        self.first_token_s = self.first_token_s or now
        self.last_token_s = now
        if delta.is_round:
            self.num_rounds += 1
            self.num_round_tokens += len(delta.token_ids)
            self.num_drafted += delta.num_drafted
            self.num_verified += delta.num_verified
            self.num_accepted += delta.num_accepted

    def lines(self) -> list[str]:
        rounds, later_s = max(1, self.num_rounds), self.last_token_s - self.first_token_s
        speed = (self.num_tokens - 1) / later_s if later_s > 0 else 0.0
        return [
            f"{self.num_tokens} tokens in {self.num_rounds} verify rounds: accept length "
            f"{self.num_round_tokens / rounds:.2f} (tokens per round, the target's own one included)",
            f"verify budget {1 + self.num_verified / rounds:.2f} (tokens verified per round, the target's own one included); "
            f"{self.num_drafted / rounds:.2f} drafted a round, {self.num_accepted} of {self.num_verified} verified were accepted",
            f"{speed:.1f} tokens/s, first token after {1000 * self.first_token_s:.0f} ms",
        ]


class Progress:
    """What the start is doing: on a terminal a line that is gone when it is done, elsewhere a line for each phase that takes its
    time."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._waiting: asyncio.TimerHandle | None = None

    def __call__(self, phase: str) -> None:
        if self._out.isatty():
            self._write(f"{_ERASED}{phase} ..." if phase else _ERASED)
            return
        if self._waiting is not None:
            self._waiting.cancel()
        if phase:
            self._waiting = asyncio.get_running_loop().call_later(_SILENT_S, self._write, f"{phase} ...\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class Printer:
    """Text to the terminal. With `show_drafts` each token is coloured by origin; a character made of several tokens takes
    the colour of the one that completes it."""

    def __init__(self, model: LoadedModel, stop_ids: tuple[int, ...], *, show_drafts: bool) -> None:
        self._detokeniser = Detokeniser(model.tokenizer)
        self._stop_ids = frozenset(stop_ids)
        self._show_drafts = show_drafts
        self._plain = bool(os.environ.get("NO_COLOR"))

    def add(self, delta: Delta) -> None:
        for index, token_id in enumerate(delta.token_ids):
            text = "" if token_id in self._stop_ids else self._detokeniser.push(token_id)
            if text:
                self._write(text, accepted=delta.is_round and index < delta.num_accepted)

    def finish(self) -> None:
        self._write(self._detokeniser.flush() + "\n", accepted=False)

    def legend(self) -> str:
        if self._plain:
            return "«drafted and accepted», the target's own"
        return f"{ACCEPTED}drafted and accepted{RESET} {OWN}the target's own{RESET}"

    def _write(self, text: str, *, accepted: bool) -> None:
        if self._show_drafts and text.strip("\n"):
            text = self._marked(text, accepted)
        sys.stdout.write(text)
        sys.stdout.flush()

    def _marked(self, text: str, accepted: bool) -> str:
        if self._plain:
            return f"«{text}»" if accepted else text
        return f"{ACCEPTED if accepted else OWN}{text}{RESET}"


def generate(settings: Settings, prompt: Prompt, *, show_drafts: bool) -> None:
    asyncio.run(_generate(settings, prompt, show_drafts))


async def _generate(settings: Settings, prompt: Prompt, show_drafts: bool) -> None:
    chat = prompt.chat(settings.model_name)
    progress = Progress(sys.stderr)
    engine = Engine(settings, launch_colocated, progress)
    try:
        await engine.start()
        model = LoadedModel.from_card(await engine.card())
        prompt_ids = await model.prompt_ids(chat)
        params = sampling_params(chat, model.card, len(prompt_ids))
        printer = Printer(model, params.stop_ids, show_drafts=show_drafts)
        tally = await _run(engine, Request(uuid.uuid4().hex, tuple(prompt_ids), params, "generate"), printer)
    finally:
        progress("")
        await engine.stop()
    if show_drafts:
        print(printer.legend(), *tally.lines(), sep="\n", file=sys.stderr)


async def _run(engine: Engine, request: Request, printer: Printer) -> Tally:
    async with contextlib.aclosing(engine.subscribe(request.subscriber)) as stream:
        await anext(stream)
        tally = Tally()
        await engine.submit(request)
        async for deltas in stream:
            for delta in deltas:
                if delta.finish_reason is FinishReason.ERROR:
                    raise revive(*(delta.error or ("InternalFault", "the engine gave no reason")))
                tally.add(delta)
                printer.add(delta)
                if delta.finish_reason is not None:
                    printer.finish()
                    return tally
    raise ServingError("the engine ended before the answer did")
