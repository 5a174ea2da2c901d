"""The training loop: states in, checkpoints and metrics out, stopped and resumed at any step.

Owns the order of the data, the training state on disk and when to evaluate and export. Must not know how states were made.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafter.train.blocks import Batch, build_batch, draw_anchors
from drafter.train.loss import LossConfig, confidence_loss, target_laws, vocabulary_loss
from drafter.train.measure import measure
from drafter.train.network import DraftNetwork
from drafter.train.optimiser import Optimiser, OptimiserConfig, schedule
from drafter.train.states import States, StatesFolder, save_atomically
from scheduler.errors import SettingsError

_STATE_FILE = "training.safetensors"
_METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """positions_per_step: drafted positions of one update, reached by whole sequences. anchors_per_sequence: of one visit.

    total_steps: length of the learning-rate schedule, and where training ends. minutes: stop earlier, state saved; 0 never.
    held_out_every: every such-many-th prompt (by its id) is evaluated on and never trained on.
    """

    total_steps: int = 1000
    minutes: float = 0.0
    positions_per_step: int = 4096
    anchors_per_sequence: int = 96
    variable_block: bool = True
    held_out_every: int = 40
    evaluate_every: int = 100
    evaluate_sequences: int = 48
    log_every: int = 10
    seed: int = 0
    loss: LossConfig = field(default_factory=LossConfig)
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)


class DataOrder:
    """Which sequence comes next. An epoch is every training sequence known at its start, shuffled; shards written
    meanwhile join the next one. The order itself is part of the saved state, so that resuming continues exactly."""

    def __init__(self, folder: StatesFolder, held_out_every: int, generator: torch.Generator) -> None:
        self.folder, self.every, self.generator = folder, held_out_every, generator
        self.epoch, self.at = -1, 0
        self.order: list[str] = []

    def next(self) -> States:
        if self.at >= len(self.order):
            self._new_epoch()
        name = self.order[self.at]
        self.at += 1
        return self.folder.read_named(name)

    def _new_epoch(self) -> None:
        self.folder.refresh()
        names = [name for name, meta in self.folder.named() if not held_out(meta, self.every)]
        if not names:
            raise SettingsError(f"{self.folder.folder} holds no sequence to train on beside the held-out ones")
        permutation = torch.randperm(len(names), generator=self.generator).tolist()
        self.order, self.at, self.epoch = [names[i] for i in permutation], 0, self.epoch + 1

    def held_out_sequences(self, limit: int) -> Iterator[States]:
        names = sorted(name for name, meta in self.folder.named() if held_out(meta, self.every))
        yield from (self.folder.read_named(name) for name in names[:limit])


def held_out(meta: dict[str, Any], every: int) -> bool:
    return every > 0 and int(meta["prompt_id"][:8], 16) % every == 0


class Training:
    """One run in one folder: metrics.jsonl, training.safetensors (resume), and what the caller exports."""

    def __init__(self, network: DraftNetwork, folder: StatesFolder, run: Path, config: LoopConfig) -> None:
        self.network, self.run, self.config = network, run, config
        self.optimiser = Optimiser(network.named_parameters(), config.optimiser)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.data = DataOrder(folder, config.held_out_every, self.generator)
        self.num_positions = 0

    @property
    def step(self) -> int:
        return self.optimiser.num_steps

    def train(self) -> Iterator[dict[str, Any]]:
        """Yields the evaluation metrics each time they are taken, after the state has been saved; lastly at the end."""
        began, deadline = time.monotonic(), time.monotonic() + self.config.minutes * 60
        first_position = self.num_positions
        while self.step < self.config.total_steps:
            losses = self.update(self.next_batch())
            if self.step % self.config.log_every == 0:
                rate = (self.num_positions - first_position) / (time.monotonic() - began)
                self.log({"positions_per_s": round(rate, 1), "epoch": self.data.epoch, **losses})
            timed_out = self.config.minutes > 0 and time.monotonic() > deadline
            at_end = timed_out or self.step == self.config.total_steps
            if at_end or self.step % self.config.evaluate_every == 0:
                self.save()
                yield self.evaluate()
            if at_end:
                return

    def next_batch(self) -> Batch:
        parts: list[tuple[States, Tensor, int]] = []
        num_slots = 0
        while num_slots < self.config.positions_per_step:
            states = self.data.next()
            if states.answer_len < 2:
                continue
            anchors = draw_anchors(states, self.config.anchors_per_sequence, self.generator)
            width = self.network.arch.block_size
            length = (
                int(torch.randint(1, width + 1, (1,), generator=self.generator))
                if self.config.variable_block
                else width
            )
            parts.append((states, anchors, length))
            num_slots += len(anchors) * length
        return build_batch(parts, self.config.loss.decay)

    def update(self, batch: Batch) -> dict[str, float]:
        """Forward, backward and one step of the optimiser. Raises SettingsError when the loss is no number."""
        loss, metrics = batch_loss(self.network, batch, self.config.loss)
        if not math.isfinite(float(loss.detach())):
            raise SettingsError(
                f"loss is {float(loss.detach())} at step {self.step}; lower the learning rate and resume from {self.run}"
            )
        loss.backward()
        factor = schedule(self.step, self.config.total_steps, self.config.optimiser)
        metrics["grad_norm"] = round(self.optimiser.step(factor), 4)
        metrics["lr_factor"] = round(factor, 4)
        self.num_positions += batch.num_positions
        return metrics

    def evaluate(self) -> dict[str, Any]:
        found = measure(self.network, self.data.held_out_sequences(self.config.evaluate_sequences))
        return self.log({"held_out": found})

    def log(self, values: dict[str, Any]) -> dict[str, Any]:
        row = {"step": self.step, "positions": self.num_positions, **values}
        try:
            self.run.mkdir(parents=True, exist_ok=True)
            with (self.run / _METRICS_FILE).open("a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise SettingsError(f"could not write {self.run / _METRICS_FILE}: {error}") from None
        return row

    def save(self) -> None:
        """Everything that the next step depends on, as one file that appears whole or not at all."""
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
        save_atomically(tensors, self.run / _STATE_FILE, {"counters": json.dumps(counters)})

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
        logits = network.confidence_logits(hidden, heads.embeddings)
        confidence = confidence_loss(logits, terms.overlap, slots.weights, denominator)
        metrics["confidence"] = float(confidence.detach())
        total = total + config.confidence * confidence
    return total, {"loss": float(total.detach()), **metrics}
