"""What is trained is what is served: every head on every family of targets, through a written checkpoint, slot by slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from drafter.backbone import Backbone
from drafter.block_attention import BlockStart
from drafter.checkpoint import Checkpoint, load_checkpoint, read_drafter, write_checkpoint
from drafter.heads import build_heads
from drafter.train import loop
from drafter.train.blocks import build_batch
from drafter.train.loop import batch_loss
from drafter.train.loss import LossConfig
from drafter.train.network import DraftNetwork
from drafter.train.recipe import DrafterShape, RunConfig, build_network, drafter_config
from drafter.train.states import States, StatesFolder, shard_path, write_shard
from scheduler.errors import SettingsError
from verifier.architecture import read_config
from verifier.features import CommittedFeatures
from verifier.kv import PagedKV

CPU = torch.device("cpu")
SHAPE = DrafterShape(target_layer_ids=(0, 1), mask_token_id=0, block_size=5, markov_rank=8, draft_vocab_size=40)
CASES = [
    ("llama", replace(SHAPE, kind="dflash")),
    ("llama", SHAPE),
    ("llama", replace(SHAPE, head_type="gated", confidence=False)),
    ("llama", replace(SHAPE, head_type="rnn", draft_vocab_size=0)),
    ("qwen2", replace(SHAPE, head_type="rnn")),
    ("qwen3", replace(SHAPE, head_type="gated", num_layers=3)),
    ("qwen3", replace(SHAPE, kind="dflash", num_layers=1)),
]


def random_states(seed: int, length: int) -> States:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 64, (length,), generator=random, dtype=torch.int32)
    features, last = (torch.randn(length, width, generator=random) for width in (128, 64))
    meta = {"prompt_id": f"{seed:016x}", "domain": "chat", "temperature": 1.0}
    return States(ids, features, last, torch.full((length,), 60.0), 3, meta)


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1].kind}-{case[1].head_type}")
def trained(
    request: pytest.FixtureRequest, write_target: Callable[..., Path], tmp_path: Path
) -> tuple[DraftNetwork, Checkpoint, States]:
    family, shape = request.param
    target = write_target(tmp_path / "target", family)
    write_shard(shard_path(tmp_path / "states", 0, 0), [random_states(i, 20) for i in range(3)])
    config = RunConfig(str(target), tmp_path / "states", tmp_path / "run", shape, dtype="float32", max_len=64)
    folder = StatesFolder(config.states)
    network = build_network(config, folder)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.08 * torch.randn(parameter.shape, generator=random))
    settings = drafter_config(read_config(target), shape, config.loop)
    write_checkpoint(tmp_path / "out", settings, network.checkpoint_tensors(torch.float32))
    arch = read_drafter(tmp_path / "out")
    assert arch.kind == ("dflash" if shape.kind == "dflash" else f"dspark-{shape.head_type}")
    return network, load_checkpoint(tmp_path / "out", target, torch.float32, CPU), random_states(0, 20)


def going_on(folder: Path, shape: DrafterShape) -> RunConfig:
    """Another run on the same states, from the checkpoint that `trained` wrote."""
    return RunConfig(
        str(folder / "target"), folder / "states", folder / "other", shape, dtype="float32", init_from=folder / "out"
    )


def served_hidden(checkpoint: Checkpoint, states: States, anchor: int) -> Tensor:
    """[γ, d] of the block whose anchor stands at that position, by the serving backbone."""
    decoder = checkpoint.arch.decoder
    pool = PagedKV(
        num_layers=decoder.num_layers,
        num_blocks=8,
        block_size=8,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        dtype=torch.float32,
        device=CPU,
    )
    backbone = Backbone(checkpoint, pool, max_len=64, dtype=torch.float32, device=CPU)
    slots = torch.arange(8, 8 + anchor)
    backbone.absorb([CommittedFeatures(states.features[:anchor], slots, torch.arange(anchor))])
    start = BlockStart(int(states.ids[anchor]), anchor, np.arange(1, 8, dtype=np.int32))
    return backbone.forward([start], checkpoint.arch.block_size)[0]


@torch.no_grad()
def test_the_training_forward_equals_the_serving_forward(trained: tuple[DraftNetwork, Checkpoint, States]) -> None:
    network, checkpoint, states = trained
    width = checkpoint.arch.block_size
    # two lengths in one batch: the recurrent head walks blocks of different ends at once
    anchors = torch.tensor([4, 9])
    batch = build_batch([(random_states(1, 15), torch.tensor([3, 5, 6]), 2), (states, anchors, width)], 4.0)
    hidden = network(batch.blocks)
    heads = network.head_terms(hidden, batch.blocks, batch.previous_ids)
    markov, confidence = build_heads(checkpoint)
    for index, anchor in enumerate(anchors.tolist()):
        rows = slice(6 + index * width, 6 + (index + 1) * width)
        served = served_hidden(checkpoint, states, anchor)
        torch.testing.assert_close(served, hidden[rows], atol=1e-4, rtol=1e-4)
        embeddings = None
        if markov is not None:
            assert heads.embeddings is not None and heads.mixed is not None and heads.w2 is not None
            terms, state = markov.cell.slot_terms(served[None]), None
            for k, previous in enumerate(states.ids[anchor : anchor + width].tolist()):
                embedding = markov.embed(torch.tensor([previous]))
                mixed, state = markov.cell.step(embedding.clone(), None if terms is None else terms[:, k], state)
                torch.testing.assert_close(embedding[0], heads.embeddings[rows][k], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(mixed[0], heads.mixed[rows][k], atol=1e-4, rtol=1e-4)
            bias = markov.bias(heads.mixed[rows], None)
            torch.testing.assert_close(bias, heads.mixed[rows] @ heads.w2.t(), atol=1e-4, rtol=1e-4)
            embeddings = heads.embeddings[rows]
        if confidence is not None:
            logits = confidence.logits(served[None], None if embeddings is None else embeddings[None])[0]
            trained_logits = network.confidence_logits(hidden[rows], embeddings)
            torch.testing.assert_close(logits, trained_logits, atol=1e-4, rtol=1e-4)
        else:
            assert not network.arch.has_confidence


def test_gradients_reach_every_weight(trained: tuple[DraftNetwork, Checkpoint, States]) -> None:
    network, _, states = trained
    loss, _ = batch_loss(network, build_batch([(states, torch.arange(3, 17), 5)], 4.0), LossConfig(kl=0.1))
    loss.backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.any()), name


def test_training_may_go_on_from_a_checkpoint(trained: tuple[DraftNetwork, Checkpoint, States], tmp_path: Path) -> None:
    network, checkpoint, states = trained
    shape = replace(SHAPE, kind="dflash" if checkpoint.arch.kind == "dflash" else "dspark")
    shape = replace(
        shape,
        num_layers=checkpoint.arch.decoder.num_layers,
        head_type=checkpoint.arch.head_type,
        confidence=checkpoint.arch.has_confidence,
        block_size=3,
    )
    config = going_on(tmp_path, shape)
    folder = StatesFolder(config.states)
    started = build_network(config, folder)
    assert torch.equal(started.draft_vocab_ids, network.draft_vocab_ids)
    batch = build_batch([(states, torch.arange(3, 17), 3)], 4.0)
    found, expected = (batch_loss(x, batch, LossConfig())[1] for x in (started, network))
    assert found == pytest.approx(expected, rel=1e-4)
    other = replace(config, shape=replace(shape, num_layers=shape.num_layers + 1))
    with pytest.raises(SettingsError, match=r"init_from: .* has decoder"):
        build_network(other, folder)


@pytest.mark.parametrize("trained", [CASES[1]], indirect=True)
@pytest.mark.parametrize(("head", "within"), [("gated", 1e-4), ("rnn", 0.12)])
@torch.no_grad()
def test_a_larger_head_begins_as_the_markov_head_it_comes_from(
    trained: tuple[DraftNetwork, Checkpoint, States], tmp_path: Path, head: str, within: float
) -> None:
    """From random cells it took millions of positions to get where counting bigrams begins."""
    network, _, states = trained
    shape = replace(SHAPE, head_type=head)
    config = going_on(tmp_path, shape)
    grown = build_network(config, StatesFolder(config.states))
    batch = build_batch([(states, torch.arange(3, 15), 5)], 4.0)
    biases = []
    for each in (network, grown):
        terms = each.head_terms(each(batch.blocks), batch.blocks, batch.previous_ids)
        assert terms.mixed is not None and terms.w2 is not None
        biases.append(terms.mixed @ terms.w2.t())
    expected, found = biases
    assert float((found - expected).norm() / expected.norm()) < within
    random = build_network(replace(config, init_from=None), StatesFolder(config.states))
    assert float(random.markov_head.markov_w2.weight.abs().max()) > 0, (
        "bigrams, which a random cell would not let through"
    )


@pytest.mark.parametrize("trained", [CASES[2]], indirect=True)
def test_a_head_does_not_shrink(trained: tuple[DraftNetwork, Checkpoint, States], tmp_path: Path) -> None:
    shape = replace(SHAPE, confidence=False)
    config = going_on(tmp_path, shape)
    with pytest.raises(SettingsError, match=r"init_from: .* has head_type gated, this run vanilla"):
        build_network(config, StatesFolder(config.states))


def test_every_tensor_of_a_step_lies_on_the_device_of_the_network(
    trained: tuple[DraftNetwork, Checkpoint, States], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device, which mixes with no other: a tensor left on the CPU is an error there as it is on a GPU."""
    network, _, states = trained
    meta = torch.device("meta")
    ids = network.draft_vocab_ids if network.reduced else None
    moved = type(network)(
        network.arch, network.embed_tokens.to(meta), network.lm_head.to(meta), ids, network.feature_scale, max_len=64
    )
    # numbers of a step are read for the log; on this device there are none
    monkeypatch.setattr(loop, "float", lambda value: 0.0, raising=False)
    batch = build_batch([(states, torch.arange(3, 17), 5), (random_states(1, 15), torch.arange(3, 9), 2)], 4.0)
    loss, _ = batch_loss(moved, batch.to(meta), LossConfig(kl=0.1))
    loss.backward()
    assert all(p.grad is not None and p.grad.device == meta for p in moved.parameters())


def test_a_detached_confidence_loss_trains_its_own_head_only(trained: tuple[DraftNetwork, Checkpoint, States]) -> None:
    network, _, states = trained
    if not network.arch.has_confidence:
        return
    alone = LossConfig(ce=0, tv=0, kl=0, detach_confidence=True)
    loss, _ = batch_loss(network, build_batch([(states, torch.arange(3, 17), 5)], 4.0), alone)
    loss.backward()
    moved = {n for n, p in network.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert moved == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
