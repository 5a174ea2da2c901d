"""What goes over the wire for one chat completion: SSE chunks, the unary body, usage and speculation numbers.

Strings are built by hand: one chunk per verify round is the path that runs thousands of times a second, and all of a
chunk but its text is constant. Knows no HTTP and no engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.wire import Delta

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def dump(value: Any) -> str:
    """Compact JSON in readable UTF-8. The three separators that careless clients split lines at stay escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085")


@dataclass(frozen=True, slots=True)
class Identity:
    """What all chunks of one answer share."""

    id: str
    created: int
    model: str
    fingerprint: str


class ChunkWriter:
    """SSE events of one streamed answer, in the order role, contents, finish, usage, DONE."""

    def __init__(self, identity: Identity, *, include_usage: bool) -> None:
        self._identity = identity
        self._include_usage = include_usage
        self._head = dump(self._fields("chat.completion.chunk"))[:-1]
        usage = ',"usage":null' if include_usage else ""
        self._content_head = f'data: {self._head},"choices":[{{"index":0,"delta":{{"content":'
        self._content_tail = f'}},"logprobs":null,"finish_reason":null}}]{usage}}}\n\n'

    def _fields(self, kind: str) -> dict[str, Any]:
        identity = self._identity
        return {
            "id": identity.id,
            "object": kind,
            "created": identity.created,
            "model": identity.model,
            "system_fingerprint": identity.fingerprint,
        }

    def _event(self, delta: dict[str, Any], finish_reason: str | None) -> bytes:
        body = self._fields("chat.completion.chunk")
        body["choices"] = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]
        if self._include_usage:
            body["usage"] = None
        return f"data: {dump(body)}\n\n".encode()

    def role(self) -> bytes:
        return self._event({"role": "assistant", "content": ""}, None)

    def content(self, text: str) -> bytes:
        return f"{self._content_head}{dump(text)}{self._content_tail}".encode()

    def finish(self, reason: str) -> bytes:
        return self._event({}, reason)

    def usage(self, usage: dict[str, Any], metrics: dict[str, Any] | None) -> bytes:
        body = self._fields("chat.completion.chunk") | {"choices": [], "usage": usage}
        if metrics is not None:
            body["metrics"] = metrics
        return f"data: {dump(body)}\n\n".encode()


def error_event(body: dict[str, Any]) -> bytes:
    """A failure after the answer began. No DONE follows: clients must not take the text for complete."""
    return f"data: {dump(body)}\n\n".encode()


def unary_body(
    identity: Identity, text: str, finish_reason: str, usage: dict[str, Any], metrics: dict[str, Any] | None
) -> bytes:
    body: dict[str, Any] = {
        "id": identity.id,
        "object": "chat.completion",
        "created": identity.created,
        "model": identity.model,
        "system_fingerprint": identity.fingerprint,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": finish_reason,
            }
        ],
        "usage": usage,
    }
    if metrics is not None:
        body["metrics"] = metrics
    return dump(body).encode()


def usage_body(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


@dataclass(slots=True)
class RoundLog:
    """Verify rounds of one answer: tokens verified and accepted in each."""

    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, delta: Delta, num_kept: int) -> None:
        """`num_kept`: tokens of the round that the client got, fewer than committed when a stop string cut it."""
        if delta.is_round:
            self.verified.append(delta.num_verified)
            self.accepted.append(min(delta.num_accepted, num_kept))

    def body(self, draft_width: int, *, detailed: bool) -> dict[str, Any]:
        """vLLM's `metrics.speculative_decoding` object, which load generators read.

        Index j of the histogram counts the rounds that accepted j drafts. `num_draft_tokens` are those that were
        verified: drafts the planner left out were never put to the target.
        """
        steps, accepted, verified = len(self.accepted), sum(self.accepted), sum(self.verified)
        width = max(draft_width, max(self.accepted, default=0))
        numbers: dict[str, Any] = {
            "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / verified if verified else 0.0,
            "acceptance_histogram": _histogram(self.accepted, width),
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": verified,
            "num_spec_tokens": width,
        }
        if detailed:
            numbers |= {"per_step_accepted": self.accepted, "per_step_drafted": self.verified}
        return {"speculative_decoding": numbers}


def _histogram(accepted: Sequence[int], width: int) -> list[int]:
    histogram = [0] * (width + 1)
    for count in accepted:
        histogram[count] += 1
    return histogram
