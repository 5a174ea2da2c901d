"""Over a small draft vocabulary every token is scored, and the law keeps the best of the corrected logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafter.checkpoint import load_checkpoint
from drafter.heads import build_heads
from drafter.propose import choose_candidates, propose
from scheduler.wire import SamplingParams
from verifier.sampling import SamplingTable


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_that_only_the_markov_bias_lifts_is_proposed(golden: Path, temperature: float) -> None:
    checkpoint = load_checkpoint(golden / "dspark_vanilla", golden / "target", torch.float32, torch.device("cpu"))
    markov, confidence = build_heads(checkpoint)
    assert markov is not None
    hidden = torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(0))
    anchors = torch.tensor([1, 2, 3])
    mixed, _ = markov.cell.step(markov.embed(anchors), None, None)
    bias = markov.bias(mixed, None)
    # base logits that are lowest exactly where the bias is highest, and much smaller than it
    base = -1e-3 * bias.argsort(-1).argsort(-1).float().unsqueeze(1)
    table = SamplingTable.build([SamplingParams(temperature=temperature)] * 3, torch.device("cpu"))
    proposal = propose(
        hidden=hidden, candidates=choose_candidates(base, None, 4), keep=4, anchor_ids=anchors, markov=markov,
        confidence=confidence, table=table, output_positions=torch.zeros(3, 1, dtype=torch.int64),
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    best = (base[:, 0] + bias).topk(4)
    if temperature == 0.0:
        assert torch.equal(proposal.token_ids[:, 0], best.indices[:, 0])
        return
    assert proposal.q_ids is not None and proposal.q_probs is not None
    assert proposal.q_ids.shape == (3, 1, 4)
    order = proposal.q_ids[:, 0].argsort(-1)
    expected = best.indices.argsort(-1)
    assert torch.equal(proposal.q_ids[:, 0].gather(1, order), best.indices.gather(1, expected))
    law = torch.softmax(best.values, -1).gather(1, expected)
    torch.testing.assert_close(proposal.q_probs[:, 0].gather(1, order), law)
