"""What a request must look like before it is queued. Each refusal is one line that names the parameter and what it may be."""

from __future__ import annotations

import math
import sys

from scheduler.errors import BadParams
from scheduler.wire import Request, SamplingParams

_INT64 = 2**63
_MOST_LOGPROBS = 20
_MOST_BIAS = 100
_MOST_PRIORITY = 100
_PENALTIES = (("presence_penalty", -2, 2), ("frequency_penalty", -2, 2), ("repetition_penalty", 0.01, 100))


def check_request(request: Request, vocab_size: int) -> None:
    """Raises BadParams."""
    if not request.request_id:
        raise BadParams("request_id must not be empty", "request_id")
    if not request.prompt_ids:
        raise BadParams("the prompt must have at least one token", "prompt")
    low, high = min(request.prompt_ids), max(request.prompt_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise BadParams(f"the prompt has token {bad}, and the vocabulary is 0 to {vocab_size - 1}", "prompt")
    if request.timeout_s is not None and not 0 < request.timeout_s < math.inf:
        raise BadParams(f"timeout_s must be a positive number of seconds, not {request.timeout_s}", "timeout_s")
    if not -_MOST_PRIORITY <= request.priority <= _MOST_PRIORITY:
        raise BadParams(f"priority must be from -100 to 100, not {request.priority}", "priority")
    check_params(request.params, vocab_size)


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raises BadParams."""
    if not 0.0 <= params.temperature < math.inf:
        raise BadParams(f"temperature must be 0 or more, not {params.temperature}", "temperature")
    # A computing thread may flush subnormal numbers to 0.
    if not sys.float_info.min <= params.top_p <= 1.0:
        raise BadParams(f"top_p must be above 0 and at most 1, not {params.top_p}", "top_p")
    if not 0 <= params.top_k < _INT64:
        raise BadParams(f"top_k must be from 0 (off) to 2^63 - 1, not {params.top_k}", "top_k")
    if not 0.0 <= params.min_p <= 1.0:
        raise BadParams(f"min_p must be from 0 to 1, not {params.min_p}", "min_p")
    if params.seed is not None and not -_INT64 <= params.seed < _INT64:
        raise BadParams(f"seed must fit 64 bits, and {params.seed} does not", "seed")
    if params.max_tokens < 1:
        raise BadParams(f"max_tokens must be at least 1, not {params.max_tokens}", "max_tokens")
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise BadParams(
            f"min_tokens must be from 0 to max_tokens ({params.max_tokens}), not {params.min_tokens}", "min_tokens"
        )
    for stop_id in params.stop_ids:
        if not 0 <= stop_id < vocab_size:
            raise BadParams(
                f"stop token {stop_id} is not in the vocabulary, which is 0 to {vocab_size - 1}", "stop_token_ids"
            )
    if params.min_tokens > 0 and len(set(params.stop_ids)) == vocab_size:
        raise BadParams("min_tokens leaves no token to draw when every token is a stop token", "min_tokens")
    if params.grammar is not None and not params.stop_ids:
        raise BadParams(
            "structured output needs a stop token to end with: leave ignore_eos out, and where the model has no end token "
            "give stop_token_ids",
            "stop_token_ids",
        )
    _check_logits_changes(params, vocab_size)
    if params.num_logprobs is not None and not 0 <= params.num_logprobs <= _MOST_LOGPROBS:
        raise BadParams(f"top_logprobs must be from 0 to {_MOST_LOGPROBS}, not {params.num_logprobs}", "top_logprobs")


def _check_logits_changes(params: SamplingParams, vocab_size: int) -> None:
    """Bounds that also keep every logit finite."""
    for name, low, high in _PENALTIES:
        value = getattr(params, name)
        if not low <= value <= high:
            raise BadParams(f"{name} must be from {low:g} to {high:g}, not {value}", name)
    for token, bias in params.logit_bias:
        if not 0 <= token < vocab_size:
            raise BadParams(
                f"logit_bias names token {token}, and the vocabulary is 0 to {vocab_size - 1}", "logit_bias"
            )
        if not -_MOST_BIAS <= bias <= _MOST_BIAS:
            raise BadParams(f"logit_bias must be from -100 to 100, and that of token {token} is {bias}", "logit_bias")
    if len({token for token, _ in params.logit_bias}) < len(params.logit_bias):
        raise BadParams("logit_bias names a token twice", "logit_bias")
