"""A tiny byte-level tokenizer, the card of a model that has it, and a scheduler that plays back scripts.

`ScriptedScheduler` speaks the gateway's port with the real wire types; what a request is answered is a list of rounds.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import httpx
import pytest
from fastapi import FastAPI
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from scheduler.errors import SchedulerLost, ServingError
from scheduler.stats import SchedulerStats
from scheduler.wire import Delta, FinishReason, Request, TokenLogprob, Usage
from services.gateway.app import create_app
from services.gateway.config import GatewayConfig
from services.model_card import ModelCard

CORPUS = [
    "Hello there, how are you today? The quick brown fox jumps over the lazy dog.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))",
    "naïve café — “quoted” text, 日本語のテキスト, 你好世界, emoji 😀 👩‍👩‍👧‍👦 🏳️‍🌈 done.",
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS = "<|im_end|>"


def build_rust_tokenizer() -> RustTokenizer:
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def rust_tokenizer() -> RustTokenizer:
    return build_rust_tokenizer()


@pytest.fixture(scope="session")
def card(rust_tokenizer: RustTokenizer) -> ModelCard:
    return ModelCard(
        name="tiny-chat",
        created=1_700_000_000,
        tokenizer_json=rust_tokenizer.to_str(),
        chat_template=TEMPLATE,
        special_tokens={"eos_token": EOS},
        eos_ids=(rust_tokenizer.token_to_id(EOS),),
        max_model_len=256,
        draft_width=7,
        fingerprint="fp_test",
    )


def scripted_logprob(token_id: int, num_top: int) -> TokenLogprob:
    """A made-up but fixed law: every id has its own logprob, and the ids above it are the next most probable."""
    top = tuple((token_id + step, -0.01 * (token_id % 50) - step) for step in range(num_top))
    return TokenLogprob(-0.01 * (token_id % 50), top)


@dataclass
class Script:
    """rounds: ids committed per step. failure: raised at submit, or sent as the last delta when `late`.

    step_s: pause before each step. hang: never ends.
    """

    rounds: Sequence[Sequence[int]] = ()
    finish: FinishReason = FinishReason.STOP
    failure: ServingError | None = None
    late: bool = False
    step_s: float = 0.0
    hang: bool = False
    cached_tokens: int = 3


def collect(chunks: Sequence[dict]) -> dict[int, dict]:
    """Per choice of a stream: text, logprob entries and finish reason."""
    found: dict[int, dict] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            entry = found.setdefault(choice["index"], {"text": "", "logprobs": [], "finish_reason": None})
            assert entry["finish_reason"] is None, "nothing comes after the finish reason"
            entry["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            entry["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"] is not None:
                entry["logprobs"].append(choice["logprobs"])
    return found


@dataclass
class ScriptedScheduler:
    """Implements services.gateway.engine.Scheduler. `answer` maps a request to its script."""

    model_card: ModelCard
    answer: Callable[[Request], Script]
    ready: bool = True
    requests: list[Request] = field(default_factory=list)
    cancels: Counter[str] = field(default_factory=Counter)
    queues: dict[str, asyncio.Queue[list[Delta] | None]] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    num_subscriptions: int = 0
    healthy: bool = True
    places: dict[str, int] = field(default_factory=dict)

    async def card(self) -> ModelCard:
        if not self.ready:
            raise SchedulerLost("loading the models")
        return self.model_card

    async def submit(self, request: Request) -> None:
        if request.subscriber not in self.queues:
            raise SchedulerLost("not subscribed")
        self.requests.append(request)
        script = self.answer(request)
        if script.failure is not None and not script.late:
            raise script.failure
        self.tasks[request.request_id] = asyncio.create_task(self._play(request, script))

    async def _play(self, request: Request, script: Script) -> None:
        queue, num_tokens = self.queues[request.subscriber], 0
        for index, ids in enumerate(script.rounds):
            await asyncio.sleep(script.step_s)
            num_tokens += len(ids)
            last = index == len(script.rounds) - 1 and not script.hang and not script.late
            queue.put_nowait([self._delta(request, script, index, ids, num_tokens, last)])
        if script.late and script.failure is not None:
            error = (type(script.failure).__name__, str(script.failure))
            queue.put_nowait([Delta(request.request_id, (), finish_reason=FinishReason.ERROR, error=error)])

    def _delta(
        self, request: Request, script: Script, index: int, ids: Sequence[int], num_tokens: int, last: bool
    ) -> Delta:
        delta = Delta(request.request_id, tuple(ids))
        num_top = request.params.num_logprobs
        if num_top is not None:
            delta = replace(delta, logprobs=tuple(scripted_logprob(token_id, num_top) for token_id in ids))
        if index:
            delta = replace(delta, is_round=True, num_drafted=7, num_verified=5, num_accepted=max(0, len(ids) - 1))
        if last:
            usage = Usage(len(request.prompt_ids), num_tokens, script.cached_tokens)
            delta = replace(delta, finish_reason=script.finish, usage=usage)
        return delta

    async def cancel(self, request_id: str) -> None:
        self.cancels[request_id] += 1
        task = self.tasks.pop(request_id, None)
        if task is not None and not task.done():
            task.cancel()
            request = next(request for request in self.requests if request.request_id == request_id)
            usage = Usage(len(request.prompt_ids), 0, 3)
            last = Delta(request_id, (), finish_reason=FinishReason.CANCELLED, usage=usage)
            if request.subscriber in self.queues:
                self.queues[request.subscriber].put_nowait([last])

    async def subscribe(self, subscriber: str) -> AsyncGenerator[list[Delta], None]:
        queue = self.queues[subscriber] = asyncio.Queue()
        self.num_subscriptions += 1
        try:
            yield []
            while (deltas := await queue.get()) is not None:
                yield deltas
        finally:
            del self.queues[subscriber]

    def die(self) -> None:
        """Every subscription ends, as when the process is gone."""
        for task in self.tasks.values():
            task.cancel()
        for queue in self.queues.values():
            queue.put_nowait(None)

    async def queue_position(self, request_id: str) -> int | None:
        return self.places.get(request_id.partition("-")[0])

    async def snapshot(self) -> SchedulerStats:
        if not self.ready:
            raise SchedulerLost("loading the models")
        return SchedulerStats(num_rounds=10, num_accepted_tokens=4, num_verified_tokens=20, num_drafted_tokens=70)

    async def check_health(self) -> None:
        if not self.healthy:
            raise SchedulerLost("no step for 30 s")


@asynccontextmanager
async def running(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """The app with its lifespan, once it knows its model, behind an in-process HTTP client."""
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            async with asyncio.timeout(60):
                while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            yield client


class Bench:
    """What most tests want: make an app from a script, and text from or to ids."""

    def __init__(self, card: ModelCard, tokenizer: RustTokenizer) -> None:
        self.card, self.tokenizer = card, tokenizer
        self.config = GatewayConfig(keepalive_s=30.0, connect_timeout_s=30.0, call_timeout_s=30.0)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    @property
    def eos(self) -> int:
        return self.card.eos_ids[0]

    def rounds(self, text: str, width: int = 3, *, eos: bool = True) -> list[list[int]]:
        ids = self.ids(text) + ([self.eos] if eos else [])
        return [ids[:1], *(ids[start : start + width] for start in range(1, len(ids), width))]

    def scheduler(self, script: Script | Callable[[Request], Script]) -> ScriptedScheduler:
        return ScriptedScheduler(self.card, script if callable(script) else lambda request: script)

    @asynccontextmanager
    async def serve(
        self, script: Script | Callable[[Request], Script], config: GatewayConfig | None = None
    ) -> AsyncIterator[tuple[httpx.AsyncClient, ScriptedScheduler]]:
        scheduler = self.scheduler(script)
        async with running(create_app(scheduler, config or self.config)) as client:
            yield client, scheduler


@pytest.fixture
def bench(card: ModelCard, rust_tokenizer: RustTokenizer) -> Bench:
    return Bench(card, rust_tokenizer)


@pytest.fixture
def make_script() -> type[Script]:
    return Script


@pytest.fixture
def body() -> Callable[..., dict[str, object]]:
    def make(**changes: object) -> dict[str, object]:
        return {"model": "tiny-chat", "messages": [{"role": "user", "content": "Hello"}], **changes}

    return make


@pytest.fixture
def events() -> Callable[[str], list[object]]:
    """The data of each SSE event: parsed JSON, or the text when it is none."""

    def parse(text: str) -> list[object]:
        found: list[object] = []
        for block in text.split("\n\n"):
            if block.startswith("data: "):
                data = block.removeprefix("data: ")
                found.append(data if data == "[DONE]" else json.loads(data))
        return found

    return parse


@pytest.fixture
def choices() -> Callable[[Sequence[dict]], dict[int, dict]]:
    return collect
