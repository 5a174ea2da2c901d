"""The request body of POST /v1/chat/completions: what is served, what is refused by name, what is harmless.

Rule: a parameter that would change the answer is either honoured or refused with a 400 that names it, never ignored.
Parameters that change nothing about the answer (user, metadata, store, service_tier, ...) and unknown ones are taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from scheduler.errors import BadParams, TooLong
from scheduler.wire import SamplingParams
from services.model_card import ModelCard

# Unsupported parameters and the values of them that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "return_token_ids": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"], []),
    "audio": (),
    "moderation": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
}


class Message(BaseModel):
    """content: text, or text parts, which are joined by line breaks as other servers do."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any) -> str:
        if content is None or isinstance(content, str):
            return content or ""
        if isinstance(content, list):
            return "\n".join(_part_text(part) for part in content)
        raise ValueError("must be a string or a list of text parts")

    @model_validator(mode="before")
    @classmethod
    def _needs_content(cls, message: Any) -> Any:
        if isinstance(message, Mapping) and message.get("content") is None and not message.get("tool_calls"):
            raise ValueError("content is required")
        return message

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: `developer` is the newer word for `system`."""
        role = "system" if self.role == "developer" else self.role
        extra = {key: value for key, value in (self.model_extra or {}).items() if value is not None}
        return {**extra, "role": role, "content": self.content} | _template_calls(extra.get("tool_calls"))


def _part_text(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ValueError(f"content part of type {kind!r} is not supported; only text parts are")


def _template_calls(tool_calls: Any) -> dict[str, Any]:
    """Earlier tool calls of a conversation: templates want their arguments as objects, the wire has JSON text."""
    if not isinstance(tool_calls, list):
        return {}
    return {"tool_calls": [_parsed_call(call) for call in tool_calls]}


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None


class ChatRequest(BaseModel):
    """max_completion_tokens wins over its older name max_tokens."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**63)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(None, ge=1, lt=2**63)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**63)
    min_tokens: int | None = Field(None, ge=0, lt=2**63)
    stop: str | list[str] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    ignore_eos: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _up_to_four(cls, stop: Any) -> Any:
        stops = [stop] if isinstance(stop, str) else stop
        if stops is not None and not (isinstance(stops, list) and all(isinstance(s, str) and s for s in stops)):
            raise ValueError("must be a non-empty string or a list of up to 4 of them")
        if stops is not None and len(stops) > 4:
            raise ValueError(f"at most 4 stop strings are allowed, got {len(stops)}")
        return stops

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def parse_chat(body: bytes) -> ChatRequest:
    """The validated request; BadParams names the first thing that is wrong with it."""
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadParams(f"the request body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise BadParams("the request body must be a JSON object")
    _refuse_unsupported(raw)
    try:
        chat = ChatRequest.model_validate(raw)
    except ValidationError as error:
        raise _bad_params(error) from None
    _check_together(chat)
    return chat


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    for name, harmless in UNSUPPORTED.items():
        value = raw.get(name)
        if value is not None and not any(_same(value, allowed) for allowed in harmless):
            raise BadParams(f"{name} is not supported by this server", param=name)


def _same(value: Any, allowed: Any) -> bool:
    """Equality in which True is not 1."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _bad_params(error: ValidationError) -> BadParams:
    first = error.errors(include_url=False)[0]
    location = ".".join(str(part) for part in first["loc"] if not _is_union_arm(part))
    reason = first["msg"].removeprefix("Value error, ")
    return BadParams(f"{location}: {reason}" if location else reason, param=location or None)


def _is_union_arm(part: str | int) -> bool:
    return isinstance(part, str) and ("[" in part or part in ("str", "int"))


def _check_together(chat: ChatRequest) -> None:
    if chat.stream_options is not None and not chat.stream:
        raise BadParams("stream_options is only allowed when stream is true", param="stream_options")
    extra = (chat.stream_options.model_extra or {}) if chat.stream_options is not None else {}
    if extra.get("continuous_usage_stats"):
        raise BadParams(
            "stream_options.continuous_usage_stats is not supported by this server",
            param="stream_options.continuous_usage_stats",
        )
    if chat.min_tokens and chat.wanted_tokens is not None and chat.min_tokens > chat.wanted_tokens:
        raise BadParams(f"min_tokens {chat.min_tokens} is more than max_tokens {chat.wanted_tokens}", "min_tokens")


def sampling_params(chat: ChatRequest, card: ModelCard, num_prompt: int) -> SamplingParams:
    """What the engine is asked for. Values the client leaves out come from the model's generation_config, then OpenAI's
    defaults; without a limit the answer may fill the context."""
    room = card.max_model_len - num_prompt
    wanted = chat.wanted_tokens
    if room < 1 or (wanted or 1) > room:
        asked = f"{wanted} tokens were asked for" if wanted else "at least 1 is needed for the answer"
        raise TooLong(
            f"the context holds {card.max_model_len} tokens: the messages have {num_prompt} "
            f"and {asked}, together {num_prompt + (wanted or 1)}"
        )
    eos = () if chat.ignore_eos else card.eos_ids
    return SamplingParams(
        temperature=_first(chat.temperature, card.defaults.get("temperature"), 1.0),
        top_k=max(0, int(_first(chat.top_k, card.defaults.get("top_k"), 0))),
        top_p=_first(chat.top_p, card.defaults.get("top_p"), 1.0),
        min_p=_first(chat.min_p, card.defaults.get("min_p"), 0.0),
        seed=chat.seed,
        max_tokens=wanted or room,
        min_tokens=min(chat.min_tokens or 0, room),
        stop_ids=tuple(dict.fromkeys((*eos, *(chat.stop_token_ids or ())))),
    )


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
