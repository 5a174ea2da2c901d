"""The real engine in one process: scheduler, target and drafter on small models, and a client that collects its answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from drafter.actor import DrafterWorker
from drafter.checkpoint import read_layer_ids
from drafter.config import DrafterConfig
from scheduler.actor import SchedulerActor
from scheduler.config import SchedulerConfig
from scheduler.core import PrefixScheduler
from scheduler.ports import Drafter
from scheduler.refinement import RefinedCurve
from scheduler.throughput import CostCurve, CurvePoints
from scheduler.wire import Delta, Request, SamplingParams
from verifier.actor import VerifierWorker
from verifier.config import VerifierConfig
from verifier.runner import TargetRunner

NUM_BLOCKS = 400
GPU_LIKE = CurvePoints(
    tokens=(1, 64, 128, 1024),
    contexts=(0,),
    verify_s=((0.010, 0.0101, 0.0102, 0.011),),
    requests=(1, 128),
    widths=(1, 7),
    draft_s=((0.001, 0.001), (0.002, 0.002)),
)


class SteadyCurve(RefinedCurve):
    """Stays what it was told, whatever this machine's steps take."""

    def observe(self, **_: object) -> None:
        return


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)

    @property
    def last(self) -> Delta:
        return self.deltas[-1]

    @property
    def rounds(self) -> list[Delta]:
        return [delta for delta in self.deltas if delta.is_round]


@dataclass
class RunningEngine:
    actor: SchedulerActor
    verifier: VerifierWorker
    answers: dict[str, Answer] = field(default_factory=dict)
    _begun: dict[str, asyncio.Event] = field(default_factory=dict)
    _finished: dict[str, asyncio.Event] = field(default_factory=dict)
    _count: int = 0

    @property
    def runner(self) -> TargetRunner:
        return self.verifier._loaded()

    @property
    def core(self) -> PrefixScheduler:
        assert self.actor._loop is not None
        return self.actor._loop.core

    async def submit(self, prompt: Sequence[int], params: SamplingParams) -> str:
        self._count += 1
        name = f"r{self._count}"
        self.answers[name] = Answer()
        self._begun[name], self._finished[name] = asyncio.Event(), asyncio.Event()
        await self.actor.submit(Request(name, tuple(prompt), params, subscriber="test"))
        return name

    async def begun(self, name: str) -> None:
        """Its first delta has come."""
        await asyncio.wait_for(self._begun[name].wait(), 120)

    async def finished(self, name: str) -> Answer:
        await asyncio.wait_for(self._finished[name].wait(), 120)
        return self.answers[name]

    async def ask(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Answer]:
        """All prompts at once; their answers in order."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        names = [await self.submit(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
        return [await self.finished(name) for name in names]

    def forget(self, name: str) -> None:
        del self.answers[name], self._begun[name], self._finished[name]

    async def listen(self) -> None:
        async for deltas in self.actor.subscribe("test"):
            for delta in deltas:
                answer = self.answers[delta.request_id]
                assert not answer.deltas or answer.last.finish_reason is None, "nothing comes after the ending"
                answer.deltas.append(delta)
                answer.token_ids += delta.token_ids
                self._begun[delta.request_id].set()
                if delta.finish_reason is not None:
                    self._finished[delta.request_id].set()


Launch = Callable[..., AbstractAsyncContextManager[RunningEngine]]


@pytest.fixture
def launch() -> Launch:
    """launch(target, checkpoint or Drafter or None, planner=..., num_blocks=..., dtype=..., ...) as a context.

    like_a_gpu: plan with the cost curve of a larger target, where drafts pay; a tiny one's drafts cost as much as it does.
    """

    @asynccontextmanager
    async def running(
        target: Path,
        drafter: Path | str | Drafter | None,
        *,
        dtype: str = "float32",
        num_blocks: int = NUM_BLOCKS,
        block_size: int = 16,
        candidates: int = 0,
        seed: int | None = None,
        max_model_len: int = 0,
        like_a_gpu: bool = False,
        **scheduler: object,
    ) -> AsyncIterator[RunningEngine]:
        executor = ThreadPoolExecutor(1)
        named = str(drafter) if isinstance(drafter, Path | str) else "none"
        verifier = VerifierWorker(
            VerifierConfig(
                str(target),
                dtype=dtype,
                device="cpu",
                capture_layers=read_layer_ids(named),
                num_blocks=num_blocks,
                block_size=block_size,
                max_model_len=max_model_len,
                num_threads=1,
                seed=seed,
            ),
            executor,
        )
        await verifier.start()
        worker: Drafter | None = None if drafter is None or isinstance(drafter, Path | str) else drafter
        if named != "none":
            worker = DrafterWorker(
                DrafterConfig(
                    named, str(target), dtype=dtype, device="cpu", candidates=candidates, num_blocks=num_blocks,
                    block_size=block_size, num_threads=1, seed=seed,
                ),
                executor,
            )  # fmt: skip
            await worker.start()
        config = SchedulerConfig(**{"check_integrity": True, "planner": "fixed:7", **scheduler})  # type: ignore[arg-type]
        actor = SchedulerActor(config, verifier, worker)
        await actor.start()
        engine = RunningEngine(actor, verifier)
        if like_a_gpu:
            engine.core.drafting.prices.curve = SteadyCurve(CostCurve(GPU_LIKE, measured_at=0.0))
        listener = asyncio.create_task(engine.listen())
        try:
            yield engine
        finally:
            listener.cancel()
            await actor.stop()
            executor.shutdown()

    return running


class DenseTarget:
    """The target by transformers, whole sequences, no cache: the slow twin."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM

        self._greedy: dict[tuple[tuple[int, ...], int], list[int]] = {}
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")

    @torch.inference_mode()
    def logits(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Rows of equal length -> logits after each row's last token [R, V]."""
        return self.model(torch.tensor(rows)).logits[:, -1]

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        key = (tuple(prompt), num_tokens)
        if key not in self._greedy:
            ids = list(prompt)
            for _ in range(num_tokens):
                ids.append(int(self.logits([ids])[0].argmax()))
            self._greedy[key] = ids[len(prompt) :]
        return list(self._greedy[key])


@pytest.fixture(scope="session")
def golden_twin(golden: Path) -> DenseTarget:
    return DenseTarget(golden / "target")
