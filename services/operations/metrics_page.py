"""docs/metrics.md, from the catalogue."""

from __future__ import annotations

from services.metrics import ALIASES, BUDGET, GATEWAY, SCHEDULER, Spec
from services.operations.records import RECORDS

_INTRO = """# Metrics

`GET /metrics` of a gateway. This page is made of the catalogue in `services/metrics.py` by `python -m services.operations`.

Names below are those in Prometheus: counters with `_total`; a histogram has `_bucket`, `_sum` and `_count`. Every series has
the label `model` beside those listed; it is empty while no model is loaded. Those of the engine, `dspark_gateway_open_requests`
and `dspark_scheduler_up` have `group` too, the engine group (`0`, `1`, ...); aliases call the two `model_name` and `engine`.
Ratios are for the reader: divide the rates of two counters, as in

```promql
sum(rate(dspark_round_tokens_total[5m])) / sum(rate(dspark_verify_rounds_total[5m]))
```

which is the mean accept length. The engine's numbers are the same from every gateway replica: take them once,
`max by (job, model, group) (...)`, before adding up groups. A gateway's own numbers are of the replica that a scrape reached.

The engine counts tokens and knows no text: an answer that ends at a stop string is `cancelled` there (the gateway's
`dspark_requests_total` has it as stop), and its last block counts whole. A stop id that was drafted and accepted is an accepted
token here; in an answer's own `metrics.speculative_decoding` it is the round's own, so that accepted and rounds add up to tokens.
"""
_RECORDED = """
## Recorded

Series that the rules of `helm/dspark-serve/rules/dspark.yaml` keep, from several gateway replicas already taken once: for alerts,
autoscalers, boards of your own and queries over weeks. What stands before the first colon are their labels.

| name | meaning |
|---|---|"""


def metrics_page() -> str:
    parts = [
        _INTRO,
        "## Of the engine\n",
        _table((*SCHEDULER, BUDGET)),
        "\n## Of a gateway\n",
        _table(GATEWAY),
        "\n## Aliases for tools that know vLLM\n",
        _table(ALIASES),
        _RECORDED,
        *(f"| `{record.name}` | {record.about} |" for record in RECORDS),
    ]
    return "\n".join(parts) + "\n"


def exported_name(spec: Spec) -> str:
    return f"{spec.name}_total" if spec.kind == "counter" else spec.name


def _table(specs: tuple[Spec, ...]) -> str:
    rows = [
        f"| `{exported_name(spec)}` | {spec.kind} | {', '.join(f'`{label}`' for label in spec.labels)} | {spec.help} |"
        for spec in specs
    ]
    return "\n".join(["| name | kind | labels | meaning |", "|---|---|---|---|", *rows])
