"""The command line: `dspark serve | generate | measure | bench | simulate | prepare | train | calibrate | evaluate | doctor |
top`.

Parses flags into settings; errors are one line.

Exit status 0: done; of `serve`, drained after it was told to stop. 1: something failed while running. 2: wrong usage or
settings. 130 and 143: stopped by SIGINT or SIGTERM before it was ready, or a second time while draining.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from scheduler.errors import Rejected, ServingError, SettingsError
from services.bench.flags import BENCH, SWEEP, add_flags, sweep_of
from services.evaluate_commands import add_calibrate, add_evaluate
from services.foreground import Stopped, end_now, open_closed_streams, print_to_nobody, run_behind, stop_signals_raise
from services.simulate import add_simulate
from services.threads import SPIN_COUNT
from services.top import add_top
from services.train_commands import add_prepare, add_train

if TYPE_CHECKING:
    from services.settings import Settings

# Flag -> key of the settings tree. Everything else is reached by --set.
SETTING_FLAGS = {
    "model": ("model", "path"),
    "name": ("model", "name"),
    "dtype": ("model", "dtype"),
    "drafter": ("drafter", "checkpoint"),
    "planner": ("scheduler", "planner"),
    "threads": ("threads",),
}
SERVE_FLAGS = {
    "host": ("gateway", "host"),
    "port": ("gateway", "port"),
    "placement": ("placement",),
    "replicas": ("gateway", "replicas"),
}
_HELP = {
    "model": "demo, a Hugging Face folder, a hub id or a GGUF file",
    "name": "the model's name in the API",
    "dtype": "auto, bfloat16 or float32",
    "drafter": "a checkpoint folder, auto, ngram or none",
    "planner": "auto, algorithm1, fixed:k, threshold:x or off",
    "threads": "threads that compute; 0 is one per core",
    "host": "address to listen on",
    "port": "port to listen on",
    "placement": "auto, colocated or split",
    "replicas": "gateway replicas",
}


def main(argv: Sequence[str] | None = None) -> int:
    open_closed_streams()
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    args = _parser().parse_args(argv)
    return _status_of(lambda: args.run(args))


def _status_of(work: Callable[[], int | None]) -> int:
    """Exit status of a command; what went wrong as one line."""
    try:
        status = work() or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        print_to_nobody()
        return 0
    except (SettingsError, Rejected) as error:
        return _fail(str(error), 2)
    except (ServingError, OSError) as error:
        return _fail(str(error), 1)
    except Stopped as stop:
        end_now(_fail(f"stopped by {stop.name}", 128 + stop.number))
    except KeyboardInterrupt:
        end_now(_fail("interrupted", 128 + signal.SIGINT))


def _fail(message: str, status: int) -> int:
    with contextlib.suppress(OSError):  # nobody reads it, and the status says it too
        print(f"dspark: {' '.join(message.split())}", file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    """Says of a flag that nobody knows which one may be meant, with the usage of the command it was given to."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            from services.settings import suggestion

            name = unknown[0].partition("=")[0]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{suggestion(name, self._option_string_actions)}")
        return known, unknown


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dspark", description="Serving with DSpark speculative decoding.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for add in (
        _add_serve,
        _add_generate,
        _add_measure,
        _add_bench,
        add_simulate,
        _add_calibrate,
        _add_evaluate,
        _add_training,
        _add_doctor,
        _add_top,
    ):
        add(commands)
    return parser


def _command(commands: Any, name: str, text: str, run: Any, flags: dict[str, tuple[str, ...]]) -> Any:
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run)
    command.add_argument("--settings", metavar="FILE", help="YAML settings file (or environment DSPARK_SETTINGS)")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting: kv.block_size=8")
    for flag in flags:
        command.add_argument(f"--{flag}", metavar=flag.upper(), help=_HELP[flag])
    return command


def _add_serve(commands: Any) -> None:
    text = "Serve chat completions over HTTP."
    serve = _command(commands, "serve", text, _serve, SETTING_FLAGS | SERVE_FLAGS)
    serve.add_argument("--no-ray", action="store_true", help="everything in this process, without Ray")


def _add_generate(commands: Any) -> None:
    generate = _command(commands, "generate", "Answer one prompt in this process.", _generate, SETTING_FLAGS)
    generate.add_argument("prompt", help="what the user says")
    generate.add_argument("--system", default="", help="a system message")
    generate.add_argument("--max-tokens", type=int, default=256, help="at most (default %(default)s)")
    generate.add_argument("--temperature", type=float, help="0 is greedy (default: the model's)")
    generate.add_argument("--top-p", type=float, help="above 0 and at most 1 (default: the model's)")
    generate.add_argument("--top-k", type=int, help="0 is off (default: the model's)")
    generate.add_argument("--seed", type=int, help="the same text each time (default: none)")
    generate.add_argument("--show-drafts", action="store_true", help="colour tokens by origin and print the numbers")


def _add_measure(commands: Any) -> None:
    measure = _command(commands, "measure", "Time the models: the planner's cost curve.", _measure, SETTING_FLAGS)
    measure.add_argument("--plot", metavar="FILE.png", help="draw the curve")


def _add_bench(commands: Any) -> None:
    bench = _command(commands, "bench", "Compare planners under load, interleaved.", _bench, SETTING_FLAGS)
    add_flags(bench, BENCH)
    text = "Every planner at every load, kind of text and temperature; the paper's pictures."
    sweep = _command(bench.add_subparsers(metavar="sweep"), "sweep", text, _sweep, SETTING_FLAGS)
    add_flags(sweep, SWEEP)


def _add_training(commands: Any) -> None:
    text = "Let the target answer prompts: the data that drafters are trained on."
    add_prepare(commands.add_parser("prepare", help=text, description=text))
    text = "Train a drafter on a target's answers; resumes where the run was saved."
    add_train(commands.add_parser("train", help=text, description=text))


def _add_calibrate(commands: Any) -> None:
    text = "Fit the drafter's confidence to what the target accepts, and write calibration.json beside its weights."
    flags = {name: keys for name, keys in SETTING_FLAGS.items() if name != "planner"}
    add_calibrate(_command(commands, "calibrate", text, None, flags), settings_of)


def _add_evaluate(commands: Any) -> None:
    text = (
        "Measure drafters side by side: accepted length, acceptance by position, calibration; is the text the target's?"
    )
    flags = {name: keys for name, keys in SETTING_FLAGS.items() if name not in ("planner", "drafter")}
    add_evaluate(_command(commands, "evaluate", text, None, flags), settings_of)


def _add_doctor(commands: Any) -> None:
    from services.doctor.command import add_doctor

    text = "Check this machine, or with --url a running server, and say what to do."
    add_doctor(_command(commands, "doctor", text, None, SETTING_FLAGS | SERVE_FLAGS), settings_of)


def _add_top(commands: Any) -> None:
    text = "Watch a running server: requests, tokens, drafts, seconds per verb."
    add_top(commands.add_parser("top", help=text, description=text))


def settings_of(args: argparse.Namespace) -> Settings:
    flags: dict[str, Any] = {}
    for flag, keys in (SETTING_FLAGS | SERVE_FLAGS).items():
        value = getattr(args, flag, None)
        if value is not None:
            _put(flags, keys, value)
    for assignment in args.set:
        key, equals, value = assignment.partition("=")
        keys = tuple(part.strip() for part in key.split("."))
        if not equals or not all(keys):
            raise SettingsError(f"--set {assignment}: write KEY=VALUE, for example --set kv.block_size=8")
        _put(flags, keys, value)
    from services.settings import load_settings

    return load_settings(args.settings, flags=flags)


def _put(tree: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    for depth, key in enumerate(keys[:-1], 1):
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise SettingsError(f"--set {'.'.join(keys)}: {'.'.join(keys[:depth])} has a value already (command line)")
    tree[keys[-1]] = value


def _serve(args: argparse.Namespace) -> int:
    with stop_signals_raise():
        # the imports alone take seconds
        from services.address import check_address, hold_address
        from services.ingress import behind_haproxy
        from services.launch import check_access, check_cluster, serve_with_ray
        from services.launch_in_process import serve_in_process

        settings = settings_of(args)
        check_access(settings)
        check_address(settings.gateway.host, settings.gateway.port)
        if args.no_ray:
            serve_in_process(settings)
            end_now(0)  # a signal while the interpreter ends would be a traceback
        check_cluster()
        # HAProxy shares its port with nobody: not with another server, and not with us
        held = None if behind_haproxy() else hold_address(settings.gateway.host, settings.gateway.port)
        with held or contextlib.nullcontext():
            return run_behind(lambda: _status_of(lambda: serve_with_ray(settings)))


def _generate(args: argparse.Namespace) -> None:
    from services.generate import Prompt, generate

    prompt = Prompt(
        text=args.prompt,
        system=args.system,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
    )
    generate(settings_of(args), prompt, show_drafts=args.show_drafts)


def _measure(args: argparse.Namespace) -> None:
    from services.measure import measure

    measure(settings_of(args), plot=args.plot)


def _bench(args: argparse.Namespace) -> None:
    _run_bench(args, BENCH)


def _sweep(args: argparse.Namespace) -> None:
    _run_bench(args, SWEEP)


def _run_bench(args: argparse.Namespace, defaults: dict[str, str]) -> None:
    from services.bench.sweep import Files, bench

    files = Files(args.out, args.plot, args.record)
    bench(settings_of(args), sweep_of(args, defaults), url=args.url, files=files)


if __name__ == "__main__":
    sys.exit(main())
