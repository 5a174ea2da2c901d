"""Prompt lookup against a slow search, and as a drafter."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.actor import DrafterWorker
from drafter.config import DrafterConfig
from drafter.ngram import LONGEST_MATCH, lookup
from scheduler.wire import DraftAsk, SamplingParams


def slow_lookup(tokens: list[int], width: int) -> list[int]:
    for length in range(min(LONGEST_MATCH, len(tokens) - 1), 0, -1):
        for begin in range(len(tokens) - length - 1, -1, -1):
            if tokens[begin : begin + length] == tokens[-length:]:
                grown = list(tokens)
                for j in range(width):
                    grown.append(grown[begin + length + j])
                return grown[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 3), min_size=0, max_size=40), st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_lookup_equals_the_slow_search(tokens: list[int], width: int) -> None:
    assert lookup(np.array(tokens, dtype=np.int32), width).tolist() == slow_lookup(tokens, width)


def test_the_most_recent_of_the_longest_matches_is_continued() -> None:
    tokens = np.array([1, 2, 3, 9, 8, 2, 3, 7, 7, 1, 2, 3], dtype=np.int32)
    assert lookup(tokens, 3).tolist() == [9, 8, 2]


def test_a_repetition_is_continued_beyond_the_end_of_the_tokens() -> None:
    assert lookup(np.array([5, 6, 7, 6, 7], dtype=np.int32), 5).tolist() == [6, 7, 6, 7, 6]


def ask(tokens: list[int] | None) -> DraftAsk:
    return DraftAsk(
        "r",
        anchor_id=7,
        start=4,
        block_ids=np.ones(1, dtype=np.int32),
        params=SamplingParams(),
        output_index=0,
        context_ids=None if tokens is None else np.array(tokens, dtype=np.int32),
    )


@pytest.fixture
async def worker() -> DrafterWorker:
    worker = DrafterWorker(DrafterConfig("ngram", target="", max_width=4))
    await worker.start()
    return worker


async def test_the_worker_needs_tokens_and_no_features(worker: DrafterWorker) -> None:
    info = await worker.describe()
    assert (info.kind, info.width, info.needs_tokens, info.target_layer_ids) == ("ngram", 4, True, ())
    assert info.variable_width
    assert not info.has_confidence
    await worker.stop()


async def test_drafts_are_certain_and_no_match_drafts_nothing(worker: DrafterWorker) -> None:
    found, nothing = await worker.propose([ask([6, 7, 8, 6, 7]), ask([1, 2, 3, 4, 5])], 3, [])
    assert found.token_ids.tolist() == [8, 6, 7]
    assert found.token_ids.dtype == np.int32
    assert found.q_ids is None
    assert found.confidence is None
    assert nothing.token_ids.tolist() == []
    await worker.stop()


async def test_its_cost_is_measured_by_real_calls(worker: DrafterWorker) -> None:
    seconds = await worker.measure([1, 8], [1, 4])
    assert np.shape(seconds) == (2, 2)
    assert np.min(seconds) > 0
    await worker.stop()
