"""Several choices of one prompt: a sibling that comes after the first one's first token computes only the rest of the prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.wire import SamplingParams

BLOCK = 16


@pytest.mark.parametrize("length", [5, 16, 17, 40, 64])
@pytest.mark.parametrize("drafter", ["dspark_vanilla", "none"])
async def test_a_sibling_prefills_only_what_no_full_block_holds(
    launch, golden: Path, length: int, drafter: str
) -> None:
    prompt = [(7 * i) % 48 for i in range(length)]
    params = SamplingParams(temperature=1.0, max_tokens=20)
    async with launch(golden / "target", golden / drafter if drafter != "none" else None, prefill_chunk=9) as engine:
        first = await engine.submit(prompt, params)
        await engine.begun(first)
        before = (await engine.actor.snapshot()).num_prefill_tokens
        siblings = [await engine.submit(prompt, params) for _ in range(3)]
        answers = [await engine.finished(name) for name in (first, *siblings)]
        computed = (await engine.actor.snapshot()).num_prefill_tokens - before
    shared = (length - 1) // BLOCK * BLOCK  # the last prompt token is always computed: its row gives the first token
    assert [a.last.usage.cached_tokens for a in answers] == [0, shared, shared, shared]
    assert computed == 3 * (length - shared)
