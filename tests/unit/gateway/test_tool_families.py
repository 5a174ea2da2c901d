"""The formats of calls that are not one JSON object between tags: Qwen3-Coder's XML, pythonic lists, Mistral's. The same result
wherever the text is cut, no text lost, and whatever a grammar admits is read back as calls that fit their schema."""

from __future__ import annotations

import ast
import itertools
import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from scheduler.errors import BadParams
from services.gateway.call_grammar import FRAMES, tags_of
from services.gateway.dialect import Dialect
from services.gateway.events import CallArguments, CallStart, Content, Event, joined
from services.gateway.grammar import answer_grammar
from services.gateway.tool_parsers.call_object import CallRules
from services.gateway.tool_parsers.json_value import Step
from services.gateway.tool_parsers.python_value import PythonValue
from services.gateway.tool_parsers.schema_kinds import argument_json, property_kinds
from services.gateway.tools import Tool, tool_use

F = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "n": {"type": "integer"},
        "o": {"type": "object"},
        "x": {"type": ["string", "null"]},
        "r": {"$ref": "#/$defs/flag"},
    },
    "$defs": {"flag": {"type": "boolean"}},
}
SCHEMAS: dict[str, dict[str, Any]] = {"f": F, "g": {}}


def parse(family: str, pieces: Iterable[str]) -> list[Event]:
    """Events of a text that comes in `pieces`; the ids of its calls are c0, c1, ..."""
    numbers = itertools.count()
    parser = Dialect(family).call_parser(CallRules(lambda: f"c{next(numbers)}", frozenset(SCHEMAS), schemas=SCHEMAS))
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish()])


def call(index: int, name: str, arguments: str) -> list[Event]:
    return [CallStart(index, f"c{index}", name), CallArguments(index, arguments)]


def xml(name: str, **values: str) -> str:
    told = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{told}</function>\n</tool_call>"


CODER: dict[str, tuple[str, Sequence[Event]]] = {
    "no call": ("1 < 2 <b> </function> x", [Content("1 < 2 <b> </function> x")]),
    "every kind of value": (
        xml("f", a="Oslo\n<b>", n="3", o='{"k": [1]}', x="null", r="True", z="5", y="hi"),
        call(0, "f", '{"a": "Oslo\\n<b>", "n": 3, "o": {"k": [1]}, "x": null, "r": true, "z": 5, "y": "hi"}'),
    ),
    "a string that looks like a number": (xml("f", a="007", x="5"), call(0, "f", '{"a": "007", "x": "5"}')),
    "a number that is none": (xml("f", n="three"), call(0, "f", '{"n": "three"}')),
    "numbers that JSON has not": (xml("g", n="NaN", m="-Infinity"), call(0, "g", '{"n": "NaN", "m": "-Infinity"}')),
    "a Python dict": (xml("f", o="{'a': None, 'b': (1,)}"), call(0, "f", '{"o": {"a": null, "b": [1]}}')),
    "line breaks at both ends": (xml("f", a="\n\nx\n\n"), call(0, "f", '{"a": "\\n\\nx\\n\\n"}')),
    "only line breaks": (xml("f", a="\n"), call(0, "f", '{"a": "\\n"}')),
    "no text": (xml("f", a=""), call(0, "f", '{"a": ""}')),
    "no layout": (
        "<tool_call><function=f><parameter=a>x</parameter></function></tool_call>",
        call(0, "f", '{"a": "x"}'),
    ),
    "text around": ("Hm.\n" + xml("g") + "\nDone", [Content("Hm."), *call(0, "g", "{}"), Content("\nDone")]),
    "two": (xml("f", n="1") + "\n" + xml("g"), [*call(0, "f", '{"n": 1}'), *call(1, "g", "{}")]),
    "two in one tag": (
        "<tool_call>\n<function=f>\n</function>\n<function=g>\n</function>\n</tool_call>",
        [*call(0, "f", "{}"), *call(1, "g", "{}")],
    ),
    "no tag around it": ("So <function=g>\n</function> ok", [Content("So"), *call(0, "g", "{}"), Content(" ok")]),
    "an end that was left out": (
        "<function=f>\n<parameter=a>\nx\n<parameter=n>\n7\n</function>",
        call(0, "f", '{"a": "x", "n": 7}'),
    ),
    "unicode": (xml("f", a="東京 😀 \u2028"), call(0, "f", '{"a": "東京 😀 \u2028"}')),
    "an undeclared name": (xml("oops", q="1"), call(0, "oops", '{"q": 1}')),
    "a name that is none": ("<function=a b></function>", [Content("<function=a b></function>")]),
    "prose in a tag": ("<tool_call>no</tool_call>", [Content("<tool_call>no</tool_call>")]),
    "prose after a name": ("<function=f> is what", [Content("<function=f> is what")]),
    "broken between values": (
        "<tool_call><function=f><parameter=n>1</parameter> oops </function></tool_call> b",
        [*call(0, "f", '{"n": 1 oops </function>'), Content(" b")],
    ),
    "cut in a string": ("<function=f><parameter=a>\nab</par", call(0, "f", '{"a": "ab</par')),
    "cut in a number": ("<function=f><parameter=n>\n12", call(0, "f", '{"n": 12')),
    "cut before a value": ("<tool_call>\n<function=f>\n<par", [Content("<tool_call>\n<function=f>\n<par")]),
    "cut between tags": (xml("g")[:-5], call(0, "g", "{}")),
}
PYTHONIC: dict[str, tuple[str, Sequence[Event]]] = {
    "a list": (
        """[f(a='x\\n\\'é"', n=-1), g()]""",
        [*call(0, "f", '{"a": "x\\n\'é\\"", "n": -1}'), *call(1, "g", "{}")],
    ),
    "values of every kind": (
        "[f(a=[1, 2.5, {'k': True, 3: None,}, [], {}], n=1e3, x=0x1F, o=false,)]\n",
        call(0, "f", '{"a": [1, 2.5, {"k": true, "3": null}, [], {}], "n": 1000.0, "x": 31, "o": false}'),
    ),
    "long strings": ('[f(a="""x"y\n""", x="")]', call(0, "f", '{"a": "x\\"y\\n", "x": ""}')),
    "escapes": (r"[f(a='\x41\u00e9\U0001F600\101\q\ud83d')]", call(0, "f", r'{"a": "Aé😀A\\q\ud83d"}')),
    "brackets in strings": ("[f(a=')] [g()'), g()]", [*call(0, "f", '{"a": ")] [g()"}'), *call(1, "g", "{}")]),
    "tagged": (
        "So <|python_start|>[g()]<|python_end|> bye",
        [Content("So"), *call(0, "g", "{}"), Content(" bye")],
    ),
    "two lists": ("[g()]\n[g()]", [*call(0, "g", "{}"), *call(1, "g", "{}")]),
    "text after": ("[g()] bye", [*call(0, "g", "{}"), Content(" bye")]),
    "not at the beginning": ("hi [g()]", [Content("hi [g()]")]),
    "an undeclared name": ("[oops(a=1)]", [Content("[oops(a=1)]")]),
    "a later undeclared name": ("[g(), oops()]", [*call(0, "g", "{}"), Content(", oops()]")]),
    "a link": ("[text](url)", [Content("[text](url)")]),
    "a JSON list": ('["f", 1]', [Content('["f", 1]')]),
    "no keyword": ("[f(1)]", [Content("[f(1)]")]),
    "broken inside": ("[f(a=1, b=foo)] x", call(0, "f", '{"a": 1, "b": foo)] x')),
    "a tag and no list": ("<|python_start|>print(1)", [Content("<|python_start|>print(1)")]),
    "cut in a string": ("[f(a='x", call(0, "f", '{"a": "x')),
    "cut in a number": ("[f(a=1", call(0, "f", '{"a": 1')),
    "cut before a keyword": ("[f(a", [Content("[f(a")]),
    "cut after a call": ("[g(),", call(0, "g", "{}")),
    "cut in the tag": ("[g()]<|python_e", call(0, "g", "{}")),
}
MISTRAL: dict[str, tuple[str, Sequence[Event]]] = {
    "a list": (
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}, "id": "abcdefghi"}]',
        [*call(0, "f", '{"a": "]"}'), *call(1, "g", "{}")],
    ),
    "spaces": ('[TOOL_CALLS] [ {"name": "g", "arguments": {}} ]\n', call(0, "g", "{}")),
    "names first": (
        'Hm [TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]g[ARGS]{}',
        [Content("Hm"), *call(0, "f", '{"a": "[TOOL_CALLS]"}'), *call(1, "g", "{}")],
    ),
    "an id": ('[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"n": 1} bye', [*call(0, "f", '{"n": 1}'), Content(" bye")]),
    "no tag before the arguments": ('[TOOL_CALLS]f{"n": {"m": 1}}', call(0, "f", '{"n": {"m": 1}}')),
    "text after a list": ('[TOOL_CALLS][{"name": "g", "arguments": {}}] x', [*call(0, "g", "{}"), Content(" x")]),
    "no call": ("[TOOL_CALLS]none, sorry", [Content("[TOOL_CALLS]none, sorry")]),
    "an empty list": ("[TOOL_CALLS][]", [Content("[TOOL_CALLS][]")]),
    "broken inside": ('[TOOL_CALLS]f[ARGS]{"a": x}', call(0, "f", '{"a": x}')),
    "cut in arguments": ('[TOOL_CALLS]f[ARGS]{"a": "b', call(0, "f", '{"a": "b')),
    "cut before": ("a [TOOL_CALLS]f[ARG", [Content("a [TOOL_CALLS]f[ARG")]),
}
CASES = [("qwen3_coder", name, *case) for name, case in CODER.items()]
CASES += [("pythonic", name, *case) for name, case in PYTHONIC.items()]
CASES += [("mistral", name, *case) for name, case in MISTRAL.items()]


@pytest.mark.parametrize(("family", "name", "text", "expected"), CASES, ids=[f"{c[0]}: {c[1]}" for c in CASES])
def test_a_text_is_understood_the_same_wherever_it_is_cut(family, name, text, expected):
    assert parse(family, [text]) == joined(expected)
    assert parse(family, text) == joined(expected)
    # Pairs of cuts cost the cube of the length.
    pairs = len(text) <= 60
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        if pairs or first == second:
            assert parse(family, [text[:first], text[first:second], text[second:]]) == joined(expected), (first, second)


NOISE = {
    "qwen3_coder": ["<tool_call>", "<function=", "f>", "g>", "<parameter=", "a>", "n>", "</parameter>", "</function>"],
    "pythonic": [
        "[",
        "f(",
        "g(",
        "a=",
        "n=",
        ")",
        "]",
        ", ",
        "'",
        '"',
        '"""',
        "\\",
        "u00",
        "1",
        "-.e",
        "True",
        "{",
        "}",
        ":",
    ],
    "mistral": [
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "f",
        "{",
        "}",
        '"name"',
        ": ",
        '"f"',
        ', "arguments": ',
        "[",
        "]",
    ],
}


@pytest.mark.parametrize("family", sorted(NOISE))
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_garbage_is_never_lost_and_never_depends_on_cuts(family, data):
    pieces = data.draw(st.lists(st.sampled_from([*NOISE[family], " ", "\n", "x", "😀", "</tool_call>"]), max_size=25))
    text = "".join(pieces)
    whole = parse(family, [text])
    assert parse(family, text) == whole == parse(family, pieces)
    cut = data.draw(st.integers(0, len(text)))
    assert parse(family, [text[:cut], text[cut:]]) == whole
    if not any(isinstance(event, CallStart) for event in whole):
        assert "".join(event.text for event in whole) == text


def test_arguments_leave_as_they_come():
    numbers = itertools.count()
    rules = CallRules(lambda: f"c{next(numbers)}", frozenset(SCHEMAS), schemas=SCHEMAS)
    parser = Dialect("qwen3_coder").call_parser(rules)
    assert parser.push("<tool_call>\n<function=f>\n") == []
    assert parser.push("<parameter=a>\nab") == [*call(0, "f", '{"a": "ab')]
    assert parser.push('c"\n') == [CallArguments(0, 'c\\"')]
    assert parser.push("d\n</parameter>") == [CallArguments(0, '\\nd"')]
    assert parser.push("<parameter=n>\n1") == [CallArguments(0, ', "n": ')]
    assert parser.push("2\n</parameter></function>") == [CallArguments(0, "12}")]
    parser = Dialect("pythonic").call_parser(rules)
    assert parser.push("[f(a") == []
    assert parser.push("='b") == [CallStart(0, "c1", "f"), CallArguments(0, '{"a": "b')]
    assert parser.push("c', n=1") == [CallArguments(0, 'c", "n": ')]
    assert parser.push("2)]") == [CallArguments(0, "12}")]


python_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(python_values, st.sampled_from([repr, ascii, json.dumps]))
@settings(max_examples=100, deadline=None)
def test_every_python_literal_is_said_in_json(value, write):
    reader, said, text = PythonValue(), "", write(value)
    for char in text + ",":
        step = reader.feed(char)
        said += reader.take()
        assert step is not Step.BAD, (text, said)
        if step is not Step.MORE:
            break
    assert json.loads(said) == value


@given(st.text(alphabet="'\"\\nxuUN0189afeE_.+-[]{}:, TruFls", min_size=1, max_size=14))
@settings(max_examples=300, deadline=None)
def test_what_python_takes_for_a_literal_is_taken_for_what_it_is(text):
    """Held against Python itself, for texts that are nobody's idea of a value."""
    text = text.strip()
    try:
        expected = ast.literal_eval(text)
        wanted = json.dumps(expected, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError):
        return
    reader, said, num_read = PythonValue(), "", -1
    for char in text + ",":
        num_read += 1
        step = reader.feed(char)
        said += reader.take()
        if step is not Step.MORE:
            break
    # A value that ends before the text does is not all of it: `0,` is a tuple to Python, and no argument.
    if (step, num_read) in ((Step.DONE, len(text) - 1), (Step.AFTER, len(text))):
        assert json.loads(said) == json.loads(wanted), text


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "number"}, "3", 3),
        ({"type": "integer"}, "x", "x"),
        ({"type": "boolean"}, "FALSE", False),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "null"]}, "None", None),
        ({"enum": ["a", 1]}, "1", 1),
        ({"const": "1"}, "1", "1"),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/flag"}]}, "true", True),
        ({"anyOf": [{"type": "string"}, {}]}, "[1]", [1]),
        ({"type": "array"}, "['a', 1]", ["a", 1]),
        ({"type": "array"}, "[1, oops]", "[1, oops]"),
        ({"$ref": "#/$defs/gone"}, "5", 5),
        ({"$ref": "#/properties/it"}, "5", 5),
        (None, "5", 5),
        (None, "five", "five"),
        ({"type": "object"}, '{"a":' * 50_000, '{"a":' * 50_000),
    ],
)
def test_a_value_written_as_text_is_what_its_schema_says(schema, text, expected):
    root = {"properties": {"it": schema}, "$defs": {"flag": {"type": "boolean"}}}
    assert json.loads(argument_json(text, property_kinds(root, "it"))) == expected


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "zone": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "mode": {"enum": ["fast", "slow</b>"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "deep": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
        "flag": {"$ref": "#/$defs/flag"},
    },
    "required": ["city", "days"],
    "$defs": {"flag": {"type": "boolean"}},
}
TOOLS = {"weather": WEATHER, "clock": {"type": "object", "properties": {}}}


def byte_tokenizer(special: Sequence[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|end|>", *special)])
    return tokenizer


def tools(**changes: Any) -> list[Tool]:
    functions = [{"name": name, "parameters": schema, **changes} for name, schema in TOOLS.items()]
    return [Tool.model_validate({"type": "function", "function": each}) for each in functions]


class Writer:
    """Writes what a grammar admits, at random: each byte is one of those that may follow, printable ones first."""

    def __init__(self, special: Sequence[str]) -> None:
        self._tokenizer = byte_tokenizer(special)
        self._end = self._tokenizer.token_to_id("<|end|>")
        self._library = LLTokenizer(self._tokenizer.to_str(), eos_token=self._end)
        self.special = {tag: self._tokenizer.token_to_id(tag) for tag in special}

    def write(self, lark: str, seed: int, most: int = 900) -> str | None:
        dice, ids = random.Random(seed), []
        matcher = LLMatcher(self._library, LLMatcher.grammar_from_lark(lark))
        while len(ids) < most and not matcher.is_stopped():
            mask = matcher.compute_logit_bias()
            allowed = [token for token in range(self._tokenizer.get_vocab_size()) if mask[token]]
            printable = [each for each in allowed if each == self._end or 32 <= self._byte(each) < 127]
            token = dice.choice(printable or allowed)
            matcher.consume_token(token)
            if token == self._end:
                break
            ids.append(token)
        return self._tokenizer.decode(ids, skip_special_tokens=False) if len(ids) < most else None

    def _byte(self, token: int) -> int:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return ord(text[0]) if text else 0


@pytest.mark.parametrize("special", [False, True], ids=["tags are text", "tags are special tokens"])
@pytest.mark.parametrize("family", sorted(FRAMES))
def test_whatever_the_grammar_of_a_required_call_admits_is_calls_that_fit(family, special):
    writer = Writer(tags_of(family) if special else ())
    dialect, seen = Dialect(family, special=writer.special), 0
    for parallel in (True, False):
        grammar = answer_grammar(None, tool_use(tools(strict=True), "required", parallel), dialect)
        for seed in range(4):
            text = writer.write(grammar.text, seed)
            if text is None:
                continue
            parser = dialect.call_parser(CallRules(lambda: "id", frozenset(TOOLS), schemas=TOOLS))
            events = joined([*parser.push(text), *parser.finish()])
            names = [event.name for event in events if isinstance(event, CallStart)]
            arguments = [event.text for event in events if isinstance(event, CallArguments)]
            assert len(names) == len(arguments) and 2 * len(names) == len(events), (text, events)
            assert parallel or len(names) == 1
            for name, said in zip(names, arguments, strict=True):
                jsonschema.validate(json.loads(said), TOOLS[name])
            seen += bool(names)
    assert seen >= 4


@pytest.mark.parametrize("family", sorted(FRAMES))
def test_where_the_model_may_choose_its_text_is_free_and_its_calls_are_held(family):
    writer = Writer(())
    dialect = Dialect(family)
    grammar = answer_grammar(None, tool_use(tools(strict=True), "auto", True), dialect)
    frame = FRAMES[family]
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar.text), None) == ""
    matcher = LLMatcher(writer._library, LLMatcher.grammar_from_lark(grammar.text))
    free = writer._tokenizer.encode("Hi, 1 < 2 (x) {y} [z]").ids
    assert matcher.try_consume_tokens(free) == len(free) and matcher.is_accepting()
    bad = {"llama3_json": '{"no', "pythonic": "[no"}.get(family, frame.opener + frame.head + "no_such_tool")
    ids = writer._tokenizer.encode(bad).ids
    assert LLMatcher(writer._library, LLMatcher.grammar_from_lark(grammar.text)).try_consume_tokens(ids) < len(ids)


@pytest.mark.parametrize(
    ("family", "schema", "word"),
    [
        ("qwen3_coder", {"properties": {"a b>": {}}}, "argument name"),
        ("pythonic", {"properties": {"a b": {}}}, "argument name"),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "format": "date"}}}, "format"),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}, "pattern"),
        ("qwen3_coder", {"properties": {"a": {"enum": ["x</parameter>"]}}}, "between tags"),
        ("pythonic", {"allOf": [{"required": ["a"]}], "properties": {"a": {}}}, "allOf"),
        ("mistral_args", {"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
    ],
)
def test_a_strict_tool_whose_schema_cannot_be_written_is_refused_by_name(family, schema, word):
    made = [Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}})]
    with pytest.raises(BadParams, match=rf"^tools\.0\.function\.parameters.*{word}"):
        answer_grammar(None, tool_use(made, "required", None), Dialect(family))


def test_mistral_gets_ids_that_its_templates_take():
    made = {Dialect("mistral").new_call_id() for _ in range(50)}
    assert len(made) == 50 and all(len(each) == 9 and each.isalnum() for each in made)
    assert Dialect("hermes").new_call_id().startswith("call_")
