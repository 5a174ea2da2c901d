"""Penalties, logit bias and logprobs at every verified row, against row-by-row twins in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from scheduler.wire import Extension, SamplingParams
from verifier.acceptance import judge
from verifier.sampling import SamplingTable, draw

VOCAB = 16
PROMPT = [3, 3, 7]
GREEDY = SamplingParams(temperature=0)
CHANGES = [
    {"presence_penalty": 1.7},
    {"frequency_penalty": -1.3},
    {"repetition_penalty": 1.6},
    {"repetition_penalty": 0.7},
    {"logit_bias": ((5, 3.0), (7, -100.0))},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.3, "logit_bias": ((3, 2.5), (0, -1.0))},
]  # fmt: skip


def slow_logits(logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> np.ndarray:
    """One row, token by token, in float64."""
    row = logits.astype(np.float64)
    for token in range(len(row)):
        count = list(output).count(token)
        if count or token in prompt:
            row[token] = (
                row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
            )
        row[token] -= params.frequency_penalty * count
        row[token] -= params.presence_penalty if count else 0
        row[token] += dict(params.logit_bias).get(token, 0)
    return row


def softmax(row: np.ndarray) -> np.ndarray:
    law = np.exp(row - row.max())
    return law / law.sum()


def extension(
    params: SamplingParams, output: Sequence[int], drafts: Sequence[int], name: str = "r", **q: np.ndarray
) -> Extension:
    known = [*PROMPT, *output]
    return Extension(
        request_id=name,
        start=len(known) - 1,
        token_ids=np.array([known[-1], *drafts], dtype=np.int32),
        num_draft=len(drafts),
        samples=True,
        block_ids=np.zeros(1, dtype=np.int32),
        params=params,
        output_index=len(output),
        history_ids=np.array(known, dtype=np.int32) if params.needs_history else None,
        **q,
    )


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("changes", CHANGES, ids=lambda c: "+".join(c))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_row_sees_the_drafts_before_it_as_output(changes: dict, dtype: torch.dtype) -> None:
    params = replace(GREEDY, **changes)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        logits = (torch.randn(8, VOCAB, generator=generator(seed)) * 2).to(dtype)
        output = rng.integers(0, VOCAB, rng.integers(0, 6)).tolist()
        drafts: list[int] = []
        for row in logits.double().numpy()[:7]:
            drafts.append(int(slow_logits(row, PROMPT, [*output, *drafts], params).argmax()))
        wanted = [*drafts, int(slow_logits(logits[7].double().numpy(), PROMPT, [*output, *drafts], params).argmax())]
        before = logits.clone()
        verdict = judge(logits=logits, extensions=[extension(params, output, drafts)])[0]
        assert verdict.token_ids == tuple(wanted) and verdict.num_accepted == 7
        assert torch.equal(logits, before)
        wrong = [*drafts[:3], (drafts[3] + 1) % VOCAB, *drafts[4:]]
        assert judge(logits=logits, extensions=[extension(params, output, wrong)])[0].token_ids == tuple(wanted[:4])


def plain_text(target: np.ndarray, params: SamplingParams, length: int) -> list[int]:
    """Decoding of a Markov target without drafts, one judged row at a time."""
    output: list[int] = []
    while len(output) < length:
        row = torch.from_numpy(target[[([*PROMPT, *output])[-1]]])
        output += judge(logits=row, extensions=[extension(params, output, [])])[0].token_ids
    return output


@pytest.mark.parametrize("changes", CHANGES, ids=lambda c: "+".join(c))
@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(seed=5, temperature=1.2, top_p=0.9)], ids=["greedy", "seeded"]
)
def test_penalised_text_is_the_same_with_right_wrong_and_ordinary_drafts_beside_others(
    params: SamplingParams, changes: dict
) -> None:
    params = replace(params, **changes)
    target = torch.randn(VOCAB, VOCAB, generator=generator(4)).numpy() * 2
    plain = plain_text(target, params, 40)
    drafters = [
        lambda output: plain[len(output) :][:7],
        lambda output: [(plain[len(output)] + 1) % VOCAB] * 7,
        lambda output: target[output[-1] if output else 7].argsort()[::-1][:4].tolist(),
        lambda output: [*plain[len(output) :][: len(output) % 5], 2, 2][:7],
    ]
    for drafter in drafters:
        output: list[int] = []
        while len(output) < 40:
            drafts = drafter(output)
            rows = torch.from_numpy(target[[([*PROMPT, *output])[-1], *drafts]])
            noise = torch.randn(5, VOCAB, generator=generator(len(output)))
            verdicts = judge(
                logits=torch.cat([noise[:2], rows, noise[2:]]),
                extensions=[
                    extension(SamplingParams(), [], [1], "a"),
                    extension(params, output, drafts),
                    extension(replace(GREEDY, presence_penalty=1.0), [4, 4], [4, 5], "b"),
                ],
                generator=generator(1),
            )
            output += verdicts[1].token_ids
        assert output[:40] == plain


@pytest.mark.parametrize(
    ("changes", "aware"), [(CHANGES[0], False), (CHANGES[2], False), (CHANGES[4], True), (CHANGES[5], False)],
    ids=["presence", "repetition", "bias, drafted with it", "all, drafted without"],
)  # fmt: skip
def test_sampled_tokens_follow_the_penalised_law(changes: dict, aware: bool) -> None:
    """The first two tokens after the prompt, over 6,000 requests with fresh noise."""
    count, params = 6_000, SamplingParams(temperature=1.3, **changes)
    target = torch.randn(VOCAB, VOCAB, generator=generator(8)).numpy().astype(np.float64) * 1.5
    table = SamplingTable.build([params], "cpu").take(np.zeros(count, dtype=np.int64))
    noise, made = generator(1), []
    best = np.argsort(-target, axis=1)[:, :6].copy()
    bias = np.array([dict(params.logit_bias).get(token, 0.0) for token in range(VOCAB)]) if aware else np.zeros(VOCAB)
    previous, rounds = torch.full((count,), 7), []
    for k in range(2):
        ids = torch.from_numpy(best[previous.numpy()])
        scores = torch.from_numpy(np.take_along_axis(target[previous.numpy()] + bias, ids.numpy(), axis=1))
        previous, law = draw(scores.float(), ids, table, torch.full((count,), k), noise)
        assert law is not None
        rounds.append((previous.numpy(), ids.numpy(), law.numpy()))
    drafts, q_ids, q_probs = (np.stack(column, axis=1) for column in zip(*rounds, strict=True))
    made = [extension(params, [], drafts[i].tolist(), q_ids=q_ids[i], q_probs=q_probs[i]) for i in range(count)]
    rows = np.concatenate([np.full((count, 1), 7), drafts], axis=1)
    judging = generator(2)
    verdicts = judge(logits=torch.from_numpy(target[rows.ravel()]).float(), extensions=made, generator=judging)
    pairs = [v.token_ids[:2] for v in verdicts]
    short = [i for i, pair in enumerate(pairs) if len(pair) == 1]
    more = judge(
        logits=torch.from_numpy(target[[pairs[i][0] for i in short]]).float(),
        extensions=[extension(params, pairs[i], []) for i in short],
        generator=judging,
    )
    for i, verdict in zip(short, more, strict=True):
        pairs[i] = pairs[i] + verdict.token_ids
    seen = np.bincount([a * VOCAB + b for a, b in pairs], minlength=VOCAB**2)
    first = softmax(slow_logits(target[7], PROMPT, [], params) / params.temperature)
    law = np.stack(
        [first[t] * softmax(slow_logits(target[t], PROMPT, [t], params) / params.temperature) for t in range(VOCAB)]
    ).ravel()
    assert p_value(seen, law * count) > 1e-3
    unpenalised = np.stack([softmax(target[7] / 1.3)[t] * softmax(target[t] / 1.3) for t in range(VOCAB)]).ravel()
    assert p_value(seen, unpenalised * count) < 1e-6


def p_value(seen: np.ndarray, expected: np.ndarray) -> float:
    rare = expected < 10
    seen, expected = np.append(seen[~rare], seen[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    kept = expected > 0
    return float(stats.chisquare(seen[kept], expected[kept] * seen[kept].sum() / expected[kept].sum()).pvalue)


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(seed=1), SamplingParams()], ids=["greedy", "seeded", "sampled"]
)
def test_a_bias_of_100_is_always_obeyed_and_one_of_minus_100_never_drawn(params: SamplingParams) -> None:
    logits = torch.randn(8, VOCAB, generator=generator(2)) * 3
    always = replace(params, logit_bias=((9, 100.0),))
    verdict = judge(logits=logits, extensions=[extension(always, [], [9] * 7)], generator=generator(0))[0]
    assert verdict.token_ids == (9,) * 8
    tops = logits.argmax(-1).tolist()
    never = replace(params, logit_bias=tuple((token, -100.0) for token in set(tops)))
    for draft in tops[:7]:
        verdict = judge(logits=logits[:2], extensions=[extension(never, [], [draft])], generator=generator(draft))[0]
        assert verdict.num_accepted == 0 and verdict.token_ids[0] not in tops


def test_a_batch_in_which_nobody_asks_for_anything_is_judged_on_the_logits_themselves() -> None:
    """No copy and no pass over the vocabulary: the fast path costs what it cost before there were penalties."""
    from verifier.acceptance import _as_asked, _Batch

    logits = torch.randn(6, VOCAB)
    plain = [extension(GREEDY, [], [1, 2]), extension(SamplingParams(top_p=0.5), [], [1, 2])]
    assert _as_asked(logits, _Batch.build(plain), None) is logits
    asked = [plain[0], extension(replace(GREEDY, presence_penalty=0.5), [], [1, 2])]
    assert _as_asked(logits, _Batch.build(asked), None) is not logits


# --- logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_rows_of_exactly_the_emitted_tokens(dtype: torch.dtype) -> None:
    rng, made, rows = np.random.default_rng(3), [], []
    kinds = [
        replace(GREEDY, num_logprobs=3),
        SamplingParams(num_logprobs=0, top_k=2),
        SamplingParams(),
        SamplingParams(seed=3, num_logprobs=20, temperature=0.4),
        replace(GREEDY, num_logprobs=2, presence_penalty=2.0, logit_bias=((3, 50.0),), min_tokens=9, stop_ids=(1,)),
    ]
    for i in range(60):
        logits = (torch.randn(int(rng.integers(1, 9)), VOCAB, generator=generator(i)) * 3).to(dtype)
        drafts = logits.float().argmax(-1)[:-1].tolist()
        if len(drafts) > 2 and i % 2:
            drafts[int(rng.integers(0, len(drafts)))] = 3
        made.append(extension(kinds[i % len(kinds)], [2, 5], drafts, f"r{i}"))
        rows.append(logits)
    verdicts = judge(logits=torch.cat(rows), extensions=made, generator=generator(0))
    accepted = {v.num_accepted for v in verdicts}
    assert {0, 1, 2} <= accepted
    for e, logits, verdict in zip(made, rows, verdicts, strict=True):
        if e.params.num_logprobs is None:
            assert verdict.logprobs is None
            continue
        assert verdict.logprobs is not None and len(verdict.logprobs) == len(verdict.token_ids)
        for row, token, found in zip(logits.double().numpy(), verdict.token_ids, verdict.logprobs, strict=False):
            law = np.log(softmax(row))
            assert found.logprob == pytest.approx(law[token], abs=1e-5)
            best = np.sort(law)[::-1][: e.params.num_logprobs]
            np.testing.assert_allclose([value for _, value in found.top], best, atol=1e-5)
            np.testing.assert_allclose([law[token] for token, _ in found.top], best, atol=1e-5)
