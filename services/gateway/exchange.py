"""What is known of one HTTP request while it is answered, for whoever logs or limits it. Never holds a prompt or a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from services.gateway.request_trace import RequestTrace

_KEY = "exchange"


@dataclass(slots=True)
class Exchange:
    """request_id: as sent back in x-request-id. answer_id: the engine's, and the `id` in the answer's body.
    api_key: the name of the key it came with. model: as the client called it.

    outcome: stop, length, tool_calls, cancelled, rejected or failed; empty for endpoints that generate nothing.
    error: the code in the error envelope. first_token_s: seconds from arrival; 0 when none came.
    trace: where the request is sampled.
    """

    request_id: str = ""
    answer_id: str = ""
    api_key: str = ""
    model: str = ""
    stream: bool = False
    outcome: str = ""
    error: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    first_token_s: float = 0.0
    trace: RequestTrace | None = None

    @classmethod
    def of(cls, scope: Scope) -> Exchange:
        """The exchange of this request, made on first use."""
        state: dict[str, Any] = scope.setdefault("state", {})
        found = state.get(_KEY)
        if not isinstance(found, cls):
            found = state[_KEY] = cls()
        return found
