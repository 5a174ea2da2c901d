"""The architecture numbers of a target, read from its config.json, and the refusal of what this decoder is not.

Owns the list of supported families. Must not know weights or devices.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.errors import SettingsError

FAMILIES = ("llama", "qwen2", "qwen3")
# Of each way of scaling rotary positions, the numbers that config.json must give.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """Dimensions of a Llama, Qwen2 or Qwen3 decoder. `head_dim` may differ from hidden_size / num_heads (Qwen3)."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope: dict[str, Any]
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @property
    def num_qkv_heads(self) -> int:
        return self.num_heads + 2 * self.num_kv_heads


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"model folder {folder} has no config.json") from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise SettingsError(f"{path} does not hold a JSON object")
    return config


def read_architecture(folder: Path) -> Architecture:
    """Raises SettingsError naming what this decoder does not compute."""
    return parse_architecture(read_config(folder), str(folder / "config.json"))


def parse_architecture(config: dict[str, Any], where: str) -> Architecture:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise SettingsError(f"{where}: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    _refuse_variants(config, where)
    rope = _rope(config, where)
    num_heads = _count(config, "num_attention_heads", where)
    hidden_size = _count(config, "hidden_size", where)
    return Architecture(
        model_type=family,
        vocab_size=_count(config, "vocab_size", where),
        hidden_size=hidden_size,
        intermediate_size=_count(config, "intermediate_size", where),
        num_layers=_count(config, "num_hidden_layers", where),
        num_heads=num_heads,
        num_kv_heads=_count(config, "num_key_value_heads", where, default=num_heads),
        head_dim=_count(config, "head_dim", where, default=hidden_size // num_heads),
        rms_norm_eps=_positive(config, "rms_norm_eps", where),
        rope_theta=_positive(rope, "rope_theta", where),
        rope=rope,
        max_position_embeddings=_count(config, "max_position_embeddings", where),
        tie_word_embeddings=_flag(config, "tie_word_embeddings", where),
        qkv_bias=family == "qwen2" or _flag(config, "attention_bias", where),
        output_bias=family != "qwen2" and _flag(config, "attention_bias", where),
        mlp_bias=_flag(config, "mlp_bias", where),
        qk_norm=family == "qwen3",
    )


def _given(config: dict[str, Any], key: str, where: str) -> Any:
    if key not in config:
        raise SettingsError(f"{where} lacks {key!r}")
    return config[key]


def _count(config: dict[str, Any], key: str, where: str, default: int | None = None) -> int:
    """A whole number of at least 1; `default` stands in where the key is missing or null."""
    value = default if default is not None and config.get(key) is None else _given(config, key, where)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SettingsError(f"{where}: {key} must be a whole number of at least 1, not {value!r}")
    return value


def _positive(config: dict[str, Any], key: str, where: str) -> float:
    value = _given(config, key, where)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise SettingsError(f"{where}: {key} must be a number above 0, not {value!r}")
    return float(value)


def _flag(config: dict[str, Any], key: str, where: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise SettingsError(f"{where}: {key} must be true or false, not {value!r}")
    return bool(value)


def _refuse_variants(config: dict[str, Any], where: str) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise SettingsError(f"{where}: hidden_act {config['hidden_act']!r} is not supported; supported: silu")
    layer_types = config.get("layer_types") or ["full_attention"]
    if not isinstance(layer_types, list):
        raise SettingsError(f"{where}: layer_types must be a list, not {layer_types!r}")
    if config.get("use_sliding_window") or any(kind != "full_attention" for kind in layer_types):
        raise SettingsError(f"{where}: sliding-window attention is not supported (use_sliding_window, layer_types)")
    if config.get("quantization_config"):
        raise SettingsError(f"{where}: quantised weights are not supported; give the unquantised folder or a GGUF file")


def _rope(config: dict[str, Any], where: str) -> dict[str, Any]:
    """transformers 5 writes rope_parameters, earlier releases rope_theta and rope_scaling."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise SettingsError(f"{where}: rope_parameters must be an object, not {given!r}")
    rope = dict(given)
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise SettingsError(f"{where}: rope_type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    for key in ROPE_TYPES[kind]:
        _positive(rope, key, f"{where}: rope_type {kind!r}")
    return rope
