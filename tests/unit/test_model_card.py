"""The model card: where chat template, stop ids and defaults come from, and what refuses the start."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from scheduler.errors import SettingsError
from services.model_card import ModelCard, read_card

TOKENIZER = {"added_tokens": [{"id": 7, "content": "<end>", "special": True}], "model": {}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "tokenizer.json", TOKENIZER)
    write(tmp_path, "tokenizer_config.json", {"chat_template": "{{ messages }}", "eos_token": "<end>"})
    write(tmp_path, "config.json", {"eos_token_id": 3})
    return tmp_path


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def card(folder: Path, **changes: str) -> ModelCard:
    return read_card(folder, name="m", created=1, max_model_len=64, draft_width=7, **changes)


def test_stop_ids_are_those_of_config_generation_config_and_tokenizer(folder):
    assert card(folder).eos_ids == (3, 7)
    write(folder, "generation_config.json", {"eos_token_id": [5, 7]})
    assert card(folder).eos_ids == (3, 5, 7)


def test_the_eos_token_may_be_written_as_an_object(folder):
    write(folder, "tokenizer_config.json", {"chat_template": "x", "eos_token": {"content": "<end>"}})
    assert card(folder).special_tokens == {"eos_token": "<end>"} and 7 in card(folder).eos_ids


def test_the_template_file_wins_over_the_tokenizers_config_and_a_given_one_over_both(folder):
    assert card(folder).chat_template == "{{ messages }}"
    write(folder, "chat_template.jinja", "from the file")
    assert card(folder).chat_template == "from the file"
    assert card(folder, chat_template="given").chat_template == "given"


def test_of_several_named_templates_the_default_is_used(folder):
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write(folder, "tokenizer_config.json", {"chat_template": templates})
    assert card(folder).chat_template == "d"


def test_sampling_defaults_are_the_models_own(folder):
    assert card(folder).defaults == {}
    write(folder, "generation_config.json", {"temperature": 0.6, "top_k": 20, "do_sample": True, "top_p": None})
    assert card(folder).defaults == {"temperature": 0.6, "top_k": 20.0}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, "tokenizer.json"),
        ("tokenizer_config.json", None, "chat template"),
        ("tokenizer_config.json", "{", "not valid JSON"),
    ],
)
def test_what_is_missing_refuses_the_start_and_is_named(folder, name, content, words):
    (folder / name).unlink()
    if content is not None:
        write(folder, name, content)
    with pytest.raises(SettingsError, match=words) as refusal:
        card(folder)
    assert str(refusal.value).startswith("model.path") and "\n" not in str(refusal.value)


def test_a_card_travels(folder):
    assert pickle.loads(pickle.dumps(card(folder))) == card(folder)


@pytest.mark.parametrize(
    ("generation", "known"),
    [
        ({"temperature": -5, "top_p": 0.9}, {"top_p": 0.9}),
        ({"top_p": 9, "top_k": -7, "min_p": "x", "temperature": True}, {}),
        ({"temperature": float("nan"), "repetition_penalty": 0, "top_k": 1e400}, {}),
        ({"top_k": -1}, {"top_k": -1.0}),
    ],
)
def test_a_default_that_nobody_could_ask_for_is_left_out_and_said(folder, caplog, generation, known):
    """It refused every request that did not name a value of its own, for a value that the client never sent."""
    write(folder, "generation_config.json", generation)
    assert card(folder).defaults == known
    assert caplog.text.count("left out") == len(generation) - len(known)


@pytest.mark.parametrize("ids", ["a", [3, "x"], -1, True, 2.5])
def test_an_end_token_that_is_no_id_is_refused(folder, ids):
    write(folder, "generation_config.json", {"eos_token_id": ids})
    with pytest.raises(SettingsError, match=r"eos_token_id .*write a token id"):
        card(folder)


@pytest.mark.parametrize("content", ['{"a"', "[1]", "[" * 100_000])
def test_a_damaged_tokenizer_is_refused_in_one_line(folder, content):
    write(folder, "tokenizer.json", content)
    with pytest.raises(SettingsError, match=r"tokenizer\.json (is not valid JSON|holds no JSON object)"):
        card(folder)
