"""Every sampling parameter through the whole engine: whatever is drafted, the answer is that of plain decoding.

Drafters that are always right, always wrong and ordinary, block 7; tokens, logprobs, finish reason and usage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from scheduler.wire import FinishReason, SamplingParams
from tests.integration.scripted_drafter import ScriptedDrafter, right, wrong

VOCAB = 48
PROMPTS = [[27], [43, 22, 45, 1, 2], [5, 6] * 10]
GREEDY = SamplingParams(temperature=0, max_tokens=24, num_logprobs=2)
SEEDED = SamplingParams(temperature=1.1, seed=6, max_tokens=24, num_logprobs=0)
CHANGES = [
    {},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"frequency_penalty": -2.0, "presence_penalty": -2.0},
    {"repetition_penalty": 1.8},
    {"logit_bias": ((17, 100.0),)},
    {"logit_bias": ((17, -100.0), (3, 2.0))},
    {"min_tokens": 6, "stop_ids": tuple(range(0, 48, 3)), "presence_penalty": 0.5},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
]
CASES = [(prompt, replace(base, **changes)) for changes in CHANGES for base in (GREEDY, SEEDED) for prompt in PROMPTS]


def slow_law_logits(
    row: np.ndarray, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> np.ndarray:
    row = row.astype(np.float64)
    seen = sorted({*prompt, *output})
    row[seen] = np.where(row[seen] > 0, row[seen] / params.repetition_penalty, row[seen] * params.repetition_penalty)
    for token in output:
        row[token] -= params.frequency_penalty
    row[sorted(set(output))] -= params.presence_penalty
    for token, bias in params.logit_bias:
        row[token] += bias
    if len(output) < params.min_tokens:
        row[list(params.stop_ids)] = -np.inf
    return row


def slow_greedy(twin, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    output: list[int] = []
    while len(output) < params.max_tokens:
        row = twin.logits([[*prompt, *output]])[0].double().numpy()
        output.append(int(slow_law_logits(row, prompt, output, params).argmax()))
        if output[-1] in params.stop_ids:
            break
    return output


def same(answer, expected) -> bool:
    """Ids, ending, usage, and logprobs within 1e-4: one per token, of the same alternatives."""
    assert answer.token_ids == expected.token_ids
    assert answer.last.finish_reason == expected.last.finish_reason
    counted = [(u.prompt_tokens, u.completion_tokens) for each in (answer, expected) if (u := each.last.usage)]
    assert len(counted) == 2 and counted[0] == counted[1]  # cached tokens hang on who was there before
    ours, theirs = ([p for d in each.deltas for p in d.logprobs or ()] for each in (answer, expected))
    assert len(ours) == len(theirs) == len(answer.token_ids)
    assert all(len(d.logprobs or ()) == len(d.token_ids) for d in answer.deltas)
    for a, b in zip(ours, theirs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        np.testing.assert_allclose([v for _, v in a.top], [v for _, v in b.top], atol=1e-4)
    return True


@pytest.fixture(scope="module")
def plain_answers(golden: Path) -> list:
    """Filled by the first test that needs them; decoding without speculation."""
    return []


async def undrafted(launch, golden: Path, kept: list) -> list:
    if not kept:
        async with launch(golden / "target", None, planner="off") as engine:
            kept += await engine.ask([prompt for prompt, _ in CASES], [params for _, params in CASES])
    return kept


async def test_plain_decoding_is_the_twin_s_and_logprobs_are_those_of_a_plain_forward(
    launch, golden: Path, golden_twin, plain_answers: list
) -> None:
    for (prompt, params), answer in zip(CASES, await undrafted(launch, golden, plain_answers), strict=True):
        if params.greedy and prompt is PROMPTS[1]:
            assert answer.token_ids == slow_greedy(golden_twin, prompt, params)
        found = [p for d in answer.deltas for p in d.logprobs or ()]
        text = [*prompt, *answer.token_ids]
        law = torch.log_softmax(golden_twin.model(torch.tensor([text])).logits[0].double(), dim=-1).detach().numpy()
        for k, (token, logprob) in enumerate(zip(answer.token_ids, found, strict=True)):
            row = law[len(prompt) + k - 1]
            assert logprob.logprob == pytest.approx(row[token], abs=1e-4)
            best = np.sort(row)[::-1][: params.num_logprobs]
            np.testing.assert_allclose([value for _, value in logprob.top], best, atol=1e-4)


@pytest.mark.parametrize("drafter", ["right", "wrong", "ordinary"])
async def test_every_parameter_gives_the_same_answer_whatever_is_drafted(
    launch, golden: Path, plain_answers: list, drafter: str
) -> None:
    expected = await undrafted(launch, golden, plain_answers)
    scripted = ScriptedDrafter()
    for i, answer in enumerate(expected):
        text = answer.token_ids
        scripted.script[f"r{i + 1}"] = right(text) if drafter == "right" else wrong(text, VOCAB)
    async with launch(
        golden / "target", golden / "dspark_vanilla" if drafter == "ordinary" else scripted, prefill_chunk=16
    ) as engine:
        answers = await engine.ask([prompt for prompt, _ in CASES], [params for _, params in CASES])
    assert all(same(answer, plain) for answer, plain in zip(answers, expected, strict=True))
    verified = sum(d.num_verified for a in answers for d in a.rounds)
    accepted = sum(d.num_accepted for a in answers for d in a.rounds)
    assert verified > 500
    if drafter == "wrong":
        assert accepted == 0
    if drafter == "right":
        assert all(sum(d.num_accepted + 1 for d in a.rounds) >= len(a.token_ids) - 1 for a in answers)
        assert max(len(a.rounds) for a in answers) <= 4


@pytest.mark.parametrize("drafter", ["dspark_vanilla", "dflash"])
async def test_a_drafter_drafts_what_the_bias_asks_for(launch, golden: Path, drafter: str) -> None:
    """Drafts made without the bias would all be rejected."""
    always = SamplingParams(temperature=1.0, max_tokens=33, logit_bias=((17, 100.0),))
    async with launch(golden / "target", golden / drafter, candidates=4) as engine:
        answer = (await engine.ask([PROMPTS[0]], always))[0]
    assert answer.token_ids == [17] * 33
    assert len(answer.rounds) == 4


async def test_preemption_changes_neither_penalised_tokens_nor_logprobs(
    launch, golden: Path, plain_answers: list
) -> None:
    expected = await undrafted(launch, golden, plain_answers)
    async with launch(
        golden / "target", golden / "dspark_rnn", block_size=4, num_blocks=24, prefill_chunk=7, prefix_cache=False
    ) as engine:  # fmt: skip
        answers = await engine.ask([prompt for prompt, _ in CASES[::4]], [params for _, params in CASES[::4]])
        assert (await engine.actor.snapshot()).num_preemptions > 0
    assert all(same(answer, plain) for answer, plain in zip(answers, expected[::4], strict=True))


async def test_a_token_declared_the_stop_inside_an_accepted_block_ends_text_logprobs_and_usage_there(
    launch, golden: Path
) -> None:
    """The text is known; each of its tokens in turn is declared the end of sequence, and falls inside a block of 7."""
    params = replace(GREEDY, max_tokens=20, presence_penalty=1.0)
    async with launch(golden / "target", None, planner="off") as engine:
        text = (await engine.ask([PROMPTS[1]], params))[0].token_ids
    scripted = ScriptedDrafter()
    async with launch(golden / "target", scripted) as engine:
        for stop in dict.fromkeys(text):
            scripted.script[f"r{engine._count + 1}"] = right(text)
            answer = (await engine.ask([PROMPTS[1]], replace(params, stop_ids=(stop,))))[0]
            length = text.index(stop) + 1
            assert answer.token_ids == text[:length]
            assert sum(len(d.logprobs or ()) for d in answer.deltas) == length
            assert answer.last.usage is not None and answer.last.usage.completion_tokens == length
            assert answer.last.finish_reason is (FinishReason.STOP)
            assert 1 + sum(d.num_accepted + 1 for d in answer.rounds) - length in (0, 1)


async def test_max_tokens_from_1_to_20_deliver_exactly_that_with_a_drafter_that_is_always_right(
    launch, golden: Path
) -> None:
    params = replace(GREEDY, frequency_penalty=0.5)
    async with launch(golden / "target", None, planner="off") as engine:
        text = (await engine.ask([PROMPTS[0]], params))[0].token_ids
    scripted = ScriptedDrafter(script={f"r{i}": right(text) for i in range(1, 21)})
    async with launch(golden / "target", scripted) as engine:
        limits = list(range(1, 21))
        answers = await engine.ask([PROMPTS[0]] * 20, [replace(params, max_tokens=limit) for limit in limits])
    for limit, answer in zip(limits, answers, strict=True):
        assert answer.token_ids == text[:limit]
        assert sum(len(d.logprobs or ()) for d in answer.deltas) == limit
        assert answer.last.finish_reason is FinishReason.LENGTH
        assert answer.last.usage is not None and answer.last.usage.completion_tokens == limit
