"""The drafter's worker and runner: what they describe, refuse, skip and measure, and that the event loop is never blocked."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from drafter.actor import DrafterWorker
from drafter.block_attention import BlockStart
from drafter.chain import Chain
from drafter.config import DrafterConfig
from drafter.runner import DraftRunner
from scheduler.errors import DrafterLost, SettingsError
from scheduler.wire import DraftAsk, SamplingParams
from tests.unit.drafter_twins import Flavour, write_drafter
from verifier.features import CommittedFeatures

BLOCK_SIZE = 4
NUM_BLOCKS = 12


@pytest.fixture(params=["dspark_vanilla", "eagle3"])
def config(request: pytest.FixtureRequest, golden: Path) -> DrafterConfig:
    return DrafterConfig(
        checkpoint=str(golden / request.param),
        target=str(golden / "target"),
        dtype="float32",
        device="cpu",
        candidates=8,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_threads=1,
        seed=1,
    )


def ask(name: str = "r", start: int = 4, params: SamplingParams | None = None, anchor_id: int = 5) -> DraftAsk:
    blocks = np.arange(1, 1 + -(-start // BLOCK_SIZE), dtype=np.int32)
    return DraftAsk(name, anchor_id, start, blocks, params or SamplingParams(temperature=0.0), output_index=1)


def rows(num_rows: int, first_position: int = 0) -> CommittedFeatures:
    slots = torch.arange(num_rows) + BLOCK_SIZE
    return CommittedFeatures(
        features=torch.randn(num_rows, 320, generator=torch.Generator().manual_seed(0)),
        slots=slots,
        positions=torch.arange(num_rows) + first_position,
        token_ids=slots * 7 % 48,
        previous_slots=torch.cat((torch.zeros(1, dtype=torch.int64), slots[:-1])),
    )


async def test_a_worker_drafts_in_its_thread_while_the_event_loop_goes_on(config: DrafterConfig) -> None:
    executor = ThreadPoolExecutor(1)
    worker = DrafterWorker(config, executor)
    await worker.start()
    gate = threading.Event()
    blocker = asyncio.get_running_loop().run_in_executor(executor, gate.wait)
    proposing = asyncio.ensure_future(worker.propose([ask()], 3, [rows(4)]))
    measuring = asyncio.ensure_future(worker.measure([1], [2]))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not proposing.done()
    assert not measuring.done()
    gate.set()
    (draft,) = await proposing
    assert len(draft.token_ids) == 3
    await asyncio.gather(measuring, blocker)
    await worker.stop()
    # the executor was lent and still works
    assert await asyncio.get_running_loop().run_in_executor(executor, lambda: 1) == 1
    executor.shutdown()


async def test_an_unstarted_or_stopped_worker_is_lost(config: DrafterConfig) -> None:
    worker = DrafterWorker(config)
    with pytest.raises(DrafterLost):
        await worker.propose([], 1, [])
    await worker.start()
    await worker.stop()
    with pytest.raises(DrafterLost):
        await worker.propose([], 1, [])


async def test_a_failure_while_drafting_is_a_lost_drafter_and_the_next_call_works(config: DrafterConfig) -> None:
    worker = DrafterWorker(config)
    await worker.start()
    with pytest.raises(DrafterLost, match="the drafter failed"):
        await worker.propose([ask(anchor_id=10**6)], 3, [])
    assert len(await worker.propose([ask()], 3, [])) == 1
    await worker.stop()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"checkpoint": "none"}, "drafter.checkpoint"),
        ({"candidates": -1}, "drafter.candidates"),
        ({"max_width": -1}, "drafter.max_width"),
        ({"num_blocks": 0}, "blocks"),
        ({"dtype": "float8"}, "dtype"),
        ({"device": "abacus"}, "device"),
    ],
)
async def test_settings_that_cannot_work_refuse_to_start(
    changes: dict[str, object], says: str, config: DrafterConfig
) -> None:
    with pytest.raises(SettingsError, match=says):
        await DrafterWorker(replace(config, **changes)).start()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "kind", "confidence", "variable"),
    [
        ("dspark_vanilla", "dspark-vanilla", True, False),
        ("dflash", "dflash", False, False),
        ("eagle3", "eagle3", False, True),
    ],
)
def test_it_describes_what_the_scheduler_needs(
    name: str, kind: str, confidence: bool, variable: bool, config: DrafterConfig, golden: Path
) -> None:
    config = replace(config, checkpoint=str(golden / name))
    info = DraftRunner(config).describe()
    assert (info.kind, info.width, info.has_confidence, info.variable_width) == (kind, 7, confidence, variable)
    assert info.target_layer_ids == (0, 1, 2, 3, 4)
    assert not info.needs_tokens
    assert DraftRunner(replace(config, max_width=3)).describe().width == 3
    assert pickle.loads(pickle.dumps(info)) == info


def test_max_width_limits_drafts_without_changing_them(config: DrafterConfig) -> None:
    whole = DraftRunner(config).propose([ask()], 7, [rows(4)])[0]
    short = DraftRunner(replace(config, max_width=3)).propose([ask()], 7, [rows(4)])[0]
    assert short.token_ids.tolist() == whole.token_ids.tolist()[:3]
    assert (short.confidence is None) == (whole.confidence is None)
    if short.confidence is not None and whole.confidence is not None:
        np.testing.assert_allclose(short.confidence, whole.confidence[:3], atol=1e-5)


def test_requests_beyond_the_positions_draft_nothing_and_others_are_served(config: DrafterConfig) -> None:
    runner = DraftRunner(config)
    longest = runner.describe().max_len
    beyond = DraftAsk("beyond", 5, longest + 1, np.arange(12, dtype=np.int32), SamplingParams(), output_index=1)
    far = rows(3, first_position=10**6)
    drafts = runner.propose([beyond, ask("near"), beyond], 7, [rows(4), far])
    assert [(d.request_id, len(d.token_ids)) for d in drafts] == [("beyond", 0), ("near", 7), ("beyond", 0)]
    at_the_end = runner.propose([replace(beyond, start=longest)], 7, [])
    assert len(at_the_end[0].token_ids) == 7


def test_no_asks_or_no_width_only_absorb_the_context(config: DrafterConfig) -> None:
    runner, expected = DraftRunner(config), DraftRunner(config)
    assert runner.propose([], 7, [rows(4)]) == []
    assert [len(d.token_ids) for d in runner.propose([ask()], 0, [])] == [0]
    (draft,), (twin,) = runner.propose([ask()], 7, []), expected.propose([ask()], 7, [rows(4)])
    assert draft.token_ids.tolist() == twin.token_ids.tolist()


def test_only_requests_that_need_a_law_carry_one(config: DrafterConfig) -> None:
    asks = [
        ask("greedy"),
        ask("sampled", params=SamplingParams(temperature=1.0)),
        ask("seeded", params=SamplingParams(temperature=1.0, seed=4)),
    ]
    greedy, sampled, seeded = DraftRunner(config).propose(asks, 7, [rows(4)])
    assert greedy.q_ids is None
    assert seeded.q_probs is None
    assert sampled.q_ids is not None
    assert sampled.q_probs is not None
    assert sampled.q_ids.shape == sampled.q_probs.shape == (7, 8)
    assert (sampled.q_ids.dtype, sampled.q_probs.dtype, sampled.token_ids.dtype) == (np.int32, np.float32, np.int32)


def test_measuring_times_real_calls_and_writes_block_0_only(config: DrafterConfig) -> None:
    runner = DraftRunner(config)
    runner.propose([], 0, [rows(20)])
    before = runner.backbone.pool.pool.clone()
    seconds = runner.measure([1, 3], [1, 7])
    assert np.shape(seconds) == (2, 2)
    assert np.min(seconds) > 0
    after = runner.backbone.pool.pool
    assert torch.equal(before[:, 1:], after[:, 1:])
    assert not torch.equal(before[:, 0], after[:, 0])


def test_bfloat16_hidden_states_are_close_to_float32(config: DrafterConfig) -> None:
    hidden = []
    start = BlockStart(5, 9, np.array([1, 2, 3], dtype=np.int32))
    for dtype in ("float32", "bfloat16"):
        backbone = DraftRunner(replace(config, dtype=dtype)).backbone
        with torch.inference_mode():
            backbone.absorb([rows(9)])
            if isinstance(backbone, Chain):
                hidden.append(backbone.begin([start], 7).step(torch.tensor([5])).float())
            else:
                hidden.append(backbone.forward([start], 7).float())
    assert float((hidden[0] - hidden[1]).norm() / hidden[0].norm()) < 0.03


def test_a_chain_drafts_nothing_before_the_target_has_a_state(config: DrafterConfig, golden: Path) -> None:
    runner = DraftRunner(replace(config, checkpoint=str(golden / "eagle3")))
    drafts = runner.propose([ask("first", start=0), ask("later")], 7, [rows(4)])
    assert [(d.request_id, len(d.token_ids)) for d in drafts] == [("first", 0), ("later", 7)]


def test_an_mtp_module_is_run_once_a_round_or_as_often_as_it_is_told(
    tmp_path: Path, write_target: Callable[..., Path], config: DrafterConfig
) -> None:
    target = write_target(tmp_path / "target", "llama")
    drafter = write_drafter(tmp_path / "drafter", target, Flavour("llama", "none", design="mtp"))
    settings = json.loads((drafter / "config.json").read_text())
    del settings["ttt_length"]
    (drafter / "config.json").write_text(json.dumps(settings))
    config = replace(config, checkpoint=str(drafter), target=str(target))
    assert DraftRunner(config).describe().width == 1
    wide = DraftRunner(replace(config, max_width=4))
    assert wide.describe().width == 4
    assert wide.describe().max_len == DraftRunner(config).describe().max_len
    features = replace(rows(4), features=torch.ones(4, 64))
    (draft,), (once,) = wide.propose([ask()], 4, [features]), DraftRunner(config).propose([ask()], 4, [features])
    assert len(draft.token_ids) == 4
    assert once.token_ids.tolist() == draft.token_ids.tolist()[:1]
