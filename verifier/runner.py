"""Owns the target on its device: loads it, sizes its KV cache, runs verify steps.

Synchronous; verifier/actor.py keeps it off the event loop. Between steps it keeps the KV tensors, and automata of grammars as
a cache: a Plan carries everything a step needs.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from scheduler.errors import BadParams, ServingError, SettingsError
from scheduler.wire import Extension, Plan, Verdict, VerifierInfo
from verifier import native, native_rejection
from verifier.acceptance import judge, not_finite
from verifier.architecture import Architecture, read_architecture
from verifier.attention import Span, paged_attention
from verifier.automata import Automata
from verifier.batch import FlatBatch, kept_rows, pack
from verifier.config import VerifierConfig
from verifier.device import resolve_device, resolve_dtype, set_threads
from verifier.features import CommittedFeatures
from verifier.grammar import GrammarCompiler
from verifier.kv import PagedKV, bytes_per_token
from verifier.masks import Constraint
from verifier.model import Decoder
from verifier.noise import fresh_generator
from verifier.weights import fingerprint, load_target, resolve_model

# Without a memory limit the KV cache holds this many tokens per live request, so that long requests preempt, not fail.
_DEFAULT_TOKENS_PER_REQUEST = 1024


class TargetRunner:
    """Raises SettingsError for a model, device or cache size that cannot work."""

    def __init__(self, config: VerifierConfig) -> None:
        self.config = config
        self.num_threads = set_threads(config.num_threads)
        self.device = resolve_device(config.device)
        self.dtype = resolve_dtype(config.dtype, self.device)
        folder = resolve_model(config.model, config.cache_dir)
        self.arch = read_architecture(folder)
        self.max_model_len = _max_model_len(config, self.arch)
        self.capture = checked_layers(config.capture_layers, self.arch)
        self.fingerprint = fingerprint(folder)
        weights = load_target(folder, self.arch, self.dtype, self.device)
        self.model = Decoder(self.arch, weights, max_len=self.max_model_len, dtype=self.dtype, device=self.device)
        self.kv = PagedKV(
            num_layers=self.arch.num_layers,
            num_blocks=num_blocks_of(config, self.kv_bytes_per_token, self.max_model_len),
            block_size=config.block_size,
            num_kv_heads=self.arch.num_kv_heads,
            head_dim=self.arch.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        self.generator = fresh_generator(config.seed, "verifier", self.device)
        self.grammars = GrammarCompiler(folder, self.arch.vocab_size)
        self.automata = Automata(self.grammars, config.max_live)
        self._num_layers_done = ctypes.c_int64()
        # compiled now: in the middle of a step it would look like a hanging worker
        native.usable(self.dtype, self.device, self.arch.head_dim, self.arch.num_heads // self.arch.num_kv_heads)
        native_rejection.usable(weights["model.embed_tokens.weight"])

    @property
    def progress(self) -> int:
        """Grows with every layer computed, for whoever asks whether a long step still runs."""
        return self._num_layers_done.value

    @property
    def kv_bytes_per_token(self) -> int:
        return bytes_per_token(self.arch.num_layers, self.arch.num_kv_heads, self.arch.head_dim, self.dtype)

    def describe(self) -> VerifierInfo:
        return VerifierInfo(
            num_blocks=self.kv.num_blocks,
            block_size=self.kv.block_size,
            max_model_len=self.max_model_len,
            vocab_size=self.arch.vocab_size,
            target_layer_ids=self.capture,
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            fingerprint=self.fingerprint,
            kv_bytes_per_token=self.kv_bytes_per_token,
        )

    @torch.inference_mode()
    def verify(self, plan: Plan) -> tuple[list[Verdict], CommittedFeatures | None]:
        """One forward over the plan's rows, then acceptance."""
        if not plan.extensions:
            return [], None
        constraints, failures = self._constrain(plan)
        batch = pack(plan, self.kv.block_size, self.device, constraints)
        hidden, features = self._forward(batch, capture=plan.capture)
        failures |= self._contain(plan, batch, hidden, features)
        found = judge(
            logits=self._logits(batch, hidden),
            extensions=batch.sampling,
            generator=self.generator,
            masks=batch.masks,
        )
        judged = {v.request_id: v for v in found}
        verdicts = [_verdict(e, judged, constraints, failures) for e in plan.extensions]
        if features is None:
            return verdicts, None
        return verdicts, self._committed(batch, features, kept_rows(plan, verdicts, constraints))

    def _constrain(self, plan: Plan) -> tuple[dict[str, Constraint], dict[str, ServingError]]:
        """What grammars say of this step's rows, by request id, and which requests cannot go on under theirs."""
        if not len(self.automata) and all(e.params.grammar is None for e in plan.extensions):
            return {}, {}
        return self.automata.constrain(plan.extensions)

    def _forward(self, batch: FlatBatch, *, capture: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Last hidden states [N, d] and features [N, m d] (None when not captured) of all rows."""
        return self._run(batch.ids, batch.slots, batch.positions, batch.spans, capture)

    def _run(
        self, ids: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, spans: Sequence[Span], capture: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        attend = paged_attention(self.kv, self.model.rotary, slots, positions, spans, num_heads=self.arch.num_heads)
        return self.model.forward(ids, positions, attend, self.capture if capture else (), self._num_layers_done)

    def _logits(self, batch: FlatBatch, hidden: torch.Tensor) -> torch.Tensor:
        """[S, V] of the sampled rows."""
        if len(batch.sampled_rows) != len(batch.ids) or batch.masks is not None:
            hidden = hidden.index_select(0, batch.sampled_rows)
        return self.model.logits(hidden)

    def _contain(
        self, plan: Plan, batch: FlatBatch, hidden: torch.Tensor, features: torch.Tensor | None
    ) -> dict[str, ServingError]:
        """Where numbers overflow: which requests cannot go on; rows before a draft that overflows are computed anew, in place.

        Attention weighs what a row must not see with 0, and 0 * NaN is NaN: such a draft spoils the rows before it.
        """
        if math.isfinite(hidden.sum(dtype=torch.float32).item()):
            return {}
        failures: dict[str, ServingError] = {}
        sound = torch.isfinite(hidden).all(dim=1).tolist()
        for extension, span in zip(plan.extensions, batch.spans, strict=True):
            num_known = len(extension.token_ids) - extension.num_draft
            num_sound = span.num_rows
            if not all(sound[span.first_row :][: span.num_rows]):
                num_sound = self._row_by_row(batch, span, hidden, features) if extension.num_draft else 0
            if num_sound < num_known:
                failures[extension.request_id] = not_finite(extension.output_index)
        return failures

    def _row_by_row(self, batch: FlatBatch, span: Span, hidden: torch.Tensor, features: torch.Tensor | None) -> int:
        """Computes the span's rows one after the other, up to the first that is not finite; how many are."""
        for number in range(span.num_rows):
            row = slice(span.first_row + number, span.first_row + number + 1)
            alone = Span(0, 1, span.start + number, span.block_ids)
            hidden[row], row_features = self._run(
                batch.ids[row], batch.slots[row], batch.positions[row], [alone], features is not None
            )
            if features is not None and row_features is not None:
                features[row] = row_features
            if not bool(torch.isfinite(hidden[row]).all()):
                hidden[row.stop : span.first_row + span.num_rows] = torch.nan
                return number
        return span.num_rows

    def _committed(self, batch: FlatBatch, features: torch.Tensor, rows: list[int]) -> CommittedFeatures:
        columns = (features, batch.slots, batch.positions, batch.ids, batch.previous_slots)
        if len(rows) == features.shape[0]:
            return CommittedFeatures(*columns)
        # of no rows at all (the only request of the step failed) torch would make floats
        index = torch.tensor(rows, dtype=torch.int64, device=self.device)
        return CommittedFeatures(*(column[index] for column in columns))


def _verdict(
    extension: Extension,
    judged: Mapping[str, Verdict],
    constraints: Mapping[str, Constraint],
    failures: Mapping[str, ServingError],
) -> Verdict:
    """The verdict of `judge`, unless the request's grammar has come to nothing."""
    request_id = extension.request_id
    nothing = Verdict(request_id, 0, ())
    verdict = judged.get(request_id, nothing)
    constraint, error = constraints.get(request_id), failures.get(request_id)
    if constraint is not None and constraint.dead_from is not None and verdict.num_accepted >= constraint.dead_from:
        error = BadParams(constraint.dead_reason)
    return verdict if error is None else replace(nothing, error=(type(error).__name__, str(error)))


def _max_model_len(config: VerifierConfig, arch: Architecture) -> int:
    if config.max_model_len > arch.max_position_embeddings:
        raise SettingsError(
            f"model.max_model_len {config.max_model_len} is more than the model's {arch.max_position_embeddings} positions"
        )
    return config.max_model_len or arch.max_position_embeddings


def checked_layers(layers: Sequence[int], arch: Architecture) -> tuple[int, ...]:
    bad = [i for i in layers if not -1 <= i < arch.num_layers - 1]
    if bad:
        raise SettingsError(
            f"target layer {bad[0]} cannot be captured: the target has layers 0 to {arch.num_layers - 1}, "
            "the last one is not allowed and -1 is the embedding"
        )
    return tuple(layers)


def num_blocks_of(config: VerifierConfig, token_bytes: int, max_model_len: int) -> int:
    """Blocks of the cache, block 0 included: as told, else as many as fit kv_cache_bytes, else a default per live request."""
    size = config.block_size
    if config.num_blocks:
        blocks = config.num_blocks
    elif config.kv_cache_bytes:
        blocks = config.kv_cache_bytes // (token_bytes * size)
    else:
        tokens = config.max_live * min(max_model_len, _DEFAULT_TOKENS_PER_REQUEST)
        blocks = -(-max(tokens, max_model_len) // size) + 1
    if blocks < 2:
        raise SettingsError(f"the KV cache has {blocks} blocks of {size} tokens; raise kv.num_blocks or kv.cache_bytes")
    return blocks
