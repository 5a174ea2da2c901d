"""The training kernels against their torch twins in float32 on the same bfloat16 inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.train import native
from drafter.train.loss import LossConfig, Slots, target_laws, vocabulary_loss

pytestmark = pytest.mark.skipif(native.load() is None, reason="needs AVX512-BF16 and a C compiler")

# One rounding to bfloat16 of a result, plus float32 sums in another order.
TOLERANCE = {"rtol": 2**-7, "atol": 1e-5}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def grads_of(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [g.float() for g in torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("num_rows", [1, 7, 300])
def test_rms_norm_and_its_gradients_equal_torch(num_rows: int) -> None:
    x, weight = normal(num_rows, 48).requires_grad_(), (1 + normal(48, seed=1).float() / 4).requires_grad_()
    pull = normal(num_rows, 48, seed=2)
    mine = native.rms_norm(x, weight, 1e-5)
    wide = x.detach().float().requires_grad_()
    twin = F.rms_norm(wide, (48,), weight.bfloat16().float(), 1e-5)
    torch.testing.assert_close(mine.float(), twin, **TOLERANCE)
    found, expected = grads_of((mine * pull).sum(), x, weight), grads_of((twin * pull).sum(), wide, weight)
    torch.testing.assert_close(found[0], expected[0], rtol=2**-7, atol=2**-8)
    torch.testing.assert_close(found[1], expected[1], rtol=2**-7, atol=1e-3 * num_rows**0.5)


def test_swiglu_and_its_gradient_equal_torch() -> None:
    gate_up = (4 * normal(37, 64)).requires_grad_()
    pull = normal(37, 32, seed=1)
    wide = gate_up.detach().float().requires_grad_()
    gate, up = wide.chunk(2, dim=-1)
    mine, twin = native.swiglu(gate_up), F.silu(gate) * up
    torch.testing.assert_close(mine.float(), twin, **TOLERANCE)
    found, expected = grads_of((mine * pull).sum(), gate_up), grads_of((twin * pull).sum(), wide)
    torch.testing.assert_close(found[0], expected[0], **TOLERANCE)


@pytest.mark.parametrize("num_tokens", [16, 23, 160])
@pytest.mark.parametrize("config", [LossConfig(ce=0.3, tv=0.7, kl=0.4), LossConfig(), LossConfig(ce=1, tv=0)])
def test_the_vocabulary_terms_equal_the_torch_twin(
    num_tokens: int, config: LossConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, last, hidden = normal(200, 32), normal(90, 32, seed=1), normal(700, 32, seed=2).requires_grad_()
    head = whole[:num_tokens].contiguous()
    laws = target_laws(last, (last.float() @ whole.float().t()).logsumexp(-1), head)
    mixed, w2 = normal(700, 8, seed=3).requires_grad_(), normal(num_tokens, 8, seed=4).float().requires_grad_()
    random = torch.Generator().manual_seed(5)
    weights = torch.rand(700, generator=random)
    weights[::7] = 0
    slots = Slots(
        torch.randint(90, (700,), generator=random), torch.randint(-1, num_tokens, (700,), generator=random), weights
    )

    def run() -> tuple[list[Tensor], list[Tensor]]:
        total, terms = vocabulary_loss(hidden, mixed, w2, lm_head=head, laws=laws, slots=slots, config=config)
        found = [total.detach(), terms.ce, terms.tv, terms.kl, terms.overlap]
        return [x.detach() for x in found], grads_of(total, hidden, mixed, w2)

    fast_values, fast_grads = run()
    monkeypatch.setattr(native, "usable", lambda rows: False)
    slow_values, slow_grads = run()
    torch.testing.assert_close(fast_values, slow_values, rtol=1e-5, atol=1e-5)
    for fast, slow in zip(fast_grads, slow_grads, strict=True):
        # a gradient is rounded to bfloat16 twice on its way; its size sets the scale
        torch.testing.assert_close(fast, slow, rtol=2**-6, atol=2**-8 * float(slow.abs().max()))


def test_a_nan_in_the_logits_shows_in_the_loss() -> None:
    hidden = normal(4, 32)
    hidden[2, 0] = float("nan")
    head = normal(20, 32, seed=1)
    laws = target_laws(normal(4, 32, seed=2), torch.full((4,), 9.0), head)
    slots = Slots(torch.arange(4), torch.zeros(4, dtype=torch.int64), torch.ones(4))
    total, _ = vocabulary_loss(hidden, None, None, lm_head=head, laws=laws, slots=slots, config=LossConfig())
    assert not torch.isfinite(total)


def test_a_nan_in_one_column_shows_in_the_loss() -> None:
    head = normal(20, 32, seed=1)
    head[7, 3] = float("nan")
    laws = target_laws(normal(4, 32, seed=2), torch.full((4,), 9.0), normal(20, 32, seed=1))
    slots = Slots(torch.arange(4), torch.zeros(4, dtype=torch.int64), torch.ones(4))
    total, _ = vocabulary_loss(normal(4, 32), None, None, lm_head=head, laws=laws, slots=slots, config=LossConfig())
    assert not torch.isfinite(total)
