"""Faults that users of other engines met, as kinds, on the real engine: block boundaries, stops, caches, limits, losses.

Drafters of three kinds go through each: always right (replays the target's own continuation), always wrong, and the ordinary
trained one.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest

from scheduler.errors import BadParams, TooLong
from scheduler.stats import SchedulerStats
from scheduler.wire import FinishReason, SamplingParams
from tests.replay_drafter import WIDTH, ReplayDrafter

PROMPT = [3, 19, 28, 0, 6, 17, 4, 5, 45]
NUM_TOKENS = 60


@pytest.fixture(params=["right", "wrong", "ordinary"])
def drafter(request: pytest.FixtureRequest, golden: Path, golden_twin) -> ReplayDrafter | Path:
    if request.param == "ordinary":
        return golden / "dspark_vanilla"
    return ReplayDrafter([golden_twin.greedy(PROMPT, NUM_TOKENS + WIDTH)], shift=int(request.param == "wrong"))


async def idle(engine) -> SchedulerStats:
    """Once nothing is in use any more, or as it is after a while."""
    for _ in range(200):
        stats = await engine.actor.snapshot()
        if not (stats.num_live or stats.num_waiting or stats.kv_blocks_used):
            break
        await asyncio.sleep(0.01)
    return stats


def first_seen(ids: Sequence[int], near: int) -> int:
    """A position at or after `near` whose token does not occur before, so that it can be declared the stop."""
    return next(i for i in range(near, len(ids)) if ids[i] not in ids[:i])


async def test_full_acceptance_for_many_rounds_repeats_and_loses_nothing(launch, golden: Path, golden_twin) -> None:
    expected = golden_twin.greedy(PROMPT, NUM_TOKENS)
    right = ReplayDrafter([golden_twin.greedy(PROMPT, NUM_TOKENS + WIDTH)])
    async with launch(golden / "target", right) as engine:
        (answer,) = await engine.ask([PROMPT], SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
    assert answer.token_ids == expected
    assert [d.num_accepted for d in answer.rounds[:-1]] == [WIDTH] * (len(answer.rounds) - 1)


async def test_a_wrong_drafter_is_never_accepted_and_changes_nothing(launch, golden: Path, golden_twin) -> None:
    wrong = ReplayDrafter([golden_twin.greedy(PROMPT, NUM_TOKENS + WIDTH)], shift=1)
    async with launch(golden / "target", wrong) as engine:
        (answer,) = await engine.ask([PROMPT], SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
    assert answer.token_ids == golden_twin.greedy(PROMPT, NUM_TOKENS)
    assert sum(d.num_accepted for d in answer.rounds) == 0 and sum(d.num_verified for d in answer.rounds) > 0


async def test_every_max_tokens_delivers_and_counts_exactly_that_many(
    launch, golden: Path, golden_twin, drafter
) -> None:
    expected = golden_twin.greedy(PROMPT, 20)
    async with launch(golden / "target", drafter) as engine:
        for max_tokens in range(1, 21):
            (answer,) = await engine.ask([PROMPT], SamplingParams(temperature=0.0, max_tokens=max_tokens))
            assert answer.token_ids == expected[:max_tokens]
            assert answer.last.usage.completion_tokens == max_tokens
            assert answer.last.finish_reason is FinishReason.LENGTH


async def test_a_stop_id_inside_an_accepted_block_ends_the_answer_there(
    launch, golden: Path, golden_twin, drafter
) -> None:
    prompt = [3, 19, 28, 0, 6, 17, 4, 5, 45, 9, 34, 43, 22, 42, 32, 37, 40]
    ids = golden_twin.greedy(prompt, NUM_TOKENS)
    if isinstance(drafter, ReplayDrafter):
        drafter.continuations = [golden_twin.greedy(prompt, NUM_TOKENS + WIDTH)]
    for near in range(1, 12):
        try:
            at = first_seen(ids, near)
        except StopIteration:
            break
        async with launch(golden / "target", drafter) as engine:
            params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, stop_ids=(ids[at],))
            (answer,) = await engine.ask([prompt], params)
            assert answer.token_ids == ids[: at + 1]
            assert answer.last.finish_reason is FinishReason.STOP
            assert answer.last.usage.completion_tokens == at + 1
            await asyncio.sleep(0.02)
            stats = await engine.actor.snapshot()
        assert stats.num_drafter_losses == 0, "what is absorbed while idle is no answer to the last ask"
        assert stats.num_round_tokens + 1 == at + 1, "rounds count what was emitted, nothing past the stop"
        assert sum(d.num_accepted for d in answer.rounds) <= at


async def test_min_tokens_holds_the_stop_off_exactly_that_long(launch, golden: Path, golden_twin, drafter) -> None:
    """The stop id is the greedy first token: masked for five tokens, legal from the sixth on."""
    stop = golden_twin.greedy(PROMPT, 1)[0]
    params = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=5, stop_ids=(stop,))
    ids = list(PROMPT)
    for position in range(12):
        logits = golden_twin.logits([ids])[0].clone()
        if position < 5:
            logits[stop] = -np.inf
        ids.append(int(logits.argmax()))
        if ids[-1] == stop:
            break
    async with launch(golden / "target", drafter) as engine:
        (answer,) = await engine.ask([PROMPT], params)
    assert answer.token_ids == ids[len(PROMPT) :]


async def test_greedy_and_sampled_requests_with_and_without_drafts_share_a_step(
    launch, golden: Path, golden_twin
) -> None:
    """Temperature 0 beside 1, drafts of every length beside none: counters stay counters, greedy stays greedy."""
    expected = golden_twin.greedy(PROMPT, 30)
    params = [
        SamplingParams(temperature=float(i % 2), seed=i if i % 4 == 1 else None, max_tokens=30) for i in range(12)
    ]
    async with launch(golden / "target", golden / "dspark_vanilla", planner="threshold:0.3") as engine:
        answers = await engine.ask([PROMPT] * 12, params)
    assert all(a.token_ids == expected for a, p in zip(answers, params, strict=True) if p.greedy)
    for answer in answers:
        assert all(0 <= d.num_accepted <= d.num_verified <= d.num_drafted for d in answer.rounds)
        assert 1 + sum(d.num_accepted + 1 for d in answer.rounds) >= len(answer.token_ids)


@pytest.mark.parametrize("name", ["dspark_vanilla", "eagle3"])
async def test_the_second_run_of_a_prompt_hits_the_cache_and_accepts_as_well(launch, golden: Path, name: str) -> None:
    prompt = [i % 48 for i in range(0, 290, 7)] * 3
    params = SamplingParams(temperature=0.0, max_tokens=40)
    async with launch(golden / "target", golden / name) as engine:
        (first,) = await engine.ask([prompt], params)
        (second,) = await engine.ask([prompt], params)
        follow_up = [*prompt, *first.token_ids, 7, 8]
        (third,) = await engine.ask([follow_up], params)
    assert second.token_ids == first.token_ids
    assert second.last.usage.cached_tokens >= len(prompt) - 16
    assert third.last.usage.cached_tokens >= len(prompt) + 40 - 32, "generated tokens are cached for the next turn"
    accepted = [[d.num_accepted for d in a.rounds] for a in (first, second)]
    assert accepted[0] == accepted[1], "the drafter's context came back with the target's"


async def test_a_drafter_with_fewer_positions_than_the_target_stops_drafting_and_decoding_goes_on(
    launch, golden: Path, golden_twin, tmp_path: Path
) -> None:
    folder = tmp_path / "short"
    shutil.copytree(golden / "dspark_vanilla", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 48}))
    async with launch(golden / "target", folder) as engine:
        (answer,) = await engine.ask([PROMPT], SamplingParams(temperature=0.0, max_tokens=100))
    assert answer.token_ids == golden_twin.greedy(PROMPT, 100)
    assert answer.rounds[0].num_drafted > 0 and answer.rounds[-1].num_drafted == 0


@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 65), (16, 5)])
async def test_a_request_may_fill_its_context_to_the_last_position(
    launch, golden: Path, golden_twin, drafter, block_size: int, num_blocks: int
) -> None:
    async with launch(
        golden / "target", drafter, block_size=block_size, num_blocks=num_blocks, max_model_len=64, max_live=3
    ) as engine:
        room = 64 - len(PROMPT)
        answers = await engine.ask([PROMPT] * 3, SamplingParams(temperature=0.0, max_tokens=room))
        assert [a.token_ids for a in answers] == [golden_twin.greedy(PROMPT, room)] * 3
        with pytest.raises(TooLong, match=r"64"):
            await engine.submit(PROMPT, SamplingParams(max_tokens=room + 1))
        stats = await engine.actor.snapshot()
    assert stats.kv_blocks_used == 0


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, "prompt"),
        ([48], {}, "48"),
        ([-1], {}, "-1"),
        ([1], {"temperature": -0.5}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_k": -2}, "top_k"),
        ([1], {"min_p": 1.5}, "min_p"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"min_tokens": 9, "max_tokens": 4}, "min_tokens"),
    ],
)
async def test_bad_parameters_are_refused_by_name(launch, golden: Path, prompt, params, words: str) -> None:
    async with launch(golden / "target", None, planner="off") as engine:
        with pytest.raises(BadParams, match=words):
            await engine.submit(prompt, SamplingParams(**params))


async def test_a_lost_drafter_means_plain_decoding_until_it_is_back(launch, golden: Path, golden_twin) -> None:
    expected = golden_twin.greedy(PROMPT, NUM_TOKENS)
    right = ReplayDrafter([golden_twin.greedy(PROMPT, NUM_TOKENS + WIDTH)])
    async with launch(golden / "target", right) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
        right.breaks_after = 3
        (broken,) = await engine.ask([PROMPT], params)
        assert broken.token_ids == expected
        assert broken.rounds[0].num_drafted and not broken.rounds[-1].num_drafted
        (plain,) = await engine.ask([PROMPT], params)
        assert plain.token_ids == expected and not any(d.num_drafted for d in plain.rounds)
        right.broken, right.breaks_after = False, None
        for _ in range(100):
            await asyncio.sleep(0.05)
            (answer,) = await engine.ask([PROMPT], params)
            assert answer.token_ids == expected
            if any(d.num_drafted for d in answer.rounds):
                break
        else:
            pytest.fail("the drafter came back and was not used")


async def test_cancelling_at_any_moment_ends_once_and_gives_everything_back(launch, golden: Path) -> None:
    draw = random.Random(1)
    async with launch(golden / "target", golden / "dspark_vanilla", max_live=6, num_blocks=40) as engine:
        names = [
            await engine.submit(
                [draw.randrange(48) for _ in range(draw.randrange(1, 40))], SamplingParams(max_tokens=50)
            )
            for _ in range(40)
        ]
        doomed = draw.sample(names, 25)
        for name in doomed:
            await asyncio.sleep(draw.random() * 0.01)
            await engine.actor.cancel(name)
            await engine.actor.cancel(name)
        answers = [await engine.finished(name) for name in names]
        stats = await idle(engine)
    assert {a.last.finish_reason for a in answers} <= {FinishReason.CANCELLED, FinishReason.LENGTH}
    assert sum(a.last.finish_reason is FinishReason.CANCELLED for a in answers) > 5
    assert (stats.num_live, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)


async def test_memory_and_state_return_to_their_start_over_500_requests_a_third_of_which_vanish(
    launch, golden: Path
) -> None:
    draw = random.Random(2)
    process = psutil.Process()

    async def some(engine, count: int) -> None:
        names = []
        for i in range(count):
            prompt = [draw.randrange(48) for _ in range(draw.choice([1, 5, 30, 100, 200]))]
            temperature = draw.choice([0.0, 0.7, 1.0])
            params = SamplingParams(temperature=temperature, max_tokens=draw.choice([1, 4, 20, 60]))
            names.append(await engine.submit(prompt, params))
            if i % 3 == 0:
                await asyncio.sleep(draw.random() * 0.004)
                await engine.actor.cancel(names[-1])
        for name in names:
            await engine.finished(name)
            engine.forget(name)

    async with launch(
        golden / "target", golden / "dspark_rnn", planner="fixed:4", max_live=16, max_waiting=600, num_blocks=150
    ) as engine:
        start = await engine.actor.snapshot()
        await some(engine, 200)
        gc.collect()
        before = process.memory_info().rss
        await some(engine, 300)
        gc.collect()
        grown = process.memory_info().rss - before
        end = await idle(engine)
    assert (end.num_live, end.num_waiting, end.kv_blocks_used) == (
        start.num_live,
        start.num_waiting,
        start.kv_blocks_used,
    )
    assert grown < 16 * 1024 * 1024, f"{grown / 2**20:.1f} MiB more after 300 more requests"
