"""The model as a gateway knows it: card, tokenizer and chat template, and prompts made with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scheduler.errors import BadParams
from services.gateway.chat_request import ChatRequest
from services.gateway.completion_request import CompletionRequest
from services.gateway.template import ChatTemplate
from services.gateway.text import Tokenizer
from services.model_card import ModelCard

_LONG_CHARS = 8192


@dataclass(frozen=True, slots=True)
class LoadedModel:
    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate

    @classmethod
    def from_card(cls, card: ModelCard) -> LoadedModel:
        return cls(card, Tokenizer(card.tokenizer_json), ChatTemplate(card.chat_template, card.special_tokens))

    async def prompt_ids(self, chat: ChatRequest) -> list[int]:
        """The conversation as the chat template renders it. Raises BadParams."""
        messages = [message.for_template() for message in chat.messages]

        def encode() -> list[int]:
            return self.named(
                "messages", lambda: self.tokenizer.encode(self.template.render(messages, chat.chat_template_kwargs))
            )

        return await in_thread_if_long(sum(len(message["content"]) for message in messages), encode)

    async def completion_ids(self, completion: CompletionRequest) -> list[list[int]]:
        """The ids of every prompt. Raises BadParams."""
        prompts = completion.prompts
        add_special = completion.add_special_tokens is not False

        def encode() -> list[list[int]]:
            return [self._completion_ids(prompt, add_special) for prompt in prompts]

        return await in_thread_if_long(sum(len(prompt) for prompt in prompts if isinstance(prompt, str)), encode)

    def _completion_ids(self, prompt: str | list[int], add_special: bool) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        ids = self.named("prompt", lambda: self.tokenizer.encode(prompt, add_special=add_special))
        if not ids:
            raise BadParams("the prompt must have at least one token", "prompt")
        return ids

    @staticmethod
    def named(param: str, encode: Callable[[], list[int]]) -> list[int]:
        """The result of `encode`; its BadParams names the field that the text came from."""
        try:
            return encode()
        except BadParams as error:
            raise BadParams(str(error), error.param or param) from None


async def in_thread_if_long(num_chars: int, work: Callable[[], Any]) -> Any:
    """Long texts are tokenised in a thread: other streams must not wait for them."""
    return work() if num_chars <= _LONG_CHARS else await asyncio.to_thread(work)
