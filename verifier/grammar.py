"""From a request's grammar to an automaton over the target's tokens, by llguidance; refusals in one line.

Owns the tokenizer as bytes, the limits and the cache of compiled grammars. Compiling leaves the interpreter's lock, so it runs
beside a step. Which state an automaton is in is automata.py's.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from tokenizers import Tokenizer

from scheduler.errors import BadParams
from scheduler.wire import Grammar

MAX_TEXT_BYTES = 256 * 1024
_MOST_COMPILED = 32
_END = "<|end of what a grammar describes|>"
_LONGEST_REFUSAL = 300
# A state of the lexer takes 1 to 2 KiB; the library's own limits bound the time of a compilation and of a mask.
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
# A model that can go on with white space for ever often does.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}

FIELDS = {
    "json_object": "response_format",
    "json_schema": "response_format",
    "regex": "guided_regex",
    "ebnf": "guided_grammar",
}


class GrammarCompiler:
    """Thread-safe. folder: the target's, whose tokenizer.json is read by `prepare`, or on first use.

    The automata's own end of text is an id that no text and no model has, so that what ends a request is the request's business.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._unwritable = b""
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._loading = threading.Lock()
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Reads the tokenizer, which takes a second or so and, unlike compiling, keeps the interpreter's lock. One that does not
        serve is no error yet."""
        with contextlib.suppress(BadParams):
            self._loaded()

    @property
    def end_id(self) -> int:
        return self._loaded().eos_token

    @property
    def num_ids(self) -> int:
        """Bits in a mask: those of the model's vocabulary first; all the others are never set but for `end_id`."""
        return self._loaded().vocab_size

    @property
    def unwritable(self) -> bytes:
        """The bytes that no token of the model stands for by itself."""
        self._loaded()
        return self._unwritable

    def compile(self, grammar: Grammar) -> LLMatcher:
        """An automaton in its first state, the caller's own. Raises BadParams."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
                return compiled.deep_copy()
        compiled = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > _MOST_COMPILED:
                self._compiled.popitem(last=False)
            return compiled.deep_copy()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if grammar.kind not in FIELDS:
            raise BadParams(f"a grammar is one of {', '.join(FIELDS)}, not {grammar.kind!r}", "response_format")
        if len(grammar.text.encode()) > MAX_TEXT_BYTES:
            raise _refusal(grammar, f"is longer than {MAX_TEXT_BYTES // 1024} KiB")
        tokenizer = self._loaded()
        try:
            matcher = LLMatcher(tokenizer, _definition(grammar), log_level=0, limits=_LIMITS)
        except (ValueError, RecursionError) as error:
            raise _refusal(grammar, str(error)) from None
        if matcher.is_error():
            raise _refusal(grammar, matcher.get_error())
        return matcher

    def _loaded(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                loaded = _load_tokenizer(self._folder / "tokenizer.json", self._vocab_size)
                self._unwritable = bytes(byte for byte in range(256) if not _writes(loaded, bytes((byte,))))
                self._tokenizer = loaded
            return self._tokenizer


def _load_tokenizer(path: Path, vocab_size: int) -> LLTokenizer:
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.add_special_tokens([_END])
        end_id = tokenizer.token_to_id(_END) or 0
        return LLTokenizer(tokenizer.to_str(), n_vocab=max(vocab_size, end_id + 1), eos_token=end_id)
    except Exception as error:  # the tokenizer library raises nothing narrower
        raise BadParams(
            f"this model cannot follow a grammar: its tokenizer.json does not serve ({error})", "response_format"
        ) from None


def _writes(tokenizer: LLTokenizer, text: bytes) -> bool:
    return bytes(tokenizer.decode_bytes(tokenizer.tokenize_bytes(text))) == text


def _definition(grammar: Grammar) -> str:
    """The grammar in the library's own form; raises ValueError where it has none."""
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "ebnf":
        return grammar_from("ebnf", grammar.text)
    schema = {"type": "object"} if grammar.kind == "json_object" else json.loads(grammar.text)
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_JSON_OPTIONS)


def _refusal(grammar: Grammar, reason: str) -> BadParams:
    field = FIELDS[grammar.kind]
    what = {"json_schema": "the JSON schema", "regex": "the regular expression"}.get(grammar.kind, "the grammar")
    return BadParams(f"{field}: {what} cannot be used: {' '.join(reason.split())[:_LONGEST_REFUSAL]}", field)
