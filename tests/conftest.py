"""Shared fixtures: small real targets of every family, written to disk as Hugging Face folders, and thread settings.

Thread counts and OpenMP's wait policy are set before torch loads its OpenMP runtime: idle spinning threads on two busy cores
make steps ten times slower.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from scheduler import kernels
from tests.virtual_time import virtual_time

# A shell's background jobs are deaf to SIGINT, and so would be every program that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, and none too slow for a machine that stands still for a while. For other examples:
# pytest --hypothesis-profile=other
STEADY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("other", STEADY)
settings.register_profile("same", STEADY, derandomize=True)
settings.load_profile("same")

DATA = Path(__file__).parent / "data"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws depends on no test before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="module", params=["planning.c", "numpy"])
def arithmetic(request: pytest.FixtureRequest) -> Iterator[str]:
    """Planning by each of its two twins."""
    if request.param == "planning.c" and kernels.load() is None:
        pytest.skip("no C compiler here")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(kernels, "load", lambda: None)
        yield request.param


@pytest.fixture
async def in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's event loop never waits for a timer: tests/virtual_time.py."""
    virtual_time(monkeypatch)


@pytest.fixture(scope="session")
def golden() -> Path:
    """Models and values of the reference implementation (DeepSpec), float32."""
    return DATA / "golden"


def save_target(folder: Path, family: str, *, vocab_size: int = 64, seed: int = 0, **overrides: object) -> Path:
    """A random 3-layer target of `family` saved by transformers, as a user's folder would be."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=None,
        **{"max_position_embeddings": 256, "initializer_range": 0.4, **overrides},
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # norms and biases start at one and zero: give them values, so that leaving one out is seen
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def write_target() -> Callable[..., Path]:
    """(folder, family, **config) -> folder with a small random target."""
    return save_target


@pytest.fixture(scope="session", params=["llama", "qwen2", "qwen3"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def family_target(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp(family), family)


@pytest.fixture(scope="session")
def llama_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("llama-target"), "llama", seed=3)
