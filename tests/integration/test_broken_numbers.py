"""A target whose numbers overflow on one token, as broken weights do: who uses it fails, and nobody else, then or later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scheduler.wire import FinishReason, SamplingParams
from tests.replay_drafter import ReplayDrafter

POISON = 5
GOOD = [1, 2, 3, 4, 6, 7]


@pytest.fixture(scope="module")
def overflowing(write_target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All weights are finite; an embedding's first number, which only POISON has, makes the first layer's product infinite."""
    folder = write_target(tmp_path_factory.mktemp("overflowing"), "llama", seed=3, tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    embeddings = tensors["model.embed_tokens.weight"]
    embeddings[:, 0] = 0
    embeddings[POISON] = torch.eye(embeddings.shape[1])[0]
    for name in ("gate_proj", "up_proj"):
        tensors[f"model.layers.0.mlp.{name}.weight"][:, 0] = 1e20
    tensors["model.layers.0.self_attn.o_proj.weight"][0] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, logit_bias=((POISON, -100.0),))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafter", ["none", "ngram"])
async def test_a_prompt_that_overflows_ends_with_an_error_and_neither_neighbours_nor_later_requests_notice(
    launch, overflowing: Path, dtype: str, drafter: str
) -> None:
    async with launch(overflowing, drafter, dtype=dtype, num_blocks=13, max_live=4, planner="fixed:3") as engine:
        (alone,) = await engine.ask([GOOD], greedy(40))
        assert len(alone.token_ids) == 40
        neighbours = [await engine.submit(GOOD, greedy(40)) for _ in range(3)]
        await engine.begun(neighbours[-1])
        broken = await engine.finished(await engine.submit([1, POISON, *range(8, 30)], greedy(20)))
        assert broken.last.finish_reason is FinishReason.ERROR
        assert broken.last.error == ("InternalFault", "the target's logits are not finite at output position 0")
        assert [(await engine.finished(name)).token_ids for name in neighbours] == [alone.token_ids] * 3
        assert [answer.token_ids for answer in await engine.ask([GOOD] * 8, greedy(40))] == [alone.token_ids] * 8
        assert engine.core.stats().num_verifier_losses == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", [None, 7])
async def test_a_draft_that_overflows_is_rejected_and_spoils_no_row_before_it(
    launch, overflowing: Path, dtype: str, seed: int | None
) -> None:
    """POISON stands at each place of a block in turn; what is before it is right."""
    params = SamplingParams(
        temperature=0.0 if seed is None else 1.0, seed=seed, max_tokens=40, logit_bias=((POISON, -100.0),)
    )
    async with launch(overflowing, "none", dtype=dtype) as engine:
        (alone,) = await engine.ask([GOOD], params)
    for place in range(5):
        poisoned = PoisonedDrafter(alone.token_ids, place)
        async with launch(overflowing, poisoned, dtype=dtype, planner="fixed:4") as engine:
            answers = await engine.ask([GOOD] * 2, params)
            assert engine.core.stats().num_verifier_losses == 0
        for answer in answers:
            assert answer.token_ids == alone.token_ids
            assert {d.num_accepted for d in answer.rounds[:-4]} == {place}


@pytest.mark.parametrize("planner", ["off", "fixed:4"])
async def test_a_token_that_overflows_once_accepted_ends_the_answer_after_the_same_tokens_with_and_without_drafts(
    launch, overflowing: Path, planner: str
) -> None:
    async with launch(overflowing, "none") as engine:
        (fine,) = await engine.ask([GOOD], greedy(40))
    allowed = SamplingParams(temperature=0.0, max_tokens=40, logit_bias=((POISON, 100.0),))
    async with launch(overflowing, PoisonedDrafter(fine.token_ids, 0), planner=planner) as engine:
        (answer,) = await engine.ask([GOOD], allowed)
    assert answer.token_ids == [POISON]
    assert answer.last.error == ("InternalFault", "the target's logits are not finite at output position 1")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [8, 64, 256])
async def test_a_prefix_computed_beside_an_overflowing_token_serves_others_as_before(
    launch, overflowing: Path, dtype: str, chunk: int
) -> None:
    shared = [1, 2, 3, 4, 6, 7, *range(8, 51)]
    async with launch(overflowing, "ngram", dtype=dtype, prefill_chunk=chunk) as engine:
        (alone,) = await engine.ask([shared], greedy(20))
    async with launch(overflowing, "ngram", dtype=dtype, prefill_chunk=chunk) as engine:
        (broken,) = await engine.ask([[*shared, POISON, *range(8, 60)]], greedy(20))
        assert broken.last.error == ("InternalFault", "the target's logits are not finite at output position 0")
        (after,) = await engine.ask([shared], greedy(20))
    assert after.token_ids == alone.token_ids and after.last.finish_reason is FinishReason.LENGTH


class PoisonedDrafter(ReplayDrafter):
    """Right, but for POISON at one place of each block."""

    def __init__(self, text: list[int], place: int) -> None:
        super().__init__([text], vocab_size=64)
        self.place = place

    def _next(self, ask, width):
        block = super()._next(ask, width)
        block[self.place : self.place + 1] = POISON
        return block
