"""From prompts to target states on disk: choose prompts, let the target answer them, write shards.

Owns the settings of data generation and its resuming (a prompt whose answer is in a shard is not answered again). Must not
know what is trained on it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from drafter.train.corpus import AnswerWriter, Job
from drafter.train.prompts import Prompt, builtin_prompts, jsonl_prompts, mixture, overlap_filter, sharegpt_prompts
from drafter.train.states import Shard, States, shard_path, shard_paths, write_shard
from drafter.train.target import chat_encoder, check_capture, load_decoder, stop_ids
from scheduler.errors import SettingsError
from verifier.device import resolve_device, resolve_dtype
from verifier.weights import resolve_model

_SHARD_SEQUENCES = 48


@dataclass(frozen=True, slots=True)
class PrepareConfig:
    """prompts: `builtin`, `sharegpt` or JSONL files, in any number. exclude: JSONL files of evaluation prompts.

    shares: part of each domain in the mixture. temperatures: (temperature, weight) of the answers' sampling.
    part: (index, count): this process answers every count-th prompt, so that several can write into one folder.
    """

    target: str
    folder: Path
    count: int
    capture: tuple[int, ...]
    prompts: tuple[str, ...] = ("builtin", "sharegpt")
    exclude: tuple[Path, ...] = ()
    shares: dict[str, float] = field(default_factory=lambda: {"math": 0.4, "code": 0.3, "chat": 0.3})
    temperatures: tuple[tuple[float, float], ...] = ((0.0, 0.5), (0.7, 0.2), (1.0, 0.3))
    max_tokens: int = 256
    max_prompt_tokens: int = 192
    rows: int = 64
    part: tuple[int, int] = (0, 1)
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"


def prepare(config: PrepareConfig) -> dict[str, Any]:
    """Answers what is not answered yet. Returns counts; prints one JSON line per shard."""
    device = resolve_device(config.device)
    folder = resolve_model(config.target)
    max_len = config.max_prompt_tokens + config.max_tokens
    decoder = load_decoder(folder, resolve_dtype(config.dtype, device), device, max_len=max_len)
    check_capture(config.capture, decoder.arch.num_layers)
    writer = AnswerWriter(
        decoder,
        capture=config.capture,
        stop_ids=stop_ids(folder),
        rows=config.rows,
        max_len=max_len,
        seed=config.seed * 1000 + config.part[0],
    )
    jobs = _jobs(config, folder)
    return _write_shards(config, writer, jobs)


def _write_shards(config: PrepareConfig, writer: AnswerWriter, jobs: Sequence[Job]) -> dict[str, Any]:
    number = len(list(config.folder.glob(f"states-{config.part[0]:02d}-*.safetensors")))
    began, num_tokens, num_answers = time.monotonic(), 0, 0
    batch: list[States] = []
    for states in _with_end(writer.write(jobs)):
        if states is not None:
            batch.append(states)
        if batch and (len(batch) == _SHARD_SEQUENCES or states is None):
            write_shard(shard_path(config.folder, config.part[0], number), batch)
            num_answers, num_tokens = num_answers + len(batch), num_tokens + sum(s.answer_len for s in batch)
            rate = num_tokens / (time.monotonic() - began)
            progress = {
                "answers": num_answers,
                "of": len(jobs),
                "answer_tokens": num_tokens,
                "tokens_per_s": round(rate, 1),
            }
            print(json.dumps(progress), flush=True)
            number, batch = number + 1, []
    return {"answers": num_answers, "answer_tokens": num_tokens}


def _with_end(finished: Iterator[States]) -> Iterator[States | None]:
    yield from finished
    yield None


def _jobs(config: PrepareConfig, folder: Path) -> list[Job]:
    answered = {meta["prompt_id"] for path in shard_paths(config.folder) for meta in Shard(path).meta}
    encode = chat_encoder(folder)
    choices, weights = zip(*config.temperatures, strict=True)
    jobs = []
    for prompt in choose_prompts(config)[config.part[0] :: config.part[1]]:
        # drawn from the prompt, so that a resumed run samples each prompt as the first run would have
        temperature = Random(f"{config.seed}-{prompt.prompt_id}").choices(choices, weights)[0]
        ids = encode(prompt.text)
        if prompt.prompt_id not in answered and len(ids) <= config.max_prompt_tokens:
            jobs.append(Job(prompt.prompt_id, prompt.domain, ids, temperature, config.max_tokens))
    return jobs


def choose_prompts(config: PrepareConfig) -> list[Prompt]:
    excluded = overlap_filter(config.exclude)
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


def _source(name: str, seed: int) -> dict[str, Iterator[Prompt]]:
    if name == "builtin":
        return builtin_prompts(seed)
    if name == "sharegpt":
        return {"chat": sharegpt_prompts()}
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in jsonl_prompts(Path(name)):
        by_domain.setdefault(prompt.domain, []).append(prompt)
    return {domain: iter(found) for domain, found in by_domain.items()}
