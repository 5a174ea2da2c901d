"""Grammars at every verified row: masks against an enumeration of the language, the law by chi-square, states that survive
rejection, preemption and loss, and refusals."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from scheduler.errors import BadParams
from scheduler.wire import Extension, Grammar, Plan, SamplingParams, Verdict
from tests.unit.grammar_vocabulary import END, END_ID, SIXTEEN, save_vocabulary, text_of
from verifier.acceptance import judge
from verifier.automata import Automata
from verifier.batch import pack
from verifier.grammar import MAX_TEXT_BYTES, GrammarCompiler
from verifier.masks import has
from verifier.sampling import SamplingTable, draw

VOCAB = 16
START = 3
ENUMERATED = Grammar("regex", "(ab|c|abd){1,3}d?")
ENDLESS = Grammar("regex", "((ab|c)d?)*")
LANGUAGE = {
    "".join(parts) + tail
    for count in (1, 2, 3)
    for parts in itertools.product(("ab", "c", "abd"), repeat=count)
    for tail in ("", "d")
}
GREEDY = SamplingParams(temperature=0, stop_ids=(END_ID,), grammar=ENUMERATED)


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return GrammarCompiler(save_vocabulary(tmp_path_factory.mktemp("sixteen")), VOCAB)


@pytest.fixture
def automata(compiler: GrammarCompiler) -> Automata:
    return Automata(compiler, max_live=8)


def extension(
    params: SamplingParams, output: Sequence[int], drafts: Sequence[int] = (), name: str = "r", **q: np.ndarray
) -> Extension:
    known = [START, *output]
    return Extension(
        request_id=name,
        start=len(known) - 1,
        token_ids=np.array([known[-1], *drafts], dtype=np.int32),
        num_draft=len(drafts),
        samples=True,
        block_ids=np.arange(1, 9, dtype=np.int32),
        params=params,
        output_index=len(output),
        history_ids=np.array(known, dtype=np.int32),
        **q,
    )


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def verify(
    automata: Automata,
    target: np.ndarray,
    extensions: Sequence[Extension],
    noise: torch.Generator | None = None,
    *,
    forget_forbidden: bool = False,
) -> list[Verdict]:
    """What the runner does, with a target whose logits after a token are target[token]. forget_forbidden is a mistake that the
    tests must notice: a draft that the grammar forbids is cut away instead of rejected."""
    constraints, failures = automata.constrain(extensions)
    assert not failures
    if forget_forbidden:
        constraints = {name: replace(c, num_judged=c.num_run) for name, c in constraints.items()}
    batch = pack(Plan(0, tuple(extensions)), 16, torch.device("cpu"), constraints)
    logits = torch.from_numpy(target).float()[batch.ids[batch.sampled_rows]]
    return judge(logits=logits, extensions=batch.sampling, generator=noise, masks=batch.masks)


def allowed_by_enumeration(prefix: str) -> set[int]:
    """Tokens after which the text can still become one of the language; the end where it is one."""
    found = {t for t, text in enumerate(SIXTEEN) if text != END and any(s.startswith(prefix + text) for s in LANGUAGE)}
    return found | ({END_ID} if prefix in LANGUAGE else set())


def all_outputs() -> list[list[int]]:
    """Every tokenisation of every prefix of the language."""
    outputs, frontier = [], [[]]
    while frontier:
        output = frontier.pop()
        outputs.append(output)
        frontier += [[*output, t] for t in allowed_by_enumeration(text_of(output)) - {END_ID}]
    return outputs


def test_masks_are_those_of_the_enumerated_language_whatever_came_before(automata: Automata) -> None:
    """One automaton is thrown from output to output; every mask along the drafts must be right all the same."""
    outputs = all_outputs()
    assert len(outputs) > 200
    np.random.default_rng(0).shuffle(outputs)  # type: ignore[arg-type]
    for output in outputs:
        cut = len(output) // 2
        constraint = automata.constrain([extension(GREEDY, output[:cut], output[cut:])])[0]["r"]
        assert constraint.num_judged == constraint.num_run == len(output) - cut
        for k, words in enumerate(constraint.words):
            wanted = allowed_by_enumeration(text_of(output[: cut + k]))
            assert {t for t in range(VOCAB) if has(words, t)} == wanted


def test_rows_after_a_forbidden_draft_are_not_computed_and_that_draft_is_judged_without_its_own_row(
    automata: Automata,
) -> None:
    a, b, c, newline = 0, 1, 2, 14
    made = extension(GREEDY, [], [a, b, newline, c, c])
    constraints, _ = automata.constrain([made])
    batch = pack(Plan(0, (made,)), 16, torch.device("cpu"), constraints)
    assert batch.ids.tolist() == [START, a, b]
    assert batch.sampled_rows.tolist() == [0, 1, 2, 2]
    assert batch.sampling[0].num_draft == 3


def test_a_draft_of_the_end_is_judged_with_its_row_and_nothing_after_it(automata: Automata) -> None:
    made = extension(GREEDY, [2], [END_ID, 2, 2])
    constraint = automata.constrain([made])[0]["r"]
    assert (constraint.num_judged, constraint.num_run, len(constraint.words)) == (1, 1, 1)


def decode(
    automata: Automata, target: np.ndarray, params: SamplingParams, drafter: Callable[[list[int]], list[int]], name: str
) -> list[int]:
    output: list[int] = []
    while len(output) < 40 and END_ID not in output:
        others = [
            extension(SamplingParams(), [1, 1], [4, 5], f"{name} free"),
            extension(replace(GREEDY, grammar=ENDLESS), [2, 2], [3, 3, 2], f"{name} other"),
        ]
        made = extension(params, output, drafter(output), name)
        output += verify(automata, target, [others[0], made, others[1]], generator(0))[1].token_ids
    return output[: output.index(END_ID) + 1] if END_ID in output else output[:40]


@pytest.mark.parametrize("grammar", [ENUMERATED, ENDLESS, Grammar("json_schema", '{"enum": ["ab", "ad0", [0, 1]]}')])
@pytest.mark.parametrize("seed", [None, 7], ids=["greedy", "seeded"])
def test_guided_text_is_the_same_whatever_is_drafted(automata: Automata, grammar: Grammar, seed: int | None) -> None:
    target = torch.randn(VOCAB, VOCAB, generator=generator(21)).numpy() * 2
    params = replace(
        GREEDY, temperature=0.0 if seed is None else 1.0, seed=seed, grammar=grammar, frequency_penalty=0.4
    )
    plain = decode(automata, target, params, lambda output: [], "plain")
    if grammar is ENUMERATED:
        assert text_of(plain) in LANGUAGE and plain[-1] == END_ID
    drafters = {
        "right": lambda output: plain[len(output) :][:7],
        "newlines": lambda output: [14] * 7,
        "ordinary": lambda output: target[output[-1] if output else START].argsort()[::-1][:5].tolist(),
        "late": lambda output: [*plain[len(output) :][:2], 14, 14],
        "end": lambda output: [END_ID] * 3,
    }
    for name, drafter in drafters.items():
        assert decode(automata, target, params, drafter, name) == plain


@pytest.mark.parametrize(
    ("knows", "forget_forbidden"), [(True, False), (False, False), (True, True)],
    ids=["drafts mostly allowed", "drafts all over the vocabulary", "negative control"],
)  # fmt: skip
def test_sampled_guided_tokens_follow_the_masked_law(
    compiler: GrammarCompiler, knows: bool, forget_forbidden: bool
) -> None:
    """A draft that the grammar forbids is a rejection, with the residual of the masked law; as a bonus it would bend it."""
    count, params = 6_000, SamplingParams(temperature=1.2, stop_ids=(END_ID,), grammar=ENUMERATED)
    target = torch.randn(VOCAB, VOCAB, generator=generator(5)).numpy().astype(np.float64)
    table = SamplingTable.build([params], "cpu").take(np.zeros(count, dtype=np.int64))
    ids = torch.arange(VOCAB if not knows else 4).expand(count, -1)
    noise, previous, rounds = generator(1), torch.full((count,), START), []
    for k in range(2):
        tilt = 0.7 if knows else -0.7
        scores = torch.from_numpy(target[previous.numpy()] * tilt).float()[:, : ids.shape[1]].contiguous()
        previous, law = draw(scores, ids, table, torch.full((count,), k), noise)
        assert law is not None
        rounds.append((previous.numpy(), ids.numpy(), law.numpy()))
    drafts, q_ids, q_probs = (np.stack(column, axis=1) for column in zip(*rounds, strict=True))
    automata, judging = Automata(compiler, max_live=8), generator(2)
    outputs: list[tuple[int, ...]] = []
    for first in range(0, count, 100):
        names = range(first, first + 100)
        made = [extension(params, [], drafts[i].tolist(), f"r{i}", q_ids=q_ids[i], q_probs=q_probs[i]) for i in names]
        begun = [v.token_ids[:2] for v in verify(automata, target, made, judging, forget_forbidden=forget_forbidden)]
        short = {i: output for i, output in zip(names, begun, strict=True) if len(output) == 1}
        more = verify(automata, target, [extension(params, o, [], f"r{i}") for i, o in short.items()], judging)
        outputs += [output for output in begun if len(output) == 2]
        outputs += [output + v.token_ids for output, v in zip(short.values(), more, strict=True)]
    law = np.zeros((VOCAB, VOCAB))
    for first in range(VOCAB):
        law[first] = masked_law(target[START], "", 1.2)[first]
        law[first] *= masked_law(target[first], SIXTEEN[first], 1.2) if law[first].any() else 0
    seen = np.bincount([a * VOCAB + b for a, b in outputs], minlength=VOCAB**2)
    assert not seen[law.ravel() == 0].any()
    kept = law.ravel() > 0
    fits = stats.chisquare(seen[kept], law.ravel()[kept] * count).pvalue
    assert fits < 1e-6 if forget_forbidden else fits > 1e-3


def masked_law(row: np.ndarray, prefix: str, temperature: float) -> np.ndarray:
    law = np.exp(row / temperature)
    law[sorted(set(range(VOCAB)) - allowed_by_enumeration(prefix))] = 0
    return law / law.sum()


# --- the end of a grammar


def test_the_end_is_allowed_exactly_where_the_automaton_accepts_and_is_all_there_is_when_nothing_else_may_follow(
    automata: Automata,
) -> None:
    want_end = np.zeros((VOCAB, VOCAB))
    want_end[:, END_ID] = 9
    params = replace(GREEDY, grammar=Grammar("regex", "ab0"))
    assert verify(automata, want_end, [extension(params, [])])[0].token_ids != (END_ID,)
    assert verify(automata, -want_end, [extension(params, [13, 4])])[0].token_ids == (END_ID,)


def test_an_end_that_the_request_does_not_stop_at_is_never_drawn_and_its_own_stop_ids_take_its_place(
    automata: Automata,
) -> None:
    params = replace(GREEDY, stop_ids=(7,), grammar=Grammar("regex", "ab"))
    constraint = automata.constrain([extension(params, [13])])[0]["r"]
    assert [t for t in range(VOCAB) if has(constraint.words[0], t)] == [7]


def test_min_tokens_keep_the_end_away_as_long_as_there_is_anything_else(automata: Automata) -> None:
    params = replace(GREEDY, min_tokens=3, grammar=Grammar("regex", "c*"))
    constraint = automata.constrain([extension(params, [], [2, 2, 2])])[0]["r"]
    assert [has(words, END_ID) for words in constraint.words] == [False, False, False, True]
    finished = replace(params, grammar=Grammar("regex", "c"))
    assert has(automata.constrain([extension(finished, [2], name="s")])[0]["s"].words[0], END_ID)


def test_a_grammar_that_the_vocabulary_cannot_spell_ends_its_own_request_only(automata: Automata) -> None:
    dead = replace(GREEDY, grammar=Grammar("regex", "abZ"))
    constraints, failures = automata.constrain([extension(dead, [13], [0], "dead"), extension(GREEDY, [], [], "fine")])
    assert not failures and constraints["fine"].dead_from is None
    assert constraints["dead"].dead_from == 0
    early = automata.constrain([extension(dead, [], [13, 0], "early")])[0]["early"]
    assert early.dead_from == 1 and early.num_run == early.num_judged == 1


@pytest.mark.parametrize("expression", ["Z", "Zab", "(Za|Zb)c"])
def test_a_text_that_must_begin_with_what_the_vocabulary_cannot_spell_has_no_token(
    automata: Automata, expression
) -> None:
    """The library itself would allow a token of other text here."""
    dead = replace(GREEDY, grammar=Grammar("regex", expression))
    found = automata.constrain([extension(dead, [], [], expression)])[0][expression]
    assert found.dead_from == 0 and "no token of this model may follow" in found.dead_reason


# --- states are a cache


def test_automata_are_built_anew_after_a_preemption_a_restart_or_another_request_of_the_same_name(
    compiler: GrammarCompiler,
) -> None:
    target = torch.randn(VOCAB, VOCAB, generator=generator(3)).numpy()
    target[:, END_ID] = -9
    params = replace(GREEDY, grammar=ENDLESS)
    steady, text = Automata(compiler, 8), []
    for _ in range(12):
        text += verify(steady, target, [extension(params, text)])[0].token_ids
    for length in (12, 3, 7, 0, 11):
        fresh = Automata(compiler, 8)
        for automata in (steady, fresh):
            assert (
                verify(automata, target, [extension(params, text[:length], text[length:])])[0].num_accepted
                == 12 - length
            )
    other = replace(GREEDY, grammar=Grammar("regex", "0{30}"))
    assert verify(steady, target, [extension(other, [4, 4])])[0].token_ids == (4,)


def test_automata_of_requests_that_are_gone_are_dropped(automata: Automata) -> None:
    for i in range(40):
        automata.constrain([extension(GREEDY, [], name=f"r{i}"), extension(GREEDY, [2], name="stays")])
        assert len(automata) <= 8
    for _ in range(64):
        automata.constrain([extension(GREEDY, [2], name="stays")])
    assert len(automata) == 1
    for _ in range(65):
        automata.constrain([])
    assert len(automata) == 0
    crowd = [extension(GREEDY, [], name=f"r{i}") for i in range(20)]
    automata.constrain(crowd)
    assert len(automata) == 20


# --- what cannot be compiled


@pytest.mark.parametrize(
    ("grammar", "field", "says"),
    [
        (Grammar("regex", "[ab"), "guided_regex", "the regular expression cannot be used.*unclosed character class"),
        (Grammar("regex", "(?=a)b"), "guided_regex", "look-around"),
        (Grammar("ebnf", "root := x"), "guided_grammar", "the grammar cannot be used"),
        (Grammar("json_schema", '{"type": "objct"}'), "response_format", "the JSON schema cannot be used.*objct"),
        (Grammar("json_schema", "not json"), "response_format", "cannot be used"),
        (Grammar("json_schema", '{"$ref": "#/nowhere"}'), "response_format", "nowhere"),
        (Grammar("json_schema", '{"type": "array", "uniqueItems": true}'), "response_format", "uniqueItems"),
        (Grammar("json_schema", '{"minimum": 5, "maximum": 3, "type": "integer"}'), "response_format", "greater than"),
        (Grammar("json_schema", "[" * 100_000), "response_format", "cannot be used"),
        (Grammar("regex", "a" * MAX_TEXT_BYTES + "a"), "guided_regex", "longer than 256 KiB"),
        (Grammar("xml"), "response_format", "not 'xml'"),
    ],
    ids=lambda v: v.text[:20] if isinstance(v, Grammar) else "",
)
def test_a_grammar_that_cannot_be_used_is_refused_in_one_line_that_names_its_field(
    compiler: GrammarCompiler, grammar: Grammar, field: str, says: str
) -> None:
    with pytest.raises(BadParams, match=says) as refusal:
        compiler.compile(grammar)
    assert refusal.value.param == field
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400


def test_a_target_without_a_tokenizer_refuses_grammars(tmp_path: Path) -> None:
    with pytest.raises(BadParams, match=r"cannot follow a grammar: its tokenizer\.json does not serve"):
        GrammarCompiler(tmp_path, VOCAB).compile(ENUMERATED)


def test_json_schemas_objects_and_both_dialects_of_ebnf_are_followed(automata: Automata) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for grammar, good, bad in [
        (Grammar("json_schema", json.dumps(schema)), '{"a":10}', '{"b":10}'),
        (Grammar("json_object"), '{"b":[1,0]}', "[1]"),
        (Grammar("ebnf", 'root ::= "a" [01]+'), "a01", "b"),
        (Grammar("ebnf", 'start: "a" /[01]+/'), "a01", "b"),
    ]:
        params = replace(GREEDY, grammar=grammar)
        for text, follows in ((good, True), (bad, False)):
            drafts = [SIXTEEN.index(c) for c in text]
            constraint = automata.constrain([extension(params, [], drafts, f"{grammar} {text}")])[0][
                f"{grammar} {text}"
            ]
            assert (constraint.num_run == len(drafts)) is follows
            assert not follows or has(constraint.words[-1], END_ID)


def test_json_cannot_go_on_with_white_space_for_ever(automata: Automata) -> None:
    params = replace(GREEDY, grammar=Grammar("json_object"))
    constraint = automata.constrain([extension(params, [6], [14] * 100)])[0]["r"]
    assert constraint.num_run == 64


def test_a_heavy_but_legal_grammar_compiles_and_is_followed_within_its_limits(automata: Automata) -> None:
    words = ["".join(letters) for letters in itertools.product("abcd01", repeat=5)]
    params = replace(GREEDY, grammar=Grammar("json_schema", json.dumps({"enum": words})))
    constraint = automata.constrain([extension(params, [], [8, 0, 2, 2, 14])])[0]["r"]
    assert constraint.num_run == 4
