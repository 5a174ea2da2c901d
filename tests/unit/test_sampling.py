"""The transform against a slow twin, the keyed noise against integer arithmetic, and the draws against their laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from scheduler.errors import BadParams
from scheduler.wire import SamplingParams
from verifier import noise, sampling
from verifier.sampling import SamplingTable, draw, peak, pick, seeded_pick, transform

WIDTHS = [1, 5, 64, 600, 1031, 2048]  # narrow, wide, and wide with a prime width
REAL_VOCABULARY = 49152


def slow_law(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """One row, float64, by sorting everything."""
    order = np.argsort(-logits, kind="stable")
    if params.greedy:
        return np.eye(len(logits))[order[0]]
    scaled = (logits - logits.max()) / params.temperature
    probs = np.exp(scaled) / np.exp(scaled).sum()
    kept = order[: params.top_k or None]
    if params.top_p < 1:
        reached = np.cumsum(probs[kept])
        kept = kept[: int(np.searchsorted(reached, params.top_p * reached[-1])) + 1]
    kept = kept[probs[kept] >= params.min_p * probs.max()]
    law = np.zeros_like(probs)
    law[kept] = probs[kept] / probs[kept].sum()
    return law


def slow_laws(logits: torch.Tensor, params: list[SamplingParams]) -> np.ndarray:
    return np.stack([slow_law(row, p) for row, p in zip(logits.double().numpy(), params, strict=True)])


def random_params(rng: np.random.Generator, count: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=float(rng.choice([0.0, 0.3, 0.7, 1.0, 1.7])),
            top_k=int(rng.choice([0, 0, 1, 2, 7, 60, 900, 10**6])),
            top_p=float(rng.choice([1.0, 1.0, 0.05, 0.6, 0.95, 0.999])),
            min_p=float(rng.choice([0.0, 0.0, 0.02, 0.3, 1.0])),
        )
        for _ in range(count)
    ]


def brief(params: SamplingParams) -> str:
    return f"T{params.temperature} k{params.top_k} p{params.top_p} min{params.min_p}"


def table(params: SamplingParams | list[SamplingParams], rows: int = 1) -> SamplingTable:
    return SamplingTable.build(params if isinstance(params, list) else [params] * rows, "cpu")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fit(counts: np.ndarray, law: np.ndarray) -> float:
    """p-value of a chi-square test; cells of small expectation are pooled, impossible ones must be empty."""
    law = law.astype(np.float64)
    expected = law / law.sum() * counts.sum()
    assert counts[expected == 0].sum() == 0
    rare = expected < 10
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    return float(stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue)


# --- the transform


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("spread", [0.2, 1.0, 6.0])
def test_transform_equals_the_slow_twin_for_any_parameters(width: int, spread: float) -> None:
    rng = np.random.default_rng(width)
    params = random_params(rng, 120)
    logits = torch.from_numpy(rng.normal(0, spread, (120, width)))
    logits[::3] = (logits[::3] * 4).round() / 4  # ties
    expected = slow_laws(logits, params)
    got = transform(logits, table(params)).numpy()
    np.testing.assert_array_equal(got > 0, expected > 0)
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-15)
    for row in (0, 1, 2, 3):
        alone = transform(logits[row : row + 1], table([params[row]])).numpy()
        np.testing.assert_allclose(alone[0], got[row], rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [40, 2048])
def test_transform_of_any_dtype_is_a_float32_law(dtype: torch.dtype, width: int) -> None:
    params = [SamplingParams(top_p=0.9), SamplingParams(temperature=0.3, top_k=5), SamplingParams(min_p=0.1)]
    logits = (torch.randn(3, width, generator=generator()) * 3).to(dtype)
    law = transform(logits, table(params))
    assert law.dtype == torch.float32
    np.testing.assert_allclose(law.numpy(), slow_laws(logits, params), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.95),
        SamplingParams(temperature=0.7, top_p=0.9, top_k=50),
        SamplingParams(top_k=1000, min_p=0.001),
        SamplingParams(temperature=1.7, top_p=0.999, min_p=1e-4),
    ],
    ids=brief,
)
def test_transform_of_a_real_vocabulary_is_exact_on_peaked_flat_and_tied_rows(params: SamplingParams) -> None:
    logits = torch.randn(4, REAL_VOCABULARY, generator=generator(), dtype=torch.float64)
    logits[0] *= 5
    logits[1, 7] = 30
    logits[2] = (logits[2] * 8).round() / 8
    expected = slow_laws(logits, [params] * 4)
    got = transform(logits, table(params, 4)).numpy()
    np.testing.assert_array_equal(got > 0, expected > 0)
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-15)


def test_top_k_of_one_is_greedy_even_among_ties() -> None:
    logits = torch.randn(50, 2048, generator=generator()).bfloat16().clamp_max(2)
    assert ((logits == logits.amax(-1, keepdim=True)).sum(-1) > 1).all()
    greedy = transform(logits, table(SamplingParams(temperature=0), 50))
    torch.testing.assert_close(transform(logits, table(SamplingParams(top_k=1), 50)), greedy)
    torch.testing.assert_close(transform(logits, table(SamplingParams(top_p=1e-9), 50)), greedy)


def test_greedy_ignores_every_other_parameter() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    params = SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.9, seed=3)
    assert transform(logits, table(params)).tolist() == [[0, 1, 0, 0]]


def test_greedy_tie_goes_to_the_lowest_token_id_not_the_first_candidate() -> None:
    logits = torch.tensor([[5.0, 5.0, 1.0]])
    ids = torch.tensor([[9, 4, 2]])
    greedy, sampled = SamplingParams(temperature=0), SamplingParams()
    assert draw(logits, ids, table(greedy), torch.tensor([0]), None)[0].tolist() == [4]
    mixed = draw(logits.expand(2, 3), ids.expand(2, 3), table([greedy, sampled]), torch.tensor([0, 0]), generator())
    assert mixed[0][0] == 4
    assert mixed[1] is not None and mixed[1][0].tolist() == [0, 1, 0]


def test_small_temperature_keeps_the_law_precise() -> None:
    logits = torch.tensor([[30.0, 30.0 - 2.0**-14, 29.0]])
    params = SamplingParams(temperature=1e-4)
    np.testing.assert_allclose(transform(logits, table(params)).numpy(), slow_laws(logits, [params]), rtol=1e-6)


def test_transform_leaves_the_logits_alone() -> None:
    logits = torch.randn(4, 2048, generator=generator())
    before = logits.clone()
    mix = [SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(temperature=0), SamplingParams(seed=1)]
    transform(logits, table(mix))
    seeded_pick(logits, table(SamplingParams(seed=1), 4), torch.arange(4))
    assert torch.equal(logits, before)


def test_transform_and_picks_work_inside_inference_mode() -> None:
    mix = [SamplingParams(top_p=0.5, min_p=0.01), SamplingParams(top_k=3), SamplingParams(seed=1), SamplingParams()]
    logits = torch.randn(4, 2048, generator=generator())
    outside = transform(logits, table(mix)), draw(logits, None, table(mix), torch.arange(4), generator())[0]
    with torch.inference_mode():
        inside = transform(logits * 1, table(mix)), draw(logits * 1, None, table(mix), torch.arange(4), generator())[0]
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


@pytest.mark.parametrize("width", [7, 600, 2048])
def test_peak_is_the_first_of_equal_maxima_and_shows_bad_rows(width: int) -> None:
    logits = torch.randint(0, 4, (60, width), generator=generator()).float()
    assert torch.equal(peak(logits)[1], torch.from_numpy(logits.numpy().argmax(-1)))
    logits[0, width - 1], logits[1, 0] = torch.nan, torch.inf
    logits[2] = -torch.inf
    assert torch.isfinite(peak(logits)[0]).tolist() == [False] * 3 + [True] * 57


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_p", 0.0), ("top_p", 1.5), ("top_k", -1), ("min_p", -0.1), ("min_p", 1.5), ("temperature", float("nan"))],
)
def test_nonsense_parameters_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(BadParams, match=f"{field} must be .*; got") as refusal:
        table(SamplingParams(**{field: value}))
    assert refusal.value.param == field


# --- keyed noise


def test_keyed_noise_equals_its_definition_in_plain_integers() -> None:
    word = (1 << 64) - 1

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & word
        x = (x ^ x >> 27) * 0x94D049BB133111EB & word
        return x ^ x >> 31

    def uniform(seed: int, position: int, token: int) -> float:
        key = mix(mix(seed & word) + (position + 1) * 0x9E3779B97F4A7C15 & word)
        return ((mix(key + (token + 1) * 0x9E3779B97F4A7C15 & word) >> 12) + 0.5) * 2.0**-52

    for seed in (0, 1, -1, 42, 2**63, -(2**70) + 5):
        for position, token in ((0, 0), (1, 0), (0, 1), (5, 49151), (100_000, -1), (7, -250)):
            keys = noise.row_keys(torch.tensor([noise.seed_key(seed)]), torch.tensor([position]))
            assert noise.keyed_uniform(keys, torch.tensor([token])).item() == uniform(seed, position, token)
    assert uniform(42, 3, 17) == 0.11508622767748033  # the texts of a seed must survive an upgrade


def keyed_grid(seeds: range, positions: range, tokens: range) -> torch.Tensor:
    seed_keys = torch.tensor([noise.seed_key(s) for s in seeds]).repeat_interleave(len(positions))
    keys = noise.row_keys(seed_keys, torch.tensor(list(positions)).repeat(len(seeds)))
    uniforms = noise.keyed_uniform(keys[:, None], torch.tensor(list(tokens)))
    return uniforms.reshape(len(seeds), len(positions), len(tokens))


def test_keyed_noise_is_uniform_and_open_at_both_ends() -> None:
    uniforms = keyed_grid(range(20), range(20), range(2000)).flatten()
    assert uniforms.min() > 0 and uniforms.max() < 1
    assert stats.kstest(uniforms.numpy(), "uniform").pvalue > 1e-3
    assert fit(np.bincount((uniforms * 4096).long().numpy(), minlength=4096), np.ones(4096)) > 1e-3
    low_bits = (uniforms * 2.0**52 % 64).long()  # the hash must be good in its lowest bits too
    assert fit(np.bincount(low_bits.numpy(), minlength=64), np.ones(64)) > 1e-3


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seeds", "positions", "tokens"])
@pytest.mark.parametrize("step", [1, 2, 16])
def test_neighbouring_keys_are_independent(axis: int, step: int) -> None:
    cells = (keyed_grid(range(60), range(60), range(60)) * 16).long()
    size = cells.shape[axis] - step
    pairs = cells.narrow(axis, 0, size) * 16 + cells.narrow(axis, step, size)
    assert fit(np.bincount(pairs.flatten().numpy(), minlength=256), np.ones(256)) > 1e-3


def test_keyed_noise_does_not_depend_on_shape_or_threads() -> None:
    whole = keyed_grid(range(3), range(5), range(4001))
    keys = noise.row_keys(torch.tensor([noise.seed_key(2)]), torch.tensor([4]))
    assert torch.equal(noise.keyed_uniform(keys, torch.arange(3990, 4001)), whole[2, 4, 3990:])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        assert torch.equal(keyed_grid(range(3), range(5), range(4001)), whole)
    finally:
        torch.set_num_threads(threads)


def test_gumbel_noise_is_finite_and_has_the_gumbel_law() -> None:
    values = noise.keyed_gumbel(torch.arange(40)[:, None] * 2**40, torch.arange(5000)).flatten()
    assert torch.isfinite(values).all()
    assert stats.kstest(values.numpy(), "gumbel_r").pvalue > 1e-3


def test_drafter_and_verifier_streams_of_one_seed_differ() -> None:
    first = [
        torch.rand(4, generator=noise.fresh_generator(5, name, "cpu")).tolist() for name in ("drafter", "verifier")
    ]
    again = torch.rand(4, generator=noise.fresh_generator(5, "drafter", "cpu")).tolist()
    assert first[0] != first[1] and first[0] == again
    unseeded = [torch.rand(4, generator=noise.fresh_generator(None, "drafter", "cpu")).tolist() for _ in range(2)]
    assert unseeded[0] != unseeded[1]


# --- draws


@pytest.mark.parametrize("width", [16, 2048])
def test_pick_follows_its_weights_and_never_takes_a_zero(width: int) -> None:
    weights = torch.rand(width, generator=generator()) ** 4
    weights[torch.rand(width, generator=generator(1)) < 0.5] = 0
    weights[-1] = 0
    picks = torch.cat([pick(weights.expand(4000, width), generator(s)) for s in range(20)])
    assert fit(np.bincount(picks.numpy(), minlength=width), weights.numpy()) > 1e-3


SEEDED = [
    SamplingParams(temperature=0.3, seed=0),
    SamplingParams(temperature=1.0, seed=0),
    SamplingParams(temperature=1.7, seed=0),
    SamplingParams(top_k=2, seed=0),
    SamplingParams(top_p=0.6, seed=0),
    SamplingParams(min_p=0.2, seed=0),
]


def over_positions(logits: torch.Tensor, params: SamplingParams, count: int) -> torch.Tensor:
    """The same row picked at `count` output positions."""
    rows = logits.expand(count, len(logits))
    return seeded_pick(rows, table(params).take(np.zeros(count, dtype=np.int64)), torch.arange(count))


@pytest.mark.parametrize("params", SEEDED, ids=brief)
def test_seeded_picks_follow_the_exact_law_over_positions_and_over_seeds(params: SamplingParams) -> None:
    logits = torch.randn(12, generator=generator(3)) * 1.5
    law = slow_law(logits.double().numpy(), params)
    picks = over_positions(logits, params, 100_000)
    assert fit(np.bincount(picks.numpy(), minlength=12), law) > 1e-3
    seeds = [
        SamplingParams(params.temperature, params.top_k, params.top_p, params.min_p, seed=s) for s in range(20_000)
    ]
    picks = seeded_pick(logits.expand(len(seeds), 12), table(seeds), torch.zeros(len(seeds), dtype=torch.int64))
    assert fit(np.bincount(picks.numpy(), minlength=12), law) > 1e-3


@pytest.mark.parametrize("head_floor", [2.0**-13, 0.002, 0.5], ids=["all head", "half tail", "all tail"])
def test_the_race_of_head_and_tail_is_exact(head_floor: float) -> None:
    law = torch.randn(1024, generator=generator(4)).mul(1.5).softmax(-1).sort(descending=True).values
    assert 0 < (law >= 0.002).sum() < 200
    rows = 3000
    picks = []
    for chunk in range(8):
        keys = noise.row_keys(torch.full((rows,), noise.seed_key(9)), torch.arange(rows) + rows * chunk)
        picks.append(sampling._race(law.repeat(rows, 1), keys, None, head_floor))
    assert fit(np.bincount(torch.cat(picks).numpy(), minlength=1024), law.numpy()) > 1e-3


def test_a_seeded_row_is_the_same_in_any_batch_and_with_any_thread_count() -> None:
    logits = torch.randn(40, 2048, generator=generator(5)) * 2
    mix = [SEEDED[i % len(SEEDED)] for i in range(40)]
    params = [SamplingParams(p.temperature, p.top_k, p.top_p, p.min_p, seed=i) for i, p in enumerate(mix)]
    positions = torch.arange(40) * 3
    together = seeded_pick(logits, table(params), positions)
    for i in range(0, 40, 7):
        assert seeded_pick(logits[i : i + 1], table([params[i]]), positions[i : i + 1]).item() == together[i]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        assert torch.equal(seeded_pick(logits, table(params), positions), together)
    finally:
        torch.set_num_threads(threads)


def test_rounding_of_the_logits_rarely_changes_a_seeded_pick() -> None:
    logits = torch.randn(2000, 1024, generator=generator(6)) * 2
    params, positions = table(SamplingParams(seed=1), 2000), torch.arange(2000)
    shaken = logits + 1e-4 * torch.randn(logits.shape, generator=generator(7))
    assert (seeded_pick(logits, params, positions) != seeded_pick(shaken, params, positions)).float().mean() < 2e-3


def test_an_unseeded_draw_follows_exactly_the_law_it_reports() -> None:
    params = [SamplingParams(temperature=1.3, top_p=0.8), SamplingParams()]
    ids = torch.tensor([[30, 10, 20, 5, 7], [1, 2, 3, 4, 5]])
    logits = torch.randn(2, 5, generator=generator(8)).bfloat16()
    tables = table(params).take(np.arange(60_000) % 2)
    drawn, law = draw(logits.repeat(30_000, 1), ids.repeat(30_000, 1), tables, torch.arange(60_000), generator())
    assert law is not None and law.dtype == torch.float32
    for row in (0, 1):
        counts = np.bincount(drawn[row::2].numpy(), minlength=31)[ids[row].numpy()]
        assert counts.sum() == 30_000
        assert fit(counts, law[row].numpy()) > 1e-3


def test_draw_reports_a_law_only_when_a_row_needs_it() -> None:
    greedy, seeded, fresh = SamplingParams(temperature=0), SamplingParams(seed=1), SamplingParams()
    logits = torch.randn(2, 2048, generator=generator(9))
    positions = torch.tensor([3, 4])
    for pair, needed in (
        ([greedy, greedy], False),
        ([seeded, seeded], False),
        ([greedy, seeded], False),
        ([greedy, fresh], True),
        ([seeded, fresh], True),
    ):
        ids, law = draw(logits, None, table(pair), positions, generator())
        assert (law is not None) == needed
        if pair[0] is greedy:
            assert ids[0] == logits[0].argmax()
        if pair[0] is seeded:
            assert ids[0] == seeded_pick(logits[:1], table(seeded), positions[:1])[0]


def test_a_seeded_draft_from_the_targets_own_law_is_the_targets_token() -> None:
    logits = torch.randn(3000, 1024, generator=generator(10)) * 4
    params, positions = table(SamplingParams(seed=5), 3000), torch.arange(3000)
    target = seeded_pick(logits, params, positions)
    assert torch.equal(draw(logits, None, params, positions, None)[0], target)
    candidates = logits.topk(64, dim=-1)
    shuffled = torch.randperm(64, generator=generator(11))
    drafted = draw(candidates.values[:, shuffled], candidates.indices[:, shuffled], params, positions, None)[0]
    outside = 1 - logits.softmax(-1).topk(64, dim=-1).values.sum(-1).mean()
    assert outside < 0.05
    assert (drafted != target).float().mean() < 1.5 * outside


def test_seeded_draft_and_target_agree_as_often_as_gumbel_coupling_promises() -> None:
    target_logits = torch.randn(4000, 1024, generator=generator(12)) * 3
    draft_logits = target_logits + 0.7 * torch.randn(target_logits.shape, generator=generator(13))
    params, positions = table(SamplingParams(seed=6), 4000), torch.arange(4000)
    best = draft_logits.topk(64, dim=-1)
    drafted = draw(best.values, best.indices, params, positions, None)[0]
    agree = (drafted == seeded_pick(target_logits, params, positions)).float().mean()
    p = target_logits.softmax(-1)
    q = torch.zeros_like(p).scatter_(-1, best.indices, best.values.softmax(-1))
    distance = (p - q).clamp_min(0).sum(-1)
    assert agree > ((1 - distance) / (1 + distance)).mean() - 0.02


def test_a_row_without_a_law_still_yields_ids_inside_the_vocabulary() -> None:
    """Whoever holds the logits reports the fault; until then nothing may index outside."""
    for width in (40, 2048):
        logits = torch.full((6, width), torch.nan)
        mix = [*SEEDED[:1], *SEEDED[3:], SamplingParams(), SamplingParams(temperature=0)]
        ids, _ = draw(logits, None, table(mix), torch.arange(6), generator())
        assert ((ids >= 0) & (ids < width)).all()
