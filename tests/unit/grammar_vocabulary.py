"""A vocabulary small enough to enumerate: single characters, two longer tokens and an end of sequence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<end>"
SIXTEEN = ["a", "b", "c", "d", "0", "1", "{", "}", '"', ":", ",", "[", "]", "ab", "\n", END]
END_ID = 15


def save_vocabulary(folder: Path, texts: Sequence[str] = SIXTEEN) -> Path:
    """tokenizer.json with exactly these tokens, in this order; the last one is special."""
    alphabet = {chr(c): chr(c) for c in range(33, 127)} | {"\n": "Ċ", " ": "Ġ"}
    pieces = ["".join(alphabet[c] for c in text) if text != END else text for text in texts]
    merges = [(piece[:-1], piece[-1]) for piece in pieces if len(piece) > 1 and piece != END]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return folder


def text_of(token_ids: Sequence[int], texts: Sequence[str] = SIXTEEN) -> str:
    return "".join(texts[token] for token in token_ids if texts[token] != END)
