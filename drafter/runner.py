"""Owns a drafter on its device: loads it, keeps its context cache, drafts, times itself.

Synchronous; drafter/actor.py keeps it off the event loop. Between calls it holds nothing of any request but context rows
in its cache: an ask carries everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from drafter.architecture import MAX_BLOCK, DrafterArchitecture
from drafter.backbone import Backbone
from drafter.block_attention import BlockStart
from drafter.calibration import UNCALIBRATED, load_calibration
from drafter.chain import Chain
from drafter.checkpoint import FOLDERLESS, Checkpoint, load_checkpoint, resolve_checkpoint
from drafter.config import DrafterConfig
from drafter.heads import build_heads
from drafter.native_walk import NativeWalk
from drafter.ngram import NgramRunner
from drafter.penalties import AskedChanges
from drafter.propose import Proposal, choose_candidates, propose, propose_chain
from scheduler.errors import SettingsError
from scheduler.wire import Draft, DraftAsk, DrafterInfo, FloatArray, IntArray, SamplingParams
from verifier.device import resolve_device, resolve_dtype, set_threads
from verifier.features import CommittedFeatures
from verifier.kv import PagedKV
from verifier.layers import Linear
from verifier.noise import fresh_generator
from verifier.sampling import SamplingTable
from verifier.turns import median_table
from verifier.weights import resolve_model

_MEASURED_CONTEXT = 256
# Context rows that a request's last round committed: one anchor and a few accepted drafts.
_MEASURED_ROWS = 3


class Runner(Protocol):
    """What the actor runs in its thread; scheduler.ports.Drafter without the waiting. `progress` is read by others."""

    progress: int

    def describe(self) -> DrafterInfo: ...

    def propose(self, asks: Sequence[DraftAsk], width: int, features: Sequence[CommittedFeatures]) -> list[Draft]: ...

    def measure(self, num_requests: Sequence[int], widths: Sequence[int]) -> list[list[float]]: ...


def build_runner(config: DrafterConfig) -> Runner:
    """Raises SettingsError for a checkpoint, device or cache size that cannot work."""
    if config.max_width < 0:
        raise SettingsError(f"drafter.max_width must be 0 (the checkpoint's) or more, not {config.max_width}")
    if config.checkpoint == "ngram":
        return NgramRunner(config.max_width)
    if config.checkpoint in FOLDERLESS:
        raise SettingsError(f"drafter.checkpoint: {config.checkpoint!r} drafts nothing, so it has no worker")
    return DraftRunner(config)


class DraftRunner:
    """A drafter with its context cache, which shares the block table of the target's: a block of tokens at once (DSpark,
    DFlash) or a token at a time (Eagle3, MTP)."""

    def __init__(self, config: DrafterConfig) -> None:
        if config.candidates < 0:
            raise SettingsError(
                f"drafter.candidates must be 0 (the whole draft vocabulary) or more, not {config.candidates}"
            )
        if config.num_blocks < 2:
            raise SettingsError(
                f"the drafter's cache has {config.num_blocks} blocks; give it as many as the verifier's has"
            )
        self.config = config
        self.progress = 0
        set_threads(config.num_threads)
        self.device = resolve_device(config.device)
        self.dtype = resolve_dtype(config.dtype, self.device)
        folder = resolve_checkpoint(config.checkpoint, config.cache_dir)
        checkpoint = load_checkpoint(folder, resolve_model(config.target, config.cache_dir), self.dtype, self.device)
        self.arch, self.fingerprint = checkpoint.arch, checkpoint.fingerprint
        self.calibration = UNCALIBRATED
        if config.calibrated:
            self.calibration = load_calibration(folder, self.arch.block_size, self.fingerprint)
        self.width = width_of(self.arch, config.max_width)
        self.backbone = self._build_backbone(checkpoint)
        self.lm_head = Linear(checkpoint.tensors["lm_head.weight"])
        self.vocabulary = checkpoint.draft_vocab_ids
        self.markov, self.confidence = build_heads(checkpoint)
        self.native_walk: NativeWalk | None = None
        if self.markov is not None and NativeWalk.usable(self.markov):
            self.native_walk = NativeWalk(self.markov, self.vocabulary)
        self.generator = fresh_generator(config.seed, "drafter", self.device)

    def _build_backbone(self, checkpoint: Checkpoint) -> Backbone | Chain:
        decoder = checkpoint.arch.decoder
        pool = PagedKV(
            num_layers=decoder.num_layers,
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            num_kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        # no request is longer than the cache, so the tables need not be
        longest = self.config.num_blocks * self.config.block_size + self._num_slots
        max_len = min(decoder.max_position_embeddings, longest)
        build = Backbone if checkpoint.arch.design == "dspark" else Chain
        return build(checkpoint, pool, max_len=max_len, dtype=self.dtype, device=self.device)

    @property
    def _num_slots(self) -> int:
        """Positions that a proposal may take after its context."""
        return max(self.width, self.arch.block_size)

    def describe(self) -> DrafterInfo:
        return DrafterInfo(
            kind=self.arch.kind,
            width=self.width,
            variable_width=self.arch.variable_block,
            has_confidence=self.confidence is not None,
            max_len=self.max_start,
            target_layer_ids=self.arch.target_layer_ids,
            fingerprint=self.fingerprint,
        )

    @property
    def max_start(self) -> int:
        """The longest context after which a whole block still has positions."""
        return self.backbone.max_len - self._num_slots

    def _can_draft(self, ask: DraftAsk) -> bool:
        # a chain starts from the target's state before the anchor
        return (ask.start > ask.context_from or isinstance(self.backbone, Backbone)) and ask.start <= self.max_start

    @torch.inference_mode()
    def propose(self, asks: Sequence[DraftAsk], width: int, features: Sequence[CommittedFeatures]) -> list[Draft]:
        """Absorbs `features` in order, then drafts min(width, γ) tokens per ask; none for asks beyond its positions."""
        self.backbone.absorb(features)
        self.progress += 1
        width = min(width, self.width)
        able = [ask for ask in asks if self._can_draft(ask)] if width > 0 else []
        drafted = iter(self._drafts(able, width) if able else ())
        return [next(drafted) if width > 0 and self._can_draft(ask) else _empty(ask) for ask in asks]

    def _drafts(self, asks: Sequence[DraftAsk], width: int) -> list[Draft]:
        params = [ask.params for ask in asks]
        table = SamplingTable.build(params, self.device)
        proposal = self._walk(asks, width, table)
        self.progress += 1
        tokens = _ints(proposal.token_ids)
        confidence: FloatArray | None = None
        if proposal.confidence_logits is not None:
            confidence = self.calibration.apply(_floats(proposal.confidence_logits), params)
        q_ids = q_probs = None
        if proposal.q_ids is not None and proposal.q_probs is not None:
            q_ids, q_probs = _ints(proposal.q_ids), _floats(proposal.q_probs)
        needs_law = ~(table.greedy | table.seeded)
        return [
            Draft(
                request_id=ask.request_id,
                token_ids=tokens[row],
                confidence=None if confidence is None else confidence[row],
                q_ids=q_ids[row] if q_ids is not None and needs_law[row] else None,
                q_probs=q_probs[row] if q_probs is not None and needs_law[row] else None,
            )
            for row, ask in enumerate(asks)
        ]

    def _walk(self, asks: Sequence[DraftAsk], width: int, table: SamplingTable) -> Proposal:
        """What requests that all draft `width` tokens are proposed."""
        starts = [BlockStart(ask.anchor_id, ask.start, ask.block_ids, ask.context_from) for ask in asks]
        anchor_ids = torch.tensor([ask.anchor_id for ask in asks], device=self.device)
        first = torch.tensor([ask.output_index for ask in asks], device=self.device)
        output_positions = first.unsqueeze(1) + torch.arange(width, device=self.device)
        asked = AskedChanges(asks, self.vocabulary, self.device)
        if isinstance(self.backbone, Chain):
            walk = self.backbone.begin(starts, width)
            return propose_chain(
                step=lambda token_ids: asked.apply(self.lm_head(walk.step(token_ids))),
                width=width,
                vocabulary=self.vocabulary,
                keep=self.config.candidates,
                anchor_ids=anchor_ids,
                table=table,
                output_positions=output_positions,
                generator=self.generator,
            )
        # a drafter trained on whole blocks runs whole blocks, whatever is used of them
        num_slots = width if self.arch.variable_block else self.arch.block_size
        hidden = self.backbone.forward(starts, num_slots)[:, :width]
        base = asked.apply(self.lm_head(hidden.reshape(len(asks) * width, -1)).view(len(asks), width, -1))
        keep = self.config.candidates
        if self.native_walk is not None and NativeWalk.draws(table, base.shape[-1], keep):
            law_ids = law = None
            if table.all_greedy:
                tokens, embeddings = self.native_walk.greedy(base, anchor_ids)
            else:
                tokens, embeddings, law_ids, law = self.native_walk.sampled(
                    base, anchor_ids, table, keep, output_positions, self.generator
                )
                if not table.any_unseeded:
                    law_ids = law = None
            stated = self.confidence.logits(hidden, embeddings) if self.confidence is not None else None
            return Proposal(tokens, law_ids, law, (), stated)
        return propose(
            hidden=hidden,
            candidates=choose_candidates(base, self.vocabulary, keep),
            keep=keep,
            anchor_ids=anchor_ids,
            markov=self.markov,
            confidence=self.confidence,
            table=table,
            output_positions=output_positions,
            generator=self.generator,
        )

    def measure(self, num_requests: Sequence[int], widths: Sequence[int]) -> list[list[float]]:
        """Median seconds of a whole propose, absorbing included, by request count and width. Uses block 0 only."""
        return median_table([[self._synthetic(n, width) for width in widths] for n in num_requests], self.device)

    def _synthetic(self, num_requests: int, width: int) -> Callable[[], object]:
        context = max(0, min(_MEASURED_CONTEXT, self.max_start))
        blocks = np.zeros(-(-max(context, 1) // self.config.block_size), dtype=np.int32)
        asks = [
            DraftAsk(str(i), 0, context, blocks, SamplingParams(temperature=1.0), output_index=0)
            for i in range(num_requests)
        ]
        features = [self._synthetic_features(_MEASURED_ROWS * num_requests)]
        return lambda: self.propose(asks, width, features)

    def _synthetic_features(self, num_rows: int) -> CommittedFeatures:
        size = len(self.arch.target_layer_ids) * self.arch.decoder.hidden_size
        slots = torch.arange(num_rows, device=self.device) % self.config.block_size
        return CommittedFeatures(
            features=torch.ones(num_rows, size, dtype=self.dtype, device=self.device),
            slots=slots,
            positions=torch.ones_like(slots),
            token_ids=torch.zeros_like(slots),
            previous_slots=slots,
        )


def width_of(arch: DrafterArchitecture, max_width: int) -> int:
    """Tokens drafted in a round: γ or fewer; an MTP module may be run more often than it was trained for."""
    if arch.design == "mtp":
        return min(max_width, MAX_BLOCK) or arch.block_size
    return min(arch.block_size, max_width or arch.block_size)


def _ints(tensor: Tensor) -> IntArray:
    return tensor.cpu().numpy().astype(np.int32)


def _floats(tensor: Tensor) -> FloatArray:
    return tensor.cpu().numpy()


def _empty(ask: DraftAsk) -> Draft:
    return Draft(ask.request_id, np.zeros(0, dtype=np.int32), None)
