"""POST /tokenize and /detokenize, in vLLM's shape: what a text or a conversation is to the model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from scheduler.errors import BadParams
from services.gateway.chat_request import ChatRequest
from services.gateway.completion_request import TokenId
from services.gateway.loaded_model import LoadedModel, in_thread_if_long
from services.gateway.messages import Message
from services.gateway.parsing import parse_object, validated
from services.gateway.refusals import TOKENIZE_UNSUPPORTED, refuse_unsupported
from services.gateway.tools import MAX_TOOLS, Tool, ToolChoice, read_choice

# The fields of a chat completion that its prompt is made of.
_RENDERED = {"messages", "tools", "tool_choice", "reasoning_effort", "chat_template_kwargs"}


class TokenizeRequest(BaseModel):
    """Either `prompt`, a text, or `messages`, rendered as a chat completion would be. add_special_tokens: of a prompt; the
    chat template writes those of a conversation itself."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    reasoning_effort: Literal["none"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _one_choice(cls, choice: Any) -> Any:
        return read_choice(choice)


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    tokens: list[TokenId]


def parse_tokenize(body: bytes) -> TokenizeRequest:
    raw = parse_object(body)
    refuse_unsupported(raw, TOKENIZE_UNSUPPORTED)
    asked = validated(TokenizeRequest, raw)
    if (asked.prompt is None) == (asked.messages is None):
        raise BadParams("give either prompt or messages", "prompt")
    if asked.messages is not None and asked.add_special_tokens:
        raise BadParams("add_special_tokens is of prompt: the chat template writes its own", "add_special_tokens")
    return asked


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    return validated(DetokenizeRequest, parse_object(body))


async def tokenize(asked: TokenizeRequest, model: LoadedModel) -> dict[str, Any]:
    ids = await _ids(asked, model)
    strings = [model.tokenizer.token_bytes(each).decode("utf-8", "replace") for each in ids]
    return {
        "count": len(ids),
        "max_model_len": model.card.max_model_len,
        "tokens": ids,
        "token_strs": strings if asked.return_token_strs else None,
    }


async def _ids(asked: TokenizeRequest, model: LoadedModel) -> list[int]:
    if asked.messages is not None:
        fields = asked.model_dump(include=_RENDERED, exclude_unset=True)
        return await model.prompt_ids(validated(ChatRequest, {"model": "", **fields}))
    text = asked.prompt or ""
    add_special = asked.add_special_tokens is not False
    ids: list[int] = await in_thread_if_long(
        len(text), lambda: model.named("prompt", lambda: model.tokenizer.encode(text, add_special=add_special))
    )
    return ids


async def detokenize(asked: DetokenizeRequest, model: LoadedModel) -> dict[str, Any]:
    size = model.tokenizer.size
    for token_id in asked.tokens:
        if token_id >= size:
            raise BadParams(f"token {token_id} is not in the vocabulary, which is 0 to {size - 1}", "tokens")
    return {"prompt": model.tokenizer.decode(asked.tokens)}
