"""`dspark prepare` and `dspark train`: from prompts to answers of the target, from answers to a drafter.

Owns their flags, and recipes: YAML files whose keys are flags, which the command line overrides. Training itself is
drafter/train, which is imported when a command runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from scheduler.errors import SettingsError
from services.demo import demo_target

if TYPE_CHECKING:
    from drafter.train.prepare import PrepareConfig
    from drafter.train.recipe import RunConfig

_REQUIRED = {"prepare": ("target", "data"), "train": ("target", "data", "run", "layers")}


def add_prepare(command: argparse.ArgumentParser) -> None:
    _shared_options(command)
    command.add_argument("--prompts", nargs="+", default=["builtin"], help="builtin, sharegpt, sharegpt:N, JSONL files")
    command.add_argument("--exclude", nargs="*", type=Path, default=[], help="JSONL files of evaluation prompts")
    command.add_argument("--shares", type=_shares, default="math=0.4,code=0.3,chat=0.3", help="none: JSONL as it is")
    command.add_argument("--count", type=int, default=6000, help="number of conversations")
    command.add_argument("--temperatures", type=_weighted, default="0=0.5,0.7=0.2,1=0.3", help="temperature=weight,..")
    command.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    command.add_argument("--max-prompt-tokens", type=int, default=192, help="of a first turn")
    command.add_argument("--rows", type=int, default=64, help="answers written at once")
    command.add_argument("--minutes", type=float, default=0, help="stop earlier; run again to go on")
    command.add_argument("--part", type=_part, default="0/1", help="i/n: this process writes every n-th answer")
    command.add_argument("--keep-states", action="store_true", help="also write the states of --layers to disk")
    command.add_argument("--layers", type=_integers, default="", help="target layers whose states are kept")
    _set_run(command, "prepare", _prepare)


def add_train(command: argparse.ArgumentParser) -> None:
    _shared_options(command)
    command.add_argument("--run", dest="run_folder", type=Path, help="folder of this run: metrics, state, checkpoint")
    command.add_argument("--out", type=Path, help="write the checkpoint here too when training ends")
    command.add_argument("--complete", action="store_true", help="--out with the target's embeddings and head")
    _shape_options(command)
    _loop_options(command)
    _states_options(command)
    _set_run(command, "train", _train)


def _set_run(command: argparse.ArgumentParser, name: str, run: Callable[[argparse.Namespace], None]) -> None:
    defaults = vars(command.parse_args([]))
    # only what is said is parsed, so that a flag wins over the recipe also where it says what the default is
    for action in command._actions:
        action.default = argparse.SUPPRESS

    def whole(said: argparse.Namespace) -> argparse.Namespace:
        recipe = getattr(said, "recipe", None)
        from_file = vars(command.parse_args(recipe_flags(recipe, command))) if recipe else {}
        return argparse.Namespace(**{**defaults, **from_file, **vars(said)})

    def go(said: argparse.Namespace) -> None:
        options = whole(said)
        names = {**vars(options), "run": getattr(options, "run_folder", None)}
        missing = [key for key in _REQUIRED[name] if names[key] in (None, "", ())]
        if missing:
            raise SettingsError(f"--{missing[0]} is missing; give it as a flag or in the recipe")
        if options.target == "demo":
            options.target = str(demo_target())
        run(options)

    command.set_defaults(run=go, whole=whole)


def recipe_flags(path: Path, command: argparse.ArgumentParser) -> list[str]:
    """A recipe's keys as flags."""
    try:
        rows = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise SettingsError(f"--recipe: {path} cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(rows, dict):
        raise SettingsError(f"--recipe: {path} must be a mapping of flags, such as `steps: 1000`")
    flags: list[str] = []
    for key, value in rows.items():
        flag = f"--{key}"
        if flag not in command._option_string_actions or key == "recipe":
            raise SettingsError(f"--recipe: {path} has the key {key!r}, which is no flag of `{command.prog}`")
        if isinstance(value, bool):
            flags += [flag] if value else []
        else:
            flags += [flag, *map(str, value)] if isinstance(value, list) else [f"{flag}={value}"]
    return flags


def _shared_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--recipe", type=Path, metavar="FILE.yaml", help="flags from a file; the command line wins")
    command.add_argument("--target", default="", help="demo, a Hugging Face folder, hub id or GGUF file")
    command.add_argument("--data", type=Path, help="folder of the answers (and of kept states)")
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    command.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32; parameters are float32 either way")
    command.add_argument("--threads", type=int, default=0, help="0 is one per core")
    command.add_argument("--seed", type=int, default=0)


def _shape_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--layers", type=_integers, default="", help="target layers read, such as 3,10,17,23,28")
    command.add_argument("--kind", default="dspark", help="dspark, dflash (a dspark without heads), eagle3 or mtp")
    command.add_argument("--head", default="vanilla", help="Markov head of dspark: vanilla, gated or rnn")
    command.add_argument("--mask-token-id", type=int, default=-1, help="an id that no text contains (dspark, dflash)")
    command.add_argument("--draft-layers", type=int, default=2, help="of dspark and dflash")
    command.add_argument("--block-size", type=int, default=0, help="drafted tokens; 0 is 1 for mtp, else 7")
    command.add_argument("--markov-rank", type=int, default=128)
    command.add_argument("--no-confidence", action="store_true", help="no confidence head")
    command.add_argument("--draft-vocabulary", type=int, default=6000, help="0 is the target's whole vocabulary")
    command.add_argument("--init-from", type=Path, help="checkpoint of this target's drafter to start from")


def _loop_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--steps", type=int, default=1000, help="of the schedule; may be extended when resuming")
    command.add_argument("--minutes", type=float, default=0, help="stop earlier, state saved")
    command.add_argument("--positions-per-step", type=int, default=8192, help="of an update, all processes together")
    command.add_argument("--accumulate", type=int, default=1, help="passes of each process for one update")
    command.add_argument("--anchors", type=int, default=512, help="block starts drawn of one sequence at a visit")
    command.add_argument("--held-out-every", type=int, default=40, help="every n-th prompt is evaluated on")
    command.add_argument("--evaluate-every", type=int, default=50, help="steps; state and checkpoint are saved too")
    command.add_argument("--evaluate-sequences", type=int, default=48)
    command.add_argument("--log-every", type=int, default=10, help="steps")
    command.add_argument("--optimiser", default="muon", help="muon (matrices; the rest by adamw) or adamw")
    command.add_argument("--lr", type=float, default=1e-3, help="of AdamW")
    command.add_argument("--muon-lr", type=float, default=2.5e-3)
    command.add_argument("--warmup-share", type=float, default=0.04, help="first part of the steps")
    command.add_argument("--decay-share", type=float, default=0.35, help="last part, in which the rates fall to 0")
    command.add_argument("--weight-decay", type=float, default=0.0)
    command.add_argument("--max-grad-norm", type=float, default=1.0)
    command.add_argument("--loss", type=_floats, help="weights of ce,tv,kl,confidence; default: as published")
    command.add_argument(
        "--slot-decay", type=float, help="slot k weighs exp(-(k-1)/this); the paper's is the block size"
    )
    command.add_argument("--detach-confidence", action="store_true", help="confidence loss trains its own head only")
    command.add_argument("--tensorboard", action="store_true", help="event files in RUN/tensorboard")


def _states_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--target-device", default="", help="where states are recomputed; default is --device")
    command.add_argument("--max-len", type=int, default=2048, help="tokens of the longest sequence")
    command.add_argument("--cache", type=Path, help="folder that keeps recomputed states for later epochs")
    command.add_argument("--cache-gb", type=float, default=10.0, help="its limit")
    command.add_argument("--cache-format", default="bf16", help="bf16 or int8")
    command.add_argument("--cache-policy", default="one-pass", help="one-pass or lru")


def _prepare(options: argparse.Namespace) -> None:
    from drafter.train.prepare import prepare
    from verifier.device import set_threads

    if options.keep_states and not options.layers:
        raise SettingsError("--keep-states needs --layers: the target layers whose states are kept")
    set_threads(options.threads)
    print(json.dumps(prepare(_prepare_config(options))))


def _prepare_config(options: argparse.Namespace) -> PrepareConfig:
    from drafter.train.prepare import PrepareConfig

    return PrepareConfig(
        target=options.target,
        folder=options.data,
        count=options.count,
        capture=options.layers if options.keep_states else (),
        prompts=tuple(options.prompts),
        exclude=tuple(options.exclude),
        shares=options.shares,
        temperatures=options.temperatures,
        max_tokens=options.max_tokens,
        max_prompt_tokens=options.max_prompt_tokens,
        rows=options.rows,
        minutes=options.minutes,
        part=options.part,
        seed=options.seed,
        dtype=options.dtype,
        device=options.device,
    )


def _train(options: argparse.Namespace) -> None:
    from drafter.train.parallel import is_first, leave
    from drafter.train.recipe import export_saved, train
    from verifier.device import set_threads

    set_threads(options.threads)
    config = run_config(options)
    try:
        for metrics in train(config):
            if is_first():
                print(json.dumps(metrics), flush=True)
    finally:
        leave()
    if options.out is not None and is_first():
        export_saved(config, options.out, complete=options.complete)
        print(f"checkpoint: {options.out}", file=sys.stderr)


def run_config(options: argparse.Namespace) -> RunConfig:
    from drafter.train.designs import design_of, published_loss
    from drafter.train.loop import LoopConfig
    from drafter.train.optimiser import OptimiserConfig
    from drafter.train.recipe import CacheConfig, DrafterShape, RunConfig

    loss = published_loss(options.kind)
    if options.loss:
        ce, tv, kl, confidence = options.loss
        loss = replace(loss, ce=ce, tv=tv, kl=kl, confidence=confidence)
    if options.slot_decay:
        loss = replace(loss, decay=options.slot_decay)
    loss = replace(loss, detach_confidence=options.detach_confidence)
    shape = DrafterShape(
        target_layer_ids=options.layers,
        mask_token_id=options.mask_token_id,
        num_layers=options.draft_layers,
        block_size=options.block_size or (1 if options.kind == "mtp" else 7),
        markov_rank=options.markov_rank,
        confidence=not options.no_confidence,
        draft_vocab_size=options.draft_vocabulary,
        kind=options.kind,
        head_type=options.head,
    )
    optimiser = OptimiserConfig(
        kind=options.optimiser,
        lr=options.lr,
        muon_lr=options.muon_lr,
        warmup_share=options.warmup_share,
        decay_share=options.decay_share,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
    )
    loop = LoopConfig(
        total_steps=options.steps,
        minutes=options.minutes,
        positions_per_step=options.positions_per_step,
        accumulate=options.accumulate,
        anchors_per_sequence=options.anchors,
        # steps of a chain cost what they are; blocks of random length are for drafters that may be asked for less
        variable_block=design_of(options.kind) == "dspark",
        held_out_every=options.held_out_every,
        evaluate_every=options.evaluate_every,
        evaluate_sequences=options.evaluate_sequences,
        log_every=options.log_every,
        seed=options.seed,
        tensorboard=options.tensorboard,
        loss=loss,
        optimiser=optimiser,
    )
    limit = int(options.cache_gb * 1e9)
    return RunConfig(
        target=options.target,
        states=options.data,
        run=options.run_folder,
        shape=shape,
        loop=loop,
        dtype=options.dtype,
        max_len=options.max_len,
        init_from=options.init_from,
        device=options.device,
        target_device=options.target_device,
        cache=CacheConfig(options.cache, limit, options.cache_format, options.cache_policy) if options.cache else None,
    )


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",")) if text else ()


def _floats(text: str) -> tuple[float, ...]:
    values = tuple(float(part) for part in text.split(","))
    if len(values) != 4:
        raise argparse.ArgumentTypeError("needs four numbers: ce,tv,kl,confidence")
    return values


def _pairs(text: str) -> list[tuple[str, float]]:
    pairs = [part.partition("=") for part in text.split(",")]
    return [(name, float(value)) for name, _, value in pairs]


def _shares(text: str) -> dict[str, float]:
    return {} if text == "none" else dict(_pairs(text))


def _weighted(text: str) -> tuple[tuple[float, float], ...]:
    return tuple((float(name), weight) for name, weight in _pairs(text))


def _part(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not i/n with i < n")
    return int(index), int(count)
