"""Which checkpoints load, what they borrow from the target, and what each refusal says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter.checkpoint import load_checkpoint, read_drafter, read_layer_ids, vocabulary_maps, write_checkpoint
from scheduler.errors import SettingsError
from verifier.weights import fingerprint

CPU = torch.device("cpu")


@pytest.fixture
def target(golden: Path) -> Path:
    return golden / "target"


@pytest.fixture
def folder(golden: Path, tmp_path: Path) -> Path:
    """A copy of a reference checkpoint that a test may damage."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "drafter").mkdir(exist_ok=True)
        shutil.copyfile(golden / "dspark_vanilla" / name, tmp_path / "drafter" / name)
    return tmp_path / "drafter"


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def retensor(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refusal(folder: Path, target: Path) -> str:
    with pytest.raises(SettingsError) as caught:
        load_checkpoint(folder, target, torch.float32, CPU)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


@pytest.mark.parametrize(
    ("name", "kind", "confidence"),
    [
        ("dspark_vanilla", "dspark-vanilla", True),
        ("dspark_gated", "dspark-gated", True),
        ("dspark_rnn", "dspark-rnn", True),
        ("dspark_noconfmarkov", "dspark-vanilla", True),
        ("dflash", "dflash", False),
        ("eagle3", "eagle3", False),
    ],
)
def test_published_checkpoints_load_as_they_are(
    name: str, kind: str, confidence: bool, golden: Path, target: Path
) -> None:
    checkpoint = load_checkpoint(golden / name, target, torch.float32, CPU)
    assert checkpoint.arch.kind == kind
    assert checkpoint.arch.has_confidence is confidence
    assert checkpoint.arch.block_size == 7
    assert checkpoint.arch.target_layer_ids == read_layer_ids(golden / name) == (0, 1, 2, 3, 4)
    assert checkpoint.draft_vocab_ids is None
    # a drafter of whole blocks cannot be asked for less; one that is run per token can
    assert checkpoint.arch.variable_block == (kind == "eagle3")


def test_drafters_without_weights_capture_no_layers() -> None:
    assert read_layer_ids("ngram") == read_layer_ids("none") == ()


def test_a_missing_folder_is_named_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"drafter\.checkpoint"):
        read_layer_ids(tmp_path / "not here")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text"}, "architectures 'Gemma4DSparkModel'"),
        ({"architectures": ["Qwen3Eagle3Model"]}, "num_hidden_layers must be 1 for eagle3, not 2"),
        ({"architectures": None}, "architectures None"),
        ({"architectures": 5}, "architectures 5"),
        ({"architectures": [[]]}, "architectures []"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 1}}, "dflash_config"),
        ({"model_type": "llama"}, "model_type 'llama' does not fit Qwen3DSparkModel"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": "7"}, "block_size"),
        ({"block_size": 1_000_000}, "block_size"),
        ({"mask_token_id": 48}, "mask_token_id"),
        ({"markov_rank": None}, "markov_rank"),
        ({"markov_head_type": "transformer"}, "markov_head_type 'transformer'"),
        ({"markov_rank": 0}, "confidence_head_with_markov"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"target_layer_ids": [0, 2, 1, 3, 4]}, "strictly increasing"),
        ({"target_layer_ids": [0, 1, 1, 3, 4]}, "strictly increasing"),
        ({"target_layer_ids": [-2, 1, 2, 3, 4]}, "from -1"),
        ({"target_layer_ids": [1, 2, 3, 4, 5]}, "the last layer is not allowed"),
        ({"num_target_layers": 7}, "num_target_layers is 7 but the target has 6"),
        ({"vocab_size": 64}, "vocab_size is 64 but the target has 48"),
        ({"hidden_size": 32}, "hidden_size is 32 but the target has 64"),
        ({"intermediate_size": 64}, "mlp.gate_proj.weight has shape (128, 64), config.json says (64, 64)"),
        ({"attention_bias": True}, "lacks the tensor"),
        ({"use_sliding_window": True}, "sliding-window"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_config_is_refused_naming_the_field(
    changes: dict[str, Any], says: str, folder: Path, target: Path
) -> None:
    edit(folder, **changes)
    assert says in refusal(folder, target)


def test_a_missing_tensor_is_named(folder: Path, target: Path) -> None:
    retensor(folder, lambda t: t.pop("markov_head.markov_w2.weight"))
    assert "lacks the tensor markov_head.markov_w2.weight" in refusal(folder, target)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path, target: Path) -> None:
    retensor(folder, lambda t: t.update({"fc.weight": t["fc.weight"][:, :64].contiguous()}))
    assert "fc.weight has shape (64, 64), config.json says (64, 320)" in refusal(folder, target)


def test_a_head_that_the_config_does_not_know_is_not_silently_dropped(folder: Path, target: Path) -> None:
    edit(folder, markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False)
    assert "does not account for" in refusal(folder, target)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(value: float, folder: Path, target: Path) -> None:
    retensor(folder, lambda t: t["fc.weight"][3].fill_(value))
    assert "fc.weight holds NaN or infinity" in refusal(folder, target)


def test_an_all_zero_vocabulary_head_is_refused(folder: Path, target: Path) -> None:
    retensor(folder, lambda t: t["lm_head.weight"].zero_())
    assert "lm_head.weight is all zero" in refusal(folder, target)


def test_a_truncated_file_is_refused(folder: Path, target: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "not a readable safetensors file" in refusal(folder, target)


def test_what_the_lighter_form_leaves_out_comes_from_the_target(folder: Path, target: Path) -> None:
    vocabulary = torch.tensor([0, 3, 4, 9, 40], dtype=torch.int32)

    def lighten(tensors: dict[str, Tensor]) -> None:
        del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
        tensors["draft_vocab_ids"] = vocabulary
        tensors["markov_head.markov_w1.weight"] = tensors["markov_head.markov_w1.weight"][:6].clone()
        tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][:5].clone()

    retensor(folder, lighten)
    checkpoint = load_checkpoint(folder, target, torch.float32, CPU)
    theirs = load_file(target / "model.safetensors")
    assert checkpoint.draft_vocab_ids is not None
    assert checkpoint.draft_vocab_ids.dtype is torch.int64
    assert torch.equal(checkpoint.tensors["embed_tokens.weight"], theirs["model.embed_tokens.weight"])
    assert torch.equal(checkpoint.tensors["lm_head.weight"], theirs["lm_head.weight"][vocabulary.long()])


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (torch.tensor([3, 2, 5]), "ascending"),
        (torch.tensor([2, 2, 5]), "ascending"),
        (torch.tensor([2, 5, 48]), "ascending token ids below 48"),
        (torch.tensor([-1, 5]), "ascending"),
        (torch.tensor([1.0, 2.0]), "integers"),
        (torch.tensor([[1, 2]]), "integers"),
        (torch.arange(47), "ambiguous"),
        (torch.arange(5), "markov_w2.weight has shape (48, 16), config.json says (5, 16)"),
    ],
)
def test_a_wrong_draft_vocabulary_is_refused(ids: Tensor, says: str, folder: Path, target: Path) -> None:
    retensor(folder, lambda t: (t.pop("lm_head.weight"), t.update({"draft_vocab_ids": ids})))
    assert says in refusal(folder, target)


def test_a_written_checkpoint_reads_back_the_same(folder: Path, target: Path, tmp_path: Path) -> None:
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    written = tmp_path / "written"
    write_checkpoint(written, {**config, "variable_block": True, "dspark_serve": {"steps": 3}}, tensors)
    assert sorted(p.name for p in written.iterdir()) == ["config.json", "model.safetensors"]
    assert read_drafter(written).variable_block
    checkpoint = load_checkpoint(written, target, torch.float32, CPU)
    assert all(torch.equal(checkpoint.tensors[name], tensor) for name, tensor in tensors.items())


def test_writing_again_replaces_the_weights_and_drops_their_calibration(folder: Path, tmp_path: Path) -> None:
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    before = fingerprint(folder)
    (folder / "calibration.json").write_text("{}")
    write_checkpoint(folder, config, {name: tensor.bfloat16() for name, tensor in tensors.items()})
    assert fingerprint(folder) != before
    assert not (folder / "calibration.json").exists()


def test_a_checkpoint_that_could_not_be_loaded_is_not_written(folder: Path, tmp_path: Path) -> None:
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    del tensors["norm.weight"]
    with pytest.raises(SettingsError, match=r"norm\.weight"):
        write_checkpoint(tmp_path / "new", config, tensors)
    assert not (tmp_path / "new").exists()


@pytest.fixture
def eagle3(golden: Path, tmp_path: Path) -> Path:
    """A copy of the reference Eagle3 checkpoint that a test may damage."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "eagle3").mkdir(exist_ok=True)
        shutil.copyfile(golden / "eagle3" / name, tmp_path / "eagle3" / name)
    return tmp_path / "eagle3"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 2, "layer_types": None}, "num_hidden_layers must be 1 for eagle3, not 2"),
        ({"ttt_length": None}, "ttt_length must be a whole number from 1 to 256, not None"),
        ({"ttt_length": 1000}, "ttt_length must be a whole number from 1 to 256"),
        ({"target_layer_ids": [0, 1, 2, 3, 5]}, "the last layer is not allowed"),
        ({"target_layer_ids": [0, 1]}, "fc.weight has shape (64, 320), config.json says (64, 128)"),
        ({"architectures": ["Qwen3MTPModel"]}, "target_layer_ids must name exactly one layer for mtp"),
        ({"architectures": ["Qwen3MTPModel"], "target_layer_ids": [4]}, "lacks the tensor eh_proj.weight and 2 more"),
        ({"architectures": ["Qwen3DSparkModel"]}, "markov_rank"),
        ({"architectures": ["LlamaEagle3Model"]}, "model_type 'qwen3' does not fit LlamaEagle3Model"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_config_of_a_chain_is_refused_naming_the_field(
    changes: dict[str, Any], says: str, eagle3: Path, target: Path
) -> None:
    edit(eagle3, **changes)
    assert says in refusal(eagle3, target)


def test_eagle3_goes_by_its_other_name_too(eagle3: Path, target: Path) -> None:
    edit(eagle3, architectures=["Eagle3DraftModel"])
    assert load_checkpoint(eagle3, target, torch.float32, CPU).arch.kind == "eagle3"


def test_vocabulary_maps_of_other_makers_are_read(eagle3: Path, target: Path) -> None:
    ids = torch.tensor([1, 2, 5, 40])
    maps = {"d2t": torch.tensor([1, 1, 3, 37]), "t2d": torch.zeros(48, dtype=torch.bool).index_fill(0, ids, True)}
    assert all(torch.equal(maps[name], made) for name, made in vocabulary_maps(ids, 48).items())
    retensor(eagle3, lambda t: t.update(maps, **{"lm_head.weight": t["lm_head.weight"][ids]}))
    checkpoint = load_checkpoint(eagle3, target, torch.float32, CPU)
    assert checkpoint.draft_vocab_ids is not None
    assert checkpoint.draft_vocab_ids.tolist() == ids.tolist()
    assert not {"d2t", "t2d"} & set(checkpoint.tensors)
    retensor(eagle3, lambda t: t.pop("t2d"))
    assert torch.equal(load_checkpoint(eagle3, target, torch.float32, CPU).draft_vocab_ids, ids)


@pytest.mark.parametrize(
    ("maps", "says"),
    [
        ({"d2t": torch.tensor([1.0])}, "d2t must be a list of integers"),
        ({"d2t": torch.tensor([0, 1]), "t2d": torch.ones(48, dtype=torch.bool)}, "d2t and t2d name different tokens"),
        ({"t2d": torch.ones(48, dtype=torch.bool)}, "d2t (with or without t2d)"),
        ({"d2t": torch.tensor([0]), "draft_vocab_ids": torch.tensor([0])}, "once"),
        ({"d2t": torch.tensor([9, 7])}, "ascending token ids below 48"),
        ({"d2t": torch.tensor([9, 70])}, "ascending token ids below 48"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_vocabulary_maps_are_refused(maps: dict[str, Tensor], says: str, eagle3: Path, target: Path) -> None:
    retensor(eagle3, lambda t: (t.pop("lm_head.weight"), t.update(maps)))
    assert says in refusal(eagle3, target)
