"""Conversations as they grow: every user turn is asked in order, after the target's own answers to the ones before.

Owns which turn of which conversation is next and how turns become token sequences with a loss mask. Must not know models; the
chat template comes in as a function.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from drafter.train.answers import Answer
from drafter.train.corpus import Job
from drafter.train.prompts import Prompt

Messages = Sequence[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Failure:
    prompt_id: str
    domain: str
    reason: str


@dataclass(frozen=True, slots=True)
class Template:
    """encode: messages -> prompt ids with the generation prompt, as serving does it. decode: answer ids -> text. text: the
    template itself, for the record."""

    encode: Callable[[Messages], tuple[int, ...]]
    decode: Callable[[Sequence[int]], str]
    text: str = ""


@dataclass(slots=True)
class _Open:
    """A conversation whose next answer is being written."""

    prompt: Prompt
    temperature: float
    messages: list[dict[str, str]]
    turns: deque[str]
    parts: list[Answer] = field(default_factory=list)


class Conversations(Iterator[Job]):
    """Gives jobs to a writer and takes their answers back, until every turn is answered. A turn for which there is no room
    ends its conversation. failures: prompts of which no turn could be answered."""

    def __init__(
        self,
        prompts: Iterable[tuple[Prompt, float]],
        template: Template,
        *,
        max_tokens: int,
        max_prompt_tokens: int,
        max_len: int,
    ) -> None:
        """prompts: each with the temperature of its answers. max_prompt_tokens: of the first turn. max_len: of all turns."""
        self._new = iter(prompts)
        self._template, self._max_tokens = template, max_tokens
        self._max_prompt_tokens, self._max_len = max_prompt_tokens, max_len
        self._ready: deque[Job] = deque()
        self._open: dict[str, _Open] = {}
        self.failures: list[Failure] = []

    def __next__(self) -> Job:
        """Raises StopIteration when nothing can be asked now; answers that come in later may change that."""
        while not self._ready:
            prompt, temperature = next(self._new)
            begun = _Open(prompt, temperature, prompt.opening(), deque(prompt.turns))
            reason = self._ask(begun, self._max_prompt_tokens)
            if reason:
                self.failures.append(Failure(prompt.prompt_id, prompt.domain, reason))
        return self._ready.popleft()

    def answered(self, prompt_id: str, ids: Sequence[int], prompt_len: int, finish_reason: str) -> list[Answer]:
        """An answer to the latest turn; ids of prompt and answer. Returns the conversation's parts once it has ended."""
        conversation = self._open.pop(prompt_id)
        self._extend(conversation, list(ids), prompt_len, finish_reason)
        conversation.messages.append({"role": "assistant", "content": self._template.decode(ids[prompt_len:])})
        conversation.parts[-1].conversations[:] = list(conversation.messages)
        if conversation.turns and not self._ask(conversation, self._max_len - 2):
            return []
        return conversation.parts

    def _ask(self, conversation: _Open, max_prompt_tokens: int) -> str:
        """Queues the next turn; or why not."""
        conversation.messages.append({"role": "user", "content": conversation.turns.popleft()})
        try:
            ids = self._template.encode(conversation.messages)
        except Exception as error:  # a chat template is a program of the model's maker and may raise anything
            return f"chat template: {error}"
        if len(ids) > max_prompt_tokens:
            return f"prompt has {len(ids)} tokens, more than {max_prompt_tokens}"
        prompt = conversation.prompt
        self._open[prompt.prompt_id] = conversation
        self._ready.append(Job(prompt.prompt_id, prompt.domain, ids, conversation.temperature, self._max_tokens))
        return ""

    def _extend(self, conversation: _Open, ids: list[int], prompt_len: int, finish_reason: str) -> None:
        """Where the template renders a conversation as a continuation of itself one sequence holds all of it, and the mask
        has a span per answer; elsewhere (templates that drop earlier reasoning) a turn is a sequence of its own."""
        parts, prompt = conversation.parts, conversation.prompt
        span = (prompt_len, len(ids))
        if parts and ids[: len(parts[-1].ids)] == parts[-1].ids:
            earlier = parts.pop()
            name, spans = earlier.prompt_id, [*earlier.spans, span]
        else:
            name = f"{prompt.prompt_id}-{len(parts)}" if parts else prompt.prompt_id
            spans = [span]
        sampling = (conversation.temperature, self._max_tokens, finish_reason)
        parts.append(Answer(name, prompt.domain, ids, spans, *sampling))
