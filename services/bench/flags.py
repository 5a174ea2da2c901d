"""The flags of `dspark bench` and `dspark bench sweep`. The command line fills the settings in and calls `sweep_of`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

from scheduler.errors import SettingsError

Number = TypeVar("Number", int, float)

BENCH = {"planners": "off,auto", "concurrency": "1,4,16", "kinds": "", "temperatures": "0"}
SWEEP = {
    "planners": "off,fixed:1,fixed:2,fixed:3,fixed:5,fixed:7,threshold:0.5,algorithm1,auto",
    "concurrency": "1,2,4,8,16,32,64",
    "kinds": "code,math,chat,mixed",
    "temperatures": "0,1",
}


def add_flags(command: Any, defaults: dict[str, str]) -> None:
    command.add_argument(
        "--planners",
        help=f"comma-separated arms (default {defaults['planners']}"
        + ("; with --url `server`" if defaults is BENCH else "")
        + "); with --url each request asks for its arm, and `server` leaves the server as it is",
    )
    command.add_argument(
        "--concurrency", default=defaults["concurrency"], help="clients, comma-separated, or none (default %(default)s)"
    )
    command.add_argument("--poisson", default="", metavar="RATES", help="arrivals per second, comma-separated: 0.5,1,2")
    command.add_argument("--arrivals", type=int, default=60, help="of one open-loop run (default %(default)s)")
    command.add_argument(
        "--kinds", help=f"of text, comma-separated; mixed takes all in turn (default {defaults['kinds'] or 'all'})"
    )
    command.add_argument(
        "--temperature", default=defaults["temperatures"], help="comma-separated (default %(default)s)"
    )
    command.add_argument(
        "--prompts", metavar="FILE.jsonl", action="append", default=[], help='lines of {"turns": [...]}'
    )
    command.add_argument("--num-prompts", type=int, default=0, help="prompts per kind; 0 is all")
    command.add_argument("--max-tokens", type=int, default=96)
    command.add_argument("--answers-per-client", type=int, default=3, help="at least, in one run (default %(default)s)")
    command.add_argument("--rounds", type=int, default=3, help="repetitions of each arm (default %(default)s)")
    command.add_argument(
        "--ttft-ms", type=float, default=2000.0, help="a good answer begins within (default %(default)s)"
    )
    command.add_argument(
        "--tpot-ms", type=float, default=200.0, help="and takes per token at most (default %(default)s)"
    )
    command.add_argument(
        "--ramp", default="", metavar="CLIENTS", help="a load that rises and falls, clients by stages: 1-16-1"
    )
    command.add_argument("--stage-seconds", type=float, default=8.0, help="of the ramp (default %(default)s)")
    command.add_argument("--url", help="measure a running server instead: its address up to /v1")
    command.add_argument("--out", default="", metavar="FILE.json", help="write the numbers")
    command.add_argument(
        "--plot", default="", metavar="FILE.png", help="draw speed, throughput, verify budget and regret"
    )
    command.add_argument(
        "--record", default="", metavar="FILE.jsonl", help="keep traces for dspark simulate --workloads"
    )


def sweep_of(args: argparse.Namespace, defaults: dict[str, str]) -> Any:
    """services.bench.sweep.Sweep; raises SettingsError."""
    from services.bench.ramp import stages_of
    from services.bench.report import Limits
    from services.bench.sweep import Sweep

    as_configured = args.url and defaults is BENCH
    kinds = args.kinds if args.kinds is not None else "" if args.prompts else defaults["kinds"]
    for flag, limit in (("--ttft-ms", args.ttft_ms), ("--tpot-ms", args.tpot_ms)):
        if not limit > 0:
            raise SettingsError(f"{flag} {limit}: must be above 0")
    clients = args.concurrency
    return Sweep(
        planners=tuple((args.planners or ("server" if as_configured else defaults["planners"])).split(",")),
        concurrency=numbers("--concurrency", clients, int, above=0, example="1,4,16") if clients != "none" else (),
        rates=numbers("--poisson", args.poisson, float, above=0, example="0.5,1,2") if args.poisson else (),
        arrivals=args.arrivals,
        kinds=tuple(kinds.split(",")) if kinds else (),
        temperatures=numbers("--temperature", args.temperature, float, above=-1e-9, example="0,1"),
        prompt_files=tuple(args.prompts),
        num_prompts=args.num_prompts,
        max_tokens=args.max_tokens,
        answers_per_client=args.answers_per_client,
        rounds=args.rounds,
        ramp=stages_of(args.ramp) if args.ramp else (),
        stage_s=args.stage_seconds,
        limits=Limits(args.ttft_ms / 1000, args.tpot_ms / 1000),
    )


def numbers(flag: str, text: str, kind: Callable[[str], Number], *, above: float, example: str) -> tuple[Number, ...]:
    """Comma-separated, each once; raises SettingsError."""
    try:
        parsed = tuple(kind(part) for part in text.split(","))
    except ValueError:
        parsed = ()
    if not parsed or not all(above < number < 1e9 for number in parsed) or len(set(parsed)) < len(parsed):
        raise SettingsError(f"{flag} {text!r}: write different numbers separated by commas, for example {example}")
    return parsed
