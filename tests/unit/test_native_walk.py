"""The greedy walk in one native call against the walk of torch operators, bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from drafter.checkpoint import Checkpoint, load_checkpoint
from drafter.heads import MarkovHead, build_heads
from drafter.native_walk import GreedyWalk
from drafter.propose import Proposal, choose_candidates, propose
from scheduler.wire import SamplingParams
from verifier import native
from verifier.sampling import SamplingTable

pytestmark = pytest.mark.skipif(native.load() is None, reason="no compiler, or no AVX512-BF16")

TARGET_IDS = 5000


def with_vocabulary(golden: Path, num_columns: int, *, reduced: bool, full_w1: bool) -> Checkpoint:
    """The golden vanilla head with random weights over so many columns. full_w1: W1 has a row for each target id, else one for
    each column and one for all other ids."""
    checkpoint = load_checkpoint(golden / "dspark_vanilla", golden / "target", torch.bfloat16, torch.device("cpu"))
    generator = torch.Generator().manual_seed(num_columns)
    num_ids = TARGET_IDS if reduced else num_columns
    vocabulary = torch.randperm(num_ids, generator=generator)[:num_columns].sort().values if reduced else None
    rank = checkpoint.arch.markov_rank
    num_rows = num_ids if full_w1 or not reduced else num_columns + 1
    tensors = dict(checkpoint.tensors)
    for name, rows in (("w1", num_rows), ("w2", num_columns)):
        weight = torch.randn(rows, rank, generator=generator)
        tensors[f"markov_head.markov_{name}.weight"] = weight.to(torch.bfloat16)
    decoder = dataclasses.replace(checkpoint.arch.decoder, vocab_size=num_ids)
    arch = dataclasses.replace(checkpoint.arch, decoder=decoder)
    return dataclasses.replace(checkpoint, tensors=tensors, draft_vocab_ids=vocabulary, arch=arch)


def by_torch(checkpoint: Checkpoint, hidden: torch.Tensor, base: torch.Tensor, anchors: torch.Tensor) -> Proposal:
    markov, confidence = build_heads(checkpoint)
    table = SamplingTable.build([SamplingParams(temperature=0.0)] * len(base), torch.device("cpu"))
    return propose(
        hidden=hidden, candidates=choose_candidates(base, checkpoint.draft_vocab_ids, 0), anchor_ids=anchors, markov=markov,
        confidence=confidence, table=table, output_positions=torch.zeros(base.shape[:2], dtype=torch.int64), generator=None,
    )  # fmt: skip


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize(("reduced", "full_w1"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize(
    ("num_columns", "num_requests", "num_slots"), [(1000, 1, 7), (997, 30, 3), (33, 13, 1), (6, 12, 7)]
)
def test_tokens_and_confidences_are_those_of_the_torch_walk(
    golden: Path, num_columns: int, num_requests: int, num_slots: int, reduced: bool, full_w1: bool, num_threads: int
) -> None:
    checkpoint = with_vocabulary(golden, num_columns, reduced=reduced, full_w1=full_w1)
    markov, confidence = build_heads(checkpoint)
    assert markov is not None and confidence is not None and GreedyWalk.usable(markov)
    generator = torch.Generator().manual_seed(num_requests)
    hidden = torch.randn(num_requests, num_slots, 64, generator=generator).to(torch.bfloat16)
    # coarse, so that many columns tie and the lowest must win
    base = torch.randn(num_requests, num_slots, num_columns, generator=generator).mul_(4).round_().to(torch.bfloat16)
    anchors = torch.randint(TARGET_IDS if reduced else num_columns, (num_requests,), generator=generator)
    expected = by_torch(checkpoint, hidden, base, anchors)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        tokens, embeddings = GreedyWalk(markov, checkpoint.draft_vocab_ids)(base, anchors)
    finally:
        torch.set_num_threads(threads_before)
    assert torch.equal(tokens, expected.token_ids)
    assert expected.confidence_logits is not None
    assert torch.equal(confidence.logits(hidden, embeddings), expected.confidence_logits)


def test_ties_go_to_the_lowest_token_across_threads(golden: Path) -> None:
    checkpoint = with_vocabulary(golden, 640, reduced=True, full_w1=False)
    checkpoint.tensors["markov_head.markov_w2.weight"].zero_()
    walk = GreedyWalk(MarkovHead(checkpoint), checkpoint.draft_vocab_ids)
    base = torch.zeros(2, 1, 640, dtype=torch.bfloat16)
    base[1, 0, 300:] = 1.0
    tokens, _ = walk(base, torch.tensor([0, 1]))
    assert checkpoint.draft_vocab_ids is not None
    assert tokens[:, 0].tolist() == checkpoint.draft_vocab_ids[[0, 300]].tolist()


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_logits_that_are_no_numbers_still_give_tokens_of_the_vocabulary(golden: Path, bad: float) -> None:
    checkpoint = with_vocabulary(golden, 100, reduced=True, full_w1=False)
    walk = GreedyWalk(MarkovHead(checkpoint), checkpoint.draft_vocab_ids)
    tokens, _ = walk(torch.full((3, 4, 100), bad, dtype=torch.bfloat16), torch.tensor([1, 2, 3]))
    assert checkpoint.draft_vocab_ids is not None
    assert torch.isin(tokens, checkpoint.draft_vocab_ids).all()


@pytest.mark.parametrize("name", ["dspark_gated", "dspark_rnn"])
def test_heads_whose_cell_reads_the_hidden_state_are_left_to_torch(golden: Path, name: str) -> None:
    checkpoint = load_checkpoint(golden / name, golden / "target", torch.bfloat16, torch.device("cpu"))
    markov, _ = build_heads(checkpoint)
    assert markov is not None and not GreedyWalk.usable(markov)
