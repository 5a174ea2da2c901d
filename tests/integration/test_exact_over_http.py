"""Speculation changes nothing that a client can see: text, tokens, logprobs, finish reason and usage of a block of seven are
those with speculation off, for a drafter that is always right, always wrong and ordinary, streamed and not."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.engine import Workers
from services.settings import Settings
from services.workers import launch_colocated
from tests.integration.character_tokenizer import CHARACTERS, save_tokenizer
from tests.openai_schemas import check_answer, check_chunk
from tests.replay_drafter import WIDTH, ReplayDrafter
from tests.running_server import RunningServer, small_settings

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ID_OF = {character.replace("Ġ", " "): index for index, character in enumerate(CHARACTERS)}
NUM_TOKENS = 24


@pytest.fixture(scope="module", params=["right", "wrong", "ordinary"])
def server(
    request: pytest.FixtureRequest, golden: Path, tmp_path_factory
) -> Iterator[tuple[RunningServer, list[list[int]]]]:
    """The server, and the list of continuations that a replaying drafter proposes."""
    folder = tmp_path_factory.mktemp(f"exact-{request.param}")
    target = save_tokenizer(Path(shutil.copytree(golden / "target", folder / "target")), 48)
    known: list[list[int]] = []

    async def launch(settings: Settings) -> Workers:
        workers = await launch_colocated(settings)
        if request.param == "ordinary":
            return workers
        replay = ReplayDrafter(known, shift=int(request.param == "wrong"))
        return dataclasses.replace(workers, drafter=replay, card=dataclasses.replace(workers.card, draft_width=WIDTH))

    drafter = str(golden / "dspark_vanilla") if request.param == "ordinary" else "none"
    with RunningServer(small_settings(target, drafter, folder / "cache"), launch) as running:
        yield running, known


@pytest.fixture
def http(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server[0].url.removesuffix("/v1"), timeout=120) as client:
        yield client


def chat(**changes) -> tuple[str, dict]:
    messages = [{"role": "user", "content": "tell me of the sea"}]
    fixed = {"model": "tiny", "messages": messages, "logprobs": True, "top_logprobs": 2, "max_tokens": NUM_TOKENS}
    return CHAT, {**fixed, "temperature": 0, "ignore_eos": True, **changes}


def text(**changes) -> tuple[str, dict]:
    fixed = {"model": "tiny", "prompt": ["abc", "the sea"], "logprobs": 2, "max_tokens": NUM_TOKENS}
    return TEXT, {**fixed, "temperature": 0, "ignore_eos": True, **changes}


CASES = {
    "greedy": chat(),
    "texts": text(),
    "seeded": chat(temperature=1.0, top_p=0.9, seed=11),
    "seeded texts": text(temperature=0.8, min_p=0.05, seed=3, n=2),
    "choices": chat(temperature=1.2, seed=5, n=3),
    "penalties": chat(frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.2),
    "biased": chat(logit_bias={"5": 4, "7": -100}),
    "short": chat(max_tokens=1),
    "one block": chat(max_tokens=7),
    "one block and one": chat(max_tokens=8),
    "least": chat(min_tokens=12, ignore_eos=False, stop_token_ids=list(range(24))),
}


@dataclasses.dataclass
class Seen:
    """What the client of one choice saw."""

    text: str
    tokens: list[str]
    logprobs: list[float]
    finish_reason: str


def entries_of(logprobs: dict) -> tuple[list[str], list[float]]:
    if "content" in logprobs:
        return [e["token"] for e in logprobs["content"]], [e["logprob"] for e in logprobs["content"]]
    return logprobs["tokens"], logprobs["token_logprobs"]


def ask(http: httpx.Client, path: str, body: dict, mode: str, *, stream: bool = False) -> tuple[list[Seen], dict, dict]:
    """Choices, usage and metrics of one answer."""
    body = {**body, "speculation": {"mode": mode}}
    if not stream:
        answer = http.post(path, json=body).json()
        check_answer(answer)
        seen = []
        for choice in answer["choices"]:
            shown = choice["message"]["content"] if path == CHAT else choice["text"]
            seen.append(Seen(shown, *entries_of(choice["logprobs"]), choice["finish_reason"]))
        return seen, answer["usage"], answer.get("metrics") or {}
    response = http.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    chunks = [json.loads(part[6:]) for part in response.text.split("\n\n") if part.startswith("data: {")]
    found: dict[int, Seen] = {}
    for chunk in chunks:
        check_chunk(chunk)
        for choice in chunk["choices"]:
            each = found.setdefault(choice["index"], Seen("", [], [], ""))
            each.text += choice["delta"].get("content", "") if path == CHAT else choice["text"]
            each.finish_reason = choice["finish_reason"] or each.finish_reason
            tokens, logprobs = entries_of(choice["logprobs"]) if choice["logprobs"] else ([], [])
            each.tokens += tokens
            each.logprobs += logprobs
    return [found[index] for index in sorted(found)], chunks[-1]["usage"], chunks[-1].get("metrics") or {}


def hold_equal(first: tuple[list[Seen], dict, dict], second: tuple[list[Seen], dict, dict]) -> None:
    for one, other in zip(first[0], second[0], strict=True):
        assert (one.text, one.tokens, one.finish_reason) == (other.text, other.tokens, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert first[1][name] == second[1][name]
    assert sum(len(each.tokens) for each in first[0]) == first[1]["completion_tokens"]


def learn(known: list[list[int]], seen: list[Seen]) -> None:
    """What the replaying drafter may propose from now on; a little more than was served, so that blocks stay full."""
    known[:] = [[ID_OF[token] for token in each.tokens] + [0] * WIDTH for each in seen]


@pytest.mark.parametrize("name", list(CASES))
def test_a_block_of_seven_answers_as_no_block_does(server, http, name):
    path, body = CASES[name]
    plain = ask(http, path, body, "off")
    learn(server[1], plain[0])
    hold_equal(plain, ask(http, path, body, "fixed:7"))
    hold_equal(plain, ask(http, path, body, "fixed:7", stream=True))


@pytest.mark.parametrize("path_and_body", [chat(), text(prompt="abc")], ids=["chat", "text"])
def test_an_end_declared_inside_a_block_is_the_end_with_any_drafter(server, http, path_and_body):
    """Plain first; then what really was produced is declared the stop: as strings inside and across blocks, as a token."""
    path, body = path_and_body
    whole = ask(http, path, body, "off")[0]
    shown, tokens = whole[0].text, whole[0].tokens
    learn(server[1], whole)
    stops = [
        {"stop": shown[3:5]},
        {"stop": [shown[20:22], shown[6:18], "never"]},
        {"stop_token_ids": [ID_OF[tokens[10]]]},
    ]
    for stop in stops:
        plain = ask(http, path, body | stop, "off")
        assert plain[0][0].finish_reason == "stop" and len(plain[0][0].text) < len(shown)
        fast = ask(http, path, body | stop, "fixed:7")
        hold_equal(plain, fast)
        hold_equal(plain, ask(http, path, body | stop, "fixed:7", stream=True))
        numbers = fast[2].get("speculative_decoding")
        if numbers:
            assert 1 + sum(each + 1 for each in numbers["per_step_accepted"]) == fast[1]["completion_tokens"]


def test_the_drafters_are_what_they_are_called(server, http, request):
    path, body = chat(max_tokens=25)
    learn(server[1], ask(http, path, body, "off")[0])
    _, usage, metrics = ask(http, path, body, "fixed:7")
    numbers = metrics["speculative_decoding"]
    assert numbers["mode"] == "fixed:7" and usage["completion_tokens"] == 25
    kind = request.node.callspec.params["server"]
    if kind == "right":
        assert numbers["num_spec_steps"] == 3 and numbers["per_step_accepted"] == [7, 7, 7]
    elif kind == "wrong":
        assert numbers["num_accepted_draft_tokens"] == 0 and numbers["num_draft_tokens"] > 0
    else:
        assert numbers["num_draft_tokens"] > 0
    off = ask(http, path, body, "off")[2]["speculative_decoding"]
    assert off["num_draft_tokens"] == off["num_proposed_draft_tokens"] == 0 and off["mode"] == "off"


def test_the_two_extremes_of_a_bias_hold_at_every_position(server, http):
    always = ask(http, *chat(logit_bias={"5": 100}), "fixed:7")[0][0]
    never = ask(http, *chat(logit_bias={str(ID_OF[c]): -100 for c in set(always.text)}), "fixed:7")[0][0]
    assert always.text == CHARACTERS[5] * NUM_TOKENS and CHARACTERS[5] not in never.text


def combined(seed: int) -> tuple[str, dict]:
    """Many parameters at once, any of them at an extreme."""
    dice = random.Random(seed)
    path, body = chat() if dice.random() < 0.6 else text(prompt=dice.choice(["abc", ["abc", "the sea"], [[5, 6], [7]]]))
    body["max_tokens"] = dice.choice([1, 2, 7, 8, 9, 20])
    if path == CHAT:
        body["top_logprobs"] = dice.choice([0, 1, 20])
        messages = [{"role": "system", "content": "abc"}], [{"role": "user", "content": ""}]
        parts = [
            {
                "role": "user",
                "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}],
                "name": "n" * 300,
            }
        ]
        body["messages"] = dice.choice([*messages, parts, body["messages"]])
    else:
        body["logprobs"] = dice.choice([0, 1, 20])
    if dice.random() < 0.6:
        body |= {"temperature": dice.choice([0.3, 1, 1.7]), "seed": dice.choice([0, -5, 2**63 - 1])}
        body |= dice.choice([{}, {"top_p": 0.2}, {"top_k": 3, "min_p": 0.05}, {"top_k": 1}])
    body |= dice.choice([{}, {"presence_penalty": 2, "frequency_penalty": -2}, {"frequency_penalty": 1.5}])
    body |= dice.choice([{}, {"repetition_penalty": 0.5}, {"repetition_penalty": 1.4}])
    body |= dice.choice([{}, {"n": 2}, {"n": 3}])
    body |= dice.choice(
        [{}, {"logit_bias": {"5": 100}}, {"logit_bias": {"5": -100, "6": 3}}, {"logit_bias": {"3": 99, "4": 99}}]
    )
    guided = dice.choice(
        [
            {},
            {},
            {"guided_regex": "[a-f]{2,9}(-[0-9]{1,4})*"},
            {"guided_choice": ["yes", "no", "the sea"]},
            {"guided_regex": "(ab|cd)+e"},
        ]
    )
    if guided:
        body |= guided | {"ignore_eos": False, "stop_token_ids": [ID_OF["/"]]}
    elif dice.random() < 0.5:
        body["stop_token_ids"] = dice.sample(range(48), 8)
    return path, body | {"min_tokens": dice.choice([0, 0, 1, min(6, body["max_tokens"]), body["max_tokens"]])}


@pytest.mark.parametrize("seed", range(8))
def test_many_parameters_together_answer_as_they_do_without_speculation(server, http, seed):
    """And so they do with a stop string out of the middle of the answer, which a block, or two rounds, may hold."""
    dice = random.Random(seed)
    path, body = combined(seed)
    plain = ask(http, path, body, "off")
    shown = max((each.text for each in plain[0]), key=len)
    stops = [shown[len(shown) // 3 :][:2] or "x", shown[-4:] or "y"]
    for wanted in (body, body | {"stop": stops}):
        plain = ask(http, path, wanted, "off")
        learn(server[1], plain[0])
        hold_equal(plain, ask(http, path, wanted, "off", stream=True))
        mode = dice.choice(["fixed:7", "fixed:1", "threshold:0.3", "algorithm1", "auto"])
        hold_equal(plain, ask(http, path, wanted, mode))
        hold_equal(plain, ask(http, path, wanted, "fixed:7", stream=True))
