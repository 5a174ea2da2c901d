"""The values that cross a process boundary: what a request is, and what the four verbs hand to each other.

Everything here is frozen, picklable and small. `draft` returns `Draft`s, `plan` makes a `Plan` of `Extension`s, `verify`
returns `Verdict`s, `apply` emits `Delta`s. Sizes per step are stated where they matter: an argument above 100 KiB makes an
actor call several times slower.

Names: `num_*` counts, `*_ids` integer ids, `*_s` seconds. Positions count from 0 along prompt + output.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from operator import attrgetter

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output must match. kind: `json_object` (text empty), `json_schema` (text: JSON), `regex` (Rust syntax) or `ebnf`
    (a context-free grammar as llguidance reads it: Lark with `%json {schema}` terminals)."""

    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Speculation:
    """One request's say about its own drafts, already within the deployment's policy.

    planner: as the setting `scheduler.planner`; empty is the deployment's. max_draft_tokens: most drafts verified a round.
    """

    planner: str = ""
    max_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. The verifier applies exactly these; a drafter may leave out what depends on the history.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off. With a `seed` the token at output position n is a
    function of the target's logits and (seed, n) alone (DESIGN 4.3); without one, rejection sampling draws fresh noise.
    `stop_ids` end the request and are counted in the usage; they are committed but not shown as text.

    presence and frequency penalty count output tokens, repetition penalty (> 0, 1 is off) prompt and output. logit_bias: pairs
    (token id, added to its logit). num_logprobs: alternatives reported with each token's logprob; None reports nothing.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def needs_history(self) -> bool:
        """The law of a position depends on the tokens before it otherwise than through the model."""
        penalised = self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1
        return penalised or self.grammar is not None


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to produce.

    subscriber: the stream (one per gateway) that receives this request's deltas.
    timeout_s: seconds from arrival after which the request fails with DeadlineExceeded; None is the server's default.
    priority: higher is admitted earlier and preempted later. text_class: what its text is like (code, math, chat), a hint for
        acceptance estimates and metrics; empty is unknown. timed: its deltas carry StepTimes.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    subscriber: str = ""
    timeout_s: float | None = None
    priority: int = 0
    speculation: Speculation | None = None
    text_class: str = ""
    timed: bool = False


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """A request that drafts this step.

    anchor_id: the last committed token, whose KV row does not exist yet.
    start: RoPE position of the anchor; its context rows in the draft KV cache are those at context_from..start-1.
    block_ids: the request's block table, covering at least positions 0..start-1.
    context_from: first position from which on the drafter has all rows, at the beginning of a block; those before it are not
        to be looked at (scheduler/tables.py).
    output_index: number of output tokens committed so far; draft k (0-based) would become output token output_index + k,
        which is the position that keys the seeded noise.
    context_ids: the committed tokens, for drafters that say so in `DrafterInfo.needs_tokens` (n-gram) and for requests with
        penalties; else None.
    """

    request_id: str
    anchor_id: int
    start: int
    block_ids: IntArray
    params: SamplingParams
    output_index: int
    context_ids: IntArray | None = None
    context_from: int = 0


@dataclass(frozen=True, slots=True)
class Draft:
    """What the drafter proposes for one request; w <= the asked width (w may be 0: nothing to propose).

    token_ids: [w] drafted ids.
    confidence: [w] calibrated estimate of P(token k accepted | 1..k-1 accepted), or None when the drafter has no
        confidence head; survival is the cumulative product. Entry k must not depend on token k itself (reference 1.9).
    q_ids, q_probs: [w, K] the sparse law each token was drawn from (float32, rows sum to 1; distinct ids, then
        padding, id -1 with mass 0). None for greedy and for seeded requests, which do not need it. K = 64: 3.6 KiB a
        request at w = 7.
    """

    request_id: str
    token_ids: IntArray
    confidence: FloatArray | None
    q_ids: IntArray | None = None
    q_probs: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class Extension:
    """One request's share of a verify step: tokens to run through the target from position `start` on.

    token_ids: [n] known tokens not yet in the KV cache, then `num_draft` drafted tokens.
    samples: True when the last known token is among them, so that the target's law after it is wanted; a prefill chunk
        that does not reach the end of the known tokens has samples False and num_draft 0.
    block_ids: block table covering positions 0..start+n-1.
    output_index: as in DraftAsk: the output position of the first token this extension can emit.
    q_ids, q_probs: [num_draft, K] as in Draft.
    history_ids: all known tokens, prompt then the `output_index` output tokens, when `params.needs_history`; else None.
    """

    request_id: str
    start: int
    token_ids: IntArray
    num_draft: int
    samples: bool
    block_ids: IntArray
    params: SamplingParams
    output_index: int
    q_ids: IntArray | None = None
    q_probs: FloatArray | None = None
    history_ids: IntArray | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One verify step. `capture` asks the verifier for the hidden states that the drafter needs."""

    step: int
    extensions: tuple[Extension, ...]
    capture: bool = True

    @property
    def num_tokens(self) -> int:
        return sum(len(e.token_ids) for e in self.extensions)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of the target's probability (log-softmax of its logits, before temperature and truncation) of the token
    that was emitted, and of the `num_logprobs` most probable ones as (id, logprob), descending."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's answer for one extension.

    token_ids: the accepted drafts followed by the target's own next token (replacement or bonus): num_accepted + 1 ids.
        Empty when the extension did not sample.
    logprobs: one per token id, when the request asked for them.
    error: class name and message of a ServingError that ends this request and no other; then there are no tokens.
    """

    request_id: str
    num_accepted: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request: `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The steps between a request's previous delta and this one; several where a prompt came in chunks or was recomputed.

    began_s, ended_s: of the first and of the last of them, in seconds since the request's arrival at the scheduler; before the
        first delta's began_s it waited. draft_s .. apply_s: sums over these steps, as in StepStats: of the whole batch, which
        is what each request in it waits for.
    """

    began_s: float
    ended_s: float
    num_steps: int
    draft_s: float
    plan_s: float
    verify_s: float
    apply_s: float


@dataclass(frozen=True, slots=True)
class Delta:
    """What one round committed for one request; the last one carries finish_reason.

    token_ids: newly committed ids, in order; may be empty on the last delta.
    num_drafted, num_verified, num_accepted: of the round that produced it (drafted by the drafter, admitted by the plan,
        accepted by the target and committed). For plain decoding all are 0. A prefill's first token is no round: is_round False.
    logprobs: one per token id, when the request asked for them.
    error: class name and message of a ServingError when finish_reason is ERROR (see scheduler.errors.revive).
    times: for a request with `timed`; None when no step of its own lies behind this delta.
    """

    request_id: str
    token_ids: tuple[int, ...]
    is_round: bool = False
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: tuple[str, str] | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    times: StepTimes | None = None

    def __reduce__(self) -> tuple[type[Delta], tuple[object, ...]]:
        """A call of the class: what dataclass does for slots takes several times as long, for sixteen deltas a step."""
        return Delta, _delta_values(self)


_delta_values = attrgetter(*(each.name for each in fields(Delta)))


@dataclass(frozen=True, slots=True)
class VerifierInfo:
    """What the verifier learned at start and others may read. kv_bytes_per_token counts all layers."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]
    device: str
    dtype: str
    fingerprint: str
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """What the drafter is. `width` is γ, the drafted tokens per round; `variable_width` says that fewer may be asked
    for and cost less; `max_len` is the longest context its positions cover."""

    kind: str
    width: int
    variable_width: bool
    has_confidence: bool
    max_len: int
    target_layer_ids: tuple[int, ...]
    fingerprint: str
    needs_tokens: bool = False
