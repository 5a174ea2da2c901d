"""Settings that one gateway replica owns. Built at the edge (services/settings.py), frozen inside."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.access_log import NO_LOG, AccessLogConfig
from services.gateway.auth import NO_KEYS, AuthConfig
from services.gateway.limits import UNLIMITED, Limits
from services.gateway.request_trace import NO_TRACING, TracingConfig
from services.gateway.speculation import ALL_ALLOWED, SpeculationPolicy
from services.logs import DEFAULT_LOG, LogConfig


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """max_body_bytes: larger request bodies are refused with 413.
    stalled_s: how long a client may take to send its request's body, and how long it may take nothing of its answer before it
        counts as gone.
    keepalive_s: an open stream that is silent this long gets an SSE comment.
    connect_timeout_s: how long a request waits for a scheduler that restarts before it fails with 503.
    call_timeout_s: bound of the small calls (cancel, statistics, health).
    idle_s: a subscription without live requests is closed after this long, so that an old scheduler can drain.
    speculation_metrics: `off`, `summary` or `detailed` (per-step lists): the `metrics` object of a response.
    speculation: what requests may say about their own drafts.
    served_names: further names of the model; the card's own is always served.
    max_choices: prompts times n of one request. max_timeout_s: longest `timeout` a request gets; 0 is no bound.
    tool_format: how the model writes tool calls: one of call_grammar.FRAMES, or `auto`: as its chat template says, else hermes.
    reasoning: whether answers may begin with a thought between <think> and </think>: `think`, `off`, or `auto`: as its chat
        template and tokenizer say.
    auth: the API keys. anonymous_limits: of all requests together where no key is needed. access_log: where it goes.
    tracing: where traces go, and how many. log: how this process writes its lines, and which engine's they are.
    """

    max_body_bytes: int = 8 * 1024 * 1024
    stalled_s: float = 60.0
    keepalive_s: float = 10.0
    connect_timeout_s: float = 30.0
    call_timeout_s: float = 5.0
    idle_s: float = 10.0
    speculation_metrics: str = "summary"
    speculation: SpeculationPolicy = ALL_ALLOWED
    served_names: tuple[str, ...] = ()
    max_choices: int = 64
    max_timeout_s: float = 3600.0
    tool_format: str = "auto"
    reasoning: str = "auto"
    auth: AuthConfig = NO_KEYS
    anonymous_limits: Limits = UNLIMITED
    access_log: AccessLogConfig = NO_LOG
    tracing: TracingConfig = NO_TRACING
    log: LogConfig = DEFAULT_LOG
