"""The optimiser of a drafter: Muon for the weight matrices, AdamW for everything else (or for all), one schedule.

Owns its state, which is saved and restored as plain tensors. Must not know what the parameters are for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True, slots=True)
class OptimiserConfig:
    """kind: `adamw` (DeepSpec) or `muon` (matrices of the layers by Muon, the rest by AdamW).

    lr of AdamW; muon_lr of Muon, whose update has unit spectral norm times 0.2 sqrt(larger side).
    muon_steps: Newton-Schulz iterations. Muon's cost does not depend on the batch: it wants thousands of positions a step.
    decay_share: last part of the steps over which the rates fall to 0 as a cosine; 1 is DeepSpec's schedule.
    """

    kind: str = "adamw"
    lr: float = 6e-4
    muon_lr: float = 2e-3
    warmup_share: float = 0.04
    decay_share: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    muon_momentum: float = 0.95
    muon_steps: int = 5
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


def schedule(step: int, total_steps: int, config: OptimiserConfig) -> float:
    """Factor on the learning rates of step 0, 1, ..: linear warm-up, plateau, cosine to 0 at total_steps."""
    warmup = config.warmup_share * total_steps
    if step < warmup:
        return (step + 1) / warmup if warmup >= 1 else 1.0
    decay_from = max(total_steps * (1 - config.decay_share), warmup)
    if step < decay_from:
        return 1.0
    progress = (step - decay_from) / max(1.0, total_steps - decay_from)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class Optimiser:
    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], config: OptimiserConfig) -> None:
        self.config = config
        named = dict(parameters)
        by_muon = {n for n, p in named.items() if config.kind == "muon" and _is_inner_matrix(n, p)}
        self.matrices = {n: p for n, p in named.items() if n in by_muon}
        self.others = {n: p for n, p in named.items() if n not in by_muon}
        self.momentum = {n: torch.zeros_like(p) for n, p in self.matrices.items()}
        self.first = {n: torch.zeros_like(p) for n, p in self.others.items()}
        self.second = {n: torch.zeros_like(p) for n, p in self.others.items()}
        self.num_steps = 0

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*self.matrices.values(), *self.others.values()]

    @torch.no_grad()
    def step(self, factor: float) -> float:
        """One update with the rates times `factor`; gradients are clipped, used and dropped. Returns their norm; when that is
        no number nothing is changed."""
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm, foreach=True)
        if not math.isfinite(float(norm)):
            return float(norm)
        self.num_steps += 1
        self._adamw(self.config.lr * factor)
        self._muon(self.config.muon_lr * factor)
        for parameter in self.parameters:
            parameter.grad = None
        return float(norm)

    def _adamw(self, lr: float) -> None:
        beta1, beta2 = self.config.betas
        names = [n for n, p in self.others.items() if p.grad is not None]
        if not names:
            return
        params: list[Tensor] = [self.others[n] for n in names]
        grads = [_grad(self.others[n]) for n in names]
        first, second = [self.first[n] for n in names], [self.second[n] for n in names]
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        denominator = torch._foreach_sqrt(second)
        torch._foreach_div_(denominator, math.sqrt(1 - beta2**self.num_steps))
        torch._foreach_add_(denominator, 1e-8)
        if self.config.weight_decay:
            torch._foreach_mul_(params, 1 - lr * self.config.weight_decay)
        torch._foreach_addcdiv_(params, first, denominator, -lr / (1 - beta1**self.num_steps))

    def _muon(self, lr: float) -> None:
        beta = self.config.muon_momentum
        for name, parameter in self.matrices.items():
            if parameter.grad is None:
                continue
            momentum = self.momentum[name]
            momentum.lerp_(parameter.grad, 1 - beta)
            update = orthogonalised(parameter.grad.lerp(momentum, beta), self.config.muon_steps)
            if self.config.weight_decay:
                parameter.mul_(1 - lr * self.config.weight_decay)
            parameter.add_(update, alpha=-lr * 0.2 * math.sqrt(max(parameter.shape)))

    def state(self) -> dict[str, Tensor]:
        groups = {"momentum": self.momentum, "first": self.first, "second": self.second}
        return {f"{group}.{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor], num_steps: int) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self.num_steps = num_steps


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _is_inner_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Matrices between hidden states. Markov factors are embeddings, the confidence head is a vector."""
    return parameter.dim() == 2 and (name.startswith("layers.") or name == "fc.weight")


def orthogonalised(gradient: Tensor, num_steps: int = 5) -> Tensor:
    """Newton-Schulz iteration in bfloat16 towards the nearest matrix with singular values of 1."""
    a, b, c = _NEWTON_SCHULZ
    x = gradient.bfloat16()
    if transposed := x.shape[0] > x.shape[1]:
        x = x.t()
    x = x / (x.norm() + 1e-7)
    for _ in range(num_steps):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.t() if transposed else x).float()
