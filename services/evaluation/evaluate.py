"""`dspark evaluate`: drafters side by side on data sets, by temperature: accepted length, acceptance by position, calibration,
thresholds, and whether the text is still the target's."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from drafter.calibration import UNCALIBRATED, Calibration
from drafter.reliability import fit_of
from drafter.rounds import Rounds, accepted_length, tabulate, verified_per_round
from scheduler.errors import Failed, SettingsError
from services.evaluation.equality import NEAR_TIE, Equality, TieJudge, compare
from services.evaluation.findings import Cell, EvaluateSpec, Evaluation, SweepPoint
from services.evaluation.plots import require_matplotlib
from services.evaluation.prompts import Dataset, load_dataset
from services.evaluation.report import write_report
from services.evaluation.rollouts import Answer, Rollouts, Sampling, calibration_of, open_rollouts
from services.settings import Settings
from verifier.weights import resolve_model

PLAIN = "off"


def evaluate(settings: Settings, spec: EvaluateSpec) -> None:
    """Writes report.md, PNG files and results.json into the folder `out`; prints the tables and, last, one JSON line. Raises
    Failed when a text differs from the target's by more than a near-tie."""
    _check(spec)
    datasets = [load_dataset(file, spec.max_prompts) for file in spec.data]
    names = _distinct_names(spec.drafters)
    evaluation = asyncio.run(_evaluate(settings, spec, datasets, names))
    write_report(evaluation, spec)
    wrong = [cell for cell in evaluation.cells if cell.equality is not None and not cell.equality.holds]
    if wrong:
        cell = wrong[0]
        raise Failed(
            f"{cell.drafter}, {cell.dataset}, temperature {cell.temperature:g}: the text is not the target's; see {spec.out}"
        )


def _check(spec: EvaluateSpec) -> None:
    if not spec.data:
        raise SettingsError('--data: name at least one JSONL file of {"turns": [...]}')
    twice = {Path(file).stem for file in spec.data}
    if len(twice) < len(spec.data):
        raise SettingsError("--data: two files have the same name; a data set is named as its file")
    if "none" in spec.drafters:
        raise SettingsError("--drafter none: drafts nothing, so there is nothing to measure")
    require_matplotlib("dspark evaluate")
    Path(spec.out).mkdir(parents=True, exist_ok=True)


def _distinct_names(drafters: Sequence[str]) -> list[str]:
    """Folder names where they tell the drafters apart, whole paths else."""
    names = [Path(drafter).name for drafter in drafters]
    if len(set(names)) == len(names):
        return names
    if len(set(drafters)) < len(drafters):
        raise SettingsError("--drafter: the same drafter is named twice")
    return list(drafters)


async def _evaluate(
    settings: Settings, spec: EvaluateSpec, datasets: Sequence[Dataset], names: Sequence[str]
) -> Evaluation:
    evaluation = Evaluation(settings.model_name)
    judge = TieJudge(resolve_model(settings.target_path(), settings.cache_dir))
    plain: dict[tuple[str, float], list[Answer]] = {}
    for name, checkpoint in zip(names, spec.drafters, strict=True):
        chosen = settings.model_copy(update={"drafter": settings.drafter.model_copy(update={"checkpoint": checkpoint})})
        async with open_rollouts(
            chosen, concurrency=spec.concurrency, seed=spec.seed, apply_calibration=True
        ) as rollouts:
            one = _OneDrafter(name, chosen, spec, rollouts, judge, plain)
            for temperature in spec.temperatures:
                for dataset in datasets:
                    evaluation.cells.append(await one.cell(dataset, temperature))
                    print(_line(evaluation.cells[-1]), file=sys.stderr, flush=True)
                if spec.sweep_prompts and rollouts.drafter.has_confidence:
                    evaluation.sweeps[name, temperature] = await one.sweep(datasets, temperature)
    return evaluation


def _line(cell: Cell) -> str:
    """What a long run has found so far."""
    errors = [f"{100 * fit.ece:.1f} %" for fit in (cell.before, cell.after) if fit is not None]
    found = f"accepted length {accepted_length(cell.rounds):.2f} over {len(cell.rounds)} rounds"
    return ", ".join(
        [f"{cell.drafter}, temperature {cell.temperature:g}, {cell.dataset}: {found}", *(f"ECE {e}" for e in errors)]
    )


class _OneDrafter:
    """plain: texts of the target alone, by data set and temperature, shared by all drafters."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        spec: EvaluateSpec,
        rollouts: Rollouts,
        judge: TieJudge,
        plain: dict[tuple[str, float], list[Answer]],
    ) -> None:
        self._name = name
        self._spec = spec
        self._rollouts = rollouts
        self._judge = judge
        self._plain = plain
        self._calibration = calibration_of(settings, rollouts.drafter)

    async def cell(self, dataset: Dataset, temperature: float) -> Cell:
        sampling = self._sampling(temperature)
        self._rollouts.num_too_long = 0
        answers = await self._run(dataset.prompts, sampling, dataset.name)
        num_too_long = self._rollouts.num_too_long
        rounds = self._tabulated(answers)
        if not len(rounds):
            raise Failed(
                f"{dataset.name}: no whole rounds to count; the answers are shorter than a block, or no prompt fits the context"
            )
        raw, calibrated = (self._confidence(c, rounds, answers) for c in (UNCALIBRATED, self._calibration))
        has_confidence = self._rollouts.drafter.has_confidence
        is_calibrated = has_confidence and bool(self._calibration.regimes)
        return Cell(
            drafter=self._name,
            dataset=dataset.name,
            temperature=temperature,
            num_prompts=len({answer.prompt for answer in answers}),
            num_too_long=num_too_long,
            rounds=rounds,
            raw=raw,
            calibrated=calibrated,
            before=fit_of(raw, rounds) if has_confidence else None,
            after=fit_of(calibrated, rounds) if is_calibrated else None,
            equality=await self._equality(dataset, temperature, answers),
        )

    async def sweep(self, datasets: Sequence[Dataset], temperature: float) -> list[SweepPoint]:
        """Threshold 0 verifies everything."""
        prompts = [prompt for dataset in datasets for prompt in dataset.prompts[: self._spec.sweep_prompts]]
        points = []
        for threshold in (0.0, *self._spec.thresholds):
            planner = f"threshold:{threshold:g}" if threshold else ""
            answers = await self._run(prompts, self._sampling(temperature), f"threshold {threshold:g}", planner)
            rounds = self._tabulated(answers)
            points.append(SweepPoint(threshold, accepted_length(rounds), verified_per_round(rounds)))
        return points

    async def _equality(self, dataset: Dataset, temperature: float, answers: Sequence[Answer]) -> Equality | None:
        """Greedy: the measured answers themselves. Sampled: seeded answers of the same prompts."""
        num_prompts = self._spec.check_prompts
        prompts = dataset.prompts[:num_prompts]
        if not prompts:
            return None
        sampling = self._sampling(temperature, seeded=temperature > 0)
        if not sampling.seeded:
            served = [answer for answer in answers if answer.prompt < num_prompts]
        else:
            served = await self._run(prompts, sampling, f"{dataset.name} seeded")
        key = (dataset.name, temperature)
        if key not in self._plain:
            self._plain[key] = await self._run(prompts, sampling, f"{dataset.name} without drafts", PLAIN)
        return compare(self._plain[key], served, self._judge, NEAR_TIE[self._rollouts.target.dtype])

    def _sampling(self, temperature: float, *, seeded: bool = False) -> Sampling:
        spec = self._spec
        return Sampling(temperature, spec.max_tokens, seed=spec.seed, seeded=seeded, num_turns=spec.num_turns)

    async def _run(
        self, prompts: Sequence[Sequence[str]], sampling: Sampling, what: str, planner: str = ""
    ) -> list[Answer]:
        label = f"{self._name}, temperature {sampling.temperature:g}, {what}"
        return await self._rollouts.run(prompts, sampling, planner=planner, label=label)

    def _tabulated(self, answers: Sequence[Answer]) -> Rounds:
        rollouts = self._rollouts
        return tabulate([answer.rounds for answer in answers], rollouts.drafter.width, rollouts.model.card.eos_ids)

    def _confidence(self, calibration: Calibration, rounds: Rounds, answers: Sequence[Answer]) -> np.ndarray:
        params = [answers[number].params for number in rounds.answer]
        return calibration.apply(rounds.logits.astype(np.float32), params).astype(np.float64)
