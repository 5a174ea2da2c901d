"""The request body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from scheduler.errors import BadParams
from services.gateway.fields import MAX_TOP_LOGPROBS, GenerationFields

_DEFAULT_MAX_TOKENS = 16
_FORMS = "must be a string, a list of strings, a list of token ids or a list of lists of token ids"

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class CompletionRequest(GenerationFields):
    """prompt: one text or several, as strings or as token ids; each gets n choices, in order. logprobs: the number of
    alternatives shown with each token. add_special_tokens: whether texts begin as the tokenizer begins them (BOS)."""

    prompt: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_special_tokens: bool | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_form(cls, prompt: Any) -> Any:
        """By hand: a union of four forms would report the complaints of all of them."""
        if isinstance(prompt, str) or (isinstance(prompt, list) and _is_one_form(prompt)):
            return prompt
        raise ValueError(_FORMS)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Every prompt by itself."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_tokens is not None else _DEFAULT_MAX_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def check_together(self) -> None:
        super().check_together()
        if self.marks_drafted:
            raise BadParams("speculation.mark_drafted is of chat completions", param="speculation.mark_drafted")


def _is_one_form(prompt: list[Any]) -> bool:
    if not prompt:
        return False
    strings = all(isinstance(each, str) for each in prompt)
    return strings or _are_ids(prompt) or all(isinstance(each, list) and _are_ids(each) for each in prompt)


def _are_ids(prompt: list[Any]) -> bool:
    return bool(prompt) and all(type(each) is int and 0 <= each < 2**31 for each in prompt)
