"""`python -m drafter.train prepare | run | export`: the recipe of a drafter, step by step.

prepare: the target answers prompts, its states are kept.   run: trains, exports at every evaluation, resumes.
export: writes the checkpoint of a run's saved state.       Owns the command line only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drafter.train.designs import KINDS, design_of, published_loss
from drafter.train.loop import LoopConfig
from drafter.train.optimiser import OptimiserConfig
from drafter.train.prepare import PrepareConfig, prepare
from drafter.train.recipe import DrafterShape, RunConfig, export, start_training, train
from scheduler.errors import SettingsError
from verifier.device import set_threads


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    set_threads(options.threads)
    try:
        if options.command == "prepare":
            prepare(_prepare_config(options))
        elif options.command == "run":
            for _ in train(_run_config(options)):
                pass
        else:
            config = _run_config(options)
            training = start_training(config)
            if training.step == 0:
                raise SettingsError(f"{options.run} holds no saved state; train first")
            export(config, training.network, options.out)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m drafter.train", description="Train a DSpark drafter for a target.")
    commands = parser.add_subparsers(dest="command", required=True)
    _prepare_options(commands.add_parser("prepare", help="answers and states of the target"))
    _run_options(commands.add_parser("run", help="train; resumes where the run was saved"))
    exporting = commands.add_parser("export", help="checkpoint of a run's saved state")
    _run_options(exporting)
    exporting.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    return parser


def _shared_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="Hugging Face folder, hub id or GGUF file")
    parser.add_argument("--states", type=Path, required=True, help="folder of the target states")
    parser.add_argument("--layers", type=_integers, required=True, help="captured target layers, such as 3,10,17,23,28")
    parser.add_argument("--threads", type=int, default=0, help="0 is one per core")
    parser.add_argument("--seed", type=int, default=0)


def _prepare_options(parser: argparse.ArgumentParser) -> None:
    _shared_options(parser)
    parser.add_argument("--prompts", nargs="+", default=["builtin"], help="builtin, sharegpt, or JSONL files")
    parser.add_argument("--exclude", nargs="*", type=Path, default=[], help="JSONL files of evaluation prompts")
    parser.add_argument("--count", type=int, default=6000, help="number of prompts")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--rows", type=int, default=64, help="answers written at once")
    parser.add_argument("--part", type=_part, default=(0, 1), help="i/n: this process writes every n-th answer")


def _run_options(parser: argparse.ArgumentParser) -> None:
    _shared_options(parser)
    parser.add_argument("--run", type=Path, required=True, help="folder of this run: metrics, state, checkpoint")
    parser.add_argument("--kind", choices=KINDS, default="dspark", help="dflash is a DSpark without heads")
    parser.add_argument(
        "--mask-token-id", type=int, default=-1, help="a token id that no text contains (dspark, dflash)"
    )
    parser.add_argument("--draft-layers", type=int, default=2, help="of dspark and dflash")
    parser.add_argument("--init-from", type=Path, help="checkpoint of this target's drafter to start from")
    parser.add_argument("--head", choices=["vanilla", "gated", "rnn"], default="vanilla", help="Markov head of dspark")
    parser.add_argument("--anchors", type=int, default=96, help="block starts drawn of one sequence at a visit")
    parser.add_argument("--block-size", type=int, default=0, help="drafted tokens; 0 is 1 for mtp, else 7")
    parser.add_argument("--markov-rank", type=int, default=128)
    parser.add_argument("--draft-vocabulary", type=int, default=6000, help="0 is the target's whole vocabulary")
    parser.add_argument("--steps", type=int, default=1000, help="length of the schedule; may be extended when resuming")
    parser.add_argument("--minutes", type=float, default=0, help="stop earlier, state saved")
    parser.add_argument("--positions-per-step", type=int, default=4096)
    parser.add_argument("--evaluate-every", type=int, default=50)
    parser.add_argument("--optimiser", choices=["adamw", "muon"], default="muon")
    parser.add_argument("--lr", type=float, default=1e-3, help="of AdamW")
    parser.add_argument("--muon-lr", type=float, default=2.5e-3)
    parser.add_argument(
        "--decay-share", type=float, default=0.35, help="last part of the steps in which the rates fall to 0"
    )
    parser.add_argument("--loss", type=_floats, help="weights of ce, tv, kl, confidence; default: as published")


def _prepare_config(options: argparse.Namespace) -> PrepareConfig:
    return PrepareConfig(
        target=options.target,
        folder=options.states,
        count=options.count,
        capture=options.layers,
        prompts=tuple(options.prompts),
        exclude=tuple(options.exclude),
        max_tokens=options.max_tokens,
        rows=options.rows,
        part=options.part,
        seed=options.seed,
    )


def _run_config(options: argparse.Namespace) -> RunConfig:
    loss = published_loss(options.kind)
    if options.loss:
        ce, tv, kl, confidence = options.loss
        loss = replace(loss, ce=ce, tv=tv, kl=kl, confidence=confidence)
    shape = DrafterShape(
        target_layer_ids=options.layers,
        mask_token_id=options.mask_token_id,
        num_layers=options.draft_layers,
        block_size=options.block_size or (1 if options.kind == "mtp" else 7),
        markov_rank=options.markov_rank,
        head_type=options.head,
        draft_vocab_size=options.draft_vocabulary,
        kind=options.kind,
    )
    loop = LoopConfig(
        total_steps=options.steps,
        minutes=options.minutes,
        positions_per_step=options.positions_per_step,
        anchors_per_sequence=options.anchors,
        evaluate_every=options.evaluate_every,
        # steps of a chain cost what they are; blocks of random length are for drafters that may be asked for less
        variable_block=design_of(options.kind) == "dspark",
        seed=options.seed,
        loss=loss,
        optimiser=OptimiserConfig(
            kind=options.optimiser, lr=options.lr, muon_lr=options.muon_lr, decay_share=options.decay_share
        ),
    )
    return RunConfig(
        target=options.target,
        states=options.states,
        run=options.run,
        shape=shape,
        loop=loop,
        init_from=options.init_from,
    )


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _floats(text: str) -> tuple[float, ...]:
    values = tuple(float(part) for part in text.split(","))
    if len(values) != 4:
        raise argparse.ArgumentTypeError("needs four numbers: ce,tv,kl,confidence")
    return values


def _part(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not i/n with i < n")
    return int(index), int(count)


if __name__ == "__main__":
    sys.exit(main())
