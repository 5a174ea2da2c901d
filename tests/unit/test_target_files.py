"""Targets on disk that are damaged, half there or not what they say: each is one line that names the file and what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scheduler.errors import SettingsError
from services.engine import loading_phase
from services.settings import load_settings
from tests.unit.test_target_model import write_tiny_gguf
from verifier.config import VerifierConfig
from verifier.runner import TargetRunner
from verifier.weights import resolve_model

KEYS = "model.layers.1.self_attn.k_proj.weight"


def refusal(folder: Path, **config: object) -> str:
    with pytest.raises(SettingsError) as caught:
        TargetRunner(VerifierConfig(str(folder), **{"device": "cpu", "num_blocks": 8, "num_threads": 1, **config}))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def copy(llama_target: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_target, tmp_path / "target"))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, -1])
def test_weights_that_are_no_numbers_are_refused(copy: Path, value: float, place: int) -> None:
    change_tensors(copy, lambda tensors: tensors[KEYS].flatten().__setitem__(place, value))
    assert f"{KEYS} holds NaN or infinity" in refusal(copy)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_weights_of_a_type_that_means_something_else_are_refused(copy: Path, dtype: torch.dtype) -> None:
    change_tensors(copy, lambda tensors: tensors.update({KEYS: tensors[KEYS].to(dtype)}))
    assert f"{KEYS} is stored as {str(dtype).removeprefix('torch.')}" in refusal(copy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_weights_of_another_float_type_are_read(copy: Path, dtype: torch.dtype) -> None:
    change_tensors(copy, lambda tensors: tensors.update({KEYS: tensors[KEYS].to(dtype)}))
    TargetRunner(VerifierConfig(str(copy), dtype="float32", device="cpu", num_blocks=8, num_threads=1))


def test_tensors_that_the_config_does_not_know_are_not_silently_left_out(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    assert "has the tensor model.layers.2.input_layernorm.weight" in refusal(copy)
    (copy / "config.json").write_text(json.dumps(config))
    change_tensors(copy, lambda tensors: tensors.update({KEYS.replace("weight", "bias"): torch.ones(32)}))
    assert "self_attn.k_proj.bias, which its config.json does not account for" in refusal(copy)


def test_rotary_tables_and_an_unused_head_of_older_files_do_no_harm(copy: Path) -> None:
    older = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "other.weight": torch.ones(3)}
    change_tensors(copy, lambda tensors: tensors.update(older))
    TargetRunner(VerifierConfig(str(copy), device="cpu", num_blocks=8, num_threads=1))


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (b"[]", "not a safetensors index"),
        (b"\xff\xfe", "not a safetensors index"),
        (b"[" * 100_000, "not a safetensors index"),
        (b'{"weight_map": []}', "weight_map must"),
        (b'{"weight_map": {"a": 3}}', "weight_map must"),
        (
            b'{"weight_map": {"a": "model-00002-of-00002.safetensors"}}',
            "model-00002-of-00002.safetensors, which is not",
        ),
        (b'{"weight_map": {"promised": "model.safetensors"}}', "lacks the tensor"),
    ],
)
def test_an_index_that_is_wrong_or_names_a_missing_shard_is_refused(copy: Path, index: bytes, words: str) -> None:
    (copy / "model.safetensors.index.json").write_bytes(index)
    assert words in refusal(copy)


def test_a_tensor_that_the_index_promises_and_its_shard_lacks_is_named(copy: Path) -> None:
    names = dict.fromkeys(load_file(copy / "model.safetensors"), "model.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    change_tensors(copy, lambda tensors: tensors.pop(KEYS))
    assert f"lacks the tensor {KEYS}, which its index promises" in refusal(copy)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": "x"}, "num_attention_heads must be a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number of at least 1, not 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"vocab_size": [1]}, "vocab_size must be"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number above 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"rope_parameters": "x"}, "rope_parameters must be an object"),
        ({"rope_parameters": {"rope_type": ["x"]}}, "rope_type ['x'] is not supported"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta must be a number above 0"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' lacks 'factor'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "'linear': factor must be a number above 0"),
        ({"layer_types": 3}, "layer_types must be a list"),
        ({"max_position_embeddings": 10**13}, "lower model.max_model_len"),
    ],
)
def test_a_number_of_the_config_that_cannot_be_is_refused_by_name(
    copy: Path, change: dict[str, object], words: str
) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    assert words in refusal(copy)


def test_a_config_that_is_no_text_is_refused(copy: Path) -> None:
    (copy / "config.json").write_bytes(b"\xff\xfe{}")
    assert "config.json is not valid JSON" in refusal(copy)


@pytest.mark.parametrize(
    "sizes", [{"num_blocks": 10**13}, {"num_blocks": 0, "kv_cache_bytes": 10**16}, {"block_size": 10**14}]
)
def test_a_cache_that_does_not_fit_into_memory_names_the_settings(copy: Path, sizes: dict[str, int]) -> None:
    assert "lower kv.num_blocks, kv.cache_bytes or scheduler.max_live" in refusal(copy, **sizes)


def test_a_home_directory_that_nobody_has_is_no_traceback() -> None:
    assert "no folder here" in refusal(Path("~nosuchuser/model"))


def test_a_gguf_file_cut_off_anywhere_is_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    write_tiny_gguf(gguf, tmp_path / "whole.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (0, 3, 4, 8, 24, 60, 100, 1000, 3000, len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:length])
        with pytest.raises(SettingsError, match="could not be read as GGUF") as caught:
            resolve_model(str(cut), str(tmp_path / "cache"))
        assert "\n" not in str(caught.value)
        assert not list((tmp_path / "cache").iterdir())


def test_a_start_says_beforehand_that_it_will_convert_weights_and_only_then(tmp_path: Path) -> None:
    settings = load_settings(args={"model": {"path": "/m/some[1].gguf"}, "cache_dir": str(tmp_path)})
    assert "the weights of some[1].gguf are converted first, once" in loading_phase(settings)
    (tmp_path / "some[1]-0123").mkdir()
    (tmp_path / "some[1]-0123" / "config.json").touch()
    assert loading_phase(settings) == "loading the models"
    folder = load_settings(args={"model": {"path": "/m/folder"}, "cache_dir": str(tmp_path)})
    assert loading_phase(folder) == "loading the models"
