"""Draft checkpoints on disk: the DeepSpec format (config.json, model.safetensors) and our lighter form of it.

Lighter: `embed_tokens.weight` and `lm_head.weight` may be absent (the target's are used), and an integer tensor
`draft_vocab_ids` [Vd] (target ids, ascending) may restrict the drafted vocabulary. Then `lm_head.weight`, where stored,
and `markov_head.markov_w2.weight` have Vd rows, and `markov_head.markov_w1.weight` has V rows, or Vd + 1 of which the last
stands for every token outside the draft vocabulary.

Owns what is a checkpoint and the refusal of what is none. Must not know how it is computed.

Symbols: V target vocabulary, Vd draft vocabulary, d hidden, m captured target layers, r Markov rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from scheduler.errors import SettingsError
from verifier.architecture import Architecture, parse_architecture, read_architecture, read_config
from verifier.weights import expected_shapes, fingerprint, load_tensors, resolve_model, tensor_files

# architectures[0] -> model_type. DFlash checkpoints carry the DSpark name too.
FAMILIES = {"Qwen3DSparkModel": "qwen3", "LlamaDSparkModel": "llama", "Qwen2DSparkModel": "qwen2"}
HEAD_TYPES = ("vanilla", "gated", "rnn")
# Values of DrafterConfig.checkpoint that name no folder.
FOLDERLESS = ("ngram", "none")
# Published blocks have 3 to 16 slots; a number far above is a mistake that would only show as a very slow start.
MAX_BLOCK = 256
VOCABULARY = "draft_vocab_ids"
_CALIBRATION = "calibration.json"


@dataclass(frozen=True, slots=True)
class DrafterArchitecture:
    """What config.json says of a drafter.

    decoder: dimensions of the draft layers (num_layers is the number of draft layers).
    block_size: γ, the tokens drafted by one block. mask_token_id fills its slots 1..γ-1.
    target_layer_ids: target layers whose raw outputs feed the context, ascending; -1 is the embedding.
    markov_rank 0 is no Markov head (DFlash). variable_block: trained with blocks of random length, so that fewer than γ
    slots may be run.
    """

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
        return f"dspark-{self.head_type}" if self.markov_rank else "dflash"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded drafter. `tensors` always holds embed_tokens and lm_head ([V, d] and [Vd, d]).

    draft_vocab_ids: [Vd] int64, or None when the draft vocabulary is the target's.
    """

    arch: DrafterArchitecture
    tensors: dict[str, Tensor]
    draft_vocab_ids: Tensor | None
    fingerprint: str


def resolve_checkpoint(checkpoint: str, cache_dir: str = "") -> Path:
    """The folder of a checkpoint: itself, or the snapshot of a hub id."""
    try:
        return resolve_model(checkpoint, cache_dir)
    except SettingsError as error:
        raise SettingsError(f"drafter.checkpoint: {str(error).removeprefix('model.path: ')}") from None


def read_layer_ids(checkpoint: str | Path, cache_dir: str = "") -> tuple[int, ...]:
    """Target layers that the drafter wants captured; none for drafters without weights."""
    if str(checkpoint) in FOLDERLESS:
        return ()
    return read_drafter(resolve_checkpoint(str(checkpoint), cache_dir)).target_layer_ids


def read_drafter(folder: Path) -> DrafterArchitecture:
    """Raises SettingsError naming the file, the field and what is wrong with it."""
    return parse_drafter(read_config(folder), str(folder / "config.json"))


def parse_drafter(config: Mapping[str, Any], where: str) -> DrafterArchitecture:
    """config.json as an architecture. Unknown keys (training facts, `dspark_serve`) are ignored."""
    decoder = _decoder(config, where)
    rank = _integer(config, "markov_rank", where, low=0)
    arch = DrafterArchitecture(
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


def _decoder(config: Mapping[str, Any], where: str) -> Architecture:
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else named
    if "dflash_config" in config or str(name).startswith("DFlash"):
        raise SettingsError(
            f"{where}: dflash_config is the z-lab DFlash layout, which is not supported; use a DeepSpec one"
        )
    if not isinstance(name, str) or name not in FAMILIES:
        raise SettingsError(f"{where}: architectures {name!r} is not supported yet; supported: {', '.join(FAMILIES)}")
    if config.get("model_type") != FAMILIES[name]:
        raise SettingsError(f"{where}: model_type {config.get('model_type')!r} does not fit {name}: {FAMILIES[name]!r}")
    decoder = parse_architecture(dict(config), where)
    if decoder.model_type == "qwen2":
        return replace(decoder, qkv_bias=bool(config.get("attention_bias", True)))
    return decoder


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


def load_checkpoint(folder: Path, target_folder: Path, dtype: torch.dtype, device: torch.device) -> Checkpoint:
    """Reads and checks a drafter for this target; what the checkpoint leaves out comes from the target's folder."""
    arch = read_drafter(folder)
    target = read_architecture(target_folder)
    _check_target(arch, target, folder / "config.json")
    files = tensor_files(folder)
    tensors = load_tensors(folder, dtype, device, only=[name for name in files if not name.endswith(".inv_freq")])
    check_tensors(arch, tensors, str(folder))
    vocabulary = tensors.pop(VOCABULARY, None)
    if vocabulary is not None:
        vocabulary = vocabulary.long()
    _borrow(tensors, vocabulary, target, target_folder, dtype, device)
    return Checkpoint(arch, tensors, vocabulary, fingerprint(folder))


def _check_target(arch: DrafterArchitecture, target: Architecture, where: Path) -> None:
    pairs = {
        "hidden_size": (arch.decoder.hidden_size, target.hidden_size),
        "vocab_size": (arch.decoder.vocab_size, target.vocab_size),
        "num_target_layers": (arch.num_target_layers, target.num_layers),
    }
    for key, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise SettingsError(
                f"{where}: {key} is {ours} but the target has {theirs}; this drafter is for another target"
            )


def _borrow(
    tensors: dict[str, Tensor],
    vocabulary: Tensor | None,
    target: Architecture,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Fills in embed_tokens and lm_head from the target where the checkpoint leaves them out."""
    head = "model.embed_tokens.weight" if target.tie_word_embeddings else "lm_head.weight"
    sources = {"embed_tokens.weight": "model.embed_tokens.weight", "lm_head.weight": head}
    missing = {name: source for name, source in sources.items() if name not in tensors}
    if not missing:
        return
    loaded = load_tensors(folder, dtype, device, only=set(missing.values()))
    for name, source in missing.items():
        tensors[name] = loaded[source]
    if "lm_head.weight" in missing and vocabulary is not None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].index_select(0, vocabulary)


def check_tensors(arch: DrafterArchitecture, tensors: Mapping[str, Tensor], where: str) -> None:
    """Every tensor that config.json implies, of that shape, and none that it does not account for."""
    vocabulary = tensors.get(VOCABULARY)
    if vocabulary is not None:
        _check_vocabulary(vocabulary, arch, where)
    allowed = drafter_shapes(arch, len(vocabulary) if vocabulary is not None else None)
    missing = sorted(set(allowed) - set(tensors) - {"embed_tokens.weight", "lm_head.weight"})
    if missing:
        raise SettingsError(
            f"{where} lacks the tensor {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
        )
    unknown = sorted(set(tensors) - set(allowed) - {VOCABULARY})
    if unknown:
        raise SettingsError(f"{where} has the tensor {unknown[0]}, which its config.json does not account for")
    for name, shapes in allowed.items():
        if name in tensors and tuple(tensors[name].shape) not in shapes:
            expected = " or ".join(str(shape) for shape in shapes)
            raise SettingsError(f"{where}: {name} has shape {tuple(tensors[name].shape)}, config.json says {expected}")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise SettingsError(f"{where}: {name} holds NaN or infinity: the training that wrote it went wrong")
    if "lm_head.weight" in tensors and not bool(tensors["lm_head.weight"].any()):
        raise SettingsError(f"{where}: lm_head.weight is all zero; leave it out to use the target's")


def _check_vocabulary(ids: Tensor, arch: DrafterArchitecture, where: str) -> None:
    if ids.is_floating_point() or ids.dim() != 1 or len(ids) == 0:
        raise SettingsError(
            f"{where}: {VOCABULARY} must be a list of integers, not {ids.dtype} of shape {tuple(ids.shape)}"
        )
    size = arch.decoder.vocab_size
    if int(ids[0]) < 0 or int(ids[-1]) >= size or not bool((ids[1:] > ids[:-1]).all()):
        raise SettingsError(f"{where}: {VOCABULARY} must be ascending token ids below {size}")
    if arch.markov_rank and len(ids) == size - 1:
        raise SettingsError(
            f"{where}: {VOCABULARY} of {size - 1} ids makes markov_w1 ambiguous; use all {size} or fewer"
        )


def drafter_shapes(arch: DrafterArchitecture, draft_vocab_size: int | None = None) -> dict[str, list[tuple[int, ...]]]:
    """Tensor name -> the shapes it may have. draft_vocab_size None is the whole vocabulary."""
    decoder, rank = arch.decoder, arch.markov_rank
    d, num_ids = decoder.hidden_size, decoder.vocab_size
    num_drafted = num_ids if draft_vocab_size is None else draft_vocab_size
    shapes: dict[str, list[tuple[int, ...]]] = {
        name.removeprefix("model."): [shape]
        for name, shape in expected_shapes(decoder).items()
        if name.startswith("model.layers.")
    }
    shapes["embed_tokens.weight"] = [(num_ids, d)]
    shapes["lm_head.weight"] = [(num_drafted, d)]
    shapes["fc.weight"] = [(d, len(arch.target_layer_ids) * d)]
    shapes["hidden_norm.weight"] = shapes["norm.weight"] = [(d,)]
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


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes a checkpoint that `load_checkpoint` accepts; floating tensors are all bfloat16 or all float32.

    Each file appears whole or not at all, config.json last, so that a folder with a config.json can be loaded. A
    calibration.json of earlier weights is removed.
    """
    check_tensors(parse_drafter(config, str(folder / "config.json")), tensors, str(folder))
    dtypes = {t.dtype for t in tensors.values() if t.is_floating_point()}
    if dtypes not in ({torch.bfloat16}, {torch.float32}):
        raise ValueError(f"a checkpoint is all bfloat16 or all float32, not {sorted(map(str, dtypes))}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _CALIBRATION).unlink(missing_ok=True)
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    unfinished = folder / f".model.safetensors.{os.getpid()}"
    try:
        save_file(on_host, unfinished, metadata={"format": "pt"})
        os.replace(unfinished, folder / "model.safetensors")
        unfinished.write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n")
        os.replace(unfinished, folder / "config.json")
    finally:
        unfinished.unlink(missing_ok=True)
