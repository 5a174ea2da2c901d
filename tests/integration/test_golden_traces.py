"""The reference implementation's greedy traces, token for token and round for round, through the real engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from drafter.actor import DrafterWorker
from drafter.checkpoint import read_layer_ids
from drafter.config import DrafterConfig
from scheduler.actor import SchedulerActor
from scheduler.config import SchedulerConfig
from scheduler.wire import Request, SamplingParams
from verifier.actor import VerifierWorker
from verifier.config import VerifierConfig

# Drafts are clipped at a request's last tokens; the reference does not clip, so ours may go on past what is compared.
SPARE_TOKENS = 16
NUM_TOKENS = 48


@dataclass
class Trace:
    token_ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)


async def run_together(target: Path, checkpoint: Path, planner: str, prompts: Sequence[Sequence[int]]) -> list[Trace]:
    """All prompts live at once through scheduler, drafter and verifier in float32."""
    verifier = VerifierWorker(
        VerifierConfig(
            str(target), dtype="float32", device="cpu", capture_layers=read_layer_ids(str(checkpoint)), num_threads=1
        )
    )
    await verifier.start()
    info = await verifier.describe()
    drafter = DrafterWorker(
        DrafterConfig(
            str(checkpoint),
            str(target),
            dtype="float32",
            device="cpu",
            candidates=0,
            num_blocks=info.num_blocks,
            num_threads=1,
        )
    )
    await drafter.start()
    actor = SchedulerActor(SchedulerConfig(planner=planner, check_integrity=True), verifier, drafter)
    await actor.start()
    traces = {str(i): Trace() for i in range(len(prompts))}
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS + SPARE_TOKENS)
    stream = actor.subscribe("test")
    for name, prompt in zip(traces, prompts, strict=True):
        await actor.submit(Request(name, tuple(prompt), params, subscriber="test"))
    running = set(traces)
    async for deltas in stream:
        for delta in deltas:
            trace = traces[delta.request_id]
            trace.token_ids += delta.token_ids
            if delta.is_round:
                trace.accepted.append(delta.num_accepted)
                trace.proposed.append(delta.num_verified)
            if delta.finish_reason:
                running.discard(delta.request_id)
        if not running:
            break
    await actor.stop()
    await drafter.stop()
    await verifier.stop()
    return list(traces.values())


@pytest.mark.parametrize(
    "name", ["dspark_vanilla", "dspark_gated", "dspark_rnn", "dspark_noconfmarkov", "dflash", "eagle3"]
)
async def test_engine_reproduces_the_reference_traces(golden: Path, name: str) -> None:
    recorded = json.loads((golden / name / "greedy_traces.json").read_text())
    thresholds = sorted({t.get("confidence_threshold", 0) for t in recorded})
    for threshold in thresholds:
        expected = [t for t in recorded if t.get("confidence_threshold", 0) == threshold]
        planner = f"threshold:{threshold}" if threshold else "fixed:7"
        traces = await run_together(golden / "target", golden / name, planner, [t["prompt"] for t in expected])
        for trace, want in zip(traces, expected, strict=True):
            assert trace.token_ids[:NUM_TOKENS] == want["output_ids"][len(want["prompt"]) :]
            rounds = len(want["accepted_draft_lengths"]) - 1
            assert trace.accepted[:rounds] == want["accepted_draft_lengths"][:rounds]
            assert trace.proposed[:rounds] == want["proposal_lengths"][:rounds]
