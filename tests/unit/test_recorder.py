"""The recorder on both ports: which rounds it notes, and that planners see calibrated confidence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from drafter.calibration import UNCALIBRATED, Calibration, Scaling, sigmoid
from scheduler.wire import Draft, DraftAsk, DrafterInfo, Extension, Plan, SamplingParams, Verdict, VerifierInfo
from services.evaluation.recorder import RecordedDrafter, RecordedVerifier, Recorder

PARAMS = SamplingParams(temperature=0.0, max_tokens=20)
NO_BLOCKS = np.zeros(0, dtype=np.int32)
LOGITS = np.array([1.0, -0.5], dtype=np.float32)


def ask(name: str) -> DraftAsk:
    return DraftAsk(name, 0, 0, NO_BLOCKS, PARAMS, output_index=1)


def extension(name: str, num_draft: int, *, output_index: int = 1, samples: bool = True) -> Extension:
    tokens = np.arange(1 + num_draft, dtype=np.int32)
    return Extension(name, 0, tokens, num_draft, samples, NO_BLOCKS, PARAMS, output_index)


class FixedDrafter:
    async def describe(self) -> DrafterInfo:
        return DrafterInfo("fixed", 2, False, True, 100, (), "f")

    async def propose(self, asks: Sequence[DraftAsk], width: int, features) -> list[Draft]:
        return [Draft(each.request_id, np.array([7, 8], dtype=np.int32), sigmoid(LOGITS)) for each in asks]

    async def measure(self, num_requests, widths):
        return [[0.25]]


class FixedVerifier:
    async def describe(self) -> VerifierInfo:
        return VerifierInfo(4, 16, 100, 64, (), "cpu", "float32", "f", 1)

    async def verify(self, plan: Plan):
        return [
            Verdict(e.request_id, e.num_draft, (*range(7, 7 + e.num_draft), 50)) for e in plan.extensions
        ], "features"

    async def measure(self, num_tokens, context_lens, rows_per_request=8):
        return [[0.5]]


async def run(recorder: Recorder, plan: Plan) -> list[Draft]:
    drafter, verifier = RecordedDrafter(FixedDrafter(), recorder), RecordedVerifier(FixedVerifier(), recorder)
    drafts = await drafter.propose([ask("a")], 2, [])
    verdicts, features = await verifier.verify(plan)
    assert features == "features" and len(verdicts) == len(plan.extensions)
    return drafts


async def test_a_round_is_noted_with_its_raw_logits_and_planned_with_calibrated_confidence():
    recorder = Recorder(Calibration({"greedy": Scaling((2.0, 2.0), (1.0, 0.0))}), width=2)
    (draft,) = await run(recorder, Plan(1, (extension("a", 1),)))
    np.testing.assert_allclose(draft.confidence, sigmoid(np.float32([1.5, -0.25])), rtol=1e-6)
    (noted,) = recorder.rounds["a"]
    np.testing.assert_allclose(noted.logits, LOGITS, atol=1e-5)
    assert (noted.num_drafted, noted.num_verified, noted.token_ids) == (2, 1, (7, 50))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(extension("a", 0, output_index=0), id="the first token of an answer"),
        pytest.param(extension("a", 0, samples=False), id="a chunk of the prompt"),
        pytest.param(extension("a", 1, output_index=18), id="a round that max_tokens cuts short"),
    ],
)
async def test_what_is_no_whole_round_is_not_noted(other):
    recorder = Recorder(UNCALIBRATED, width=2)
    await run(recorder, Plan(1, (other, extension("b", 2, output_index=17))))
    assert recorder.rounds["a"] == [] and len(recorder.rounds["b"]) == 1


async def test_a_round_without_a_draft_is_noted_as_one():
    recorder = Recorder(UNCALIBRATED, width=2)
    await run(recorder, Plan(1, (extension("b", 0),)))
    (noted,) = recorder.rounds["b"]
    assert noted.logits is None and noted.num_verified == 0 and noted.token_ids == (50,)


async def test_the_ports_pass_everything_else_on():
    recorder = Recorder(UNCALIBRATED, width=2)
    drafter, verifier = RecordedDrafter(FixedDrafter(), recorder), RecordedVerifier(FixedVerifier(), recorder)
    assert (await drafter.describe()).width == 2 and await drafter.measure([1], [2]) == [[0.25]]
    assert (await verifier.describe()).vocab_size == 64 and await verifier.measure([1], [0]) == [[0.5]]
