"""`dspark prepare`: every turn of a conversation is the target's own, masked, resumed and recorded; failures are kept apart."""

from __future__ import annotations

import io
import json
import resource
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.train.answers import Answer, AnswerFolder, JsonLines
from drafter.train.conversations import Conversations, Template
from drafter.train.progress import Progress
from drafter.train.prompts import Prompt
from drafter.train.target import load_decoder
from scheduler.errors import SettingsError
from services.cli import main

STOP, OPEN, CLOSE = 1, 2, 3


@pytest.fixture(scope="module")
def target(llama_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small target with a tokenizer of one word per id and a template that goes on where it stopped: w1 ends a turn."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("target")
    shutil.copytree(llama_target, folder, dirs_exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1")
    fast.chat_template = (
        "{% for m in messages %}{% if m['content'] == 'w63' %}{{ raise_exception('no w63') }}{% endif %}"
        "{% if m['role'] == 'user' %} w2 {{ m['content'] }} w3 {% else %} {{ m['content'] }} w1 {% endif %}{% endfor %}"
    )
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows: list[dict[str, Any]] = [
        {"turns": ["w10 w11", "w12", "w13 w14"], "domain": "chat"},
        {"conversations": [{"role": "user", "content": "w20"}, {"role": "assistant", "content": "w21"}]},
        {"turns": ["w63"]},
        {"turns": [" ".join(["w30"] * 50)]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def prepare(target: Path, prompts: Path, data: Path, *more: str) -> int:
    arguments = ["prepare", "--target", str(target), "--data", str(data), "--prompts", str(prompts), "--shares", "none"]
    arguments += [
        "--max-tokens",
        "8",
        "--max-prompt-tokens",
        "20",
        "--rows",
        "4",
        "--threads",
        "1",
        "--dtype",
        "float32",
    ]
    return main([*arguments, "--temperatures", "0=1", *more])


def greedy(target: Path, ids: Sequence[int], max_tokens: int) -> list[int]:
    """The slow twin: one whole pass per token."""
    from tests.unit.test_train_states_on_the_fly import Causal

    decoder = load_decoder(target, torch.float32, torch.device("cpu"), max_len=128)
    found = list(ids)
    while len(found) < len(ids) + max_tokens and (len(found) == len(ids) or found[-1] != STOP):
        hidden, _ = decoder.forward(torch.tensor(found), torch.arange(len(found)), Causal(decoder))
        found.append(int(decoder.logits(hidden[-1:]).argmax()))
    return found


def test_every_turn_is_regenerated_after_the_answers_before_it(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    assert prepare(target, prompts, data) == 0
    counts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (counts["answers"], counts["failed"]) == (2, 2)
    answers = [a for name, _ in AnswerFolder(data).named() for a in [AnswerFolder(data).read(name)]]
    talk = [a for a in answers if a.conversations[0]["content"] == "w10 w11"]
    said = [m["content"] for m in talk[-1].conversations if m["role"] == "user"]
    assert said == ["w10 w11", "w12", "w13 w14"]
    assert sum(len(a.spans) for a in talk) == 3
    for answer in talk:
        for start, end in answer.spans:
            assert answer.ids[start - 1] == CLOSE, "an answer begins after the generation prompt"
            assert answer.ids[:end] == greedy(target, answer.ids[:start], end - start)
            assert end - start == 8 or answer.ids[end - 1] == STOP
    reasons = {row["reason"] for row in map(json.loads, (data / "errors-00.jsonl").read_text().splitlines())}
    assert any("no w63" in reason for reason in reasons)
    assert any("prompt has 52 tokens, more than 20" in reason for reason in reasons)
    settings = json.loads((data / "settings.json").read_text())
    assert (
        settings["temperatures"] == [[0.0, 1.0]] and settings["max_tokens"] == 8 and "w2" in settings["chat_template"]
    )


def test_a_second_run_answers_only_what_is_missing(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    assert prepare(target, prompts, data, "--count", "1") == 0
    first = (data / "answers-00.jsonl").read_text()
    assert prepare(target, prompts, data) == 0
    whole = (data / "answers-00.jsonl").read_text()
    assert whole.startswith(first) and len(whole) > len(first)
    assert prepare(target, prompts, data) == 0
    assert (data / "answers-00.jsonl").read_text() == whole
    assert len((data / "errors-00.jsonl").read_text().splitlines()) == 2
    assert prepare(target, prompts, data, "--seed", "7") == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert "seed was 0 when this folder was begun, now 7" in lines[-1]


def conversations(prompt: Prompt, encode: Any, max_len: int = 100) -> Conversations:
    template = Template(encode, lambda ids: " ".join(map(str, ids)))
    return Conversations([(prompt, 0.5)], template, max_tokens=4, max_prompt_tokens=50, max_len=max_len)


def growing(messages: Any) -> tuple[int, ...]:
    return tuple(int(token) for message in messages for token in f"{message['content']} 7".split())


def test_turns_of_a_template_that_goes_on_are_one_sequence_with_a_span_each() -> None:
    found = conversations(Prompt("10", "chat", ("11",)), growing)
    job = next(found)
    assert job.prompt_ids == (10, 7) and job.temperature == 0.5
    assert found.answered(job.prompt_id, [10, 7, 20, 21], 2, "stop") == []
    second = next(found)
    assert second.prompt_ids == (10, 7, 20, 21, 7, 11, 7)
    (answer,) = found.answered(second.prompt_id, [*second.prompt_ids, 30], 7, "length")
    assert answer.ids == [10, 7, 20, 21, 7, 11, 7, 30] and answer.spans == [(2, 4), (7, 8)]
    assert answer.conversations[1] == {"role": "assistant", "content": "20 21"} and answer.finish_reason == "length"


def test_turns_of_a_template_that_drops_earlier_answers_are_sequences_of_their_own() -> None:
    found = conversations(Prompt("10", "chat", ("11",)), lambda m: growing(x for x in m if x["role"] == "user"))
    job = next(found)
    found.answered(job.prompt_id, [10, 7, 20], 2, "stop")
    second = next(found)
    first, last = found.answered(second.prompt_id, [*second.prompt_ids, 30], 4, "stop")
    assert (first.ids, first.spans, last.ids, last.spans) == ([10, 7, 20], [(2, 3)], [10, 7, 11, 7, 30], [(4, 5)])
    assert last.prompt_id == f"{first.prompt_id}-1"


def test_a_conversation_ends_where_there_is_no_room_for_another_turn() -> None:
    found = conversations(Prompt("10", "chat", ("11",)), growing, max_len=8)
    job = next(found)
    (answer,) = found.answered(job.prompt_id, [10, 7, 20, 21, 22], 2, "length")
    assert answer.spans == [(2, 5)] and not found.failures
    with pytest.raises(StopIteration):
        next(found)


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "answers-00.jsonl")
    row = Answer("00", "chat", list(range(2, 60)), [(3, 58)], 0.0, 64, "stop").line()
    lines.append(row)
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(row) + 50, limits[1]))
    try:
        with pytest.raises(SettingsError, match=r"could not write .*answers-00.jsonl: File too large"):
            lines.append(row)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "answers-00.jsonl").read_text() == row + "\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_json_lines_elsewhere() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        progress = Progress("prepare", 10, stream)
        progress.show(5, tokens_per_s=12.5)
        progress.finish(10, tokens_per_s=13.0)
    assert "[" in terminal.getvalue() and "#" in terminal.getvalue() and "10/10" in terminal.getvalue()
    rows = [json.loads(line) for line in file.getvalue().splitlines()]
    assert rows == [
        {"job": "prepare", "done": 5, "of": 10, "tokens_per_s": 12.5},
        {"job": "prepare", "done": 10, "of": 10, "tokens_per_s": 13.0},
    ]
