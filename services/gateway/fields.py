"""The parameters that chat and text completions share, with their ranges. Knows no engine and no tokenizer.

Rule of the whole API: a parameter that would change the answer is honoured exactly or refused with a 400 that names it
(refusals.py); what changes nothing about the answer, and what nobody knows, is taken and passed over.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from scheduler.errors import BadParams
from services.gateway.structured import StructuredFields

MAX_STOPS = 4
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_STOP_IDS = 256
INT64 = 2**63


class StreamOptions(BaseModel):
    """include_usage: one more chunk at the end with `choices: []` and the usage; the chunks before it say `usage: null`."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None


class SpeculationFields(BaseModel):
    """One request's say about its own drafts.

    mode: as the setting scheduler.planner: `off`, `fixed:k`, `threshold:x`, `algorithm1`, ... The output is the same with
        any; speed and cost differ.
    max_draft_tokens: the most drafted tokens a verify round of this request may hold.
    mark_drafted: adds `drafted` to each entry of `logprobs.content`: whether the token was drafted and accepted.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    mode: str | None = Field(None, min_length=1, max_length=64, examples=["off"])
    max_draft_tokens: int | None = Field(None, ge=0, le=1024)
    mark_drafted: bool | None = None


class GenerationFields(StructuredFields):
    """What both endpoints take. `timeout`: seconds after which the request fails with 504; the deployment caps it.
    priority: higher is admitted earlier and preempted later. text_class: a hint for estimates of acceptance, never a rule.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=128)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=INT64)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=MAX_BIASES)
    max_tokens: int | None = Field(None, ge=1, lt=INT64)
    min_tokens: int | None = Field(None, ge=0, lt=INT64)
    stop: str | list[str] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = Field(None, max_length=MAX_STOP_IDS)
    ignore_eos: bool | None = None
    timeout: float | None = Field(None, gt=0)
    priority: int | None = Field(None, ge=-100, le=100)
    speculation: SpeculationFields | None = None
    text_class: Literal["code", "math", "chat"] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _up_to_four(cls, stop: Any) -> Any:
        stops = [stop] if isinstance(stop, str) else stop
        if stops is not None and not (isinstance(stops, list) and all(isinstance(s, str) and s for s in stops)):
            raise ValueError(f"must be a non-empty string or a list of up to {MAX_STOPS} of them")
        if stops is not None and len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings are allowed, got {len(stops)}")
        return stops

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for key in bias or {}:
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ValueError(f"keys must be token ids, and {key[:40]!r} is none")
        return bias

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def marks_drafted(self) -> bool:
        return bool(self.speculation and self.speculation.mark_drafted)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        return tuple((int(key), value) for key, value in (self.logit_bias or {}).items())

    @property
    def wanted_tokens(self) -> int | None:
        """The most output tokens the client asked for; None leaves it to the context."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives wanted with each token's logprob; None wants no logprobs."""
        return None

    @property
    def prompt_field(self) -> str:
        """The field to name when the prompt is at fault."""
        return "prompt"

    @property
    def length_field(self) -> str:
        """The field to name when the answer may be too long."""
        return "max_tokens"

    def check_together(self) -> None:
        """What single fields cannot say; raises BadParams."""
        if self.stream_options is not None and not self.stream:
            raise BadParams("stream_options is only allowed when stream is true", param="stream_options")
        extra = (self.stream_options.model_extra or {}) if self.stream_options is not None else {}
        if extra.get("continuous_usage_stats"):
            name = "stream_options.continuous_usage_stats"
            raise BadParams(f"{name} is not supported by this server", param=name)
        wanted = self.wanted_tokens
        if self.min_tokens and wanted is not None and self.min_tokens > wanted:
            raise BadParams(f"min_tokens {self.min_tokens} is more than max_tokens {wanted}", "min_tokens")
        best_of = (self.model_extra or {}).get("best_of")
        if best_of is not None and best_of != self.num_choices:
            raise BadParams("best_of is not supported by this server, except where it equals n", param="best_of")
        if self.ignore_eos and self.constraint() is not None:
            raise BadParams("ignore_eos: a constrained answer ends where its grammar ends", param="ignore_eos")
        if self.marks_drafted and self.num_logprobs is None:
            raise BadParams("speculation.mark_drafted needs logprobs", param="speculation.mark_drafted")
