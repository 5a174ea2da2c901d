"""Alerts fire in a real Prometheus because of what happens in running servers, and not for the server that is well.

The rules are the shipped ones with a shorter minute. Those of a lost worker are caused on Ray, in test_deployed.py.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from scheduler.errors import InternalFault
from scheduler.ports import ROWS_PER_REQUEST
from services.engine import Workers
from services.operations.alerts import ALERTS, rules
from services.settings import Settings
from services.workers import launch_colocated, model_card, start_drafter
from tests.integration.character_tokenizer import save_tokenizer
from tests.mixed_traffic import asking
from tests.running_prometheus import RunningPrometheus, needs_prometheus, until
from tests.running_server import RunningServer, small_settings
from verifier.actor import VerifierWorker

pytestmark = needs_prometheus
MINUTE_S = 0.4
# (alert, job)
FIRST = {
    ("DsparkAcceptLengthCollapsed", "wrong drafter"),
    ("DsparkCalibrationDrifts", "wrong drafter"),
    ("DsparkQueueGrows", "full queue"),
    ("DsparkRefusesRequests", "full queue"),
    ("DsparkCostCurveMissing", "no curve"),
}
# Its engine is stopped, then all servers.
THEN = {("DsparkSchedulerDown", "no curve"), ("DsparkErrors", "no curve")}
AT_LAST = {("DsparkAbsent", "")}
CAUSED_ON_RAY = {"DsparkWorkerLost", "DsparkVerifierDown"}
# The cause cannot be had in a test's time; promtool plays it (tests/data/alerts.yaml).
PLAYED_ONLY = {
    "DsparkSlowFirstToken": "first tokens of ten seconds and more",
    "DsparkNotReady": "a scheduler that is away for half an hour",
    "DsparkStalled": "a minute without a step",
    "DsparkCostCurveStale": "a machine that changes its speed",
    "DsparkDrafterDown": "a drafter that stays away though it is started again",
    "DsparkKvExhausted": "a cache that is full at every scrape, between one request's end and the next one's beginning too",
}
# True for the server that is well too: two where the machine is busy with something else, one because nobody calibrated the
# golden drafter.
MAY_FIRE = {"DsparkCostCurveStale", "DsparkSlowFirstToken", "DsparkCalibrationDrifts"}


class UntimedVerifier(VerifierWorker):
    """Computes as ever and cannot be timed, as on a device that is shared."""

    async def measure(
        self, num_tokens: Sequence[int], context_lens: Sequence[int], rows_per_request: int = ROWS_PER_REQUEST
    ) -> list[list[float]]:
        raise InternalFault("steps on this device cannot be timed")


async def launch_untimed(settings: Settings) -> Workers:
    executor = ThreadPoolExecutor(1)
    verifier = UntimedVerifier(settings.verifier_config(()), executor)
    await verifier.start()
    info = await verifier.describe()
    drafter = await start_drafter(settings, info, executor)
    assert drafter is not None

    async def stop() -> None:
        await drafter.stop()
        await verifier.stop()
        executor.shutdown(wait=False)

    return Workers(verifier, drafter, await model_card(settings, info, await drafter.describe()), stop)


@pytest.fixture
def start(golden: Path, tmp_path: Path) -> Callable[..., RunningServer]:
    """start(of_another_target, launch=..., drafter=..., section=...): a server with the golden drafter, not yet entered."""

    def make(
        *, other: bool = False, launch: Any = launch_colocated, drafter: str = "", **sections: Any
    ) -> RunningServer:
        folder = tmp_path / f"target-{other}"
        if not folder.exists():
            shutil.copytree(golden / "target", folder)
            save_tokenizer(folder, json.loads((folder / "config.json").read_text())["vocab_size"])
            if other:
                _write_other_weights(folder)
        checkpoint = drafter or str(golden / "dspark_vanilla")
        settings = small_settings(folder, checkpoint, tmp_path / "cache", model={"name": "m"}, **sections)
        return RunningServer(settings, launch)

    return make


def _write_other_weights(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(11)
    config = AutoConfig.from_pretrained(folder, initializer_range=0.4)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def completes(max_tokens: int) -> Callable[[httpx.Client], int]:
    """The golden drafter is always right about this prompt's continuation by the golden target."""
    body = {"model": "m", "prompt": [27], "max_tokens": max_tokens, "temperature": 0}
    return lambda http: http.post("/v1/completions", json=body).status_code


def test_each_cause_fires_its_alerts_and_a_server_that_is_well_fires_none(start, tmp_path):
    drafting = {"planner": "fixed:3"}
    servers = {
        "well": start(scheduler=drafting),
        "wrong drafter": start(other=True, scheduler=drafting),
        "full queue": start(scheduler={"planner": "off", "max_live": 1, "max_waiting": 10}),
        "no curve": start(scheduler={"planner": "auto"}, launch=launch_untimed, drafter="ngram"),
    }
    load = {"well": (24, 1, 0.2), "wrong drafter": (24, 1, 0.2), "full queue": (60, 13, 0.0), "no curve": (4, 1, 0.2)}
    seen: set[tuple[str, str]] = set()
    with contextlib.ExitStack() as running, contextlib.ExitStack() as clients:
        targets = {job: f"127.0.0.1:{running.enter_context(server).port}" for job, server in servers.items()}
        folder = tmp_path / "prometheus"
        with RunningPrometheus(folder, targets, rules(MINUTE_S), "500ms") as prometheus:

            def fired(wanted: set[tuple[str, str]]) -> bool:
                seen.update(prometheus.firing())
                return wanted <= seen

            def await_alerts(wanted: set[tuple[str, str]]) -> None:
                until(lambda: fired(wanted), what=lambda: wanted - seen)

            for job, (max_tokens, at_once, pause_s) in load.items():
                clients.enter_context(asking(f"http://{targets[job]}", completes(max_tokens), at_once, pause_s))
            await_alerts(FIRST)
            lost = servers["no curve"]
            lost.ask(lost.engine.stop())
            await_alerts(THEN)
            clients.close()
            running.close()
            await_alerts(AT_LAST)
    assert {alert for alert, job in seen if job == "well"} <= MAY_FIRE


def test_every_alert_is_caused_somewhere_or_has_a_reason_why_not():
    names = [{alert for alert, _ in FIRST | THEN | AT_LAST}, CAUSED_ON_RAY, set(PLAYED_ONLY)]
    assert sorted(name for each in names for name in each) == sorted(alert.name for alert in ALERTS)
