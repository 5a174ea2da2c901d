"""The model as a gateway knows it: card, tokenizer and chat template, and prompts made with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scheduler.errors import BadParams
from services.gateway.chat_request import ChatRequest
from services.gateway.completion_request import CompletionRequest
from services.gateway.dialect import Dialect, dialect_of
from services.gateway.template import ChatTemplate
from services.gateway.text import Tokenizer
from services.gateway.tool_prompt import calls_as_text, with_tools
from services.model_card import ModelCard

_LONG_CHARS = 8192


@dataclass(frozen=True, slots=True)
class LoadedModel:
    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate
    dialect: Dialect

    @classmethod
    def from_card(cls, card: ModelCard, *, tool_format: str = "auto", reasoning: str = "auto") -> LoadedModel:
        template = ChatTemplate(card.chat_template, card.special_tokens)
        dialect = dialect_of(card, tool_format=tool_format, reasoning=reasoning)
        return cls(card, Tokenizer(card.tokenizer_json), template, dialect)

    async def prompt_ids(self, chat: ChatRequest) -> list[int]:
        """The conversation as the chat template renders it. Raises BadParams."""
        messages, tools = [message.for_template() for message in chat.messages], chat.tool_use().for_template()
        variables = self._known(chat.chat_template_kwargs or {})
        if chat.asks_for_no_thought and "enable_thinking" in self.template.variables:
            variables.setdefault("enable_thinking", False)
        if not self.dialect.native_calls:
            messages = calls_as_text(messages, self.dialect.calls)
        if self.dialect.native_tools:
            variables["tools"] = tools
        else:
            messages = with_tools(messages, tools, self.dialect.calls)

        def encode() -> list[int]:
            return self.named("messages", lambda: self.tokenizer.encode(self.template.render(messages, variables)))

        return await in_thread_if_long(sum(len(message["content"]) for message in messages), encode)

    def _known(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Refuses what the template would pass over, but for a thought that would not have come anyway."""
        for name, value in variables.items():
            if name not in self.template.variables and not (name in ("enable_thinking", "thinking") and not value):
                param = f"chat_template_kwargs.{name[:64]}"
                raise BadParams(f"{param}: the model's chat template has no such variable", param)
        return dict(variables)

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
