"""Logprobs of emitted tokens: the log-softmax, and the same whoever else is in the batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from verifier.logprobs import token_logprobs


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_gets_the_same_alone_and_beside_others_that_ask_for_more(dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(32, 49152)).to(dtype)
    rows, tokens = list(range(32)), torch.randint(49152, (32,)).tolist()
    wanted = [row % 6 for row in rows]
    together = token_logprobs(logits, rows, tokens, wanted)
    crowded = token_logprobs(logits, [*rows, 0], [*tokens, 0], [*wanted, 20])[:-1]
    alone = [token_logprobs(logits[row : row + 1], [0], [tokens[row]], [wanted[row]])[0] for row in rows]
    assert together == crowded == alone


def test_a_token_among_the_most_probable_has_the_same_logprob_there() -> None:
    logits = torch.randn(64, 1000)
    for found in token_logprobs(logits, range(64), logits.argmax(-1).tolist(), [2] * 64):
        assert found.logprob == found.top[0][1]


def test_they_are_the_log_softmax_and_of_equal_tokens_the_lowest_ids_come_first() -> None:
    logits = torch.randn(5, 640).to(torch.bfloat16)
    logits[:, 7] = logits[:, 600] = logits[:, 300] = logits.max() + 1
    law = logits.double().log_softmax(-1)
    for row, found in enumerate(token_logprobs(logits, range(5), [11] * 5, [0, 1, 2, 5, 1000])):
        assert found.logprob == pytest.approx(float(law[row, 11]), abs=1e-5)
        order = sorted(range(640), key=lambda column: (-float(logits[row, column]), column))
        ids = [token for token, _ in found.top]
        assert ids == order[: (0, 1, 2, 5, 640)[row]]
        assert [value for _, value in found.top] == pytest.approx([float(law[row, token]) for token in ids], abs=1e-5)


def test_a_law_without_differences_names_as_many_as_were_asked_for() -> None:
    (found,) = token_logprobs(torch.zeros(1, 1000), [0], [3], [4])
    assert [token for token, _ in found.top] == [0, 1, 2, 3]
