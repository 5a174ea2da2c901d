"""From a validated request body to a job: the engine's requests, one per choice, and the form of the answer.

The one place where the parts of a request meet: prompt, sampling values, speculation, hints, parsers. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from scheduler.errors import BadParams
from scheduler.wire import Grammar, Request, SamplingParams, Speculation
from services.gateway.chat_output import ChatOutput
from services.gateway.chat_request import ChatRequest
from services.gateway.choice import Choice
from services.gateway.completion_output import CompletionOutput
from services.gateway.completion_request import CompletionRequest
from services.gateway.config import GatewayConfig
from services.gateway.dialect import Dialect
from services.gateway.fields import INT64, GenerationFields
from services.gateway.grammar import NO_THOUGHT, OPENED, answer_grammar, thought_after
from services.gateway.loaded_model import LoadedModel
from services.gateway.message_delta import ContentOnly, MessageParser
from services.gateway.message_parser import AnswerParser
from services.gateway.sampling import sampling_params
from services.gateway.stream import Identity, Output
from services.gateway.structured import Constraint
from services.gateway.text_class import text_class
from services.gateway.tools import ToolUse

NewParser = Callable[[], MessageParser]

# Enough of a prompt to see whether it ends inside a thought.
_PROMPT_END = 16


@dataclass(frozen=True, slots=True)
class Job:
    """A validated request, ready to run. requests: one per choice in index order; `num_choices` in a row share a prompt.

    new_parser: makes the state that turns one choice's text into message parts. shown_ids: special tokens it wants to see.
    may_think: answers may begin with a thought.
    """

    requests: tuple[Request, ...]
    num_choices: int
    fields: GenerationFields
    model: LoadedModel
    output: Output
    arrived_s: float
    new_parser: NewParser = ContentOnly
    shown_ids: frozenset[int] = frozenset()
    may_think: bool = False

    @property
    def num_prompt(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests[:: self.num_choices])

    @property
    def answer_id(self) -> str:
        """The requests' ids are this one, followed by their number where there are several."""
        first = self.requests[0].request_id
        return first if len(self.requests) == 1 else first.removesuffix("-0")

    @property
    def speculation(self) -> Speculation | None:
        return self.requests[0].speculation

    def timed(self) -> Job:
        """The same with requests whose deltas tell how long they took."""
        return replace(self, requests=tuple(replace(request, timed=True) for request in self.requests))

    def choices(self) -> list[Choice]:
        fields, tokenizer = self.fields, self.model.tokenizer
        return [
            Choice(
                index,
                tokenizer,
                request.params,
                fields.stops,
                self.new_parser(),
                shown_ids=self.shown_ids,
                may_think=self.may_think,
            )
            for index, request in enumerate(self.requests)
        ]


async def chat_job(
    chat: ChatRequest, model: LoadedModel, config: GatewayConfig, *, speculation_header: str | None, arrived_s: float
) -> Job:
    prompt_ids, use = await model.prompt_ids(chat), chat.tool_use()
    thought = NO_THOUGHT
    if model.dialect.thinks:
        thought = thought_after(model.dialect, model.tokenizer.decode(prompt_ids[-_PROMPT_END:]))
    grammar = await _grammar(chat.constraint(), use, model.dialect, thought)
    params = sampling_params(chat, model.card, len(prompt_ids), grammar=grammar)
    new_parser: NewParser = ContentOnly
    if use.callable or model.dialect.thinks:
        new_parser = partial(AnswerParser, model.dialect, use, opened=thought == OPENED)
    hint = chat.text_class or text_class(chat.messages[-1].content)
    draft = _Draft(chat, config, speculation_header, hint)
    identity = _identity("chatcmpl", chat.model, model)
    output = ChatOutput(
        identity,
        model.tokenizer,
        include_usage=chat.include_usage,
        logprobs=chat.num_logprobs is not None,
        mark_drafted=chat.marks_drafted,
    )
    requests = draft.requests(identity.id, [prompt_ids], params)
    shown_ids = model.dialect.shown_ids if new_parser is not ContentOnly else frozenset()
    return Job(requests, chat.num_choices, chat, model, output, arrived_s, new_parser, shown_ids, model.dialect.thinks)


async def completion_job(
    completion: CompletionRequest,
    model: LoadedModel,
    config: GatewayConfig,
    *,
    speculation_header: str | None,
    arrived_s: float,
) -> Job:
    prompts = await model.completion_ids(completion)
    grammar = await _grammar(completion.constraint(), ToolUse(), Dialect())
    params = sampling_params(completion, model.card, max(map(len, prompts)), grammar=grammar)
    first = completion.prompts[0]
    draft = _Draft(completion, config, speculation_header, completion.text_class or _hint(first))
    identity = _identity("cmpl", completion.model, model)
    output = CompletionOutput(
        identity,
        model.tokenizer,
        include_usage=completion.include_usage,
        logprobs=completion.num_logprobs is not None,
    )
    requests = draft.requests(identity.id, prompts, params)
    return Job(requests, completion.num_choices, completion, model, output, arrived_s)


async def _grammar(
    constraint: Constraint | None, use: ToolUse, dialect: Dialect, thought: str = NO_THOUGHT
) -> Grammar | None:
    """Compiling may take a while: other streams must not wait for it."""
    if constraint is None and not use.constrains:
        return None
    return await asyncio.to_thread(answer_grammar, constraint, use, dialect, thought=thought)


def _hint(prompt: str | list[int]) -> str:
    return text_class(prompt) if isinstance(prompt, str) else ""


def _identity(prefix: str, model_name: str, model: LoadedModel) -> Identity:
    return Identity(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model_name, model.card.fingerprint)


class _Draft:
    """What all engine requests of one body have in common."""

    def __init__(
        self, fields: GenerationFields, config: GatewayConfig, speculation_header: str | None, text_class: str
    ) -> None:
        self._fields = fields
        self._max_choices = config.max_choices
        self._timeout_s = _bounded_timeout(fields.timeout, config.max_timeout_s)
        self._speculation = config.speculation.granted(fields.speculation, speculation_header)
        self._text_class = text_class

    def requests(self, name: str, prompts: Sequence[Sequence[int]], params: SamplingParams) -> tuple[Request, ...]:
        num_choices = self._fields.num_choices
        total = len(prompts) * num_choices
        if total > self._max_choices:
            raise BadParams(
                f"{len(prompts)} prompts with n {num_choices} are {total} choices, and one request may have "
                f"{self._max_choices}",
                "n" if num_choices > 1 else "prompt",
            )
        return tuple(
            self._request(name if total == 1 else f"{name}-{number * num_choices + at}", prompt, params, at)
            for number, prompt in enumerate(prompts)
            for at in range(num_choices)
        )

    def _request(self, name: str, prompt_ids: Sequence[int], params: SamplingParams, at: int) -> Request:
        """Choice `at` of a seeded request has the seed + at: choices differ, and each can be asked for alone."""
        if params.seed is not None and at:
            params = replace(params, seed=(params.seed + at + INT64) % (2 * INT64) - INT64)
        return Request(
            name,
            tuple(prompt_ids),
            params,
            timeout_s=self._timeout_s,
            priority=self._fields.priority or 0,
            speculation=self._speculation,
            text_class=self._text_class,
        )


def _bounded_timeout(asked_s: float | None, most_s: float) -> float | None:
    """None leaves it to the engine's default."""
    return min(asked_s, most_s) if asked_s is not None and most_s else asked_s
