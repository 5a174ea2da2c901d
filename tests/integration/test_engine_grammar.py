"""Structured output through the whole engine: beside free requests, with any drafts, preempted, seeded, and when it fails."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.errors import BadParams, Cancelled
from scheduler.wire import FinishReason, Grammar, Request, SamplingParams
from tests.integration.scripted_drafter import ScriptedDrafter, right
from tests.unit.grammar_vocabulary import END, save_vocabulary, text_of

TEXTS = [*'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.- \n', END]
END_ID = 47
NEWLINE = TEXTS.index("\n")
WHITE = ((TEXTS.index(" "), -100.0), (NEWLINE, -100.0))
PROMPTS = [[27], [43, 22, 45, 1, 2], [5, 6] * 10]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6, "pattern": "^[a-z]+$"},
        "tags": {"type": "array", "items": {"enum": ["on", "off"]}, "maxItems": 2},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}
GUIDED = SamplingParams(
    temperature=0, max_tokens=70, stop_ids=(END_ID,), num_logprobs=1,
    logit_bias=WHITE,
    grammar=Grammar("json_schema", json.dumps(SCHEMA)),
)  # fmt: skip
SEEDED = replace(GUIDED, temperature=1.3, seed=3)
KINDS = [
    GUIDED,
    SEEDED,
    replace(SEEDED, top_p=0.9, presence_penalty=0.4, logit_bias=((0, 2.0), *WHITE)),
    replace(GUIDED, grammar=Grammar("regex", "[a-f]{2,5}(-[0-9]{3}){1,2}"), min_tokens=10),
    replace(GUIDED, grammar=Grammar("ebnf", 'root ::= "yes" | "no" | root ", " root'), max_tokens=11),
    replace(SEEDED, grammar=None, max_tokens=25),
    replace(GUIDED, grammar=None, max_tokens=25),
]
CASES = [(prompt, params) for params in KINDS for prompt in PROMPTS]


@pytest.fixture(scope="module")
def target(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained tiny target, with a vocabulary of characters."""
    folder = tmp_path_factory.mktemp("guided") / "target"
    shutil.copytree(golden / "target", folder)
    return save_vocabulary(folder, TEXTS)


@pytest.fixture(scope="module")
def plain_answers() -> list:
    return []


async def undrafted(launch, target: Path, kept: list) -> list:
    if not kept:
        async with launch(target, None, planner="off") as engine:
            kept += await engine.ask([prompt for prompt, _ in CASES], [params for _, params in CASES])
    return kept


def follows(text: str, grammar: Grammar) -> bool:
    if grammar.kind == "json_schema":
        value = json.loads(text)
        return (
            set(value) == {"name", "tags", "age"}
            and re.fullmatch("[a-z]{1,6}", value["name"]) is not None
            and set(value["tags"]) <= {"on", "off"}
            and 0 <= value["age"] <= 99
        )
    if grammar.kind == "ebnf":
        return set(text.split(", ")) <= {"yes", "no"}
    return re.fullmatch(grammar.text, text) is not None


async def test_guided_requests_follow_their_grammars_and_end_with_their_stop_token(
    launch, target: Path, plain_answers: list
) -> None:
    ended = 0
    for (_, params), answer in zip(CASES, await undrafted(launch, target, plain_answers), strict=True):
        if params.grammar is None:
            continue
        if answer.last.finish_reason is FinishReason.STOP:
            ended += 1
            assert answer.token_ids[-1] == END_ID and END_ID not in answer.token_ids[:-1]
            assert follows(text_of(answer.token_ids, TEXTS), params.grammar)
        else:
            assert answer.last.finish_reason is FinishReason.LENGTH and len(answer.token_ids) == params.max_tokens
    assert ended > 8


@pytest.mark.parametrize("drafter", ["right", "newlines", "ordinary"])
async def test_guided_and_free_requests_side_by_side_get_the_same_answers_whatever_is_drafted(
    launch, target: Path, golden: Path, plain_answers: list, drafter: str
) -> None:
    expected = await undrafted(launch, target, plain_answers)
    scripted = ScriptedDrafter()
    for i, answer in enumerate(expected):
        scripted.script[f"r{i + 1}"] = right(answer.token_ids) if drafter == "right" else lambda position: NEWLINE
    async with launch(
        target, golden / "dspark_vanilla" if drafter == "ordinary" else scripted, prefill_chunk=16
    ) as engine:
        answers = await engine.ask([prompt for prompt, _ in CASES], [params for _, params in CASES])
        assert (await engine.actor.snapshot()).num_verifier_losses == 0
    assert_same(answers, expected)
    if drafter == "right":
        assert all(d.num_accepted == d.num_verified for a in answers for d in a.rounds[:-1])


async def test_guided_requests_survive_preemption_in_the_middle(
    launch, target: Path, golden: Path, plain_answers: list
) -> None:
    expected = await undrafted(launch, target, plain_answers)
    async with launch(
        target, golden / "dspark_rnn", block_size=4, num_blocks=48, prefill_chunk=9, max_live=16
    ) as engine:
        answers = await engine.ask([prompt for prompt, _ in CASES], [params for _, params in CASES])
        assert (await engine.actor.snapshot()).num_preemptions > 5
        assert len(engine.runner.automata) <= len(CASES)
    assert_same(answers, expected)


async def test_every_token_of_a_guided_text_may_be_declared_the_stop_inside_a_block(launch, target: Path) -> None:
    """Its text is what may follow, so it ends nothing before the automaton accepts; the end of sequence still does."""
    params = replace(GUIDED, grammar=Grammar("regex", "(abc)+"), max_tokens=20)
    scripted = ScriptedDrafter()
    async with launch(target, scripted) as engine:
        text = [0, 1, 2] * 7
        for stop in (0, 1, 2):
            scripted.script[f"r{engine._count + 1}"] = right(text)
            answer = (await engine.ask([PROMPTS[0]], replace(params, stop_ids=(stop, END_ID))))[0]
            assert answer.last.finish_reason is FinishReason.STOP
            assert answer.token_ids.index(stop) == len(answer.token_ids) - 1 or answer.token_ids[-1] == END_ID


async def test_a_bad_grammar_is_refused_before_the_request_is_queued(launch, target: Path) -> None:
    async with launch(target, None) as engine:
        with pytest.raises(BadParams, match="unclosed character class") as refusal:
            await engine.submit([1], replace(GUIDED, grammar=Grammar("regex", "[ab")))
        assert refusal.value.param == "guided_regex"
        with pytest.raises(BadParams, match="needs a stop token"):
            await engine.submit([1], replace(GUIDED, stop_ids=()))
        assert not engine.core.has_work


async def test_a_grammar_that_no_token_can_follow_ends_its_own_request_and_no_other(launch, target: Path) -> None:
    """`~` is not in the vocabulary: after `ab` nothing may follow."""
    dead, fine = replace(GUIDED, grammar=Grammar("regex", "ab~")), replace(GUIDED, grammar=None, max_tokens=30)
    scripted = ScriptedDrafter()
    async with launch(target, None, planner="off") as engine:
        expected = (await engine.ask([PROMPTS[1]], fine))[0]
    scripted.script["r1"], scripted.script["r2"] = right([0, 1, 5, 5]), right(expected.token_ids)
    async with launch(target, scripted) as engine:
        failed, free = await engine.ask([PROMPTS[0], PROMPTS[1]], [dead, fine])
        stats = await engine.actor.snapshot()
    assert failed.last.finish_reason is FinishReason.ERROR and failed.last.error is not None
    assert failed.last.error[0] == "BadParams" and "no token of this model may follow" in failed.last.error[1]
    assert free.token_ids == expected.token_ids
    assert stats.num_verifier_losses == 0 and stats.kv_blocks_used == 0


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[1] * 60])
async def test_a_lone_request_whose_grammar_no_token_can_begin_ends_by_itself(
    launch, target: Path, golden: Path, prompt: list[int]
) -> None:
    """With a drafter that reads hidden states, of which the step then has none to keep."""
    async with launch(target, golden / "dspark_vanilla") as engine:
        (failed,) = await engine.ask([prompt], [replace(GUIDED, grammar=Grammar("regex", "~"))])
        (free,) = await engine.ask([prompt], [replace(GUIDED, grammar=None, max_tokens=10)])
        stats = await engine.actor.snapshot()
    assert failed.last.error is not None and failed.last.error[0] == "BadParams"
    assert "no token of this model may follow" in failed.last.error[1]
    assert len(free.token_ids) and stats.num_verifier_losses == 0 and stats.num_drafter_losses == 0


async def test_compiling_a_grammar_waits_for_no_step(launch, target: Path) -> None:
    """The computing thread is held up: a grammar is compiled, or refused, all the same."""
    release = threading.Event()
    async with launch(target, None) as engine:
        held = asyncio.get_running_loop().run_in_executor(engine.verifier._executor, release.wait, 60)
        try:
            await asyncio.wait_for(engine.verifier.check_grammar(Grammar("json_object")), 30)
            with pytest.raises(BadParams):
                await asyncio.wait_for(engine.verifier.check_grammar(Grammar("regex", "(")), 30)
            assert not held.done()
        finally:
            release.set()
            await held


async def test_a_grammar_that_compiles_too_long_is_refused_and_steps_go_on(
    launch, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verifier.actor.COMPILE_S", 0.0)
    words = [f"{i:05d}" for i in range(20_000)]
    async with launch(target, None) as engine:
        with pytest.raises(BadParams, match="not compiled within 0 s; make it simpler"):
            await engine.submit([1], replace(GUIDED, grammar=Grammar("json_schema", json.dumps({"enum": words}))))
        free = (await engine.ask([[1]], replace(GUIDED, grammar=None, stop_ids=(), max_tokens=5)))[0]
    assert len(free.token_ids) == 5


async def test_a_client_that_leaves_while_its_grammar_is_compiled_leaves_nothing_behind(launch, target: Path) -> None:
    async with launch(target, None) as engine:
        compiled = asyncio.Event()

        async def slow(grammar: Grammar) -> None:
            await compiled.wait()

        engine.verifier.check_grammar = slow
        stream = engine.actor.subscribe("leaves")
        submitted = asyncio.create_task(engine.actor.submit(Request("r", (1,), GUIDED, subscriber="leaves")))
        await asyncio.sleep(0)
        await stream.aclose()
        compiled.set()
        with pytest.raises(Cancelled, match="went away"):
            await submitted
        assert not engine.core.has_work


def assert_same(answers: list, expected: list) -> None:
    for answer, plain in zip(answers, expected, strict=True):
        assert answer.token_ids == plain.token_ids
        assert answer.last.finish_reason == plain.last.finish_reason
        ours, theirs = ([p for d in each.deltas for p in d.logprobs or ()] for each in (answer, plain))
        assert len(ours) == len(answer.token_ids)
        assert [p.logprob for p in ours] == pytest.approx([p.logprob for p in theirs], abs=1e-4)
