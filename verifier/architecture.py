"""The architecture numbers of a target, read from its config.json, and the refusal of what this decoder is not.

Owns the list of supported families. Must not know weights or devices.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.errors import SettingsError

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


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
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise SettingsError(f"model folder {folder} has no config.json") from None
    except json.JSONDecodeError as error:
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
    try:
        num_heads = int(config["num_attention_heads"])
        hidden_size = int(config["hidden_size"])
        return Architecture(
            model_type=family,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or hidden_size // num_heads),
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(rope["rope_theta"]),
            rope=rope,
            max_position_embeddings=int(config["max_position_embeddings"]),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or bool(config.get("attention_bias", False)),
            output_bias=family != "qwen2" and bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
        )
    except KeyError as error:
        raise SettingsError(f"{where} lacks {error.args[0]!r}") from None


def _refuse_variants(config: dict[str, Any], where: str) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise SettingsError(f"{where}: hidden_act {config['hidden_act']!r} is not supported; supported: silu")
    layer_types = set(config.get("layer_types") or ["full_attention"])
    if config.get("use_sliding_window") or layer_types - {"full_attention"}:
        raise SettingsError(f"{where}: sliding-window attention is not supported (use_sliding_window, layer_types)")
    if config.get("quantization_config"):
        raise SettingsError(f"{where}: quantised weights are not supported; give the unquantised folder or a GGUF file")


def _rope(config: dict[str, Any], where: str) -> dict[str, Any]:
    """transformers 5 writes rope_parameters, earlier releases rope_theta and rope_scaling."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    if rope["rope_type"] not in ROPE_TYPES:
        raise SettingsError(
            f"{where}: rope_type {rope['rope_type']!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    return rope
