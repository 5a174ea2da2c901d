"""Answered conversations on disk, as JSON lines: text, token ids and which of them the target wrote. No states.

Owns the files of a data folder: answers-NN.jsonl and errors-NN.jsonl (one pair per writing process), and settings.json. A line
is whole or absent, also after a full disk or a kill. Must not know models.

Bytes per token: about 4 for the text and 6 for the ids, against 2 d (m + 1) + 6 of a cache of states.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scheduler.errors import SettingsError

_SETTINGS = "settings.json"


@dataclass(frozen=True, slots=True)
class Answer:
    """One conversation, or the part of one whose token ids are a single sequence.

    prompt_id: of the prompt; with a part number after a dash beyond the first. ids: as the target read and wrote them.
    spans: (first token, end) of each answer in ids: the loss mask. conversations: the turns with the target's answers.
    """

    prompt_id: str
    domain: str
    ids: list[int]
    spans: list[tuple[int, int]]
    temperature: float
    max_tokens: int
    finish_reason: str
    conversations: list[dict[str, str]] = field(default_factory=list)

    def meta(self) -> dict[str, Any]:
        """What travels with the states."""
        names = ("prompt_id", "domain", "temperature", "max_tokens", "finish_reason", "spans")
        return {name: getattr(self, name) for name in names}

    def line(self) -> str:
        return json.dumps({**asdict(self), "status": "success"}, ensure_ascii=False)


class JsonLines:
    """Appends whole lines. Raises SettingsError when the disk is full, with the file as it was before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+", buffering=0)
            self._drop_unfinished_line()
        except OSError as error:
            raise SettingsError(f"could not write {path}: {error.strerror}") from None

    def _drop_unfinished_line(self) -> None:
        """A process that was killed while writing has left half of one."""
        size = self._file.seek(0, os.SEEK_END)
        while size > 0:
            start = max(0, size - (1 << 16))
            self._file.seek(start)
            block = self._file.read(size - start)
            newline = block.rfind(b"\n")
            if newline >= 0:
                size = start + newline + 1
                break
            size = start
        self._file.truncate(size)

    def append(self, line: str) -> None:
        size = self._file.seek(0, os.SEEK_END)
        try:
            rest = line.encode() + b"\n"
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            os.ftruncate(self._file.fileno(), size)
            raise SettingsError(f"could not write {self.path}: {error.strerror}") from None


class AnswerFolder:
    """Every answer of a folder. `refresh` picks up what a writer has added meanwhile; a name stays valid for ever."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._answers: dict[str, Answer] = {}
        self._read_bytes: dict[Path, int] = {}
        self.refresh()

    def refresh(self) -> int:
        """Number of answers now known."""
        for path in sorted(self.folder.glob("answers-*.jsonl")):
            try:
                with path.open("rb") as file:
                    file.seek(self._read_bytes.get(path, 0))
                    block = file.read()
            except OSError as error:
                raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
            whole = block[: block.rfind(b"\n") + 1]
            for line in whole.splitlines():
                answer = parse_answer(line, str(path))
                self._answers[answer.prompt_id] = answer
            self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole)
        return len(self._answers)

    def __len__(self) -> int:
        return len(self._answers)

    def named(self) -> list[tuple[str, dict[str, Any]]]:
        return [(name, answer.meta()) for name, answer in self._answers.items()]

    def read(self, name: str) -> Answer:
        if name not in self._answers:
            self.refresh()
        if name not in self._answers:
            raise SettingsError(f"{self.folder} no longer holds the answer {name}, which this run was training on")
        return self._answers[name]


def parse_answer(line: bytes, where: str) -> Answer:
    try:
        row = json.loads(line)
        spans = [(int(start), int(end)) for start, end in row["spans"]]
        known = {name: row[name] for name in Answer.__slots__ if name != "spans"}
        answer = Answer(**known, spans=spans)
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{where} has a line that is no answer ({error}); remove it or prepare again") from None
    ends = [0, *(edge for span in answer.spans for edge in span)]
    if not answer.spans or ends != sorted(ends) or ends[-1] > len(answer.ids):
        raise SettingsError(f"{where}: answer {answer.prompt_id} has spans that do not lie in its ids")
    return answer


def answers_path(folder: Path, part: int) -> Path:
    return folder / f"answers-{part:02d}.jsonl"


def errors_path(folder: Path, part: int) -> Path:
    return folder / f"errors-{part:02d}.jsonl"


def record_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Writes settings.json, or checks that the folder was begun with the same ones. Raises SettingsError."""
    path = folder / _SETTINGS
    found = json.loads(json.dumps(settings))
    try:
        if path.is_file():
            before = json.loads(path.read_text())
            changed = [key for key in found if before.get(key) != found[key]]
            if changed:
                raise SettingsError(
                    f"{path}: {changed[0]} was {before.get(changed[0])!r} when this folder was begun, now "
                    f"{found[changed[0]]!r}; prepare into an empty folder"
                )
            return
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{_SETTINGS}.{os.getpid()}")
        unfinished.write_text(json.dumps(found, indent=2) + "\n")
        os.replace(unfinished, path)
    except (OSError, json.JSONDecodeError) as error:
        raise SettingsError(f"could not write or read {path}: {error}") from None
