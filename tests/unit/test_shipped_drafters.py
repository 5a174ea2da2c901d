"""The trained drafters in the repository: whole, small, and for the demo target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drafter.checkpoint import load_checkpoint

DRAFTERS = Path(__file__).parents[2] / "drafters"
KINDS = {
    "smollm2-135m-dspark": ("dspark", 7),
    "smollm2-135m-dspark-rnn": ("dspark", 7),
    "smollm2-135m-dflash": ("dspark", 7),
    "smollm2-135m-eagle3": ("eagle3", 7),
    "smollm2-135m-mtp": ("mtp", 1),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the demo target what a drafter borrows: its shape and its embeddings, here random."""
    folder = tmp_path_factory.mktemp("target")
    config = json.loads((DRAFTERS / "smollm2-135m-dspark" / "config.json").read_text())
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "layer_types": ["full_attention"] * 30,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config | shape))
    embeddings = torch.randn(config["vocab_size"], config["hidden_size"]).bfloat16()
    save_file({"model.embed_tokens.weight": embeddings}, folder / "model.safetensors")
    return folder


def test_all_that_is_there_is_known_and_small() -> None:
    sizes = {path.parent.name: path.stat().st_size for path in DRAFTERS.glob("*/model.safetensors")}
    assert sizes.keys() == KINDS.keys()
    assert max(sizes.values()) < 40e6 and sum(sizes.values()) < 120e6


@pytest.mark.parametrize("name", KINDS)
def test_it_loads_for_the_demo_target(name: str, target: Path) -> None:
    design, width = KINDS[name]
    checkpoint = load_checkpoint(DRAFTERS / name, target, torch.bfloat16, torch.device("cpu"))
    assert (checkpoint.arch.design, checkpoint.arch.block_size) == (design, width)
    assert checkpoint.draft_vocab_ids is not None and len(checkpoint.draft_vocab_ids) == 6000
    for tensor in checkpoint.tensors.values():
        assert bool(torch.isfinite(tensor).all())
