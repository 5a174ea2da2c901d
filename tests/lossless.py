"""Is what is served what the target would have written? `make lossless`: greedy, float32, against `transformers.generate`.

Every arm (planner x placement) serves the same prompts in batches, with a KV pool small enough to force preemption, and must
return the ids of a plain `generate` of the same model. A difference passes only as a near-tie: the two tokens' logits at the
first difference, under the reference, lie within NEAR_TIE of the number format served; the gap is printed. With native.c in
bfloat16 the arms must also be alike among themselves, bit for bit. The last line is JSON; the exit status is 1 when anything
differs by more.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "5000")

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from drafter.train.prompts import builtin_prompts
from scheduler.wire import Request, SamplingParams
from services.engine import Engine, Launch
from services.settings import Settings
from services.workers import launch_colocated
from verifier import native
from verifier.weights import resolve_model

# Logits of the demo target reach 20, where bfloat16 steps by 0.125 and thirty layers have rounded before.
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.5}
PLANNERS = ("off", *(f"fixed:{k}" for k in range(1, 8)), "algorithm1", "auto")


class Reference:
    """The target by transformers, float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        stops = self.model.generation_config.eos_token_id
        self.stop_ids = tuple(stops) if isinstance(stops, list) else (stops,)

    def encode(self, prompt: str) -> tuple[int, ...]:
        messages = [{"role": "user", "content": prompt}]
        return tuple(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])

    @torch.inference_mode()
    def generate(self, prompts: Sequence[tuple[int, ...]], num_tokens: int, batch_size: int = 10) -> list[list[int]]:
        """Greedy continuations, stop id included, one list per prompt. Batches hold prompts of similar length."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        found: dict[int, list[int]] = {}
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            padded = self.tokenizer.pad({"input_ids": [list(prompts[i]) for i in chosen]}, return_tensors="pt")
            out = self.model.generate(**padded, max_new_tokens=num_tokens, do_sample=False)
            for i, row in zip(chosen, out[:, padded["input_ids"].shape[1] :].tolist(), strict=True):
                found[i] = self._until_stop(row)
        return [found[i] for i in range(len(prompts))]

    def _until_stop(self, ids: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(ids) if token in self.stop_ids), len(ids) - 1)
        return ids[: end + 1]

    @torch.inference_mode()
    def gap(self, ids: Sequence[int], a: int, b: int) -> float:
        """|logit a - logit b| after `ids`, unbatched and unpadded."""
        logits = self.model(torch.tensor([list(ids)])).logits[0, -1]
        return abs(float(logits[a] - logits[b]))


async def serve(
    engine: Engine, prompts: Sequence[tuple[int, ...]], stop_ids: tuple[int, ...], num_tokens: int, concurrency: int
) -> list[list[int]]:
    """All prompts, `concurrency` of them live at a time."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, stop_ids=stop_ids)
    waiting = iter(enumerate(prompts))
    answers: dict[str, list[int]] = {}
    running = 0

    async def submit_next() -> int:
        for index, prompt in waiting:
            answers[str(index)] = []
            await engine.submit(Request(str(index), prompt, params, subscriber="lossless"))
            return 1
        return 0

    stream = engine.subscribe("lossless")
    async for deltas in stream:
        if not answers:
            for _ in range(concurrency):
                running += await submit_next()
        for delta in deltas:
            answers[delta.request_id] += delta.token_ids
            if delta.finish_reason:
                assert delta.finish_reason in ("stop", "length"), (delta.request_id, delta.error)
                running += await submit_next() - 1
        if not running:
            break
    await stream.aclose()
    return [answers[str(i)] for i in range(len(prompts))]


def differences(
    reference: Reference, prompts: Sequence[tuple[int, ...]], expected: Sequence[list[int]], served: Sequence[list[int]]
) -> Iterator[tuple[int, int, float]]:
    """(prompt, output position, logit gap) of each prompt's first difference; infinite where one just ends early."""
    for index, (want, got) in enumerate(zip(expected, served, strict=True)):
        if want == got:
            continue
        at = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), None)
        if at is None:
            yield index, min(len(want), len(got)), float("inf")
        else:
            yield index, at, reference.gap([*prompts[index], *want[:at]], want[at], got[at])


def placements(names: Sequence[str]) -> dict[str, Launch]:
    launches: dict[str, Launch] = {}
    for name in names:
        if name == "colocated":
            launches[name] = launch_colocated
        else:
            from services.split import launch_split

            launches[name] = launch_split
    return launches


def mixed_prompts(count: int) -> list[str]:
    """Code, math and chat in turn, of our own making, other ones than those the drafter was trained on."""
    sources = builtin_prompts(seed=2026)
    return [next(sources[domain]).text for domain, _ in zip(itertools.cycle(sources), range(count), strict=False)]


async def compare(arguments: argparse.Namespace) -> int:
    settings = Settings.model_validate(
        {
            "model": {"path": arguments.model, "dtype": arguments.dtype, "device": "cpu", "max_model_len": 1024},
            "drafter": {"checkpoint": arguments.drafter, "dtype": arguments.dtype, "device": "cpu"},
            "scheduler": {"check_integrity": True, "max_live": arguments.concurrency},
            "kv": {"num_blocks": arguments.blocks},
        }
    )
    reference = Reference(resolve_model(settings.target_path(), settings.cache_dir))
    prompts = [reference.encode(text) for text in mixed_prompts(arguments.prompts)]
    expected = reference.generate(prompts, arguments.tokens)
    report: list[dict[str, object]] = []
    first_arm: list[list[int]] = []
    near_tie = NEAR_TIE[arguments.dtype]
    for placement, launch in placements(arguments.placements.split(",")).items():
        engine = Engine(settings, launch)
        await engine.start()
        for planner in arguments.planners.split(","):
            await engine.set_planner(planner)
            before, begin = await engine.snapshot(), time.perf_counter()
            served = await serve(engine, prompts, reference.stop_ids, arguments.tokens, arguments.concurrency)
            after, seconds = await engine.snapshot(), time.perf_counter() - begin
            found = list(differences(reference, prompts, expected, served))
            rounds = after.num_rounds - before.num_rounds
            first_arm = first_arm or served
            arm = {
                "placement": placement,
                "planner": planner,
                "prompts": len(prompts),
                "tokens": sum(map(len, served)),
                "equal": len(prompts) - len(found),
                "near_tie_gaps": [gap for _, _, gap in found if gap < near_tie],
                "wrong": [[i, at, gap] for i, at, gap in found if not gap < near_tie],
                "unlike_first_arm": sum(a != b for a, b in zip(first_arm, served, strict=True)),
                "accept_length": round((after.num_round_tokens - before.num_round_tokens) / rounds, 3)
                if rounds
                else 1.0,
                "preemptions": after.num_preemptions - before.num_preemptions,
                "seconds": round(seconds, 1),
            }
            print("  ".join(f"{key} {value}" for key, value in arm.items()), flush=True)
            report.append(arm)
        await engine.stop()
    same_bits = native.packable(torch.zeros(2, 2, dtype=getattr(torch, arguments.dtype)))
    failed = [arm for arm in report if arm["wrong"] or (same_bits and arm["unlike_first_arm"])]
    print(json.dumps({"dtype": arguments.dtype, "near_tie": near_tie, "arms": report, "lossless": not failed}))
    return 1 if failed else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--blocks", type=int, default=56, help="KV blocks of 16 tokens; few, so that requests preempt")
    parser.add_argument("--planners", default=",".join(PLANNERS))
    parser.add_argument("--placements", default="colocated,split")
    parser.add_argument(
        "--dtype", default="float32", choices=sorted(NEAR_TIE), help="of what is served; the reference is float32"
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="auto")
    sys.exit(asyncio.run(compare(parser.parse_args())))


if __name__ == "__main__":
    main()
