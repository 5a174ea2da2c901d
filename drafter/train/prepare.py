"""From prompts to training data: choose prompts, let the target answer every turn, write the answers down.

Owns the settings of data generation, their record beside the data, and its resuming (a prompt that is answered or has failed is
not asked again). Must not know what is trained on it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from drafter.train.answers import JsonLines, answers_path, errors_path, record_settings
from drafter.train.conversations import Conversations
from drafter.train.corpus import AnswerWriter, Written
from drafter.train.progress import Progress
from drafter.train.prompts import (
    OverlapFilter,
    Prompt,
    builtin_prompts,
    jsonl_prompts,
    mixture,
    overlap_filter,
    sharegpt_prompts,
)
from drafter.train.states import Shard, States, shard_path, shard_paths, write_shard
from drafter.train.target import chat_template, check_capture, load_decoder, stop_ids
from scheduler.errors import SettingsError
from verifier.device import resolve_device, resolve_dtype
from verifier.weights import fingerprint, resolve_model

_SHARD_SEQUENCES = 48
_SHAREGPT = "sharegpt"


@dataclass(frozen=True, slots=True)
class PrepareConfig:
    """prompts: `builtin`, `sharegpt` (`sharegpt:3` asks up to three turns of a conversation) or JSONL files, in any number.
    exclude: JSONL files of evaluation prompts. shares: part of each domain in the mixture; empty takes JSONL files as they are.

    capture: layers whose states are kept on disk as the answers are written; empty keeps none, training recomputes them.
    temperatures: (temperature, weight) of the answers' sampling, one drawn per conversation. max_tokens: of an answer,
    max_prompt_tokens: of a first turn, max_len: of a conversation (0: one turn's worth, times four for more turns).
    minutes: ask no more after this long; answers in flight are dropped, the next run asks them again. 0 never stops.
    part: (index, count): this process answers every count-th prompt, so that several can write into one folder.
    """

    target: str
    folder: Path
    count: int
    capture: tuple[int, ...] = ()
    prompts: tuple[str, ...] = ("builtin", "sharegpt")
    exclude: tuple[Path, ...] = ()
    shares: dict[str, float] = field(default_factory=lambda: {"math": 0.4, "code": 0.3, "chat": 0.3})
    temperatures: tuple[tuple[float, float], ...] = ((0.0, 0.5), (0.7, 0.2), (1.0, 0.3))
    max_tokens: int = 256
    max_prompt_tokens: int = 192
    max_len: int = 0
    rows: int = 64
    minutes: float = 0.0
    part: tuple[int, int] = (0, 1)
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"

    def sampling(self) -> dict[str, Any]:
        """What decides the answers, for the record."""
        named = asdict(self)
        return {key: named[key] for key in ("temperatures", "max_tokens", "max_prompt_tokens", "seed", "capture")}


def prepare(config: PrepareConfig) -> dict[str, Any]:
    """Answers what is not answered yet. Returns counts. Raises SettingsError."""
    device = resolve_device(config.device)
    folder = resolve_model(config.target)
    dtype = resolve_dtype(config.dtype, device)
    prompts = choose_prompts(config)
    deepest = max((len(prompt.turns) for prompt in prompts), default=1)
    max_len = config.max_len or (config.max_prompt_tokens + config.max_tokens) * min(deepest, 4)
    if config.max_prompt_tokens + 2 > max_len:
        raise SettingsError(f"max_len: {max_len} leaves no room for an answer to {config.max_prompt_tokens} tokens")
    decoder = load_decoder(folder, dtype, device, max_len=max_len)
    if config.capture:
        check_capture(config.capture, decoder.arch.num_layers)
    template = chat_template(folder)
    sampled = {"target": fingerprint(folder), "chat_template": template.text, **config.sampling()}
    record_settings(config.folder, sampled)
    writer = AnswerWriter(
        decoder,
        capture=config.capture or None,
        stop_ids=stop_ids(folder),
        rows=config.rows,
        max_len=max_len,
        seed=config.seed * 1000 + config.part[0],
    )
    mine = _unanswered(config, prompts)
    conversations = Conversations(
        [(prompt, _temperature(config, prompt)) for prompt in mine],
        template,
        max_tokens=config.max_tokens,
        max_prompt_tokens=config.max_prompt_tokens,
        max_len=max_len,
    )
    return _write(config, writer, conversations, len(mine))


def _write(config: PrepareConfig, writer: AnswerWriter, conversations: Conversations, total: int) -> dict[str, Any]:
    part = config.part[0]
    answers, errors = JsonLines(answers_path(config.folder, part)), JsonLines(errors_path(config.folder, part))
    shards = _Shards(config.folder, part)
    progress = Progress("prepare", total)
    began, num_tokens, num_done, num_failed = time.monotonic(), 0, 0, 0
    counts: dict[str, Any] = {}
    for written in _with_end(writer.answers(conversations)):
        if written is not None:
            job, ids = written.job, written.ids
            finished = conversations.answered(job.prompt_id, ids, len(job.prompt_ids), written.finish_reason)
            num_tokens, num_done = num_tokens + len(ids) - len(job.prompt_ids), num_done + bool(finished)
            if written.states is not None:
                shards.add(written.states)
            for answer in finished:
                answers.append(answer.line())
        for failure in conversations.failures[num_failed:]:
            errors.append(json.dumps({**asdict(failure), "status": "error"}))
            num_failed += 1
        rate = num_tokens / (time.monotonic() - began)
        counts = {"answer_tokens": num_tokens, "tokens_per_s": round(rate, 1), "failed": num_failed}
        progress.show(num_done, **counts)
        if config.minutes > 0 and time.monotonic() - began > config.minutes * 60:
            break
    shards.close()
    progress.finish(num_done, **counts)
    return {"answers": num_done, **counts}


class _Shards:
    """States on their way to disk, a few dozen sequences to a file."""

    def __init__(self, folder: Path, part: int) -> None:
        self.folder, self.part = folder, part
        self.number = len(list(folder.glob(f"states-{part:02d}-*.safetensors")))
        self.batch: list[States] = []

    def add(self, states: States) -> None:
        self.batch.append(states)
        if len(self.batch) == _SHARD_SEQUENCES:
            self.close()

    def close(self) -> None:
        if self.batch:
            write_shard(shard_path(self.folder, self.part, self.number), self.batch)
            self.number, self.batch = self.number + 1, []


def _with_end(finished: Iterator[Written]) -> Iterator[Written | None]:
    yield from finished
    yield None


def _unanswered(config: PrepareConfig, prompts: list[Prompt]) -> list[Prompt]:
    """This part's prompts without those of earlier runs. Where states are kept, only what is in a shard counts: answers
    whose states were still in memory when a run was stopped are written again."""
    done = {meta["prompt_id"] for path in shard_paths(config.folder) for meta in Shard(path).meta}
    names = ["errors"] if config.capture else ["answers", "errors"]
    for path in (path for name in names for path in config.folder.glob(f"{name}-*.jsonl")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                done.add(str(json.loads(line)["prompt_id"]).partition("-")[0])
    return [p for p in prompts[config.part[0] :: config.part[1]] if p.prompt_id not in done]


def _temperature(config: PrepareConfig, prompt: Prompt) -> float:
    """Drawn from the prompt, so that a resumed run samples each prompt as the first run would have."""
    choices, weights = zip(*config.temperatures, strict=True)
    return float(Random(f"{config.seed}-{prompt.prompt_id}").choices(choices, weights)[0])


def choose_prompts(config: PrepareConfig) -> list[Prompt]:
    excluded = overlap_filter(config.exclude)
    if not config.shares:
        return _whole_files(config, excluded)
    sources: dict[str, list[Iterator[Prompt]]] = {domain: [] for domain in config.shares}
    for name in config.prompts:
        for domain, prompts in _source(name, config.seed).items():
            if domain in sources:
                sources[domain].insert(0, prompts)
    empty = [domain for domain, found in sources.items() if not found and config.shares[domain] > 0]
    if empty:
        raise SettingsError(
            f"prompts: no source given has prompts of the domain {empty[0]!r}; lower its share or add one"
        )
    return mixture(sources, config.shares, config.count, lambda p: not excluded.overlaps(p.text), config.seed)


def _whole_files(config: PrepareConfig, excluded: OverlapFilter) -> list[Prompt]:
    """Every prompt of the JSONL files, in order, up to `count`."""
    found: dict[str, Prompt] = {}
    for name in config.prompts:
        if name == "builtin" or name.split(":")[0] == _SHAREGPT:
            raise SettingsError(f"prompts: {name} needs shares of domains; only JSONL files are taken as they are")
        for prompt in jsonl_prompts(Path(name)):
            if not any(excluded.overlaps(turn) for turn in prompt.turns):
                found.setdefault(prompt.prompt_id, prompt)
    return list(found.values())[: config.count]


def _source(name: str, seed: int) -> dict[str, Iterator[Prompt]]:
    if name == "builtin":
        return builtin_prompts(seed)
    if name.split(":")[0] == _SHAREGPT:
        turns = name.removeprefix(_SHAREGPT).removeprefix(":") or "1"
        if not turns.isdigit() or int(turns) < 1:
            raise SettingsError(f"prompts: {name!r} is not sharegpt or sharegpt:N with N turns")
        return {"chat": sharegpt_prompts(max_turns=int(turns))}
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in jsonl_prompts(Path(name)):
        by_domain.setdefault(prompt.domain, []).append(prompt)
    return {domain: iter(found) for domain, found in by_domain.items()}
