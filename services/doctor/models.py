"""Checks of the models that the settings name: are they there, do they fit each other and this machine's memory, is the drafter
calibrated, is there a cost curve. Reads files; loads nothing but the drafter."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from drafter.calibration import FILE_NAME, UNCALIBRATED, load_calibration
from drafter.checkpoint import FOLDERLESS, load_checkpoint, resolve_checkpoint
from scheduler.admit import parse_planner
from scheduler.errors import SettingsError
from scheduler.throughput import CurveRejected, load_curve
from services.doctor.findings import Finding, age, fail, ok, warn
from services.engine import curve_path, machine_key
from services.gateway.loaded_model import LoadedModel
from services.model_card import read_card
from services.settings import Settings
from verifier.architecture import Architecture, read_architecture
from verifier.device import resolve_device, resolve_dtype
from verifier.kv import bytes_per_token
from verifier.runner import checked_layers, num_blocks_of
from verifier.weights import expected_shapes, fingerprint, is_converted, is_local, resolve_model, tensor_shapes

if TYPE_CHECKING:
    from drafter.architecture import DrafterArchitecture

GIB = 1024**3
_OLD_S = 30 * 24 * 3600.0
_TIGHT = 0.85
_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")


class NotHere(Exception):
    """Nothing to look at yet; the message says why. Not a fault: the first start fetches or converts it."""


@dataclass(frozen=True)
class Models:
    """The files of both models, looked at once."""

    settings: Settings

    @cached_property
    def target(self) -> Path:
        """Raises NotHere where looking would download or convert."""
        path = self.settings.target_path()
        if not is_local(path):
            raise NotHere(f"{path} has not been downloaded")
        if (
            path.lower().endswith(".gguf")
            and Path(path).is_file()
            and not is_converted(Path(path), self.settings.cache_dir)
        ):
            raise NotHere(f"{Path(path).name} has not been converted")
        return resolve_model(path, self.settings.cache_dir)

    @cached_property
    def arch(self) -> Architecture:
        return read_architecture(self.target)

    @property
    def has_drafter(self) -> bool:
        return self.settings.drafter_checkpoint() not in FOLDERLESS

    @cached_property
    def drafter(self) -> Path:
        checkpoint = self.settings.drafter_checkpoint()
        if not is_local(checkpoint):
            raise NotHere(f"{checkpoint} has not been downloaded")
        return resolve_checkpoint(checkpoint, self.settings.cache_dir)

    @cached_property
    def drafter_arch(self) -> DrafterArchitecture:
        """After the check that it fits the target, weights included."""
        import torch

        checkpoint = load_checkpoint(self.drafter, self.target, torch.bfloat16, torch.device("cpu"))
        return checkpoint.arch


def _not_yet(name: str, reason: NotHere) -> Finding:
    return warn(name, f"not checked: {reason} yet", "start once, then run this again")


def check_model(models: Models) -> Finding:
    try:
        folder = models.target
    except NotHere as reason:
        return warn(
            "model", f"{reason} yet", "nothing, or run `dspark measure`: the first start does it, and takes longer"
        )
    arch, shapes = models.arch, tensor_shapes(folder)
    for name, shape in expected_shapes(arch).items():
        if shapes.get(name) != shape:
            has = f"has shape {shapes[name]}" if name in shapes else "is missing"
            raise SettingsError(f"{folder}: {name} {has}, and config.json says {shape}")
    settings = models.settings
    template = settings.model.chat_template
    card = read_card(
        folder,
        name=settings.model_name,
        created=0,
        max_model_len=arch.max_position_embeddings,
        draft_width=0,
        chat_template=Path(template).read_text(encoding="utf-8") if template else "",
    )
    LoadedModel.from_card(card)
    return ok(
        "model",
        f"{card.name}: {arch.model_type}, {arch.num_layers} layers of {arch.hidden_size}, vocabulary {arch.vocab_size}, "
        f"context {arch.max_position_embeddings}",
    )


def check_drafter(models: Models) -> Finding:
    """Layer ids, hidden size, vocabulary, every tensor's shape, and that no weight is NaN."""
    if not models.has_drafter:
        return ok("drafter", f"{models.settings.drafter_checkpoint()}: no checkpoint to fit")
    try:
        arch = models.drafter_arch
    except NotHere as reason:
        return _not_yet("drafter", reason)
    checked_layers(arch.target_layer_ids, models.arch)
    layers = ", ".join(map(str, arch.target_layer_ids))
    return ok("drafter", f"{arch.kind} of up to {arch.block_size} tokens, on the target's layers {layers}")


def check_calibration(models: Models) -> Finding:
    if not models.has_drafter:
        return ok("calibration", f"{models.settings.drafter_checkpoint()} states no confidence")
    try:
        arch = models.drafter_arch
    except NotHere as reason:
        return _not_yet("calibration", reason)
    if not arch.has_confidence:
        return ok("calibration", f"{arch.kind} has no confidence head")
    calibration = load_calibration(models.drafter, arch.block_size, fingerprint(models.drafter))
    if calibration == UNCALIBRATED:
        return warn(
            "calibration",
            f"{models.drafter} has no {FILE_NAME}, so the planner believes the head's raw confidence",
            "run `dspark calibrate`",
        )
    return ok("calibration", f"for these weights, regimes {', '.join(calibration.regimes)}")


def check_memory(models: Models, limit: Path = _MEMORY_LIMIT) -> Finding:
    """Weights, KV blocks and drafter against what the devices have. limit: the control group's file."""
    try:
        needs = _needs(models)
    except NotHere as reason:
        return _not_yet("memory", reason)
    shown = []
    worst: Finding | None = None
    for device, parts in needs.items():
        needed, free = sum(parts.values()), _free_bytes(device, limit)
        made = " + ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
        said = f"{device}: {made} = {needed / GIB:.1f} GiB of {free / GIB:.1f} free"
        shown.append(said)
        if needed > free:
            worst = fail(
                "memory", said, "lower kv.cache_bytes (or kv.num_blocks, scheduler.max_live), or use another device"
            )
        elif needed > _TIGHT * free and worst is None:
            worst = warn("memory", f"{said}: little is left for a step", "lower kv.cache_bytes or scheduler.max_live")
    return worst or ok("memory", "; ".join(shown))


def _needs(models: Models) -> dict[str, dict[str, int]]:
    """Bytes by device and purpose."""
    settings, arch = models.settings, models.arch
    device = resolve_device(settings.model.device)
    dtype = resolve_dtype(settings.model.dtype, device)
    per_token = bytes_per_token(arch.num_layers, arch.num_kv_heads, arch.head_dim, dtype)
    config = settings.verifier_config(())
    blocks = num_blocks_of(config, per_token, config.max_model_len or arch.max_position_embeddings)
    parameters = sum(_count(shape) for shape in expected_shapes(arch).values())
    needs = {str(device): {"weights": parameters * dtype.itemsize, "KV": blocks * config.block_size * per_token}}
    if models.has_drafter:
        draft_device = resolve_device(settings.drafter.device)
        draft_dtype = resolve_dtype(settings.drafter.dtype, draft_device)
        decoder = models.drafter_arch.decoder
        name = (
            str(draft_device)
            if settings.placement != "split" or draft_device.type == "cpu"
            else f"{draft_device} of the drafter"
        )
        parts = needs.setdefault(name, {})
        parts["drafter"] = sum(_count(shape) for shape in tensor_shapes(models.drafter).values()) * draft_dtype.itemsize
        row = bytes_per_token(decoder.num_layers, decoder.num_kv_heads, decoder.head_dim, draft_dtype)
        parts["its KV"] = blocks * config.block_size * row
    return needs


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _free_bytes(device: str, limit: Path) -> int:
    import torch

    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(torch.device(device.partition(" ")[0]))[0]
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    try:
        return min(free, int(limit.read_text()))
    except (OSError, ValueError):
        return free


def check_curve(models: Models) -> Finding:
    settings = models.settings
    if not parse_planner(settings.scheduler.planner).adaptive:
        return ok("curve", f"the planner {settings.scheduler.planner} needs none")
    key = machine_key(settings)
    path = curve_path(settings, key)
    try:
        width = _width(models)
        curve = load_curve(path, key | _worker_key(models, width), width=width)
    except NotHere as reason:
        return _not_yet("curve", reason)
    except CurveRejected as error:
        return warn(
            "curve",
            f"{path.name}: {error}",
            "nothing, or run `dspark measure`: the next start measures it, which takes up to a minute",
        )
    age_s = time.time() - curve.measured_at
    if age_s > _OLD_S:
        return warn(
            "curve",
            f"{path.name} was measured {age(age_s)} ago",
            f"nothing: each start tries it with a few steps and measures anew where they disagree; delete {path} to have it "
            "measured all the same",
        )
    return ok("curve", f"measured {age(age_s)} ago, up to {curve.points.tokens[-1]} tokens a step")


def _width(models: Models) -> int:
    from drafter.runner import width_of

    checkpoint, most = models.settings.drafter_checkpoint(), models.settings.drafter.max_width
    if checkpoint == "ngram":
        from drafter.ngram import NgramRunner

        return NgramRunner(most).describe().width
    return width_of(models.drafter_arch, most) if models.has_drafter else 0


def _worker_key(models: Models, width: int) -> dict[str, str]:
    """As scheduler.actor makes it of what the workers say of themselves."""
    settings = models.settings
    device = resolve_device(settings.model.device)
    drafter = "none"
    if models.has_drafter:
        drafter = f"{fingerprint(models.drafter)} width {width}"
    elif settings.drafter_checkpoint() == "ngram":
        from drafter.ngram import NgramRunner

        drafter = f"{NgramRunner(settings.drafter.max_width).describe().fingerprint} width {width}"
    return {
        "target": fingerprint(models.target),
        "dtype": str(resolve_dtype(settings.model.dtype, device)).removeprefix("torch."),
        "device": str(device),
        "drafter": drafter,
    }
