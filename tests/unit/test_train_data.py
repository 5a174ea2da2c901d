"""Prompts, the target's answers to them, and the states kept of those answers."""

from __future__ import annotations

import ast
import io
import json
import resource
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch

from drafter.train.code_functions import FUNCTIONS
from drafter.train.corpus import AnswerWriter, Job
from drafter.train.prompts import (
    Prompt,
    builtin_prompts,
    jsonl_prompts,
    mixture,
    overlap_filter,
    stream_json_array,
)
from drafter.train.states import Shard, States, StatesFolder, shard_path, write_shard
from drafter.train.target import check_capture, load_decoder
from scheduler.errors import SettingsError
from verifier.model import Decoder

CAPTURE = (-1, 1)


@pytest.fixture(scope="module")
def decoder(llama_target: Path) -> Decoder:
    return load_decoder(llama_target, torch.float32, torch.device("cpu"), max_len=64)


def jobs(count: int, temperature: float = 0.0, max_tokens: int = 12) -> list[Job]:
    random = Random(5)
    prompts = [tuple(random.randrange(2, 64) for _ in range(random.randrange(1, 9))) for _ in range(count)]
    return [Job(f"{i:016x}", "chat", prompt, temperature, max_tokens) for i, prompt in enumerate(prompts)]


def whole_pass(decoder: Decoder, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The slow twin: one causal pass without a cache. Features, last hidden after the norm, logits."""
    heads = decoder.arch.num_heads, decoder.arch.num_kv_heads, decoder.arch.num_kv_heads

    def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.transpose(0, 1).split(heads)
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, enable_gqa=True
        )
        return out[0].transpose(0, 1).reshape(len(ids), -1)

    hidden, features = decoder.forward(torch.tensor(ids), torch.arange(len(ids)), attend, CAPTURE)
    assert features is not None
    last = torch.nn.functional.rms_norm(hidden, (hidden.shape[1],), decoder.norm, decoder.arch.rms_norm_eps)
    return (
        features,
        last,
        last @ decoder.embed_tokens.t() if decoder.arch.tie_word_embeddings else decoder.logits(hidden),
    )


@torch.inference_mode()
def test_greedy_answers_and_states_equal_passes_without_a_cache(decoder: Decoder) -> None:
    writer = AnswerWriter(decoder, capture=CAPTURE, stop_ids=[1], rows=4, max_len=24)
    answers = {states.meta["prompt_id"]: states for states in writer.write(jobs(11))}
    assert len(answers) == 11
    for job in jobs(11):
        states = answers[job.prompt_id]
        ids = list(job.prompt_ids)
        while len(ids) - len(job.prompt_ids) < job.max_tokens and (len(ids) == len(job.prompt_ids) or ids[-1] != 1):
            ids.append(int(whole_pass(decoder, ids)[2][-1].argmax()))
        assert states.ids.tolist() == ids
        features, last, logits = whole_pass(decoder, ids)
        answered = slice(states.prompt_len - 1, -1)
        torch.testing.assert_close(states.features[:-1], features[:-1], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(states.last[answered], last[answered], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(states.lse[answered], logits.logsumexp(-1)[answered], atol=1e-3, rtol=1e-3)


def test_sampled_answers_follow_the_targets_law(decoder: Decoder) -> None:
    writer = AnswerWriter(decoder, capture=CAPTURE, stop_ids=[], rows=50, max_len=24, seed=3)
    same = [Job(str(i), "chat", (5, 9), 1.0, 1) for i in range(3000)]
    counts = torch.bincount(torch.tensor([int(s.ids[-1]) for s in writer.write(same)]), minlength=64).double()
    with torch.inference_mode():
        expected = whole_pass(decoder, [5, 9])[2][-1].double().softmax(-1) * len(same)
    common = expected > 5
    chi_square = ((counts - expected).square() / expected)[common].sum()
    degrees = int(common.sum())
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


def test_answers_end_at_the_room_of_a_row_and_too_long_prompts_are_skipped(decoder: Decoder) -> None:
    writer = AnswerWriter(decoder, capture=CAPTURE, stop_ids=[], rows=2, max_len=10)
    written = list(writer.write([Job("a", "chat", (3,) * 9, 0.0, 50), Job("b", "chat", (3,) * 4, 0.0, 50)]))
    assert [(len(s.ids), s.meta["prompt_id"], s.meta["finish_reason"]) for s in written] == [(10, "b", "length")]


def states_of(ids: list[int], prompt_len: int, prompt_id: str = "00") -> States:
    n = len(ids)
    features = torch.arange(n * 6, dtype=torch.float32).view(n, 6)
    meta = {"prompt_id": prompt_id, "domain": "chat", "temperature": 0.0}
    return States(
        torch.tensor(ids, dtype=torch.int32), features, features[:, :3] + 1, torch.arange(n) / 2, prompt_len, meta
    )


def test_a_shard_gives_back_each_sequence(tmp_path: Path) -> None:
    written = [states_of([1, 2, 3], 1), states_of([4, 5, 6, 7, 8], 2, "ab")]
    write_shard(shard_path(tmp_path, 0, 0), written)
    folder = StatesFolder(tmp_path)
    write_shard(shard_path(tmp_path, 1, 0), [states_of([9, 9], 1, "cd")])
    assert folder.refresh() == 3
    for (name, meta), expected in zip(folder.named(), written, strict=False):
        found = folder.read_named(name)
        assert found.meta == meta == expected.meta and found.prompt_len == expected.prompt_len
        for field in ("ids", "features", "last", "lse"):
            torch.testing.assert_close(getattr(found, field), getattr(expected, field))


def test_a_truncated_shard_is_refused_in_one_line(tmp_path: Path) -> None:
    path = shard_path(tmp_path, 0, 0)
    write_shard(path, [states_of([1, 2, 3], 1)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(SettingsError, match=r"not a readable file of target states \(truncated\?\)"):
        Shard(path)


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        with pytest.raises(SettingsError, match=r"could not write .*states-00-00000"):
            write_shard(shard_path(tmp_path, 0, 0), [states_of([1, 2, 3] * 40, 1)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="run prepare first"):
        StatesFolder(tmp_path)


@pytest.mark.parametrize("capture", [(), (3,), (1, 1), (2, 0), (-2,)])
def test_wrong_layer_ids_are_refused(capture: tuple[int, ...]) -> None:
    with pytest.raises(SettingsError, match="strictly increasing"):
        check_capture(capture, 4)


def test_a_json_array_that_is_cut_off_gives_its_whole_objects() -> None:
    rows = [{"id": i, "text": "ä{]," * 5} for i in range(40)]
    whole = json.dumps(rows, ensure_ascii=False).encode()
    for cut in (len(whole), len(whole) - 3, len(whole) // 2, 10):
        found = list(stream_json_array(io.BytesIO(whole[:cut]), chunk_bytes=64))
        assert found == rows[: len(found)]
        assert len(found) >= 40 * cut // len(whole) - 1


HELD_OUT = [
    "Write a function to find the tallest giraffe in a list of zoo animals.",
    "A baker has 12 trays of buns and sells 7 of them before noon. How many trays are left?",
    "Write a function to add two numbers.",
    "Write a function to find the smallest panda of a zoo.",
    "Write a function to find the width of a river.",
    "Write a function to find the speed of a swallow.",
]


@pytest.fixture(scope="module")
def held_out_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eval") / "eval.jsonl"
    path.write_text("\n".join(json.dumps({"turns": [text]}) for text in HELD_OUT))
    return path


def test_evaluation_prompts_and_near_copies_are_found(held_out_file: Path) -> None:
    found = overlap_filter([held_out_file])
    assert all(found.overlaps(text) for text in HELD_OUT)
    assert found.overlaps("please WRITE a function, to find the tallest giraffe in a list of zoo animals, in Java")
    assert found.overlaps("A baker has 12 trays of buns and sells 7 of them before noon. What is left?")
    assert not found.overlaps("Write a function to find the tallest building of a city.")
    assert not found.overlaps("A baker has 3 ovens. How many does he need?")


def test_prompts_read_from_files_name_the_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"turns": ["one", "two"], "domain": "math"}\n{"conversations": [{"role": "user", "content": "hi"}]}\n{"text": "x"}\n'
    )
    source = jsonl_prompts(path)
    assert list(islice(source, 2)) == [Prompt("one", "math", ("two",)), Prompt("hi", "chat")]
    with pytest.raises(SettingsError, match=r"prompts\.jsonl:3 has neither"):
        next(source)


def test_a_mixture_keeps_its_shares_and_repeats_nothing() -> None:
    def numbered(domain: str) -> Iterator[Prompt]:
        for i in range(10_000):
            yield Prompt(f"{domain} {i % 70}", domain)

    sources = {"math": [numbered("math")], "code": [numbered("code"), numbered("code")]}
    chosen = mixture(sources, {"math": 0.25, "code": 0.75}, 80, lambda p: not p.text.endswith(" 3"))
    assert len({p.text for p in chosen}) == len(chosen)
    assert sum(p.domain == "math" for p in chosen) == 20 and sum(p.domain == "code" for p in chosen) == 60
    assert not any(p.text.endswith(" 3") for p in chosen)


def test_an_endless_source_that_repeats_itself_ends() -> None:
    repeating = (Prompt(f"p {i % 5}", "chat") for i in range(10**9))
    assert len(mixture({"chat": [repeating]}, {"chat": 1.0}, 50, lambda p: True)) == 5


def test_the_functions_to_ask_for_differ_and_their_examples_fit_their_signatures() -> None:
    rows = [[part.strip() for part in line.split(" | ")] for line in FUNCTIONS]
    assert len({what for what, *_ in rows}) == len({name for _, name, *_ in rows}) == len(rows)
    for _, name, signature, example in rows:
        [function] = ast.parse(f"def {name}({signature.replace(' -> ', ') -> ')}: ...").body
        call, result = example.rsplit(" -> ", 1)
        assert isinstance(function, ast.FunctionDef)
        assert len(ast.literal_eval(f"({call},)")) == len(function.args.args), name
        ast.literal_eval(result)


def test_built_in_prompts_are_many_and_the_same_for_a_seed() -> None:
    for domain, least in (("math", 1500), ("code", 900), ("chat", 1000)):
        texts = [p.text for p in islice(builtin_prompts(1)[domain], 2000)]
        assert texts == [p.text for p in islice(builtin_prompts(1)[domain], 2000)]
        assert len(set(texts)) >= least
        assert not any("{" + letter + "}" in text for text in texts for letter in "ABCGHPabcdefgh")
