"""The training loop: states in, checkpoints and metrics out, stopped and resumed at any step, in one process or several.

Owns the update, the training state on disk and when to evaluate and export. Must not know how states were made.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from drafter.train.blocks import Batch
from drafter.train.loss import LossConfig, confidence_loss, target_laws, vocabulary_loss
from drafter.train.measure import measure
from drafter.train.metrics import MetricsLog
from drafter.train.network import DraftNetwork
from drafter.train.optimiser import Optimiser, OptimiserConfig, schedule
from drafter.train.order import DataOrder, Visit
from drafter.train.parallel import Ranks
from drafter.train.progress import Progress
from drafter.train.states import StatesSource, save_atomically
from scheduler.errors import SettingsError

_STATE_FILE = "training.safetensors"


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """positions_per_step: drafted positions of one update, all processes together, reached by whole sequences.
    anchors_per_sequence: of one visit. accumulate: passes that each process makes for one update.

    total_steps: length of the learning-rate schedule, and where training ends. minutes: stop earlier, state saved; 0 never.
    held_out_every: every such-many-th prompt (by its id) is evaluated on and never trained on.
    """

    total_steps: int = 1000
    minutes: float = 0.0
    positions_per_step: int = 4096
    accumulate: int = 1
    anchors_per_sequence: int = 96
    variable_block: bool = True
    held_out_every: int = 40
    evaluate_every: int = 100
    evaluate_sequences: int = 48
    log_every: int = 10
    seed: int = 0
    tensorboard: bool = False
    loss: LossConfig = field(default_factory=LossConfig)
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)


class _Loss(nn.Module):
    """The network with its loss, as the one forward that DistributedDataParallel wants."""

    def __init__(self, network: DraftNetwork, config: LossConfig) -> None:
        super().__init__()
        self.network, self.config = network, config

    def forward(self, batch: Batch, denominator: Tensor) -> tuple[Tensor, dict[str, float]]:
        return batch_loss(self.network, batch, self.config, denominator)


class Training:
    """One run in one folder: metrics.jsonl, training.safetensors (resume), and what the caller exports."""

    def __init__(
        self, network: DraftNetwork, source: StatesSource, run: Path, config: LoopConfig, ranks: Ranks | None = None
    ) -> None:
        self.network, self.run, self.config = network, run, config
        self.ranks = ranks if ranks is not None else Ranks()
        self.optimiser = Optimiser(network.named_parameters(), config.optimiser)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.data = DataOrder(source, config.held_out_every, self.generator)
        self.num_positions = 0
        self._loss = _Loss(network, config.loss)
        self._parallel = self._distributed() if self.ranks.size > 1 else None
        self._metrics = MetricsLog(run, tensorboard=config.tensorboard and self.ranks.first)

    def _distributed(self) -> DistributedDataParallel:
        unused = self.network.arch.has_confidence and not self.config.loss.confidence
        return DistributedDataParallel(self._loss, find_unused_parameters=unused)

    @property
    def step(self) -> int:
        return self.optimiser.num_steps

    def train(self) -> Iterator[dict[str, Any]]:
        """Yields the evaluation metrics each time they are taken, after the state has been saved; lastly at the end. In
        processes other than the first the metrics are empty."""
        began, deadline = time.monotonic(), time.monotonic() + self.config.minutes * 60
        first_position = self.num_positions
        progress = Progress("train", self.config.total_steps)
        while self.step < self.config.total_steps:
            losses = self.update(self.next_batches())
            rate = round((self.num_positions - first_position) / (time.monotonic() - began), 1)
            if self.step % self.config.log_every == 0:
                self.log({"positions_per_s": rate, "epoch": self.data.epoch, **losses})
            if self.ranks.first:
                progress.show(self.step, positions_per_s=rate, loss=losses["loss"])
            at_end = self._timed_out(deadline) or self.step == self.config.total_steps
            if at_end or self.step % self.config.evaluate_every == 0:
                self.save()
                yield self.evaluate() if self.ranks.first else {}
            if at_end:
                return

    def _timed_out(self, deadline: float) -> bool:
        """All processes stop at the same step."""
        if self.config.minutes <= 0:
            return False
        late = torch.tensor(float(time.monotonic() > deadline), device=self.network.lm_head.device)
        return float(self.ranks.summed(late)) > 0

    def next_batches(self) -> list[list[Visit]]:
        """What the next update reads: one list per pass, those of all processes."""
        config, passes = self.config, self.config.accumulate * self.ranks.size
        num_slots = -(-config.positions_per_step // passes)
        width = self.network.arch.block_size
        return [
            self.data.draw(num_slots, config.anchors_per_sequence, width, config.variable_block) for _ in range(passes)
        ]

    def update(self, passes: Sequence[Sequence[Visit]]) -> dict[str, float]:
        """Forward, backward and one step of the optimiser: the mean over the slots of all passes, whoever computes them.
        Raises SettingsError when loss or gradient is no number; parameters and saved state are as before then."""
        decay, device = self.config.loss.decay, self.network.lm_head.device
        denominator = torch.tensor(sum(visit.weight(decay) for visits in passes for visit in visits)).clamp_min(1e-9)
        mine = passes[self.ranks.rank :: self.ranks.size]
        totals: dict[str, float] = {}
        for index, visits in enumerate(mine):
            batch = self.data.load(visits, decay).to(device)
            metrics = self._backward(batch, denominator.to(device), last=index == len(mine) - 1)
            metrics["positions"] = batch.num_positions
            totals = {name: totals.get(name, 0.0) + value for name, value in metrics.items()}
        summed = self.ranks.summed(torch.tensor(list(totals.values()), dtype=torch.float64, device=device)).tolist()
        found = dict(zip(totals, summed, strict=True))
        self._check("loss", found["loss"])
        factor = schedule(self.step, self.config.total_steps, self.config.optimiser)
        norm = self.optimiser.step(factor)
        self._check("gradient", norm)
        self.num_positions += round(found.pop("positions"))
        rounded = {name: round(value, 4) for name, value in found.items()}
        return {**rounded, "grad_norm": round(norm, 4), "lr_factor": round(factor, 4)}

    def _backward(self, batch: Batch, denominator: Tensor, *, last: bool) -> dict[str, float]:
        if self._parallel is None:
            loss, metrics = self._loss(batch, denominator)
            loss.backward()
            return metrics
        # gradients are averaged over the processes once, at the last pass; the loss is a share of one sum
        with contextlib.nullcontext() if last else self._parallel.no_sync():
            loss, metrics = self._parallel(batch, denominator)
            (loss * self.ranks.size).backward()
        return metrics

    def _check(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise SettingsError(
                f"{what} is {value} at step {self.step}; lower the learning rate and resume from {self.run}"
            )

    def evaluate(self) -> dict[str, Any]:
        found = measure(self.network, self.data.held_out_sequences(self.config.evaluate_sequences))
        return self.log({"held_out": found})

    def log(self, values: dict[str, Any]) -> dict[str, Any]:
        row = {"step": self.step, "positions": self.num_positions, **values}
        if self.ranks.first:
            self._metrics.write(row)
        return row

    def save(self) -> None:
        """Everything that the next step depends on, as one file that appears whole or not at all."""
        if not self.ranks.first:
            return
        tensors = {f"parameter.{n}": p.detach() for n, p in self.network.named_parameters()}
        tensors |= {f"optimiser.{n}": t for n, t in self.optimiser.state().items()}
        tensors["generator"] = self.generator.get_state()
        tensors["feature_scale"] = self.network.feature_scale
        tensors["draft_vocab_ids"] = self.network.draft_vocab_ids
        counters = {
            "step": self.step,
            "positions": self.num_positions,
            "epoch": self.data.epoch,
            "at": self.data.at,
            "order": self.data.order,
            "config": asdict(self.config),
        }
        on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
        save_atomically(on_host, self.run / _STATE_FILE, {"counters": json.dumps(counters)})

    @torch.no_grad()
    def resume(self) -> bool:
        """Continues from the run's saved state; False when there is none. The schedule may have been extended."""
        path = self.run / _STATE_FILE
        if not path.is_file():
            return False
        tensors, counters = read_state(path)
        for name, parameter in self.network.named_parameters():
            saved = tensors.get(f"parameter.{name}")
            if saved is None or saved.shape != parameter.shape:
                raise SettingsError(f"{path} is of another drafter: {name} differs; train into an empty folder")
            parameter.copy_(saved)
        optimiser = {n.removeprefix("optimiser."): t for n, t in tensors.items() if n.startswith("optimiser.")}
        if set(optimiser) != set(self.optimiser.state()):
            raise SettingsError(f"{path} was trained with another optimiser; give the same one or an empty folder")
        self.optimiser.restore(optimiser, counters["step"])
        self.generator.set_state(tensors["generator"])
        self.num_positions = counters["positions"]
        self.data.epoch, self.data.at, self.data.order = counters["epoch"], counters["at"], counters["order"]
        return True


def read_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(metadata["counters"])  # noqa: SIM118
    except (SafetensorError, OSError, KeyError) as error:
        raise SettingsError(f"{path} is no readable training state (truncated?): {error}") from None


def saved_state(run: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    path = run / _STATE_FILE
    return read_state(path) if path.is_file() else None


def batch_loss(
    network: DraftNetwork, batch: Batch, config: LossConfig, denominator: Tensor | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Loss and its terms. denominator: see `vocabulary_loss`."""
    slots = batch.slots(network.row_of, len(network.draft_vocab_ids))
    hidden = network(batch.blocks)
    heads = network.head_terms(hidden, batch.blocks, batch.previous_ids)
    laws = target_laws(batch.last, batch.lse, network.lm_head)
    total, terms = vocabulary_loss(
        hidden,
        heads.mixed,
        heads.w2,
        lm_head=network.lm_head,
        laws=laws,
        slots=slots,
        config=config,
        denominator=denominator,
    )
    metrics = {name: float(value.detach()) for name, value in (("ce", terms.ce), ("tv", terms.tv), ("kl", terms.kl))}
    if network.arch.has_confidence and config.confidence:
        read, embeddings = hidden, heads.embeddings
        if config.detach_confidence:
            read, embeddings = read.detach(), None if embeddings is None else embeddings.detach()
        logits = network.confidence_logits(read, embeddings)
        confidence = confidence_loss(logits, terms.overlap, slots.weights, denominator)
        metrics["confidence"] = float(confidence.detach())
        total = total + config.confidence * confidence
    return total, {"loss": float(total.detach()), **metrics}
