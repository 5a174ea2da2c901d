"""Tokens to text and text to tokens, at the edge: tokenizer, incremental detokeniser, stop strings.

Detokenising works on bytes. Every token stands for a fixed byte string (byte-level BPE and sentencepiece with byte
fallback both do), so an incremental UTF-8 decoder is all the state a stream needs: it never emits half a character,
does not depend on where a block of tokens was cut, and its tail is flushed at the end. Knows no HTTP and no torch.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from scheduler.errors import BadParams, SettingsError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted: character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


class Tokenizer:
    """A tokenizer.json. `encode` is safe in a thread; `piece` gives the bytes a token stands for."""

    def __init__(self, tokenizer_json: str) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        spec = json.loads(tokenizer_json)
        self._pieces, self.strips_first_space = _pieces(self._tokenizer, spec)
        added = spec.get("added_tokens", [])
        self._special = {token["id"]: token["content"].encode() for token in added if token["special"]}

    @property
    def size(self) -> int:
        """Ids below it have a piece."""
        return len(self._pieces)

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids. Rendered chat text gets nothing added: the template wrote the special tokens already. Raises
        BadParams for text that is none."""
        try:
            text.encode()
        except UnicodeEncodeError:
            # JSON can say it ("\\ud83d"), UTF-8 cannot.
            raise BadParams("the text has half of a surrogate pair, which is no character") from None
        return list(self._tokenizer.encode(text, add_special_tokens=add_special).ids)

    def piece(self, token_id: int) -> bytes:
        """The bytes a token adds to the text. Special tokens are not shown; neither are ids beyond the tokenizer (padding
        of the embedding table)."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token is called: its bytes, and for a special token its text."""
        return self._special.get(token_id) or self.piece(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of all ids at once, special tokens included."""
        text = b"".join(self.token_bytes(token_id) for token_id in token_ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_first_space else text


def _pieces(tokenizer: tokenizers.Tokenizer, spec: Mapping[str, Any]) -> tuple[list[bytes], bool]:
    decoders = _decoders(spec.get("decoder"))
    kinds = {decoder["type"] for decoder in decoders}
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    to_bytes = _byte_level_piece if "ByteLevel" in kinds else _fallback_piece
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
        raise SettingsError(
            f"model.path: the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is not supported; "
            "supported are byte-level BPE and sentencepiece (byte fallback, metaspace)"
        )
    for text, token_id in vocab.items():
        table[token_id] = to_bytes(text)
    for added in spec.get("added_tokens", []):
        table[vocab[added["content"]]] = b"" if added["special"] else added["content"].encode()
    return table, _strips_first_space(decoders)


def _decoders(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _strips_first_space(decoders: Iterable[Mapping[str, Any]]) -> bool:
    for decoder in decoders:
        if decoder["type"] == "Strip" and decoder.get("content") == " " and decoder.get("start", 0) > 0:
            return True
        if decoder["type"] == "Metaspace" and decoder.get("prepend_scheme", "always") != "never":
            return True
    return False


_ALPHABET = byte_level_alphabet()


def _byte_level_piece(text: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in text)
    except KeyError:
        return text.encode()


def _fallback_piece(text: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(match.group(1), 16)]) if match else text.replace(_SPACE, " ").encode()


class Detokeniser:
    """Text of one growing output. `push` returns what became certain, `flush` the rest. Special tokens are not shown, but
    for `shown_ids`."""

    def __init__(self, tokenizer: Tokenizer, shown_ids: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._shown_ids = shown_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.strips_first_space

    def push(self, *token_ids: int) -> str:
        text = self._tokenizer
        pieces = [text.token_bytes(each) if each in self._shown_ids else text.piece(each) for each in token_ids]
        return self._emit(self._decoder.decode(b"".join(pieces)))

    def flush(self) -> str:
        """An unfinished character becomes U+FFFD, as a decode of all ids at once would show it."""
        return self._emit(self._decoder.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces, wherever the pieces are cut.

    The match that ends first wins; of those that end together, the longest. Text that may still become a stop string is
    held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._num_passed = 0
        self.searches = bool(self._stops)
        self.matched = False

    def push(self, text: str) -> str:
        """What can be shown: everything before the match, or all but a possible beginning of one."""
        if not self._stops:
            return text
        window = self._held + text
        cut = self._first_match(window)
        if cut is not None:
            self.matched, self._held = True, ""
            return window[:cut]
        return self._hold_back(window)

    def pass_over(self, text: str) -> str:
        """What can be shown of text that ends no stop string (min_tokens); one that ends later may begin in it."""
        if not self._stops:
            return text
        window = self._held + text
        self._num_passed = len(window)
        return self._hold_back(window)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _first_match(self, window: str) -> int | None:
        """Where the match begins, which ends beyond what was passed over."""
        found = []
        for stop in self._stops:
            start = window.find(stop, max(0, self._num_passed + 1 - len(stop)))
            if start >= 0:
                found.append((start + len(stop), start))
        return min(found)[1] if found else None

    def _hold_back(self, window: str) -> str:
        shown = len(window) - self._possible_prefix(window)
        self._held, self._num_passed = window[shown:], max(0, self._num_passed - shown)
        return window[:shown]

    def _possible_prefix(self, window: str) -> int:
        """Length of the longest end of `window` with which a stop string begins."""
        return max(_overlap(window, stop) for stop in self._stops)


def _overlap(window: str, stop: str) -> int:
    """Length of the longest end of `window` that is a beginning of `stop`, but not all of it."""
    start = max(0, len(window) - len(stop) + 1)
    while (start := window.find(stop[0], start)) >= 0:
        if stop.startswith(window[start:]):
            return len(window) - start
        start += 1
    return 0


class OutputText:
    """Ids of one answer to its text, with stop strings; counts the tokens the client is charged for.

    A stop id that ended the answer is counted and not shown. Tokens after a stop string are neither. No stop string ends
    with the first `num_unsearched` tokens (min_tokens). `keeps_starts`: `starts` has for each token the characters of text
    before it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        *,
        num_unsearched: int = 0,
        shown_ids: frozenset[int] = frozenset(),
        keeps_starts: bool = False,
    ) -> None:
        self._detokeniser = Detokeniser(tokenizer, shown_ids)
        self._matcher = StopMatcher(stops)
        self._num_unsearched = num_unsearched
        self.num_tokens = 0
        self.num_chars = 0
        self.num_shown = 0
        self.starts: list[int] | None = [] if keeps_starts else None

    @property
    def stopped(self) -> bool:
        return self._matcher.matched

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these tokens, up to a stop string."""
        if self.starts is None and not self._matcher.searches:
            self.num_tokens += len(token_ids)
            text = self._detokeniser.push(*token_ids)
            self.num_chars += len(text)
            return self._shown(text)
        parts = []
        for token_id in token_ids:
            self.num_tokens += 1
            if self.starts is not None:
                self.starts.append(self.num_chars)
            parts.append(self._search(self._detokeniser.push(token_id)))
            if self._matcher.matched:
                break
        return self._shown("".join(parts))

    def count_hidden(self, num_tokens: int) -> None:
        """Tokens that count but are not text: the stop id."""
        self.num_tokens += num_tokens

    def finish(self) -> str:
        """The tail, when the answer ended without a stop string."""
        if self._matcher.matched:
            return ""
        tail = self._search(self._detokeniser.flush())
        return self._shown(tail if self._matcher.matched else tail + self._matcher.flush())

    def _search(self, text: str) -> str:
        self.num_chars += len(text)
        return self._matcher.pass_over(text) if self.num_tokens <= self._num_unsearched else self._matcher.push(text)

    def _shown(self, text: str) -> str:
        self.num_shown += len(text)
        return text
