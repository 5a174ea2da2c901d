"""A tokenizer for small targets that have none, so that they can be chatted with."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHARACTERS = ["Ġ", *"abcdefghijklmnopqrstuvwxyz0123456789.,:;!?-+*/()"]
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }};{% endfor %}assistant:"


def save_tokenizer(folder: Path, vocab_size: int) -> Path:
    """One token per character, as many characters as the target has ids."""
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(CHARACTERS[:vocab_size])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder
