"""Draft checkpoints on disk: the DeepSpec format (config.json, model.safetensors) and our lighter form of it.

Lighter: `embed_tokens.weight` and `lm_head.weight` may be absent (the target's are used), and an integer tensor
`draft_vocab_ids` [Vd] (target ids, ascending) may restrict the drafted vocabulary. Then `lm_head.weight`, where stored,
and `markov_head.markov_w2.weight` have Vd rows, and `markov_head.markov_w1.weight` has V rows, or Vd + 1 of which the last
stands for every token outside the draft vocabulary. Eagle3 checkpoints of other makers say the same by `d2t` [Vd] (target
id minus draft id) and `t2d` [V] (is a target id drafted); both forms are read.

Owns the files and the check that they hold what drafter/architecture.py asks for. Must not know how it is computed.

Symbols: V target vocabulary, Vd draft vocabulary, d hidden, m captured target layers, r Markov rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from drafter.architecture import DrafterArchitecture, drafter_shapes, parse_drafter
from scheduler.errors import SettingsError
from verifier.architecture import Architecture, read_architecture, read_config
from verifier.weights import check_numbers, fingerprint, load_tensors, resolve_model, tensor_files

# Values of DrafterConfig.checkpoint that name no folder.
FOLDERLESS = ("ngram", "none")
VOCABULARY = "draft_vocab_ids"
DRAFT_TO_TARGET, TARGET_TO_DRAFT = "d2t", "t2d"
_CALIBRATION = "calibration.json"


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


def load_checkpoint(folder: Path, target_folder: Path, dtype: torch.dtype, device: torch.device) -> Checkpoint:
    """Reads and checks a drafter for this target; what the checkpoint leaves out comes from the target's folder."""
    arch = read_drafter(folder)
    target = read_architecture(target_folder)
    _check_target(arch, target, folder / "config.json")
    files = tensor_files(folder)
    tensors = load_tensors(folder, dtype, device, only=[name for name in files if not name.endswith(".inv_freq")])
    tensors = with_vocabulary(tensors, str(folder))
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


def with_vocabulary(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """A draft vocabulary stated as `d2t` (and `t2d`) becomes `draft_vocab_ids`."""
    found = dict(tensors)
    offsets, drafted = found.pop(DRAFT_TO_TARGET, None), found.pop(TARGET_TO_DRAFT, None)
    if offsets is None and drafted is None:
        return found
    if offsets is None or VOCABULARY in found:
        raise SettingsError(f"{where}: give the draft vocabulary as d2t (with or without t2d) or as {VOCABULARY}, once")
    if offsets.dim() != 1 or offsets.is_floating_point():
        raise SettingsError(f"{where}: d2t must be a list of integers, not {offsets.dtype} of {tuple(offsets.shape)}")
    ids = offsets.long() + torch.arange(len(offsets), device=offsets.device)
    if drafted is not None and not torch.equal(drafted.flatten().nonzero().flatten(), ids):
        raise SettingsError(f"{where}: d2t and t2d name different tokens")
    found[VOCABULARY] = ids
    return found


def vocabulary_maps(ids: Tensor, num_ids: int) -> dict[str, Tensor]:
    """ids [Vd] as `d2t` and `t2d`, which other engines read."""
    drafted = torch.zeros(num_ids, dtype=torch.bool)
    drafted[ids] = True
    return {DRAFT_TO_TARGET: ids - torch.arange(len(ids)), TARGET_TO_DRAFT: drafted}


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
    check_numbers({name: tensor for name, tensor in tensors.items() if name != VOCABULARY}, where)
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


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes a checkpoint that `load_checkpoint` accepts; floating tensors are all bfloat16 or all float32.

    Each file appears whole or not at all, config.json last, so that a folder with a config.json can be loaded. A
    calibration.json of earlier weights is removed.
    """
    arch = parse_drafter(config, str(folder / "config.json"))
    check_tensors(arch, with_vocabulary(tensors, str(folder)), str(folder))
    dtypes = {t.dtype for t in tensors.values() if t.is_floating_point()}
    if dtypes not in ({torch.bfloat16}, {torch.float32}):
        raise ValueError(f"a checkpoint is all bfloat16 or all float32, not {sorted(map(str, dtypes))}")
    folder.mkdir(parents=True, exist_ok=True)
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    weights, settings = (folder / f".{name}.{os.getpid()}" for name in ("model.safetensors", "config.json"))
    try:
        # both are on the disk before anything of the earlier checkpoint goes: the disk may be full
        save_file(on_host, weights, metadata={"format": "pt"})
        settings.write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n")
        (folder / _CALIBRATION).unlink(missing_ok=True)
        os.replace(weights, folder / "model.safetensors")
        os.replace(settings, folder / "config.json")
    except (OSError, SafetensorError) as error:
        raise SettingsError(f"could not write {folder}: {error}") from None
    finally:
        for unfinished in (weights, settings):
            unfinished.unlink(missing_ok=True)
