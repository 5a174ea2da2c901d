"""From a target and its states to a drafter: the shape of the network, where it starts, and the checkpoint it becomes.

Owns the config.json of a trained drafter, the choice of the draft vocabulary and of the feature scale. Must not know the
training loop's insides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafter.architecture import parse_drafter
from drafter.checkpoint import write_checkpoint
from drafter.train.answers import AnswerFolder
from drafter.train.bigrams import bigram_factors
from drafter.train.designs import architecture_name, chain_keys, design_of, network_class
from drafter.train.fresh import FreshStates
from drafter.train.loop import LoopConfig, Training, saved_state
from drafter.train.network import DraftNetwork
from drafter.train.parallel import Ranks, join
from drafter.train.process import prepare_process
from drafter.train.start import check_start, choose_vocabulary, feature_scale, read_start
from drafter.train.states import States, StatesFolder, StatesSource, shard_paths
from drafter.train.states_cache import StatesCache
from drafter.train.target import check_capture, load_decoder, stop_ids
from scheduler.errors import SettingsError
from verifier.architecture import read_config
from verifier.device import resolve_device, resolve_dtype
from verifier.weights import fingerprint, load_tensors, resolve_model

_SCALE_SEQUENCES = 48


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """kind: dspark, dflash (a DSpark without heads), eagle3 or mtp. block_size γ; markov_rank 0 is no Markov head, head_type
    one of vanilla, gated, rnn.

    num_layers: draft layers of the target's own widths; eagle3 and mtp have one whatever it says. target_layer_ids: what the
    states hold; mtp reads the last of them. draft_vocab_size: the target's most probable tokens that may be drafted; 0 is
    all of them. mask_token_id fills a DSpark block's slots after the anchor: an id that no text contains.
    """

    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    num_layers: int = 2
    block_size: int = 7
    markov_rank: int = 128
    confidence: bool = True
    draft_vocab_size: int = 6000
    kind: str = "dspark"
    head_type: str = "vanilla"

    @property
    def has_heads(self) -> bool:
        return self.kind == "dspark"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """See drafter/train/states_cache.py."""

    folder: Path
    limit_bytes: int
    form: str = "bf16"
    policy: str = "one-pass"


@dataclass(frozen=True, slots=True)
class RunConfig:
    """states: folder that `prepare` has written, with states kept in it or only answers. run: metrics, state, checkpoint.

    target_device: where the target recomputes states of answers; empty is `device`. cache: of those. init_from: checkpoint of
    the same shape to start from. max_len: tokens of the longest sequence.
    """

    target: str
    states: Path
    run: Path
    shape: DrafterShape
    loop: LoopConfig = field(default_factory=LoopConfig)
    dtype: str = "auto"
    max_len: int = 2048
    init_from: Path | None = None
    device: str = "auto"
    target_device: str = ""
    cache: CacheConfig | None = None


def drafter_config(target: dict[str, Any], shape: DrafterShape, loop: LoopConfig) -> dict[str, Any]:
    """The target's config.json with what makes it a drafter's, as DeepSpec writes it."""
    name = architecture_name(shape.kind, target.get("model_type"))
    check_capture(shape.target_layer_ids, int(target["num_hidden_layers"]))
    dropped = ("_name_or_path", "_model_name_or_path", "torch_dtype", "quantization_config")
    common = {
        **{key: value for key, value in target.items() if key not in dropped},
        "architectures": [name],
        "num_target_layers": target["num_hidden_layers"],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if design_of(shape.kind) != "dspark":
        return {**common, **chain_keys(shape.kind, shape.block_size, shape.target_layer_ids)}
    rank = shape.markov_rank if shape.has_heads else 0
    confidence = shape.confidence and shape.has_heads
    return {
        **common,
        "num_hidden_layers": shape.num_layers,
        "layer_types": ["full_attention"] * shape.num_layers,
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "num_anchors": loop.anchors_per_sequence,
        "target_layer_ids": list(shape.target_layer_ids),
        "markov_rank": rank,
        **({"markov_head_type": shape.head_type} if rank else {}),
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": bool(confidence and rank),
        "variable_block": loop.variable_block,
    }


def build_network(config: RunConfig, source: StatesSource) -> DraftNetwork:
    """A network that has learnt nothing yet; vocabulary and feature scale are the run's own when it has a saved state."""
    target_folder = resolve_model(config.target)
    target = read_config(target_folder)
    settings = drafter_config(target, config.shape, config.loop)
    arch = parse_drafter(settings, "drafter configuration")
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    d, m = arch.decoder.hidden_size, len(config.shape.target_layer_ids)
    if source.feature_size != m * d:
        raise SettingsError(
            f"{source.where} holds features of width {source.feature_size}; target_layer_ids need {m * d}"
        )
    embed_tokens, head, norm = _target_weights(target_folder, target, dtype, device)
    saved = saved_state(config.run)
    start = None if config.init_from is None or saved is not None else read_start(config.init_from, target_folder)
    if saved is not None:
        vocabulary, scale = saved[0]["draft_vocab_ids"], saved[0]["feature_scale"]
    else:
        scale = feature_scale(islice(_sequences(source), _SCALE_SEQUENCES))
        if start is not None:
            ids = start.draft_vocab_ids
            vocabulary = ids if ids is not None else torch.arange(arch.decoder.vocab_size)
        else:
            size = config.shape.draft_vocab_size
            vocabulary = choose_vocabulary(_sequences(source), head, size, stop_ids(target_folder))
    reduced = len(vocabulary) < arch.decoder.vocab_size
    network = network_class(config.shape.kind)(
        arch,
        embed_tokens,
        head.index_select(0, vocabulary.to(device)).contiguous() if reduced else head,
        vocabulary if reduced else None,
        scale,
        max_len=config.max_len,
    )
    generator = torch.Generator().manual_seed(config.loop.seed)
    network.initialise(generator, norm.float())
    if start is not None and config.init_from is not None:
        check_start(start, network, config.init_from)
        network.load_checkpoint_tensors(start.tensors)
        if start.arch.head_type != arch.head_type:
            network.markov_head.begin_as_vanilla()
    elif saved is None and arch.markov_rank and reduced:
        factors = bigram_factors(_sequences(source), network.lm_head, network.row_of, arch.markov_rank, generator)
        with torch.no_grad():
            network.markov_head.markov_w1.weight.copy_(factors[0])
            network.markov_head.markov_w2.weight.copy_(factors[1])
        network.markov_head.begin_as_vanilla()
    return network


def _target_weights(
    folder: Path, config: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings and head [V, d], weight of the last norm [d]."""
    head_name = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    names = ("model.embed_tokens.weight", head_name, "model.norm.weight")
    weights = load_tensors(folder, dtype, device, only=set(names))
    return weights[names[0]], weights[names[1]], weights[names[2]]


def _sequences(source: StatesSource) -> Iterator[States]:
    names = [name for name, _ in source.named()]
    for index, name in enumerate(names):
        source.upcoming(names[index : index + 16])
        yield source.read_named(name)


def open_source(config: RunConfig) -> StatesSource:
    """States that lie in the data folder, or answers whose states the target computes as they are needed."""
    if shard_paths(config.states):
        return StatesFolder(config.states)
    answers = AnswerFolder(config.states)
    folder = resolve_model(config.target)
    device = resolve_device(config.target_device or config.device)
    check_capture(config.shape.target_layer_ids, int(read_config(folder)["num_hidden_layers"]))
    if not len(answers):
        raise SettingsError(f"{config.states} holds no target states and no answers; run prepare first")
    decoder = load_decoder(folder, resolve_dtype(config.dtype, device), device, max_len=config.max_len)
    layers = list(config.shape.target_layer_ids)
    cache = None
    if config.cache is not None:
        kept, identity = config.cache, {"target": fingerprint(folder), "target_layer_ids": layers}
        cache = StatesCache(kept.folder, identity, limit_bytes=kept.limit_bytes, form=kept.form, policy=kept.policy)
    return FreshStates(answers, decoder, layers, cache)


def start_training(config: RunConfig, ranks: Ranks | None = None) -> Training:
    """A run's training, resumed where it was saved. ranks: the processes that train; default is those of torchrun."""
    ranks = join(config.device) if ranks is None else ranks
    if ranks.size > 1 and resolve_device(config.device).type == "cuda":
        config = replace(config, device=f"cuda:{ranks.local}")
    source = open_source(config)
    training = Training(build_network(config, source), source, config.run, config.loop, ranks)
    training.resume()
    return training


def export(config: RunConfig, network: DraftNetwork, folder: Path, *, complete: bool = False) -> None:
    """Writes the drafter as a checkpoint that serving loads. complete: with the target's embeddings and head, as DeepSpec
    publishes it and other engines expect it."""
    settings = drafter_config(read_config(resolve_model(config.target)), config.shape, config.loop)
    tensors = network.checkpoint_tensors()
    if complete:
        tensors["embed_tokens.weight"] = network.embed_tokens.to(torch.bfloat16)
        tensors["lm_head.weight"] = network.lm_head.to(torch.bfloat16, copy=True)
    write_checkpoint(folder, settings, tensors)


def train(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Trains, and exports to `run/checkpoint` at every evaluation. Yields the metrics of each."""
    prepare_process()
    training = start_training(config)
    for metrics in training.train():
        if training.ranks.first:
            export(config, training.network, config.run / "checkpoint")
        yield metrics


def export_saved(config: RunConfig, folder: Path, *, complete: bool = False) -> None:
    """The checkpoint of a run's saved state."""
    training = start_training(config, Ranks())
    if training.step == 0:
        raise SettingsError(f"{config.run} holds no saved state; train first")
    export(config, training.network, folder, complete=complete)
