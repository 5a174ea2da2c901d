"""The bodies that this server answers with, for /openapi.json. Answers are written by hand (chat_output.py and its like);
the tests hold them against these models and against OpenAI's own schemas."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

FinishReasonName = Literal["stop", "length", "tool_calls"]


class Body(BaseModel):
    model_config = ConfigDict(extra="allow")


class ErrorFields(Body):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Body):
    """Every error of every path."""

    error: ErrorFields


class PromptTokensDetails(Body):
    cached_tokens: int


class CompletionTokensDetails(Body):
    reasoning_tokens: int


class Usage(Body):
    """cached_tokens: of the prompt, found in the prefix cache. reasoning_tokens: of the completion, up to the end of the
    thought; only of models that think."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class SpeculativeDecoding(Body):
    """Verify rounds of this answer. num_draft_tokens: drafted tokens put to the target; num_proposed_draft_tokens: drafted at
    all; index j of the histogram: rounds that accepted j. mode, max_draft_tokens: the request's own say, as in force."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    num_proposed_draft_tokens: int
    mode: str | None = None
    max_draft_tokens: int | None = None
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


class AnswerMetrics(Body):
    speculative_decoding: SpeculativeDecoding


class TopLogprob(Body):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobs(Body):
    """drafted: only when speculation.mark_drafted asks for it."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]
    drafted: bool | None = None


class ChatLogprobs(Body):
    content: list[TokenLogprobs] | None
    refusal: list[TokenLogprobs] | None


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(Body):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Body):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName


class ChatCompletion(Body):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: AnswerMetrics | None = None


class FunctionCallDelta(Body):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Body):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta | None = None


class MessageDelta(Body):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Body):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName | None


class ChatCompletionChunk(Body):
    """One `data:` event of a stream: a role, what one verify round committed, a finish reason, or (choices empty) the usage.
    The stream ends with `data: [DONE]`; a failure after it began is a last event with an ErrorBody instead. Lines that begin
    with a colon are keep-alive comments."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: AnswerMetrics | None = None


class CompletionLogprobs(Body):
    """text_offset: of each token in the choice's text, in characters."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Body):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName | None


class Completion(Body):
    """The whole answer, and each `data:` event of a stream, in which finish_reason is null but for the last of a choice."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: AnswerMetrics | None = None


class ServedModel(Body):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Body):
    object: Literal["list"]
    data: list[ServedModel]


class Tokens(Body):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(Body):
    prompt: str


class Alive(Body):
    status: Literal["alive"]


class Ready(Body):
    status: Literal["ready"]
    model: str


class NotReady(ErrorBody):
    status: Literal["not ready"]
    reason: str
