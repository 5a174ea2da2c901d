"""The walk from base logits to tokens: it draws from exactly the law it reports, and confidence never looks ahead."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from drafter.checkpoint import load_checkpoint
from drafter.heads import build_heads
from drafter.propose import Candidates, Proposal, choose_candidates, largest, propose
from scheduler.wire import SamplingParams
from verifier.sampling import SamplingTable, seeded_pick

HEADS = ["dspark_vanilla", "dspark_gated", "dspark_rnn"]


@pytest.fixture(autouse=True)
def large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats the small vocabularies here as one too large to be scored whole, where candidates are chosen beforehand."""
    monkeypatch.setattr("drafter.propose.SCORED_WHOLE", 0)


@pytest.mark.parametrize(("width", "count"), [(8192, 64), (1000, 7), (130, 8), (48, 64), (16, 16), (49152, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_largest_is_topk(width: int, count: int, dtype: torch.dtype) -> None:
    rows = torch.randn(5, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    count = min(count, width)
    values, columns = largest(rows, count)
    assert torch.equal(rows.gather(1, columns).float(), values)
    assert all(len(set(row)) == count for row in columns.tolist())
    expected = rows.float().topk(count).values
    assert torch.equal(values.sort(descending=True).values, expected)


def test_candidates_of_a_reduced_vocabulary_are_named_by_target_ids() -> None:
    base, vocabulary = torch.randn(2, 3, 40), torch.arange(40) * 5 + 2
    some = choose_candidates(base, vocabulary, 4)
    assert some.columns is not None
    assert some.token_ids is not None
    assert torch.equal(some.token_ids, some.columns * 5 + 2)
    every = choose_candidates(base, vocabulary, 40)
    assert every.columns is None
    assert every.token_ids is not None
    assert torch.equal(every.token_ids[1, 2], vocabulary)


def walk(name: str, golden: Path, num_requests: int, params: SamplingParams, count: int, seed: int = 0) -> Proposal:
    """The same random block hidden states in every request, so that rows differ by what was drawn alone."""
    checkpoint = load_checkpoint(golden / name, golden / "target", torch.float32, torch.device("cpu"))
    markov, confidence = build_heads(checkpoint)
    hidden = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(seed)).expand(num_requests, -1, -1)
    base = hidden @ checkpoint.tensors["lm_head.weight"].T * 0.5
    return propose(
        hidden=hidden,
        candidates=choose_candidates(base, None, count),
        anchor_ids=torch.full((num_requests,), 7),
        markov=markov,
        confidence=confidence,
        table=SamplingTable.build([params] * num_requests, "cpu"),
        output_positions=torch.arange(3).expand(num_requests, -1),
        generator=torch.Generator().manual_seed(seed),
    )


@pytest.mark.parametrize("name", HEADS)
def test_tokens_are_drawn_from_the_law_that_is_reported(name: str, golden: Path) -> None:
    proposal = walk(name, golden, 20_000, SamplingParams(temperature=1.2, top_p=0.95), count=6)
    assert proposal.q_ids is not None
    assert proposal.q_probs is not None
    assert proposal.q_probs.shape == (20_000, 3, 6)
    for slot in range(3):
        # requests that drew the same tokens before share the law of this slot
        prefix = torch.zeros(20_000, dtype=torch.int64)
        for earlier in range(slot):
            prefix = prefix * 48 + proposal.token_ids[:, earlier]
        common = prefix.mode().values
        rows = (prefix == common).nonzero()[:, 0]
        law = proposal.q_probs[rows[0], slot].double()
        torch.testing.assert_close(proposal.q_probs[rows, slot].double(), law.expand(len(rows), -1))
        drawn = proposal.token_ids[rows, slot, None] == proposal.q_ids[rows[0], slot]
        assert bool(drawn.any(dim=1).all())
        possible = law > 0
        expected = (law[possible] / law.sum() * len(rows)).numpy()
        assert chisquare(drawn.sum(0)[possible].numpy(), expected).pvalue > 1e-4
        assert not bool(drawn[:, ~possible].any())


@pytest.mark.parametrize("name", [*HEADS, "dspark_noconfmarkov"])
def test_confidence_of_a_slot_is_the_same_whatever_is_drawn_there(name: str, golden: Path) -> None:
    proposal = walk(name, golden, 300, SamplingParams(temperature=1.5), count=0)
    assert proposal.confidence_logits is not None
    assert len(set(proposal.token_ids[:, 0].tolist())) > 3
    torch.testing.assert_close(proposal.confidence_logits[:, 0], proposal.confidence_logits[:1, 0].expand(300))
    seen: dict[int, float] = {}
    for token, logit in zip(proposal.token_ids[:, 0].tolist(), proposal.confidence_logits[:, 1].tolist(), strict=True):
        assert seen.setdefault(token, logit) == pytest.approx(logit, abs=1e-5)
    spread = np.ptp(list(seen.values()))
    assert (spread > 1e-3) == (name != "dspark_noconfmarkov")


def test_greedy_and_seeded_requests_report_no_law(golden: Path) -> None:
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=3)):
        proposal = walk("dspark_vanilla", golden, 2, params, count=5)
        assert proposal.q_ids is None
        assert proposal.q_probs is None


def test_a_seeded_draft_is_the_targets_own_token_where_the_logits_agree() -> None:
    logits = torch.randn(30, 2, 48, generator=torch.Generator().manual_seed(1)) * 2
    table = SamplingTable.build([SamplingParams(temperature=0.9, seed=i) for i in range(30)], "cpu")
    positions = torch.arange(60).view(30, 2)
    proposal = propose(
        hidden=torch.zeros(30, 2, 1),
        candidates=Candidates(logits, None, None),
        anchor_ids=torch.zeros(30, dtype=torch.int64),
        markov=None,
        confidence=None,
        table=table,
        output_positions=positions,
        generator=None,
    )
    for slot in range(2):
        expected = seeded_pick(logits[:, slot], table, positions[:, slot])
        assert proposal.token_ids[:, slot].tolist() == expected.tolist()
