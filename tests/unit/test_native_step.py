"""native.c: packed products against float64, whole layers against torch operators, and bits that no batch changes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from scheduler.compiled import find_compiler, load
from scheduler.wire import Extension, Plan, SamplingParams
from verifier import native, sampling
from verifier.batch import pack
from verifier.config import VerifierConfig
from verifier.layers import Linear
from verifier.runner import TargetRunner

pytestmark = pytest.mark.skipif(
    not native.packable(torch.zeros(32, 32, dtype=torch.bfloat16)), reason="needs AVX512-BF16 and a C compiler"
)

IDS = np.random.default_rng(5).integers(2, 60, 90)
TABLES = {"a": np.array([5, 2, 9, 7, 1, 11]), "b": np.array([21, 30, 22, 23, 24, 29])}


@pytest.mark.parametrize(("inputs", "outputs"), [(2, 1), (64, 32), (96, 33), (576, 70), (34, 160)])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_packed_product_equals_float64_for_any_number_of_rows(inputs: int, outputs: int, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    bias = torch.randn(outputs, generator=generator).bfloat16()
    torch.set_num_threads(num_threads)
    try:
        for n in [0, *range(1, 35), 40, 63, 65, 97]:
            x = torch.randn(n, inputs, generator=generator).bfloat16()
            residual = torch.randn(n, outputs, generator=generator).bfloat16()
            exact = x.double() @ weight.double().T
            close = {"rtol": 2**-8, "atol": 1e-5 * inputs}
            torch.testing.assert_close(Linear(weight)(x).double(), exact, **close)
            got = Linear(weight, bias).add_to(residual, x).double()
            torch.testing.assert_close(got, exact + bias.double() + residual.double(), **close)
    finally:
        torch.set_num_threads(1)


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs AMX, for which the others are built anyway")
def test_without_tiles_the_same_source_multiplies_by_vectors() -> None:
    compiler, packed = find_compiler(), native.PackedProduct(torch.randn(70, 96).bfloat16(), None)
    assert compiler is not None
    flags = ["-fopenmp", "-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8"]
    by_vectors = load(Path(native.__file__).with_name("native.c"), compiler, {"multiply": "ppipp"}, flags=flags)
    x, out = torch.randn(50, 96).bfloat16(), torch.zeros(50, 70).bfloat16()
    by_vectors.dspark_multiply(ctypes.addressof(packed.arguments), x.data_ptr(), 50, None, out.data_ptr())
    torch.testing.assert_close(out, packed(x), rtol=2**-7, atol=1e-3)


def test_a_packed_product_takes_any_layout_and_refuses_what_it_would_misread() -> None:
    weight = torch.randn(40, 64).bfloat16()
    linear, x = Linear(weight), torch.randn(3, 5, 128).bfloat16()
    every_other = x[..., ::2]
    torch.testing.assert_close(linear(every_other), linear(every_other.contiguous()), rtol=0, atol=0)
    assert linear(every_other).shape == (3, 5, 40)
    with pytest.raises(TypeError, match=r"bfloat16 on the CPU, not torch\.float32"):
        linear(torch.zeros(1, 64))
    with pytest.raises(ValueError, match="32 columns where the product has 64"):
        linear(torch.zeros(1, 32, dtype=torch.bfloat16))


@pytest.mark.parametrize("width", [1, 15, 16, 100, 4096 + 3])
def test_the_peak_is_the_first_largest_and_a_row_without_a_law_is_not_finite(width: int) -> None:
    rows = torch.randn(9, width, generator=torch.Generator().manual_seed(width)).bfloat16()
    rows[1] = rows[1].round()  # many ties
    rows[2] = -torch.inf
    rows[3, width // 2] = torch.inf
    rows[4, width - 1] = torch.nan
    rows[5] = -5.0
    tops, columns = sampling.peak(rows)
    assert torch.equal(torch.isfinite(tops), torch.tensor([True, True, False, False, False, True, True, True, True]))
    for i in (0, 1, 5, 6, 7, 8):
        values = rows[i].tolist()
        assert (tops[i].item(), columns[i].item()) == (max(values), values.index(max(values)))


def step(*parts: tuple[str, int, int, bool]) -> Plan:
    """Of each part the tokens start..stop-1 of request a or b; the last flag: every row's logits, as for drafts."""
    return Plan(
        step=0,
        extensions=tuple(
            Extension(
                request_id=name,
                start=start,
                token_ids=IDS[start:stop].astype(np.int32),
                num_draft=stop - start - 1 if sampled else 0,
                samples=sampled,
                block_ids=TABLES[name][: -(-stop // 16)].astype(np.int32),
                params=SamplingParams(temperature=0.0),
                output_index=0,
            )
            for name, start, stop, sampled in parts
        ),
    )


def last_rows(
    folder: Path, steps: list[Plan], num_threads: int, dtype: str = "bfloat16"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [S, V] and features [N, m d] of the rows of request a in the last step."""
    runner = TargetRunner(
        VerifierConfig(str(folder), dtype=dtype, device="cpu", capture_layers=(-1, 0, 1), num_threads=num_threads)
    )
    for plan in steps:
        batch = pack(plan, runner.kv.block_size, runner.device)
        with torch.inference_mode():
            hidden, features = runner._forward(batch, capture=True)
            logits = runner._logits(batch, hidden)
        assert features is not None
    span = batch.spans[[e.request_id for e in steps[-1].extensions].index("a")]
    own = (batch.sampled_rows >= span.first_row) & (batch.sampled_rows < span.first_row + span.num_rows)
    return logits[own], features[span.first_row : span.first_row + span.num_rows]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_row_has_the_same_bits_alone_among_others_and_behind_drafts(
    family: str, tmp_path: Path, write_target: Callable[..., Path]
) -> None:
    """What a bfloat16 answer is must not depend on the load: no planner, batch or prompt chunk may change a logit."""
    folder = write_target(tmp_path, family, head_dim=32)
    plain = [step(("a", i, i + 1, True)) for i in range(60)]
    wanted_logits, wanted_features = last_rows(folder, plain, 1)
    for num_threads, steps in (
        (1, [step(("a", 0, 59, False)), step(("a", 59, 60, True))]),
        (2, [step(("b", 0, 31, False), ("a", 0, 40, False)), step(("b", 31, 80, False), ("a", 40, 60, True))]),
        (2, [step(("a", 0, 13, False), ("b", 0, 50, True)), step(("a", 13, 52, False)), step(("a", 52, 60, True))]),
    ):
        logits, features = last_rows(folder, steps, num_threads)
        assert torch.equal(logits[-1], wanted_logits[-1])
        assert torch.equal(features[-1], wanted_features[-1])
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_all_layers_in_one_call_are_as_exact_as_torch_operators_and_count_as_progress(
    family: str, tmp_path: Path, write_target: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_target(tmp_path, family, head_dim=32, tie_word_embeddings=False, initializer_range=0.1)
    steps = [step(("a", 0, 30, False), ("b", 0, 3, True)), step(("b", 3, 9, True), ("a", 30, 38, True))]
    exact = last_rows(folder, steps, 1, "float32")
    by_native = last_rows(folder, steps, 2)
    with monkeypatch.context() as without:
        without.setattr(native, "load", lambda: None)
        by_torch = last_rows(folder, steps, 1)
    for true, mine, torchs in zip(exact, by_native, by_torch, strict=True):
        errors = [(true - found.float()).abs().mean().item() for found in (mine, torchs)]
        assert 0 < errors[0] < 1.15 * errors[1] < 0.1 * true.abs().mean().item(), errors
    torch.set_num_threads(1)
    runner = TargetRunner(VerifierConfig(str(folder), dtype="bfloat16", device="cpu", num_threads=1))
    runner.verify(steps[0])
    assert runner.progress == runner.arch.num_layers
