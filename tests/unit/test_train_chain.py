"""Trainable Eagle3 and MTP: against a slow twin and against serving, their gradients, their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafter.block_attention import BlockStart
from drafter.chain import Chain
from drafter.checkpoint import load_checkpoint, write_checkpoint
from drafter.config import DrafterConfig
from drafter.runner import DraftRunner
from drafter.train.blocks import build_batch, valid_anchors
from drafter.train.chain import ChainNetwork
from drafter.train.corpus import AnswerWriter, Job
from drafter.train.designs import published_loss
from drafter.train.loop import batch_loss
from drafter.train.network import Blocks
from drafter.train.recipe import DrafterShape, RunConfig, build_network, drafter_config, export
from drafter.train.states import States, StatesFolder, shard_path, write_shard
from drafter.train.target import load_decoder
from scheduler.errors import SettingsError
from tests.unit.drafter_twins import twin_of
from verifier.architecture import read_config
from verifier.features import CommittedFeatures

LAYERS = (0, 1)
KINDS = ["eagle3", "mtp"]
BLOCK_SIZE = 8


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, write_target) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "model", request.param, seed=3)


@pytest.fixture(scope="module")
def states_folder(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    decoder = load_decoder(target, torch.float32, torch.device("cpu"), max_len=40)
    writer = AnswerWriter(decoder, capture=LAYERS, stop_ids=[1], rows=8, max_len=32)
    prompts = [torch.randint(2, 64, (5,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(8)]
    jobs = [Job(f"{i:08x}{i:08x}", "chat", tuple(prompt), float(i % 2), 20) for i, prompt in enumerate(prompts)]
    write_shard(shard_path(folder, 0, 0), list(writer.write(jobs)))
    return folder


@pytest.fixture(scope="module")
def found(states_folder: Path) -> list[States]:
    known = StatesFolder(states_folder)
    return [s for s in (known.read_named(name) for name, _ in known.named()) if s.answer_len > 10][:3]


@pytest.fixture(params=KINDS)
def config(request: pytest.FixtureRequest, target: Path, states_folder: Path, tmp_path: Path) -> RunConfig:
    shape = DrafterShape(LAYERS, mask_token_id=-1, block_size=4, draft_vocab_size=40, kind=request.param)
    return RunConfig(str(target), states_folder, tmp_path / "run", shape, dtype="float32", max_len=64)


@pytest.fixture
def network(config: RunConfig, states_folder: Path) -> ChainNetwork:
    made = build_network(config, StatesFolder(states_folder))
    assert isinstance(made, ChainNetwork)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.08 * torch.randn(parameter.shape, generator=generator))
    return made


@pytest.fixture
def checkpoint(network: ChainNetwork, config: RunConfig, tmp_path: Path) -> Path:
    """What the network exports, in float32."""
    settings = drafter_config(read_config(Path(config.target)), config.shape, config.loop)
    write_checkpoint(tmp_path / "checkpoint", settings, network.checkpoint_tensors(torch.float32))
    return tmp_path / "checkpoint"


def read_by(network: ChainNetwork, states: States) -> Tensor:
    """The features of the layers that the checkpoint names."""
    return states.features[:, -64 * len(network.arch.target_layer_ids) :]


def blocks_of(states: States, anchors: Tensor, length: int) -> Blocks:
    return Blocks(states.features[: int(anchors.max())], anchors, states.ids.long(), length)


@torch.no_grad()
def test_blocks_packed_over_sequences_equal_one_slow_forward_per_slot(
    network: ChainNetwork, checkpoint: Path, config: RunConfig, found: list[States]
) -> None:
    twin = twin_of(checkpoint, Path(config.target))
    batch = [blocks_of(s, valid_anchors(s)[:-4:3], length) for s, length in zip(found, (4, 1, 3), strict=True)]
    hidden = network(batch).split([len(b.anchors) * b.length for b in batch])
    for states, blocks, rows in zip(found, batch, hidden, strict=True):
        logits = (rows @ network.lm_head.T).view(len(blocks.anchors), blocks.length, -1)
        for anchor, row in zip(blocks.anchors.tolist(), logits, strict=True):
            ids = states.ids.tolist()
            after = ids[anchor + 1 : anchor + 1 + blocks.length]
            features = read_by(network, states)[:anchor]
            expected, _, _ = twin.logits(features, ids[: anchor + 1], after, blocks.length)
            torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_training_and_serving_compute_the_same(
    network: ChainNetwork, checkpoint: Path, config: RunConfig, found: list[States]
) -> None:
    serving = DrafterConfig(
        str(checkpoint), config.target, "float32", "cpu", num_blocks=20, block_size=BLOCK_SIZE, num_threads=1
    )
    backbone = DraftRunner(serving).backbone
    assert isinstance(backbone, Chain)
    states = found[0]
    anchor, length = int(valid_anchors(states)[4]), config.shape.block_size
    slots = torch.arange(BLOCK_SIZE, BLOCK_SIZE + anchor)
    before = torch.cat((torch.zeros(1, dtype=torch.int64), slots[:-1]))
    features = read_by(network, states)[:anchor]
    backbone.absorb([CommittedFeatures(features, slots, torch.arange(anchor), states.ids[:anchor].long(), before)])
    walk = backbone.begin([BlockStart(0, anchor, np.arange(1, 8, dtype=np.int32))], length)
    served = torch.cat([walk.step(states.ids[anchor + k][None].long()) for k in range(length)])
    trained = network([blocks_of(states, torch.tensor([anchor]), length)])
    torch.testing.assert_close(served, trained, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_slot_sees_nothing_of_its_own_token_or_later(network: ChainNetwork, found: list[States]) -> None:
    states = found[0]
    anchor = int(valid_anchors(states)[2])
    before = network([blocks_of(states, torch.tensor([anchor]), 4)])
    ids, features = states.ids.clone(), states.features.clone()
    ids[anchor + 2], features[anchor:] = (ids[anchor + 2] + 1) % 64, 3.0
    changed = States(ids, features, states.last, states.lse, states.prompt_len, states.meta)
    after = network([blocks_of(changed, torch.tensor([anchor]), 4)])
    torch.testing.assert_close(after[:2], before[:2])
    assert bool((after[2:] - before[2:]).abs().amax(-1).min() > 1e-3)


def test_gradients_reach_every_weight(network: ChainNetwork, config: RunConfig, found: list[States]) -> None:
    parts = [(s, valid_anchors(s), 4) for s in found]
    loss = published_loss(config.shape.kind)
    total, metrics = batch_loss(network, build_batch(parts, loss.decay), loss)
    total.backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.any()), name
    assert "confidence" not in metrics


def test_the_exported_file_is_what_other_engines_expect(
    network: ChainNetwork, config: RunConfig, tmp_path: Path
) -> None:
    export(config, network, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    settings = read_config(tmp_path / "out")
    family = settings["model_type"].capitalize()
    assert settings["num_hidden_layers"] == 1 and settings["ttt_length"] == 4
    assert not {"embed_tokens.weight", "lm_head.weight", "mask_token_id", "markov_rank"} & {*stored, *settings}
    if config.shape.kind == "eagle3":
        assert settings["architectures"] == [f"{family}Eagle3Model"] and settings["target_layer_ids"] == [0, 1]
        assert stored["fc.weight"].shape == (64, 128) and stored["layers.0.self_attn.q_proj.weight"].shape[1] == 128
        assert stored["d2t"].shape == (40,) and stored["t2d"].sum() == 40
    else:
        assert settings["architectures"] == [f"{family}MTPModel"] and settings["target_layer_ids"] == [1]
        assert stored["eh_proj.weight"].shape == (64, 128) and stored["draft_vocab_ids"].shape == (40,)
    loaded = load_checkpoint(tmp_path / "out", Path(config.target), torch.float32, torch.device("cpu"))
    assert loaded.arch.kind == config.shape.kind
    assert loaded.draft_vocab_ids is not None
    assert loaded.draft_vocab_ids.tolist() == network.draft_vocab_ids.tolist()


@torch.no_grad()
def test_training_may_go_on_from_a_checkpoint(
    network: ChainNetwork, checkpoint: Path, config: RunConfig, found: list[States]
) -> None:
    started = build_network(replace(config, init_from=checkpoint), StatesFolder(config.states))
    assert torch.equal(started.draft_vocab_ids, network.draft_vocab_ids)
    batch = [blocks_of(found[0], valid_anchors(found[0])[:5], 4)]
    torch.testing.assert_close(started(batch), network(batch), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_an_mtp_module_starts_from_states_whose_dimensions_have_one_size(
    target: Path, states_folder: Path, found: list[States], tmp_path: Path
) -> None:
    """A few dimensions of a raw residual stream are a thousand times the rest and would be all that a norm lets through."""
    shape = DrafterShape(LAYERS, mask_token_id=-1, block_size=1, draft_vocab_size=0, kind="mtp")
    made = build_network(
        RunConfig(str(target), states_folder, tmp_path, shape, dtype="float32", max_len=64),
        StatesFolder(states_folder),
    )
    states = torch.cat([s.features[:-1, -64:] for s in found])
    normed = states * states.square().mean(-1, keepdim=True).rsqrt() * made.get_parameter("hnorm.weight")
    size = normed.square().mean(0).sqrt()
    assert float(size.min()) > 0.5 and float(size.max()) < 2


def test_an_unknown_kind_is_refused(config: RunConfig, write_target: Callable[..., Path]) -> None:
    with pytest.raises(SettingsError, match="kind: 'medusa' is not one of dspark, dflash, eagle3, mtp"):
        drafter_config(read_config(Path(config.target)), replace(config.shape, kind="medusa"), config.loop)
