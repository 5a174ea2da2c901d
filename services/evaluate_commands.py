"""`dspark calibrate` and `dspark evaluate`: their flags, parsed into what services/evaluation runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from scheduler.errors import SettingsError
from services.settings import Settings

SettingsOf = Callable[[argparse.Namespace], Settings]


def add_calibrate(command: argparse.ArgumentParser, settings_of: SettingsOf) -> None:
    command.set_defaults(run=lambda args: _calibrate(args, settings_of))
    command.add_argument(
        "--prompts",
        metavar="SOURCE",
        nargs="+",
        default=[],
        help='builtin, sharegpt, or JSONL files of {"turns": [...]} (default: builtin, and sharegpt where installed)',
    )
    _add_exclude(command)
    command.add_argument("--num-prompts", type=int, default=400, help="(default %(default)s)")
    command.add_argument("--max-tokens", type=int, default=192, help="per answer (default %(default)s)")
    command.add_argument(
        "--held-out", type=float, default=0.4, help="share of the prompts to judge by (default %(default)s)"
    )
    command.add_argument(
        "--regimes", default="greedy,sampled,seeded", help="comma-separated, of these (default %(default)s)"
    )
    command.add_argument("--temperature-only", action="store_true", help="the paper's method: no biases")
    command.add_argument(
        "--least-rounds",
        type=int,
        default=50,
        help="a draft position that fewer rounds reached is not fitted but inherits (default %(default)s)",
    )
    command.add_argument(
        "--replace", action="store_true", help="write over an earlier calibration.json also where rounds are too few"
    )
    command.add_argument("--plot", metavar="FILE.png", help="reliability before and after")
    _add_run(command, concurrency=32)


def add_evaluate(command: argparse.ArgumentParser, settings_of: SettingsOf) -> None:
    command.set_defaults(run=lambda args: _evaluate(args, settings_of))
    command.add_argument(
        "--drafter",
        dest="drafters",
        metavar="FOLDER",
        nargs="+",
        default=[],
        help="checkpoint folders, or ngram; others are compared with the first (default: the settings')",
    )
    command.add_argument(
        "--data",
        metavar="FILE.jsonl",
        nargs="+",
        required=True,
        help='data sets: lines of {"turns": ["text", ...]}; each is named as its file',
    )
    command.add_argument("--out", metavar="FOLDER", default="evaluation", help="for the report (default %(default)s)")
    command.add_argument("--temperatures", default="0,1", help="comma-separated (default %(default)s)")
    command.add_argument("--max-prompts", type=int, default=0, help="of each data set; 0 is all")
    command.add_argument("--max-tokens", type=int, default=256, help="per answer (default %(default)s)")
    command.add_argument("--all-turns", action="store_true", help="ask all turns, not the first alone")
    command.add_argument(
        "--thresholds",
        default="0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9",
        help="of the calibrated confidence, comma-separated; 0 comes first in any case (default %(default)s)",
    )
    command.add_argument(
        "--sweep-prompts",
        type=int,
        default=4,
        help="of each data set, run per threshold; 0 is none (default %(default)s)",
    )
    command.add_argument(
        "--check-prompts",
        type=int,
        default=8,
        help="of each data set, whose text is compared with decoding without drafts; 0 is none (default %(default)s)",
    )
    _add_run(command, concurrency=16)


def _add_exclude(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--exclude",
        metavar="FILE.jsonl",
        nargs="+",
        default=[],
        help="evaluation prompts: what overlaps with them is not asked",
    )


def _add_run(command: argparse.ArgumentParser, *, concurrency: int) -> None:
    command.add_argument("--concurrency", type=int, default=concurrency, help="requests at once (default %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="(default %(default)s)")


def _calibrate(args: argparse.Namespace, settings_of: SettingsOf) -> None:
    from services.evaluation.calibrate import CalibrateSpec, calibrate

    spec = CalibrateSpec(
        prompts=tuple(args.prompts),
        exclude=tuple(args.exclude),
        num_prompts=_at_least(args, "num_prompts", 2),
        max_tokens=_at_least(args, "max_tokens", 2),
        held_out=args.held_out,
        regimes=tuple(args.regimes.split(",")),
        temperature_only=args.temperature_only,
        least_rounds=_at_least(args, "least_rounds", 1),
        replace=args.replace,
        concurrency=_at_least(args, "concurrency", 1),
        seed=args.seed,
        plot=args.plot,
    )
    calibrate(settings_of(args), spec)


def _evaluate(args: argparse.Namespace, settings_of: SettingsOf) -> None:
    from services.evaluation.evaluate import EvaluateSpec, evaluate

    temperatures = _numbers("--temperatures", args.temperatures, largest=2.0)
    thresholds = _numbers("--thresholds", args.thresholds, largest=1.0)
    settings = settings_of(args)
    spec = EvaluateSpec(
        data=tuple(args.data),
        drafters=tuple(args.drafters) or (settings.drafter_checkpoint(),),
        out=args.out,
        temperatures=temperatures,
        max_prompts=_at_least(args, "max_prompts", 0),
        max_tokens=_at_least(args, "max_tokens", 2),
        num_turns=0 if args.all_turns else 1,
        thresholds=tuple(threshold for threshold in thresholds if threshold > 0),
        sweep_prompts=_at_least(args, "sweep_prompts", 0),
        check_prompts=_at_least(args, "check_prompts", 0),
        concurrency=_at_least(args, "concurrency", 1),
        seed=args.seed,
    )
    evaluate(settings, spec)


def _numbers(flag: str, text: str, *, largest: float) -> tuple[float, ...]:
    """Ascending, each once."""
    try:
        numbers = sorted({float(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not all(0 <= number <= largest for number in numbers):
        raise SettingsError(f"{flag} {text!r}: write numbers from 0 to {largest:g} separated by commas")
    return tuple(numbers)


def _at_least(args: argparse.Namespace, name: str, least: int) -> int:
    value: Any = getattr(args, name)
    if value < least:
        raise SettingsError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    return int(value)
