"""The request body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from scheduler.errors import BadParams
from services.gateway.fields import INT64, MAX_TOP_LOGPROBS, GenerationFields
from services.gateway.messages import Message
from services.gateway.tools import MAX_TOOLS, Tool, ToolChoice, ToolUse, read_choice, tool_use

# What the server itself tells the chat template.
_RESERVED = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
)


class ChatRequest(GenerationFields):
    """max_completion_tokens wins over its older name max_tokens. chat_template_kwargs: variables of the model's own chat
    template, such as `enable_thinking`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=INT64)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _one_choice(cls, choice: Any) -> Any:
        return read_choice(choice)

    @field_validator("chat_template_kwargs")
    @classmethod
    def _not_ours(cls, variables: dict[str, Any] | None) -> dict[str, Any] | None:
        taken = sorted(set(variables or {}) & set(_RESERVED))
        if taken:
            raise ValueError(f"{taken[0]} is set by the server and cannot be given here")
        return variables

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompt_field(self) -> str:
        return "messages"

    @property
    def length_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def asks_for_no_thought(self) -> bool:
        """`reasoning_effort: none`, the only effort that is taken."""
        return (self.model_extra or {}).get("reasoning_effort") == "none"

    def tool_use(self) -> ToolUse:
        """Raises BadParams."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def check_together(self) -> None:
        super().check_together()
        if self.tool_use().constrains and self.ignore_eos:
            raise BadParams("ignore_eos: tool calls end where their grammar ends", param="ignore_eos")
        if self.top_logprobs and not self.logprobs:
            raise BadParams("top_logprobs needs logprobs: true", param="top_logprobs")
