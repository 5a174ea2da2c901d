"""The four dashboards: what they show and what each panel means. The numbers are named in services/metrics.py."""

from __future__ import annotations

from services.operations.panels import Panel, Row, board
from services.operations.promql import buckets, engine, gateway, gauge, lost, quantile, ratio

_TTFT = "dspark_time_to_first_token_seconds"
_TPOT = "dspark_time_per_output_token_seconds"
_ACCEPT_LENGTH = ratio(engine("dspark_round_tokens"), engine("dspark_verify_rounds"))
_MODELS = 'verb=~"draft|verify"'


def _quantiles(histogram: str) -> tuple[tuple[str, str], ...]:
    return tuple((quantile(q, histogram), f"p{round(q * 100)}") for q in (0.5, 0.95, 0.99))


_TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            "Requests",
            "Requests that ended, by outcome: stop, length, cancelled, rejected or failed.",
            ((gateway("dspark_requests", "outcome"), "{{outcome}}"),),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Failed",
            "Share of requests that failed through no fault of the client.",
            ((ratio(gateway("dspark_requests", where='outcome="failed"'), gateway("dspark_requests")), "failed"),),
            "percentunit",
        ),
        Panel(
            "Errors by code",
            "Requests not served to their end, by the code in the error body. engine_overloaded is a full queue.",
            ((gateway("dspark_request_errors", "code"), "{{code}}"),),
            "reqps",
        ),
        Panel(
            "Tokens",
            "Tokens emitted to clients, and prompt tokens computed (prefix hits not among them).",
            ((engine("dspark_emitted_tokens"), "emitted"), (engine("dspark_prefill_tokens"), "prompt")),
            "short",
        ),
        Panel(
            "Time to first token",
            "From a request's arrival at the gateway to its first token, queue included.",
            _quantiles(_TTFT),
            "s",
        ),
        Panel(
            "Time per output token",
            "Per request: first to last token, over tokens - 1. Lower with longer accepted drafts.",
            _quantiles(_TPOT),
            "s",
        ),
        Panel(
            "Request duration",
            "From a request's arrival to its end.",
            _quantiles("dspark_request_duration_seconds"),
            "s",
        ),
    ),
)
_QUEUE = Row(
    "Queue and cache",
    (
        Panel(
            "Requests at the engine",
            "Running requests hold KV blocks; waiting ones do not yet. Waiting without end means too much load.",
            ((gauge("dspark_requests_running"), "running"), (gauge("dspark_requests_waiting"), "waiting")),
            "short",
        ),
        Panel(
            "Time in the queue",
            "Mean seconds from arrival to the first KV block.",
            ((ratio(engine("dspark_queue_seconds"), engine("dspark_admitted_requests")), "mean"),),
            "s",
        ),
        Panel(
            "KV cache in use",
            "Share of KV blocks that live requests hold. Near 1, requests wait or are preempted.",
            (
                (
                    ratio(
                        gauge("dspark_kv_blocks_used", "job", "group"), gauge("dspark_kv_blocks_total", "job", "group")
                    ),
                    "{{job}}/{{group}}",
                ),
            ),
            "percentunit",
            most=1,
        ),
    ),
)
_LENGTH = Row(
    "Accepted length",
    (
        Panel(
            "Tokens per verify round",
            "Mean accept length: tokens a running request gets from one pass of the target; 1 is plain decoding.",
            ((_ACCEPT_LENGTH, "all"),),
        ),
        Panel(
            "By text class",
            "Tokens per verify round of requests whose prompt looks like code, math or chat.",
            (
                (
                    ratio(
                        engine("dspark_class_round_tokens", "text_class"),
                        engine("dspark_class_verify_rounds", "text_class"),
                    ),
                    "{{text_class}}",
                ),
            ),
        ),
        Panel(
            "By engine group",
            "Tokens per verify round of each group, so of each drafter.",
            (
                (
                    ratio(
                        engine("dspark_round_tokens", "job", "model", "group"),
                        engine("dspark_verify_rounds", "job", "model", "group"),
                    ),
                    "{{job}}/{{group}} {{model}}",
                ),
            ),
        ),
        Panel(
            "Acceptance by position",
            "Of the rounds that verified a draft position, the share that accepted it. Falls from left to right.",
            (
                (
                    ratio(
                        engine("dspark_accepted_tokens_per_pos", "position"),
                        engine("dspark_verify_tokens_per_pos", "position"),
                    ),
                    "position {{position}}",
                ),
            ),
            "percentunit",
            most=1,
        ),
        Panel(
            "Drafted, verified, accepted, wasted",
            "Tokens a second: proposed by the drafter; admitted by the plan; accepted by the target; verified in vain.",
            (
                (engine("dspark_draft_tokens"), "drafted"),
                (engine("dspark_verify_tokens"), "verified"),
                (engine("dspark_accepted_tokens"), "accepted"),
                (f"{engine('dspark_verify_tokens')} - {engine('dspark_accepted_tokens')}", "wasted"),
            ),
            "short",
        ),
        Panel(
            "Accepted of verified",
            "Share of the verified draft tokens that the target accepted. The planner raises it as load grows.",
            ((ratio(engine("dspark_accepted_tokens"), engine("dspark_verify_tokens")), "accepted"),),
            "percentunit",
            most=1,
        ),
    ),
)
_BUDGET = Row(
    "Verify budget",
    (
        Panel(
            "Verify budget against load",
            "Tokens verified per request and round (drafts and its own one), beside running requests: more load, less budget.",
            (
                (
                    f"1 + {ratio(engine('dspark_verify_tokens'), engine('dspark_verify_rounds'))}",
                    "budget",
                ),
                (gauge("dspark_requests_running"), "running requests"),
            ),
        ),
        Panel(
            "Budgets of rounds",
            "How many rounds had which verify budget.",
            ((buckets("dspark_verify_budget_tokens"), "{{le}}"),),
            kind="heatmap",
        ),
        Panel(
            "Trimmed",
            "Share of drafted tokens that the plan did not put to the target.",
            ((f"1 - {ratio(engine('dspark_verify_tokens'), engine('dspark_draft_tokens'))}", "trimmed"),),
            "percentunit",
            most=1,
        ),
    ),
)
_CALIBRATION = Row(
    "Confidence",
    (
        Panel(
            "Calibration error, as the drafter states",
            "Stated minus real acceptance by position, without sign. Above 0.1 the checkpoint wants `dspark calibrate`.",
            (
                (
                    f"abs({engine('dspark_confidence_stated', 'position')} - {engine('dspark_confidence_accepted', 'position')})"
                    f" / ({engine('dspark_confidence_drafts', 'position')} > 0)",
                    "position {{position}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Calibration error, as the planner believes",
            "The same after the correction that is learnt while serving, by text class.",
            (
                (
                    f"abs({engine('dspark_confidence_believed', 'text_class')}"
                    f" - {engine('dspark_confidence_accepted', 'text_class')})"
                    f" / ({engine('dspark_confidence_drafts', 'text_class')} > 0)",
                    "{{text_class}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Acceptance by text class",
            "Of drafts put to the target after their predecessors were accepted, the share accepted.",
            (
                (
                    ratio(
                        engine("dspark_confidence_accepted", "text_class"),
                        engine("dspark_confidence_drafts", "text_class"),
                    ),
                    "{{text_class}}",
                ),
            ),
            "percentunit",
            most=1,
        ),
    ),
)
_GATE = Row(
    "Gate and planner",
    (
        Panel(
            "Draft gate",
            "1 for the state: open, partial (some requests draft), shut (no draft pays at this load) or off.",
            ((gauge("dspark_draft_gate", "state"), "{{state}}"),),
        ),
        Panel(
            "Steps without drafts, and probes",
            "Share of steps in which drafting was shut off, and of steps that drafted only to look again.",
            (
                (ratio(engine("dspark_gate_shut_steps"), engine("dspark_steps")), "shut"),
                (ratio(engine("dspark_gate_probes"), engine("dspark_steps")), "probes"),
            ),
            "percentunit",
            most=1,
        ),
        Panel(
            "Plans without trimming",
            "Plans a second that verified every draft for want of a cost curve. Anything above 0 is a fault.",
            ((engine("dspark_untrimmed_plans"), "untrimmed"),),
            "short",
        ),
        Panel(
            "Planner",
            "The planner in force.",
            ((gauge("dspark_planner_info", "planner"), "{{planner}}"),),
            kind="stat",
            width=12,
        ),
        Panel(
            "Why nothing is trimmed",
            "The reason, where there is one. Empty is good.",
            ((gauge("dspark_trim_off", "reason"), "{{reason}}"),),
            kind="stat",
            width=12,
        ),
    ),
)
_TIME = Row(
    "Where the time goes",
    (
        Panel(
            "Seconds per second in each verb",
            "draft and verify are the models; plan and apply are host work and should stay thin.",
            ((engine("dspark_step_seconds", "verb"), "{{verb}}"),),
            "percentunit",
            stacked=True,
        ),
        Panel(
            "Seconds of a step",
            "Mean seconds of each verb in a step of the loop.",
            (
                (
                    f"{engine('dspark_step_seconds', 'verb')} / ignoring(verb) group_left() ({engine('dspark_steps')} > 0)",
                    "{{verb}}",
                ),
            ),
            "s",
            stacked=True,
        ),
        Panel(
            "Steps",
            "Steps of the loop a second.",
            ((engine("dspark_steps"), "steps"),),
            "ops",
        ),
        Panel(
            "Device share",
            "Of the loop's seconds, those inside the models. The rest is host work in which devices may wait.",
            ((ratio(engine("dspark_step_seconds", where=_MODELS), engine("dspark_step_seconds")), "models"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Overlap of drafter and target",
            "Seconds per second in both models together. Above 1 they work at the same time (split placement).",
            ((engine("dspark_step_seconds", where=_MODELS), "draft + verify"),),
        ),
        Panel(
            "Tokens of a step",
            "Tokens the target ran in a step: prompt chunks, last tokens and drafts.",
            (
                (ratio(engine("dspark_step_tokens"), engine("dspark_steps")), "all"),
                (ratio(engine("dspark_prefill_tokens"), engine("dspark_steps")), "prompt"),
            ),
        ),
    ),
)
_CURVE = Row(
    "Cost curve",
    (
        Panel(
            "Real against predicted seconds",
            "Draft and verify seconds over what the cost curve said. 1 is right; away from it plans are worse.",
            (
                (
                    ratio(engine("dspark_measured_step_seconds"), engine("dspark_predicted_step_seconds")),
                    "real / predicted",
                ),
            ),
        ),
        Panel(
            "Machine now against the saved curve",
            "Seconds of steps now over those when the curve was measured. 2 is a machine at half its speed.",
            ((gauge("dspark_cost_curve_factor", "job", "group"), "{{job}}/{{group}}"),),
        ),
        Panel(
            "Age of the curve",
            "Seconds since it was measured.",
            ((gauge("dspark_cost_curve_age_seconds", "job", "group"), "{{job}}/{{group}}"),),
            "s",
        ),
    ),
)
_CACHE = Row(
    "KV cache",
    (
        Panel(
            "Blocks",
            "Held by live requests, kept idle for prefix hits, and all.",
            (
                (gauge("dspark_kv_blocks_used"), "used"),
                (gauge("dspark_kv_blocks_cached"), "cached"),
                (gauge("dspark_kv_blocks_total"), "all"),
            ),
            "short",
        ),
        Panel(
            "Prefix hits",
            "Share of looked-up prompt tokens that were already in the cache.",
            ((ratio(engine("dspark_prefix_cache_hit_tokens"), engine("dspark_prefix_cache_query_tokens")), "hits"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Preemptions",
            "Requests a second that lost their blocks and are computed again. More than a few: too few blocks.",
            ((engine("dspark_preemptions"), "preemptions"),),
            "ops",
        ),
    ),
)
_ENGINES = Row(
    "Engines",
    (
        Panel(
            "Scheduler answers",
            "1 when the scheduler answered the scrape.",
            (
                (
                    'min by (job, group, instance) (dspark_scheduler_up{job=~"$job", group=~"$group"})',
                    "{{job}}/{{group}} {{instance}}",
                ),
            ),
            most=1,
        ),
        Panel(
            "Workers up",
            "1 when the worker answers. Without its drafter an engine decodes plainly.",
            (
                (gauge("dspark_verifier_up", "job", "group"), "{{job}}/{{group}} verifier"),
                (gauge("dspark_drafter_up", "job", "group"), "{{job}}/{{group}} drafter"),
            ),
            most=1,
        ),
        Panel(
            "Workers lost",
            "Losses within the last hour.",
            (
                (
                    lost("dspark_verifier_losses"),
                    "{{job}}/{{group}} verifier",
                ),
                (
                    lost("dspark_drafter_losses"),
                    "{{job}}/{{group}} drafter",
                ),
            ),
            "short",
        ),
        Panel(
            "Since the last step",
            "Seconds since a step completed. Grows while idle; under load it is a stall.",
            ((gauge("dspark_last_step_age_seconds", "job", "group"), "{{job}}/{{group}}"),),
            "s",
        ),
    ),
)
_PER_ENGINE = Row(
    "Load of each",
    (
        Panel(
            "Tokens emitted",
            "Tokens a second of each engine group.",
            ((engine("dspark_emitted_tokens", "job", "group"), "{{job}}/{{group}}"),),
            "short",
        ),
        Panel(
            "Running",
            "Requests that hold KV blocks.",
            ((gauge("dspark_requests_running", "job", "group"), "{{job}}/{{group}}"),),
            "short",
        ),
        Panel(
            "Waiting",
            "Requests that wait for blocks.",
            ((gauge("dspark_requests_waiting", "job", "group"), "{{job}}/{{group}}"),),
            "short",
        ),
        Panel(
            "Refused",
            "Requests a second that an engine refused, by error.",
            ((engine("dspark_admission_rejections", "job", "group", "reason"), "{{job}}/{{group}} {{reason}}"),),
            "reqps",
        ),
        Panel(
            "Failed and finished",
            "Requests a second that an engine ended.",
            (
                (engine("dspark_failed_requests", "job", "group"), "{{job}}/{{group}} failed"),
                (engine("dspark_finished_requests", "job", "group"), "{{job}}/{{group}} finished"),
            ),
            "reqps",
        ),
        Panel(
            "Open at gateways",
            "Requests that each gateway has at its engine, as far as scrapes reach it.",
            (
                (
                    'sum by (job, group, instance) (dspark_gateway_open_requests{job=~"$job", group=~"$group"})',
                    "{{job}}/{{group}} {{instance}}",
                ),
            ),
            "short",
        ),
    ),
)

DASHBOARDS = {
    "overview": board(
        "dspark-overview", "DSpark: overview", "Traffic, errors, latency, queue, KV cache.", (_TRAFFIC, _QUEUE)
    ),
    "speculation": board(
        "dspark-speculation",
        "DSpark: speculation",
        "What drafts bring: accepted length, verify budget, calibration, gate.",
        (_LENGTH, _BUDGET, _CALIBRATION, _GATE),
    ),
    "engine": board(
        "dspark-engine",
        "DSpark: engine",
        "Seconds of the four verbs, predicted and real steps, cache.",
        (_TIME, _CURVE, _CACHE),
    ),
    "fleet": board("dspark-fleet", "DSpark: fleet", "The engine groups side by side.", (_ENGINES, _PER_ENGINE)),
}
