"""`dspark calibrate`: real rounds of a drafter, temperatures fitted on some of the prompts and judged on the others,
calibration.json beside the weights. What is fitted on too few rounds replaces no earlier fit unless told."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drafter.calibration import (
    FILE_NAME,
    GREEDY,
    REGIMES,
    SEEDED,
    UNCALIBRATED,
    Calibration,
    Scaling,
    save_calibration,
    sigmoid,
)
from drafter.checkpoint import FOLDERLESS, resolve_checkpoint
from drafter.reliability import Fit, fit_of
from drafter.rounds import Rounds, accepted_length, tabulate
from drafter.temperature_scaling import Search, fit_scaling, num_reached
from scheduler.errors import Failed, SettingsError
from services.evaluation.plots import ReliabilityPanel, draw_reliability, require_matplotlib
from services.evaluation.prompts import calibration_prompts, default_sources
from services.evaluation.rollouts import Rollouts, Sampling, calibration_of, open_rollouts
from services.settings import Settings


@dataclass(frozen=True, slots=True)
class CalibrateSpec:
    """prompts: `builtin`, `sharegpt` or JSONL files; empty is the first two where installed. held_out: share of the prompts that
    is not fitted on. temperature_only: the paper's method, without biases. least_rounds: a position that fewer rounds reached is
    not fitted. replace: also write over an earlier fit when there are such. concurrency: requests at once."""

    prompts: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    num_prompts: int = 400
    max_tokens: int = 192
    held_out: float = 0.4
    regimes: tuple[str, ...] = REGIMES
    temperature_only: bool = False
    least_rounds: int = Search().least_rounds
    replace: bool = False
    concurrency: int = 32
    seed: int = 0
    plot: str | None = None


@dataclass(frozen=True, slots=True)
class RegimeFit:
    """num_rounds: fitted on, and held out. num_reached: [γ], those fitted on that tell about a position. before, after: on the
    held-out prompts."""

    scaling: Scaling
    num_rounds: tuple[int, int]
    num_reached: list[int]
    accepted_length: float
    before: Fit
    after: Fit
    held_out: Rounds

    def facts(self) -> dict[str, Any]:
        return {
            "rounds_fitted": self.num_rounds[0],
            "rounds_held_out": self.num_rounds[1],
            "rounds_reached": self.num_reached,
            "accepted_length": round(self.accepted_length, 4),
            "before": self.before.facts(),
            "after": self.after.facts(),
        }


def calibrate(settings: Settings, spec: CalibrateSpec) -> None:
    """Writes calibration.json, prints a table and, last, one JSON line. Raises Failed, after that, when the file was kept as it
    was because too few rounds reached some position."""
    _check(spec)
    if settings.drafter_checkpoint() in FOLDERLESS:
        raise SettingsError(
            f"drafter.checkpoint: {settings.drafter_checkpoint()!r} states no confidence, so there is nothing to calibrate"
        )
    prompts = calibration_prompts(spec.prompts or default_sources(), spec.exclude, spec.num_prompts, spec.seed)
    if len(prompts) < 2:
        raise SettingsError("--prompts: at least 2 prompts are needed, to fit on and to judge by")
    if settings.drafter.max_width:
        raise SettingsError("drafter.max_width: leave it 0; all positions are calibrated")
    folder = resolve_checkpoint(settings.drafter_checkpoint(), settings.cache_dir)
    fingerprint, known, fits = asyncio.run(_fit_all(settings, spec, prompts))
    regimes = {**known.regimes, **{regime: fit.scaling for regime, fit in fits.items()}}
    few = too_few(fits, spec.least_rounds)
    is_kept = bool(few) and bool(known.regimes) and not spec.replace
    fit_facts = {"prompts": len(prompts), "max_tokens": spec.max_tokens} | {r: f.facts() for r, f in fits.items()}
    if not is_kept:
        save_calibration(folder, Calibration(regimes, fingerprint), {"fit": fit_facts})
    print("\n".join(table(fits)))
    if few and not is_kept:
        print(f"inherited, not fitted: {few}")
    if not is_kept:
        print(f"written: {folder / FILE_NAME}")
    if spec.plot:
        draw_reliability([_panel(regime, fit) for regime, fit in fits.items()], spec.plot)
        print(f"plot: {spec.plot}")
    print(json.dumps({"calibrate": settings.model_name, "drafter": folder.name, **fit_facts}))
    if is_kept:
        raise Failed(
            f"{folder / FILE_NAME} is kept as it was: {few}; ask more prompts (--num-prompts), or write what could be fitted "
            "over it (--replace)"
        )


def _check(spec: CalibrateSpec) -> None:
    if not 0 < spec.held_out < 1:
        raise SettingsError(f"--held-out {spec.held_out:g}: must lie between 0 and 1, for example 0.4")
    unknown = [regime for regime in spec.regimes if regime not in REGIMES]
    if unknown or not spec.regimes:
        raise SettingsError(f"--regimes {','.join(spec.regimes)}: choose from {','.join(REGIMES)}")
    if spec.plot:
        require_matplotlib("--plot")


async def _fit_all(
    settings: Settings, spec: CalibrateSpec, prompts: Sequence[str]
) -> tuple[str, Calibration, dict[str, RegimeFit]]:
    """Fingerprint of the weights, what the file beside them says of these weights, and the new fits."""
    num_fitted = min(len(prompts) - 1, max(1, round(len(prompts) * (1 - spec.held_out))))
    async with open_rollouts(
        settings, concurrency=spec.concurrency, seed=spec.seed, apply_calibration=False
    ) as rollouts:
        if not rollouts.drafter.has_confidence:
            raise SettingsError(
                f"drafter.checkpoint: {settings.drafter_checkpoint()} has no confidence head, so there is nothing to calibrate"
            )
        known = UNCALIBRATED
        with contextlib.suppress(SettingsError):  # of other weights, or broken: nothing that serving would read
            known = calibration_of(settings, rollouts.drafter)
        fits = {}
        for regime in spec.regimes:
            rounds = await _rounds(rollouts, spec, prompts, regime)
            is_fitted = rounds.answer < num_fitted
            fits[regime] = _judged(rounds.take(is_fitted), rounds.take(~is_fitted), regime, spec, known)
        return rollouts.drafter.fingerprint, known, fits


async def _rounds(rollouts: Rollouts, spec: CalibrateSpec, prompts: Sequence[str], regime: str) -> Rounds:
    """The rounds of all prompts; `answer` is the prompt's number."""
    sampling = Sampling(
        temperature=0.0 if regime == GREEDY else 1.0,
        max_tokens=spec.max_tokens,
        seed=spec.seed,
        seeded=regime == SEEDED,
    )
    answers = await rollouts.run([[prompt] for prompt in prompts], sampling, label=regime)
    by_prompt = {answer.prompt: answer.rounds for answer in answers}
    noted = [by_prompt.get(number, []) for number in range(len(prompts))]
    return tabulate(noted, rollouts.drafter.width, rollouts.model.card.eos_ids)


def _judged(fitted: Rounds, held_out: Rounds, regime: str, spec: CalibrateSpec, known: Calibration) -> RegimeFit:
    """Keeps the head's own confidence where the fit does not help on prompts it has not seen."""
    if not len(fitted) or not len(held_out):
        raise Failed(
            f"{regime}: {len(fitted)} rounds to fit on and {len(held_out)} to judge by; ask more prompts "
            "(--num-prompts) or longer answers (--max-tokens)"
        )
    plain = Scaling.of_temperatures(*(1.0,) * fitted.width)
    search = Search(with_bias=not spec.temperature_only, least_rounds=spec.least_rounds)
    # a temperature that was fitted along with a bias says nothing without it
    scaling = fit_scaling(fitted, search, None if spec.temperature_only else known.regimes.get(regime))
    before, after = (fit_of(confidence_of(s, held_out), held_out) for s in (plain, scaling))
    if after.ece >= before.ece:
        scaling, after = plain, before
    length = accepted_length(held_out)
    return RegimeFit(scaling, (len(fitted), len(held_out)), num_reached(fitted), length, before, after, held_out)


def too_few(fits: Mapping[str, RegimeFit], least_rounds: int) -> str:
    """Which positions of which regimes fewer rounds than that reached, and how many; empty where there is none."""
    said = []
    for regime, fit in fits.items():
        short = [f"{k} ({count})" for k, count in enumerate(fit.num_reached, start=1) if count < least_rounds]
        if short:
            said.append(f"{regime} draft {', '.join(short)}")
    return f"fewer than {least_rounds} rounds reached {'; '.join(said)}" if said else ""


def confidence_of(scaling: Scaling, rounds: Rounds) -> np.ndarray:
    """[N, γ]; NaN where nothing was drafted."""
    return sigmoid(scaling.logits(rounds.logits.astype(np.float32))).astype(np.float64)


def table(fits: dict[str, RegimeFit]) -> list[str]:
    lines = ["held-out prompts: error of the stated prefix survival (ECE, 20 bins), by draft position, in %"]
    for regime, fit in fits.items():
        lines.append(
            f"{regime}: {fit.num_rounds[0]} rounds fitted, {fit.num_rounds[1]} held out, accepted length "
            f"{fit.accepted_length:.2f} (the target's own token counted)"
        )
        lines.append(_row("before", fit.before))
        lines.append(_row("after", fit.after))
        pairs = zip(fit.scaling.temperatures, fit.scaling.biases, strict=True)
        lines.append("  T, b    " + "  ".join(f"{t:.2f},{b:+.2f}" for t, b in pairs))
    return lines


def _row(name: str, fit: Fit) -> str:
    cells = "".join(f"{'-' if e is None else f'{100 * e:.1f}':>6}" for e in fit.ece_at)
    auc = "-" if fit.auc is None else f"{fit.auc:.3f}"
    return f"  {name:<7}{cells}   mean {100 * fit.ece:.2f}   AUC {auc}   Brier {fit.brier:.4f}"


def _panel(regime: str, fit: RegimeFit) -> ReliabilityPanel:
    plain = Scaling.of_temperatures(*(1.0,) * fit.held_out.width)
    return ReliabilityPanel(
        regime, fit.held_out, confidence_of(plain, fit.held_out), confidence_of(fit.scaling, fit.held_out)
    )
