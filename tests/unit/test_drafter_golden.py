"""The first round of every reference drafter (DeepSpec, float32, whole vocabulary), tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafter.backbone import BlockStart
from drafter.config import DrafterConfig
from drafter.propose import Proposal, choose_candidates, propose
from drafter.runner import DraftRunner
from scheduler.wire import DraftAsk, SamplingParams
from verifier.features import CommittedFeatures
from verifier.kv import slots_of
from verifier.sampling import SamplingTable

DRAFTERS = ["dspark_vanilla", "dspark_gated", "dspark_rnn", "dspark_noconfmarkov", "dflash"]
BLOCK_SIZE = 4
WIDTH = 7
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=DRAFTERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def values(name: str, golden: Path) -> dict[str, Tensor]:
    return load_file(golden / name / "first_round.safetensors")


@pytest.fixture
def runner(name: str, golden: Path) -> DraftRunner:
    return DraftRunner(
        DrafterConfig(
            checkpoint=str(golden / name),
            target=str(golden / "target"),
            dtype="float32",
            device="cpu",
            candidates=0,
            num_blocks=40,
            block_size=BLOCK_SIZE,
            num_threads=1,
        )
    )


def ask_of(values: dict[str, Tensor], prompt: str, first_block: int) -> DraftAsk:
    start = values[f"{prompt}.target_features"].shape[1]
    blocks = np.arange(first_block, first_block + -(-start // BLOCK_SIZE), dtype=np.int32)
    greedy = SamplingParams(temperature=0.0)
    return DraftAsk(prompt, int(values[f"{prompt}.anchor"]), start, blocks[::-1].copy(), greedy, output_index=1)


def rows_of(values: dict[str, Tensor], ask: DraftAsk, first: int, stop: int) -> CommittedFeatures:
    return CommittedFeatures(
        features=values[f"{ask.request_id}.target_features"][0, first:stop],
        slots=torch.from_numpy(slots_of(ask.block_ids, first, stop, BLOCK_SIZE)),
        positions=torch.arange(first, stop),
    )


def first_round(runner: DraftRunner, asks: list[DraftAsk]) -> tuple[Tensor, Tensor, Proposal]:
    """Block hidden states, base logits and the proposal of requests whose context is absorbed."""
    with torch.inference_mode():
        hidden = runner.backbone.forward([BlockStart(a.anchor_id, a.start, a.block_ids) for a in asks], WIDTH)
        base = runner.lm_head(hidden.flatten(0, 1)).view(len(asks), WIDTH, -1)
        proposal = propose(
            hidden=hidden,
            candidates=choose_candidates(base, runner.vocabulary, 0),
            anchor_ids=torch.tensor([a.anchor_id for a in asks]),
            markov=runner.markov,
            confidence=runner.confidence,
            table=SamplingTable.build([a.params for a in asks], "cpu"),
            output_positions=torch.ones(len(asks), WIDTH, dtype=torch.int64),
            generator=None,
        )
    return hidden, base, proposal


def assert_golden(values: dict[str, Tensor], asks: list[DraftAsk], outcome: tuple[Tensor, Tensor, Proposal]) -> None:
    hidden, base, proposal = outcome
    ours = {"block_hidden": hidden, "base_logits": base, "draft_logits": torch.stack(proposal.logits, dim=1)}
    if proposal.confidence_logits is not None:
        ours["confidence_logits"] = proposal.confidence_logits
    for row, ask in enumerate(asks):
        for field, tensor in ours.items():
            expected = values[f"{ask.request_id}.{field}"][0]
            torch.testing.assert_close(tensor[row], expected, atol=TOLERANCE, rtol=0, msg=f"{ask.request_id} {field}")
        assert proposal.token_ids[row].tolist() == values[f"{ask.request_id}.draft_tokens"][0].tolist()
    assert (proposal.confidence_logits is None) == ("p0.confidence_logits" not in values)


def test_each_prompt_alone_gives_the_reference_tensors(runner: DraftRunner, values: dict[str, Tensor]) -> None:
    for prompt in ("p0", "p1", "p2", "p3"):
        ask = ask_of(values, prompt, first_block=1)
        runner.backbone.absorb([rows_of(values, ask, 0, ask.start)])
        assert_golden(values, [ask], first_round(runner, [ask]))


def test_prompts_of_different_lengths_in_one_batch_give_the_reference_tensors(
    runner: DraftRunner, values: dict[str, Tensor]
) -> None:
    asks = [ask_of(values, p, first_block=1 + 10 * i) for i, p in enumerate(("p2", "p0", "p3"))]
    for ask in asks:
        runner.backbone.absorb([rows_of(values, ask, 0, ask.start)])
    assert_golden(values, asks, first_round(runner, asks))


def test_context_that_arrives_in_chunks_gives_the_reference_tensors(
    runner: DraftRunner, values: dict[str, Tensor]
) -> None:
    asks = [ask_of(values, p, first_block=1 + 10 * i) for i, p in enumerate(("p3", "p1"))]
    for ask in asks:
        for first in range(0, ask.start, 7):
            runner.backbone.absorb([rows_of(values, ask, first, min(first + 7, ask.start))])
    assert_golden(values, asks, first_round(runner, asks))


def test_propose_returns_the_reference_tokens_and_confidence(runner: DraftRunner, values: dict[str, Tensor]) -> None:
    asks = [ask_of(values, p, first_block=1 + 10 * i) for i, p in enumerate(("p1", "p2", "p3"))]
    drafts = runner.propose(asks, WIDTH, [rows_of(values, a, 0, a.start) for a in asks])
    for ask, draft in zip(asks, drafts, strict=True):
        assert draft.request_id == ask.request_id
        assert draft.token_ids.tolist() == values[f"{ask.request_id}.draft_tokens"][0].tolist()
        assert draft.q_ids is None
        assert draft.q_probs is None
        if draft.confidence is not None:
            expected = values[f"{ask.request_id}.confidence_logits"][0].sigmoid().numpy()
            np.testing.assert_allclose(draft.confidence, expected, atol=TOLERANCE)
