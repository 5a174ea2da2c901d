"""Tool calls out of text: the same result wherever the text is cut, no text lost, arguments as the model wrote them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.events import CallArguments, CallStart, Content, Event, joined
from services.gateway.tool_parsers.call_object import CallRules
from services.gateway.tool_parsers.json_value import JsonValue, Step
from services.gateway.tool_parsers.tagged import HERMES, LLAMA3_JSON, CallSyntax, ToolCallParser

NAMES = frozenset({"get_weather", "f", "g"})


def parse(syntax: CallSyntax, pieces: Iterable[str]) -> list[Event]:
    """Events of a text that comes in `pieces`; the ids of its calls are c0, c1, ..."""
    numbers = itertools.count()
    parser = ToolCallParser(syntax, CallRules(lambda: f"c{next(numbers)}", NAMES))
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish()])


def pairs_of_cuts(text: str) -> Iterable[tuple[str, str, str]]:
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        yield text[:first], text[first:second], text[second:]


def call(index: int, name: str, arguments: str) -> list[Event]:
    return [CallStart(index, f"c{index}", name), CallArguments(index, arguments)]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CITY = '{"city": "Oslo"}'
# text -> what it is, for the tagged family; each is also cut at every pair of positions
HERMES_CASES: dict[str, tuple[str, Sequence[Event]]] = {
    "no call": ("Hello <b>you</b>, 1 < 2.\n", [Content("Hello <b>you</b>, 1 < 2.\n")]),
    "nothing": ("", []),
    "a call": (hermes("f", CITY), call(0, "f", CITY)),
    "text around": (
        f"Let me see.\n\n{hermes('f', CITY)}\nDone. ",
        [Content("Let me see."), *call(0, "f", CITY), Content("\nDone. ")],
    ),
    "two blocks": (hermes("f", CITY) + "\n" + hermes("g", "{}"), [*call(0, "f", CITY), *call(1, "g", "{}")]),
    "blocks that touch": (hermes("f", "{}") + hermes("g", "{}"), [*call(0, "f", "{}"), *call(1, "g", "{}")]),
    "two calls in one block": (
        '<tool_call>{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {"a": 1}}</tool_call>',
        [*call(0, "f", "{}"), *call(1, "g", '{"a": 1}')],
    ),
    "a list of calls": (
        '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]</tool_call>',
        [*call(0, "f", "{}"), *call(1, "g", "{}")],
    ),
    "tags in a string": (
        hermes("f", '{"a": "</tool_call><tool_call>{"}'),
        call(0, "f", '{"a": "</tool_call><tool_call>{"}'),
    ),
    "escapes": (hermes("f", r'{"a": "\"}\\", "b": "é"}'), call(0, "f", r'{"a": "\"}\\", "b": "é"}')),
    "nested": (
        hermes("f", '{"a": [{"b": {"c": [[], {}, -1.5e+3, true, null]}}]}'),
        call(0, "f", '{"a": [{"b": {"c": [[], {}, -1.5e+3, true, null]}}]}'),
    ),
    "unicode": (
        "去 👩‍👩‍👧 \u2028" + hermes("f", '{"città": "😀\u2028"}'),
        [Content("去 👩‍👩‍👧 \u2028"), *call(0, "f", '{"città": "😀\u2028"}')],
    ),
    "arguments before the name": (
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        call(0, "f", '{"a": 1}'),
    ),
    "arguments in a string": (hermes("f", r'"{\"a\": \"b\"}"'), call(0, "f", '{"a": "b"}')),
    "half a surrogate in a string of arguments": (hermes("f", r'"{\ud83d"'), call(0, "f", r'"{\ud83d"')),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
    "null arguments": (hermes("f", "null"), call(0, "f", "{}")),
    "a number for arguments": (hermes("f", "12"), call(0, "f", "12")),
    "an undeclared name": (hermes("oops", "{}"), call(0, "oops", "{}")),
    "other keys": (
        '<tool_call>{"id": 7, "name": "f", "arguments": {}, "type": "function"}</tool_call>',
        call(0, "f", "{}"),
    ),
    "no closing tag at the end": ('<tool_call>{"name": "f", "arguments": {}}\n', call(0, "f", "{}")),
    "half a closing tag at the end": ('<tool_call>{"name": "f", "arguments": {}}\n</tool', call(0, "f", "{}")),
    "a block opened twice": (
        '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        [*call(0, "f", "{}"), *call(1, "g", "{}")],
    ),
    "cut inside arguments": ('<tool_call>{"name": "f", "arguments": {"a": "b', call(0, "f", '{"a": "b')),
    "cut before arguments": ('<tool_call>\n{"name": "f", "arg', [Content('<tool_call>\n{"name": "f", "arg')]),
    "cut in the tag": ("Hm <tool_", [Content("Hm <tool_")]),
    "prose in a block": ("A <tool_call> b </tool_call> c", [Content("A <tool_call> b </tool_call> c")]),
    "an empty block": ("<tool_call></tool_call>", [Content("<tool_call></tool_call>")]),
    "broken JSON before the name": (
        "Look:\n<tool_call>{name: 'f'}</tool_call>",
        [Content("Look:\n<tool_call>{name: 'f'}</tool_call>")],
    ),
    "a call after a broken one": (
        '<tool_call>{"name\n' + hermes("f", "{}"),
        [Content('<tool_call>{"name'), *call(0, "f", "{}")],
    ),
    "no name": (
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        [Content('<tool_call>{"arguments": {"a": 1}}</tool_call>')],
    ),
    "a name that is no name": (hermes("a b", "{}"), [Content(hermes("a b", "{}"))]),
    "a number for a name": (
        '<tool_call>{"name": 12345, "arguments": {}}</tool_call>',
        [Content('<tool_call>{"name": 12345, "arguments": {}}</tool_call>')],
    ),
    "broken inside arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": tru}}\n</tool_call>\nbye',
        [*call(0, "f", '{"a": tru}}\n'), Content("\nbye")],
    ),
    "broken after arguments": (
        '<tool_call>{"name": "f", "arguments": {}, oops}</tool_call> bye',
        [*call(0, "f", "{}"), Content(", oops} bye")],
    ),
    "text after the object": (
        '<tool_call>{"name": "f", "arguments": {}} oops</tool_call>',
        [*call(0, "f", "{}"), Content(" oops")],
    ),
}


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


LLAMA_CASES: dict[str, tuple[str, Sequence[Event]]] = {
    "no call": ("Hello {you}.", [Content("Hello {you}.")]),
    "a call": (llama("f", CITY), call(0, "f", CITY)),
    "whitespace first": ("\n " + llama("f", CITY) + "\n", call(0, "f", CITY)),
    "the other word": ('{"name": "f", "arguments": {}}', call(0, "f", "{}")),
    "with a type": ('{"type": "function", "name": "f", "parameters": {}}', call(0, "f", "{}")),
    "two calls": (llama("f", CITY) + "; " + llama("g", "{}"), [*call(0, "f", CITY), *call(1, "g", "{}")]),
    "tagged": ("<|python_tag|>" + llama("f", CITY), call(0, "f", CITY)),
    "tagged after text": ("Look. <|python_tag|>" + llama("f", CITY), [Content("Look."), *call(0, "f", CITY)]),
    "tagged twice": (
        f"<|python_tag|>{llama('f', '{}')}<|python_tag|>{llama('g', '{}')}",
        [*call(0, "f", "{}"), *call(1, "g", "{}")],
    ),
    "tagged code": (
        '<|python_tag|>search.call(query="x")',
        [Content('<|python_tag|>search.call(query="x")')],
    ),
    "an answer in JSON": ('{"answer": {"name": "f"}}', [Content('{"answer": {"name": "f"}}')]),
    "an undeclared name": (llama("oops", "{}"), [Content(llama("oops", "{}"))]),
    "a call later in the text": ("So: " + llama("f", "{}"), [Content("So: " + llama("f", "{}"))]),
    "text after": (llama("f", "{}") + "\nDone", [*call(0, "f", "{}"), Content("\nDone")]),
    "broken inside arguments": (llama("f", '{"a": x'), call(0, "f", '{"a": x}')),
    "cut inside arguments": ('{"name": "f", "parameters": {"a": "b', call(0, "f", '{"a": "b')),
    "cut before": ('{"name": "f"', [Content('{"name": "f"')]),
}
CASES = [(HERMES, name, *case) for name, case in HERMES_CASES.items()]
CASES += [(LLAMA3_JSON, name, *case) for name, case in LLAMA_CASES.items()]


# Those whose boundaries are of every kind are cut twice, the others once: pairs cost the cube of the length.
CUT_TWICE = {"tags in a string", "a call after a broken one", "broken after arguments", "two calls"}


@pytest.mark.parametrize(("syntax", "name", "text", "expected"), CASES, ids=[f"{c[0].opener}: {c[1]}" for c in CASES])
def test_a_text_is_understood_the_same_wherever_it_is_cut(syntax, name, text, expected):
    assert parse(syntax, [text]) == joined(expected)
    assert parse(syntax, text) == joined(expected)
    cuts = pairs_of_cuts(text) if name in CUT_TWICE else ((text[:at], text[at:]) for at in range(len(text)))
    for pieces in cuts:
        assert parse(syntax, pieces) == joined(expected), pieces


# What commits of several tokens at once have been seen to hold (the reference's boundary patterns).
BOUNDARIES = [
    ["xxx", "yyy<tool_call>", '{"name": "f", "arguments": {}}</tool_call>'],
    ['<tool_call>{"name"', ': "f", "arguments": {}}', "</tool_call>"],
    ['<tool_call>{"name": "f", "arguments": {}}\n</tool_call>', "\n"],
    ['<tool_call>{"name": "f", "arguments": {', "}}\n</tool_call>yyy"],
    ['<tool_call>{"name": "f", "arguments": {}}</tool_call>'],
    [
        '..<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": ',
        '"g", "arguments": {}}</tool_call>',
    ],
    [
        '<tool_call>{"name": "f", "arguments": {}}',
        "</tool_call><tool_call>",
        '{"name": "g", "arguments": {}}</tool_call>',
    ],
]


@pytest.mark.parametrize("pieces", BOUNDARIES)
def test_a_block_that_closes_one_thing_and_opens_the_next_keeps_both(pieces):
    whole = "".join(pieces)
    events = parse(HERMES, pieces)
    assert events == parse(HERMES, whole)
    starts = [event for event in events if isinstance(event, CallStart)]
    assert [start.name for start in starts] == ["f", "g"][: whole.count("<tool_call>")]
    assert all(CallArguments(start.index, "{}") in events for start in starts)


def test_arguments_leave_as_they_come():
    parser = ToolCallParser(HERMES, CallRules(lambda: "c0"))
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == []
    assert parser.push('{"a": ') == [CallStart(0, "c0", "f"), CallArguments(0, '{"a": ')]
    assert parser.push('"b') == [CallArguments(0, '"b')]
    assert parser.push('"}}</tool_call>') == [CallArguments(0, '"}')]
    assert parser.finish() == []


def test_content_is_held_back_only_while_it_may_be_a_tag():
    parser = ToolCallParser(HERMES, CallRules(lambda: "c0"))
    assert parser.push("one <") == [Content("one")]
    assert parser.push("b> two") == [Content(" <b> two")]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(json_values, st.booleans(), st.sampled_from([None, 1]))
@settings(max_examples=40, deadline=None)
def test_every_json_value_is_recognised_to_its_last_character(value, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    scanner = JsonValue()
    steps = [scanner.feed(char) for char in text]
    assert all(step is Step.MORE for step in steps[:-1])
    if isinstance(value, int | float) and not isinstance(value, bool):
        assert steps[-1] is Step.MORE and scanner.feed(" ") is Step.AFTER
    else:
        assert steps[-1] is Step.DONE


@given(st.text(alphabet='{}[]",:\\eu0129.-tr ', min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_what_is_refused_is_no_json_and_what_is_done_is(text):
    text = text.lstrip()
    scanner, step = JsonValue(), Step.MORE
    for index, char in enumerate(text):
        step = scanner.feed(char)
        if step is Step.DONE:
            json.loads(text[: index + 1])
            return
        if step is Step.AFTER:
            json.loads(text[:index])
            return
        if step is Step.BAD:
            with pytest.raises(ValueError):
                json.loads(text)
            return


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(max_size=8), json_values, max_size=3)),
        max_size=3,
    ),
    st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<{"), max_size=20),
    st.data(),
)
@settings(max_examples=30, deadline=None)
def test_any_calls_come_back_as_they_were_written(calls, content, data):
    written = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    for syntax, text in (
        (HERMES, content + "\n".join(hermes(*each) for each in written)),
        (LLAMA3_JSON, "; ".join(llama(*each) for each in written) or content),
    ):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
        pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
        events = parse(syntax, pieces)
        assert [event for event in events if not isinstance(event, Content)] == [
            event for index, (name, arguments) in enumerate(written) for event in call(index, name, arguments)
        ]
        shown = "".join(event.text for event in events if isinstance(event, Content))
        expected = content if syntax is HERMES or not written else ""
        assert shown == (expected.rstrip(" \t\r\n") if written else expected)


@given(st.text(alphabet='<>/_tolca{}[]":,nmergus1 \n\\', max_size=60), st.data())
@settings(max_examples=100, deadline=None)
def test_garbage_is_never_lost_and_never_depends_on_cuts(noise, data):
    text = (
        data.draw(st.sampled_from(["", "<tool_call>", '<tool_call>{"name": "f", ', '{"name": "f", "parameters": ']))
        + noise
    )
    for syntax in (HERMES, LLAMA3_JSON):
        whole = parse(syntax, [text])
        assert parse(syntax, text) == whole
        cut = data.draw(st.integers(0, len(text)))
        assert parse(syntax, [text[:cut], text[cut:]]) == whole
        if not any(isinstance(event, CallStart) for event in whole):
            assert "".join(event.text for event in whole) == text
