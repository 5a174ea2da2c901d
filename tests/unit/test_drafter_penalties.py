"""A drafter's logits under a request's penalties are those that the target's next row gets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drafter.penalties import AskedChanges
from scheduler.wire import DraftAsk, SamplingParams
from verifier.penalties import Judged, penalise

VOCAB = 12
HISTORY = np.array([1, 2, 2, 5, 7, 7, 7, 3], dtype=np.int32)
PLAIN = SamplingParams()
ASKED = SamplingParams(
    presence_penalty=0.5, frequency_penalty=-0.7, repetition_penalty=1.4, logit_bias=((0, 3.0), (7, -2.0), (11, 1.0))
)


def ask(params: SamplingParams) -> DraftAsk:
    return DraftAsk("r", 3, 7, np.zeros(1, np.int32), params, 5, HISTORY if params.needs_history else None)


@pytest.mark.parametrize("vocabulary", [None, [0, 2, 3, 7, 10], [1, 2, 3, 4, 5, 6, 7]])
@pytest.mark.parametrize("shape", [(3, VOCAB), (3, 4, VOCAB)])
def test_every_slot_gets_the_penalties_of_the_anchor(vocabulary: list[int] | None, shape: tuple[int, ...]) -> None:
    full = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    wanted = full.clone()
    rows = wanted[1].view(-1, VOCAB)
    for row in range(len(rows)):
        penalise(rows[row : row + 1], [Judged(ASKED, 0, np.zeros(0, np.int32), HISTORY, 5)])
    columns = list(range(VOCAB)) if vocabulary is None else vocabulary
    ids = None if vocabulary is None else torch.tensor(vocabulary)
    changes = AskedChanges([ask(PLAIN), ask(ASKED), ask(PLAIN)], ids, torch.device("cpu"))
    torch.testing.assert_close(changes.apply(full[..., columns].clone()), wanted[..., columns])


def test_penalties_without_the_context_are_a_fault() -> None:
    blind = DraftAsk("r", 3, 7, np.zeros(1, np.int32), SamplingParams(presence_penalty=1.0), 5)
    with pytest.raises(ValueError, match="penalties need the history"):
        AskedChanges([blind], None, torch.device("cpu"))
