"""Where a target's files are and how its tensors are read: Hugging Face folder or hub id (safetensors), or a GGUF file.

A GGUF file is dequantised once by transformers into a Hugging Face folder in the cache, so that later starts read plain
safetensors. Never pickle.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from scheduler.compiled import default_cache_dir, home_path
from scheduler.errors import SettingsError
from verifier.architecture import Architecture

logger = logging.getLogger(__name__)

STORED_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def resolve_model(model: str, cache_dir: str = "") -> Path:
    """A local Hugging Face folder for a folder, a GGUF file (converted once into the cache) or a hub id."""
    path = home_path(model)
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise SettingsError(f"model.path: GGUF file {path} does not exist")
        return _converted_gguf(path, home_path(cache_dir) if cache_dir else default_cache_dir())
    if path.exists():
        raise SettingsError(f"model.path: {path} is neither a folder nor a .gguf file")
    return _hub_snapshot(model)


def is_local(model: str) -> bool:
    """Whether `resolve_model` would download nothing: it is here, or it is no hub id at all."""
    if home_path(model).exists() or model.lower().endswith(".gguf"):
        return True
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        snapshot_download(model, allow_patterns=_HUB_FILES, local_files_only=True)
    except HFValidationError:
        return True
    except Exception:  # the hub's library has a class for each way of not having it
        return False
    return True


def is_converted(path: Path, cache_dir: str = "") -> bool:
    """Whether a GGUF file's conversion is in the cache, whole."""
    return _intact(_conversion_folder(path, home_path(cache_dir) if cache_dir else default_cache_dir()))


def _conversion_folder(path: Path, cache: Path) -> Path:
    """Named by the file's name, size and time."""
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    return cache / f"{path.stem}-{key}"


def _hub_snapshot(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except HFValidationError:
        raise SettingsError(f"model.path: {model!r} is no folder here and no valid hub id") from None
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise SettingsError(
            f"model.path: {model!r} is no folder here and could not be fetched from the hub: {reason[0] if reason else error}"
        ) from None


def _converted_gguf(path: Path, cache: Path) -> Path:
    """The folder appears whole or not at all; of several processes one converts and the others wait for it."""
    folder = _conversion_folder(path, cache)
    if _intact(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(cache):
            if not _intact(folder):
                logger.info("converting the weights of %s, once: a minute, on a busy machine more", path.name)
                _convert_into(folder, path)
    except (OSError, SafetensorError) as error:
        raise SettingsError(
            f"cache_dir: the converted weights of {path.name} cannot be written to {cache} ({error}); set another one"
        ) from None
    return folder


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Waits until no other process is in here for the same folder; the system lets go of what a killed one held."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        # a file system without locks: two may convert at once, each into a folder of its own
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _convert_into(folder: Path, path: Path) -> None:
    unfinished = Path(tempfile.mkdtemp(prefix=f"{path.stem}-", dir=folder.parent))
    try:
        _convert_gguf(path, unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
    except OSError:
        # without a lock another process may have finished first
        if not _intact(folder):
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _intact(folder: Path) -> bool:
    """Whether a converted model is there and whole: safetensors files know their length."""
    try:
        return (folder / "config.json").is_file() and all(_names(path) for path in {*tensor_files(folder).values()})
    except SettingsError:
        return False


def _convert_gguf(path: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source, name = str(path.parent), path.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
        # transformers keeps GGUF weights packed unless told otherwise
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
    except (OSError, SafetensorError):
        raise
    except Exception as error:  # a file that is cut or damaged breaks its readers in many ways
        reason = [*str(error).splitlines(), type(error).__name__][0]
        raise SettingsError(f"model.path: {path} could not be read as GGUF (truncated?): {reason}") from None
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it; one file or the shards of an index."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / shard for name, shard in _weight_map(index).items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        raise SettingsError(f"{folder} has no model.safetensors and no model.safetensors.index.json")
    return dict.fromkeys(_names(single), single)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, every file there."""
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SettingsError(f"{index} is not a safetensors index: {type(error).__name__} {error}") from None
    if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
        raise SettingsError(
            f"{index} is not a safetensors index: weight_map must give each tensor the name of its file"
        )
    for shard in sorted({*shards.values()}):
        if not (index.parent / shard).is_file():
            raise SettingsError(f"{index} names {shard}, which is not there (download not finished?)")
    return shards


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of every tensor, from the headers alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in set(tensor_files(folder).values()):
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise SettingsError(f"{path} is not a readable safetensors file (truncated?): {error}") from None
    return shapes


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise SettingsError(f"{path} is not a readable safetensors file (truncated?): {error}") from None


def load_tensors(
    folder: Path, dtype: torch.dtype, device: torch.device, only: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """Reads the tensors (or those named) as `dtype` on `device`. Integer tensors keep their type."""
    files = tensor_files(folder)
    wanted = set(files) if only is None else set(only)
    missing = sorted(wanted - set(files))
    if missing:
        raise SettingsError(
            f"{folder} lacks the tensor {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
        )
    tensors: dict[str, Tensor] = {}
    for path in sorted({files[name] for name in wanted}):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                    if name in wanted:
                        tensor = file.get_tensor(name)
                        _check_stored(tensor, name, path)
                        tensors[name] = tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
        except (SafetensorError, OSError) as error:
            raise SettingsError(f"{path} is not a readable safetensors file (truncated?): {error}") from None
    if absent := sorted(wanted - set(tensors)):
        raise SettingsError(f"{folder} lacks the tensor {absent[0]}, which its index promises")
    return tensors


def _check_stored(tensor: Tensor, name: str, path: Path) -> None:
    """Eight-bit floats mean nothing without their scales, and complex numbers would lose their halves."""
    if (tensor.is_floating_point() and tensor.dtype not in STORED_DTYPES) or tensor.is_complex():
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in STORED_DTYPES)
        raise SettingsError(
            f"{path}: {name} is stored as {str(tensor.dtype).removeprefix('torch.')}, which is not supported; supported: {known}"
        )


def check_numbers(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raises SettingsError for a tensor that is not floating or holds NaN or infinity."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise SettingsError(
                f"{where}: {name} is stored as {str(tensor.dtype).removeprefix('torch.')}, and weights are floating-point numbers"
            )
        # far cheaper than isfinite of every element
        if not bool(torch.isfinite(torch.stack(tensor.aminmax())).all()):
            raise SettingsError(
                f"{where}: {name} holds NaN or infinity; the file is damaged, or its training went wrong"
            )


def load_target(folder: Path, arch: Architecture, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """The target's tensors, every one that the decoder needs present and of the shape that config.json says, and none that
    would change what it computes left over."""
    shapes = expected_shapes(arch)
    _refuse_leftovers(set(tensor_files(folder)) - set(shapes), folder)
    tensors = load_tensors(folder, dtype, device, only=shapes)
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise SettingsError(f"{folder}: {name} has shape {tuple(tensors[name].shape)}, config.json says {shape}")
    check_numbers(tensors, str(folder))
    return tensors


def _refuse_leftovers(names: set[str], folder: Path) -> None:
    """Biases, scales or whole layers of which config.json says nothing. Older files store rotary tables too."""
    left = sorted(name for name in names if name.startswith("model.") and not name.endswith(".inv_freq"))
    if left:
        raise SettingsError(f"{folder} has the tensor {left[0]}, which its config.json does not account for")


def expected_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Hugging Face tensor names and shapes of a Llama, Qwen2 or Qwen3 decoder."""
    d, f, hd = arch.hidden_size, arch.intermediate_size, arch.head_dim
    q_dim, kv_dim = arch.num_heads * hd, arch.num_kv_heads * hd
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab_size, d), "model.norm.weight": (d,)}
    if not arch.tie_word_embeddings:
        shapes["lm_head.weight"] = (arch.vocab_size, d)
    for i in range(arch.num_layers):
        layer = f"model.layers.{i}"
        linears = {
            "self_attn.q_proj": (q_dim, d, arch.qkv_bias),
            "self_attn.k_proj": (kv_dim, d, arch.qkv_bias),
            "self_attn.v_proj": (kv_dim, d, arch.qkv_bias),
            "self_attn.o_proj": (d, q_dim, arch.output_bias),
            "mlp.gate_proj": (f, d, arch.mlp_bias),
            "mlp.up_proj": (f, d, arch.mlp_bias),
            "mlp.down_proj": (d, f, arch.mlp_bias),
        }
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
        shapes[f"{layer}.input_layernorm.weight"] = (d,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (d,)
        if arch.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (hd,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (hd,)
    return shapes


def fingerprint(folder: Path) -> str:
    """Short name of exactly these weights: config text plus the size and header of each tensor file."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(set(tensor_files(folder).values())):
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 16))
    return digest.hexdigest()[:16]
