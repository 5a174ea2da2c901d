"""The losses against a slow numpy twin, and their hand-written gradients against autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from drafter.train.loss import LossConfig, Slots, confidence_loss, slot_weights, target_laws, vocabulary_loss

NUM_SLOTS, NUM_LAWS, NUM_TOKENS, WIDTH, RANK = 700, 90, 23, 12, 5
CONFIG = LossConfig(ce=0.3, tv=0.7, kl=0.4)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


class Case:
    """A random problem whose target laws live on a larger vocabulary, of which 23 tokens may be drafted."""

    def __init__(self, seed: int = 0, markov: bool = True) -> None:
        random = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random)

        whole_head = normal(40, WIDTH)
        last = normal(NUM_LAWS, WIDTH)
        self.lse = (last @ whole_head.t()).logsumexp(-1)
        self.lm_head = whole_head[:NUM_TOKENS].contiguous()
        self.laws = target_laws(last, self.lse, self.lm_head)
        self.p = self.laws.probabilities(torch.arange(NUM_LAWS))
        self.hidden = normal(NUM_SLOTS, WIDTH).requires_grad_()
        self.mixed = normal(NUM_SLOTS, RANK).requires_grad_() if markov else None
        self.w2 = normal(NUM_TOKENS, RANK).requires_grad_() if markov else None
        weights = torch.rand(NUM_SLOTS, generator=random)
        weights[::7] = 0
        self.slots = Slots(
            torch.randint(NUM_LAWS, (NUM_SLOTS,), generator=random),
            torch.randint(-1, NUM_TOKENS, (NUM_SLOTS,), generator=random),
            weights,
        )

    def logits(self) -> Tensor:
        base = self.hidden @ self.lm_head.t()
        return base if self.mixed is None or self.w2 is None else base + self.mixed @ self.w2.t()


def twin(case: Case, config: LossConfig) -> tuple[float, float, float, float, np.ndarray]:
    logits, laws = case.logits().detach().double().numpy(), case.p.double().numpy()
    ce, tv, kl, overlap = (np.zeros(NUM_SLOTS) for _ in range(4))
    for n in range(NUM_SLOTS):
        q, p = softmax(logits[n]), laws[int(case.slots.law_rows[n])]
        label = int(case.slots.label_columns[n])
        ce[n] = -np.log(q[label]) if label >= 0 else 0.0
        tv[n] = np.abs(q - p).sum() + 1 - p.sum()
        kl[n] = -(p * np.log(q)).sum()
        overlap[n] = np.minimum(p, q).sum()
    w = case.slots.weights.numpy() / case.slots.weights.sum().item()
    means = [float((w * x).sum()) for x in (ce, tv, kl)]
    return config.ce * means[0] + config.tv * means[1] + config.kl * means[2], *means, overlap


def loss_of(case: Case, config: LossConfig = CONFIG):  # type: ignore[no-untyped-def]
    return vocabulary_loss(
        case.hidden, case.mixed, case.w2, lm_head=case.lm_head, laws=case.laws, slots=case.slots, config=config
    )


@pytest.mark.parametrize("markov", [True, False])
def test_the_terms_equal_a_slow_numpy_twin(markov: bool) -> None:
    case = Case(markov=markov)
    total, terms = loss_of(case)
    expected, ce, tv, kl, overlap = twin(case, CONFIG)
    assert total.item() == pytest.approx(expected, rel=1e-4)
    assert [terms.ce.item(), terms.tv.item(), terms.kl.item()] == pytest.approx([ce, tv, kl], rel=1e-4)
    np.testing.assert_allclose(terms.overlap.numpy(), overlap, atol=1e-5)
    assert torch.equal(terms.best, case.logits().argmax(-1))


@pytest.mark.parametrize("config", [CONFIG, LossConfig(), LossConfig(ce=1, tv=0)])
def test_the_written_out_gradients_equal_autograd(config: LossConfig) -> None:
    case = Case(seed=1)
    assert case.mixed is not None and case.w2 is not None
    (3 * loss_of(case, config)[0]).backward()
    found = [x.grad.clone() for x in (case.hidden, case.mixed, case.w2) if x.grad is not None]
    for x in (case.hidden, case.mixed, case.w2):
        x.grad = None
    log_q = case.logits().log_softmax(-1)
    p = case.p[case.slots.law_rows]
    known = case.slots.label_columns >= 0
    ce = -log_q.gather(1, case.slots.label_columns.clamp_min(0).unsqueeze(1)).squeeze(1) * known
    each = config.ce * ce + config.tv * (log_q.exp() - p).abs().sum(-1) - config.kl * (p * log_q).sum(-1)
    w = case.slots.weights / case.slots.weights.sum()
    (3 * (w * each).sum()).backward()
    for mine, x in zip(found, (case.hidden, case.mixed, case.w2), strict=True):
        torch.testing.assert_close(mine, x.grad, atol=1e-6, rtol=1e-4)


def test_mass_outside_the_draft_vocabulary_is_loss_that_cannot_be_removed() -> None:
    case = Case(seed=2, markov=False)
    inside = case.p.sum(-1)
    assert bool((inside < 0.999).any())
    _, terms = loss_of(case)
    assert bool((terms.overlap <= inside[case.slots.law_rows] + 1e-5).all())


def test_slots_past_the_end_of_an_answer_have_no_gradient() -> None:
    case = Case(seed=3)
    loss_of(case)[0].backward()
    assert case.hidden.grad is not None
    assert not case.hidden.grad[::7].any()
    assert bool(case.hidden.grad[1].any())


def test_a_drafter_that_equals_the_target_has_overlap_one() -> None:
    head = torch.randn(17, WIDTH, generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(1))
    laws = target_laws(hidden, (hidden @ head.t()).logsumexp(-1), head)
    slots = Slots(torch.arange(9), torch.zeros(9, dtype=torch.int64), torch.ones(9))
    _, terms = vocabulary_loss(hidden, None, None, lm_head=head, laws=laws, slots=slots, config=LossConfig())
    torch.testing.assert_close(terms.overlap, torch.ones(9), atol=1e-5, rtol=0)


def test_confidence_learns_the_overlap_and_does_not_move_it() -> None:
    overlap = torch.tensor([0.2, 0.9], requires_grad=True)
    logits = torch.zeros(2, requires_grad=True)
    loss = confidence_loss(logits, overlap.detach(), torch.tensor([1.0, 3.0]))
    loss.backward()
    assert loss.item() == pytest.approx(np.log(2))
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx([0.25 * (0.5 - 0.2), 0.75 * (0.5 - 0.9)])


def test_slot_weights_are_those_of_the_reference() -> None:
    assert [round(x, 3) for x in slot_weights(7, 4.0).tolist()] == [1, 0.779, 0.607, 0.472, 0.368, 0.287, 0.223]
