"""The metrics page: parses, matches the catalogue, sums are exact, aliases agree, no speculation number is made up."""

from __future__ import annotations

import dataclasses
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scheduler.drift import DriftRow
from scheduler.stats import SchedulerStats
from services.metrics import ALIASES, BUDGET, CATALOGUE, GATEWAY, SCHEDULER, GatewayMetrics

STATS = SchedulerStats(
    num_steps=7,
    num_rounds=10,
    num_draft_rounds=8,
    num_drafted_tokens=70,
    num_verified_tokens=17,
    num_accepted_tokens=9,
    num_round_tokens=19,
    num_emitted_tokens=21,
    verified_at=(8, 5, 4),
    accepted_at=(6, 3, 0),
    verify_budget_sum=27,
    verify_budget_count=10,
    finished={"stop": 3, "length": 1},
    failed={"VerifierLost": 1},
    rejected={"Overloaded": 2},
    draft_s=0.5,
    plan_s=0.01,
    verify_s=2.0,
    apply_s=0.02,
    kv_blocks_used=5,
    kv_blocks_total=20,
    planner="auto",
    gate_state="partial",
    rounds_of_class={"code": 4, "": 6},
    round_tokens_of_class={"code": 11, "": 8},
    drift=(DriftRow("code", (8.0, 5.0), (6.0, 3.0), (7.5, 4.5), (6.2, 3.1)),),
    trim_off_reason="no curve",
    drafter_alive=True,
)


def page(stats=STATS, fill=lambda metrics: None) -> dict[str, dict[tuple, float]]:
    """Sample name -> sorted labels -> value, as Prometheus itself would read the page."""
    metrics = GatewayMetrics()
    metrics.model_name = "m"
    fill(metrics)
    samples: dict[str, dict[tuple, float]] = {}
    for family in text_string_to_metric_families(metrics.render({"0": stats}, {"0": 3}).decode()):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in samples.setdefault(sample.name, {}), f"{sample.name} twice"
            samples[sample.name][labels] = sample.value
    return samples


def one(samples, name, **labels) -> float:
    """Of group 0, where it is the group's."""
    wanted = {"model": "m", **labels}
    (number,) = [number for found, number in samples[name].items() if dict(found) in (wanted, wanted | {"group": "0"})]
    return number


def test_every_family_of_the_catalogue_is_on_the_page_and_no_other():
    metrics = GatewayMetrics()
    metrics.model_name = "m"
    metrics.request_ended("stop", 200, 1.0)
    metrics.failed("rejected", "engine_overloaded")
    names = re.findall(r"^# TYPE (\S+) ", metrics.render({"0": STATS}, {"0": 0}).decode(), re.MULTILINE)
    expected = [spec.name + ("_total" if spec.kind == "counter" else "") for spec in CATALOGUE]
    assert sorted(names) == sorted(expected) and len(set(names)) == len(names)


def test_names_follow_the_conventions():
    for spec in CATALOGUE:
        assert re.fullmatch(r"(dspark_|vllm:spec_decode_)[a-z_]+", spec.name), spec.name
        assert not spec.name.endswith("_total") or spec.kind == "gauge"
        assert spec.help and spec.help.endswith(".")
        assert "request_id" not in spec.labels


def test_every_counter_and_gauge_of_the_scheduler_reads_a_field_that_exists():
    for spec in (*SCHEDULER, *ALIASES):
        assert all(isinstance(number, int | float) for number in spec.read(STATS).values()), spec.name


def test_the_aliases_are_the_four_that_load_generators_read_and_agree_with_ours():
    samples = page()
    alias = {
        name: samples[name][(("engine", "0"), ("model_name", "m"))]
        for name in samples
        if name.startswith("vllm:") and "pos" not in name
    }
    assert alias == {
        "vllm:spec_decode_num_drafts_total": one(samples, "dspark_draft_rounds_total"),
        "vllm:spec_decode_num_draft_tokens_total": one(samples, "dspark_verify_tokens_total"),
        "vllm:spec_decode_num_accepted_tokens_total": one(samples, "dspark_accepted_tokens_total"),
    }
    by_position = samples["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert sum(by_position.values()) == 9 and len(by_position) == 3


def test_ratios_can_be_formed_from_the_counters():
    samples = page()
    assert one(samples, "dspark_round_tokens_total") / one(samples, "dspark_verify_rounds_total") == 1.9
    at = [one(samples, "dspark_accepted_tokens_per_pos_total", position=str(k)) for k in range(3)]
    assert sum(at) == one(samples, "dspark_accepted_tokens_total")
    seconds = sum(one(samples, "dspark_step_seconds_total", verb=v) for v in ("draft", "plan", "verify", "apply"))
    assert seconds == pytest.approx(2.53)


def test_the_budget_histogram_is_exact():
    samples = page()
    buckets = samples[f"{BUDGET.name}_bucket"]
    assert {dict(labels)["le"]: n for labels, n in buckets.items()} == {"1.0": 2, "2.0": 5, "3.0": 6, "+Inf": 10}
    assert one(samples, f"{BUDGET.name}_sum") == 27 and one(samples, f"{BUDGET.name}_count") == 10


def test_labels_tell_outcomes_reasons_and_errors_apart():
    samples = page()
    assert one(samples, "dspark_finished_requests_total", reason="length") == 1
    assert one(samples, "dspark_failed_requests_total", error="VerifierLost") == 1
    assert one(samples, "dspark_admission_rejections_total", reason="Overloaded") == 2
    assert one(samples, "dspark_kv_cache_usage_ratio") == 0.25
    assert one(samples, "dspark_planner_info", planner="auto") == 1
    assert one(samples, "dspark_draft_gate", state="partial") == 1
    assert one(samples, "dspark_trim_off", reason="no curve") == 1
    assert "dspark_trim_off" not in page(dataclasses.replace(STATS, trim_off_reason=""))


def test_confidences_and_accept_lengths_come_by_text_class():
    samples = page()
    assert one(samples, "dspark_class_verify_rounds_total", text_class="code") == 4
    assert one(samples, "dspark_class_round_tokens_total", text_class="unknown") == 8
    for name, expected in (("drafts", 8), ("accepted", 6), ("stated", 7.5), ("believed", 6.2)):
        assert one(samples, f"dspark_confidence_{name}_total", text_class="code", position="0") == expected
    assert one(samples, "dspark_confidence_accepted_total", text_class="code", position="1") == 3


def test_latencies_are_observed_once_each_and_sum_exactly():
    def fill(metrics):
        for seconds in (0.0012, 0.3, 4.0):
            metrics.time_per_output_token(seconds)
            metrics.first_token(seconds)
            metrics.request_ended("stop", 200, seconds)

    samples = page(fill=fill)
    for name in ("time_per_output_token", "time_to_first_token", "request_duration"):
        assert one(samples, f"dspark_{name}_seconds_sum") == pytest.approx(4.3012)
        assert one(samples, f"dspark_{name}_seconds_count") == 3
    assert one(samples, "dspark_time_per_output_token_seconds_bucket", le="0.002") == 1
    assert one(samples, "dspark_requests_total", outcome="stop", status="200") == 3


def test_without_a_scheduler_the_page_says_so_and_keeps_the_gateways_numbers():
    samples = page(stats=None, fill=lambda metrics: metrics.request_ended("failed", 503, 0.1))
    assert one(samples, "dspark_scheduler_up") == 0 and one(samples, "dspark_gateway_open_requests") == 3
    assert one(samples, "dspark_requests_total", outcome="failed", status="503") == 1
    assert "dspark_verify_rounds_total" not in samples
    assert one(page(), "dspark_scheduler_up") == 1


def test_each_engine_group_has_its_own_numbers_and_one_that_is_gone_has_none():
    metrics = GatewayMetrics()
    metrics.model_name = "m"
    other = dataclasses.replace(STATS, num_rounds=25)
    text = metrics.render({"0": STATS, "1": other, "2": None}, {"0": 3, "1": 0, "2": 1}).decode()
    found = {
        (sample.name, sample.labels.get("group")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    rounds = {group: found.get(("dspark_verify_rounds_total", group)) for group in ("0", "1", "2")}
    assert rounds == {"0": 10, "1": 25, "2": None}
    assert [found["dspark_scheduler_up", group] for group in ("0", "1", "2")] == [1, 1, 0]
    assert [found["dspark_gateway_open_requests", group] for group in ("0", "1", "2")] == [3, 0, 1]


def test_the_gateways_own_families_have_bounded_labels():
    assert {label for spec in GATEWAY for label in spec.labels} <= {"model", "outcome", "status", "code"}
