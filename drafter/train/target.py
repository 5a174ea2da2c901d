"""The target as training needs it: its decoder, its chat template, its stop ids, its output rows.

Must not know prompts or drafters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from drafter.train.conversations import Messages, Template
from scheduler.errors import SettingsError
from verifier.architecture import read_architecture
from verifier.model import Decoder
from verifier.weights import load_target


def load_decoder(folder: Path, dtype: torch.dtype, device: torch.device, *, max_len: int) -> Decoder:
    arch = read_architecture(folder)
    return Decoder(arch, load_target(folder, arch, dtype, device), max_len=max_len, dtype=dtype, device=device)


def chat_template(folder: Path) -> Template:
    """The folder's own template, which serving uses too: messages -> prompt ids with the generation prompt."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise SettingsError(f"target: {folder} has no chat template; prompts cannot be asked as they would be served")

    def encode(messages: Messages) -> tuple[int, ...]:
        rendered = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return tuple(tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    return Template(encode, decode, str(tokenizer.chat_template))


def stop_ids(folder: Path) -> tuple[int, ...]:
    """eos_token_id of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            eos = json.loads(path.read_text()).get("eos_token_id")
            if eos is not None:
                return tuple(eos) if isinstance(eos, list) else (int(eos),)
    raise SettingsError(f"target: {folder} names no eos_token_id in generation_config.json or config.json")


def check_capture(capture: Sequence[int], num_layers: int) -> None:
    """DeepSpec's rule: strictly increasing, -1 is the embedding output, the last layer is forbidden."""
    legal = all(-1 <= layer < num_layers - 1 for layer in capture)
    if not capture or not legal or list(capture) != sorted(set(capture)):
        raise SettingsError(
            f"target_layer_ids: {list(capture)} must be strictly increasing and lie in -1..{num_layers - 2} for this target"
        )
