"""What config.json says of a drafter, the tensors that this implies, and the refusal of what no drafter here is.

Three designs share one folder layout (drafter/checkpoint.py):

dspark   DSpark and DFlash: `{Qwen3,Llama,Qwen2}DSparkModel`. A block of γ = block_size slots at once, Markov head between them.
eagle3   `{Qwen3,Llama,Qwen2}Eagle3Model` as DeepSpec writes it (`Eagle3DraftModel` is its Qwen3 one): one decoder layer, run
         once per drafted token, on [embedding of the newest token; state]. The first state is fc(captured features), every
         later one the layer's own output. γ = ttt_length.
mtp      `{Qwen3,Llama,Qwen2}MTPModel`, our own format: a DeepSeek-style multi-token-prediction module. A plain decoder layer
         on eh_proj [enorm(embedding); hnorm(state)], where the first state is the raw output of the one captured target
         layer. γ = ttt_length, 1 when absent. Tensors: enorm.weight, hnorm.weight, norm.weight [d], eh_proj.weight [d, 2 d]
         and layers.0.*; other keys as for Eagle3.

Must not know weights or devices.

Symbols: V target vocabulary, Vd draft vocabulary, d hidden, m captured target layers, r Markov rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from scheduler.errors import SettingsError
from verifier.architecture import Architecture, parse_architecture
from verifier.weights import expected_shapes

# model_type by the prefix of architectures[0], design by its suffix. DFlash checkpoints carry the DSpark name too.
FAMILIES = {"Qwen3": "qwen3", "Llama": "llama", "Qwen2": "qwen2"}
SUFFIXES = {"DSparkModel": "dspark", "Eagle3Model": "eagle3", "MTPModel": "mtp"}
# architectures[0] -> (design, model_type)
DESIGNS = {p + s: (design, family) for s, design in SUFFIXES.items() for p, family in FAMILIES.items()}
DESIGNS["Eagle3DraftModel"] = ("eagle3", "qwen3")
HEAD_TYPES = ("vanilla", "gated", "rnn")
# Published blocks have 3 to 16 slots; a number far above is a mistake that would only show as a very slow start.
MAX_BLOCK = 256

# Tensor name -> the shapes it may have.
Shapes = dict[str, list[tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class DrafterArchitecture:
    """What config.json says of a drafter.

    design: dspark, eagle3 or mtp. decoder: dimensions of the draft layers (num_layers is the number of draft layers).
    block_size: γ, the most tokens drafted in a round. mask_token_id fills slots 1..γ-1 of a block; -1 for designs without.
    target_layer_ids: target layers whose raw outputs feed the context, ascending; -1 is the embedding.
    markov_rank 0 is no Markov head (DFlash). variable_block: fewer than γ tokens may be drafted for less.
    """

    design: str
    decoder: Architecture
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    markov_rank: int
    head_type: str
    has_confidence: bool
    confidence_with_markov: bool
    variable_block: bool

    @property
    def kind(self) -> str:
        if self.design != "dspark":
            return self.design
        return f"dspark-{self.head_type}" if self.markov_rank else "dflash"


def parse_drafter(config: Mapping[str, Any], where: str) -> DrafterArchitecture:
    """config.json as an architecture. Unknown keys (training facts, `dspark_serve`) are ignored. Raises SettingsError."""
    design, decoder = _decoder(config, where)
    if design != "dspark":
        return _parse_chain(design, decoder, config, where)
    rank = _integer(config, "markov_rank", where, low=0)
    arch = DrafterArchitecture(
        design=design,
        decoder=decoder,
        block_size=_integer(config, "block_size", where, low=1, high=MAX_BLOCK),
        mask_token_id=_integer(config, "mask_token_id", where, low=0, high=decoder.vocab_size - 1),
        target_layer_ids=_layer_ids(config, where),
        num_target_layers=_integer(config, "num_target_layers", where, low=1),
        markov_rank=rank,
        head_type=str(config.get("markov_head_type") or HEAD_TYPES[0]) if rank else "none",
        has_confidence=bool(config.get("enable_confidence_head", False)),
        confidence_with_markov=bool(config.get("confidence_head_with_markov", False)),
        variable_block=bool(config.get("variable_block", False)),
    )
    if rank and arch.head_type not in HEAD_TYPES:
        raise SettingsError(f"{where}: markov_head_type {arch.head_type!r} is not one of {', '.join(HEAD_TYPES)}")
    if arch.has_confidence and arch.confidence_with_markov and not rank:
        raise SettingsError(f"{where}: confidence_head_with_markov needs a Markov head, but markov_rank is 0")
    return arch


def _parse_chain(design: str, decoder: Architecture, config: Mapping[str, Any], where: str) -> DrafterArchitecture:
    """A drafter of one layer that is run once per drafted token."""
    layer_ids = _layer_ids(config, where)
    if decoder.num_layers != 1:
        raise SettingsError(f"{where}: num_hidden_layers must be 1 for {design}, not {decoder.num_layers}")
    if design == "mtp" and len(layer_ids) != 1:
        raise SettingsError(f"{where}: target_layer_ids must name exactly one layer for mtp, not {list(layer_ids)}")
    known = {"ttt_length": 1, **config} if design == "mtp" else config
    return DrafterArchitecture(
        design=design,
        decoder=decoder,
        block_size=_integer(known, "ttt_length", where, low=1, high=MAX_BLOCK),
        mask_token_id=-1,
        target_layer_ids=layer_ids,
        num_target_layers=_integer(config, "num_target_layers", where, low=1),
        markov_rank=0,
        head_type="none",
        has_confidence=False,
        confidence_with_markov=False,
        variable_block=True,
    )


def _decoder(config: Mapping[str, Any], where: str) -> tuple[str, Architecture]:
    """Design and dimensions."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else named
    if "dflash_config" in config or str(name).startswith("DFlash"):
        raise SettingsError(
            f"{where}: dflash_config is the z-lab DFlash layout, which is not supported; use a DeepSpec one"
        )
    if not isinstance(name, str) or name not in DESIGNS:
        raise SettingsError(f"{where}: architectures {name!r} is not supported; supported: {', '.join(DESIGNS)}")
    design, family = DESIGNS[name]
    if config.get("model_type") != family:
        raise SettingsError(f"{where}: model_type {config.get('model_type')!r} does not fit {name}: {family!r}")
    decoder = parse_architecture(dict(config), where)
    if decoder.model_type == "qwen2":
        decoder = replace(decoder, qkv_bias=bool(config.get("attention_bias", True)))
    return design, decoder


def _integer(config: Mapping[str, Any], key: str, where: str, *, low: int, high: int | None = None) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        limits = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise SettingsError(f"{where}: {key} must be a whole number {limits}, not {value!r}")
    return value


def _layer_ids(config: Mapping[str, Any], where: str) -> tuple[int, ...]:
    ids = config.get("target_layer_ids")
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) for i in ids):
        raise SettingsError(f"{where}: target_layer_ids must be a list of layer numbers, not {ids!r}")
    last = _integer(config, "num_target_layers", where, low=1) - 1
    if any(second <= first for first, second in pairwise(ids)):
        raise SettingsError(f"{where}: target_layer_ids {ids} must be strictly increasing")
    if ids[0] < -1 or ids[-1] >= last:
        raise SettingsError(
            f"{where}: target_layer_ids {ids} must lie from -1 (embedding) to {last - 1}; the last layer is not allowed"
        )
    return tuple(ids)


def drafter_shapes(arch: DrafterArchitecture, draft_vocab_size: int | None = None) -> Shapes:
    """What the tensors of a checkpoint look like. draft_vocab_size None is the whole vocabulary."""
    decoder = arch.decoder
    d, num_ids = decoder.hidden_size, decoder.vocab_size
    num_drafted = num_ids if draft_vocab_size is None else draft_vocab_size
    shapes: Shapes = {
        name.removeprefix("model."): [shape]
        for name, shape in expected_shapes(decoder).items()
        if name.startswith("model.layers.")
    }
    shapes["embed_tokens.weight"] = [(num_ids, d)]
    shapes["lm_head.weight"] = [(num_drafted, d)]
    shapes["norm.weight"] = [(d,)]
    if arch.design == "eagle3":
        return shapes | _eagle3_shapes(arch)
    if arch.design == "mtp":
        return shapes | {"enorm.weight": [(d,)], "hnorm.weight": [(d,)], "eh_proj.weight": [(d, 2 * d)]}
    return shapes | _dspark_shapes(arch, draft_vocab_size)


def _eagle3_shapes(arch: DrafterArchitecture) -> Shapes:
    decoder, d = arch.decoder, arch.decoder.hidden_size
    shapes: Shapes = {"fc.weight": [(d, len(arch.target_layer_ids) * d)], "layers.0.hidden_norm.weight": [(d,)]}
    for name, num_heads in (("q", decoder.num_heads), ("k", decoder.num_kv_heads), ("v", decoder.num_kv_heads)):
        shapes[f"layers.0.self_attn.{name}_proj.weight"] = [(num_heads * decoder.head_dim, 2 * d)]
    return shapes


def _dspark_shapes(arch: DrafterArchitecture, draft_vocab_size: int | None) -> Shapes:
    d, rank, num_ids = arch.decoder.hidden_size, arch.markov_rank, arch.decoder.vocab_size
    num_drafted = num_ids if draft_vocab_size is None else draft_vocab_size
    shapes: Shapes = {"fc.weight": [(d, len(arch.target_layer_ids) * d)], "hidden_norm.weight": [(d,)]}
    if rank:
        reduced = [] if draft_vocab_size is None else [(num_drafted + 1, rank)]
        shapes["markov_head.markov_w1.weight"] = [(num_ids, rank), *reduced]
        shapes["markov_head.markov_w2.weight"] = [(num_drafted, rank)]
    if arch.head_type == "gated":
        shapes["markov_head.gate_proj.weight"] = [(rank, d + rank)]
        shapes["markov_head.gate_proj.bias"] = [(rank,)]
    if arch.head_type == "rnn":
        shapes["markov_head.joint_proj.weight"] = [(3 * rank, 2 * rank + d)]
        shapes["markov_head.joint_proj.bias"] = [(3 * rank,)]
    if arch.has_confidence:
        shapes["confidence_head.proj.weight"] = [(1, d + (rank if arch.confidence_with_markov else 0))]
        shapes["confidence_head.proj.bias"] = [(1,)]
    return shapes
