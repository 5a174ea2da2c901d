"""What a request may constrain becomes a grammar that admits exactly that; what cannot be enforced is refused by name.

Grammars are judged by the library itself, over a tokenizer whose tokens are bytes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from scheduler.errors import BadParams
from scheduler.wire import Grammar
from services.gateway.dialect import Dialect
from services.gateway.grammar import MAY_THINK, NO_THOUGHT, OPENED, answer_grammar, thought_after
from services.gateway.structured import StructuredFields, closed
from services.gateway.tools import Tool, ToolUse, read_choice, tool_use

SPECIAL = ["<|im_end|>", "<tool_call>", "</tool_call>", "</think>"]


def byte_tokenizer(special: list[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    return tokenizer


class Judge:
    """Whether a grammar admits a text as a whole answer."""

    def __init__(self, special: list[str]) -> None:
        self._tokenizer = byte_tokenizer(special)
        self._library = LLTokenizer(self._tokenizer.to_str(), eos_token=self._tokenizer.token_to_id("<|im_end|>"))

    def admits(self, grammar: Grammar | None, text: str) -> bool:
        assert grammar is not None
        make = {
            "json_schema": LLMatcher.grammar_from_json_schema,
            "regex": LLMatcher.grammar_from_regex,
            "ebnf": LLMatcher.grammar_from_lark,
        }[grammar.kind]
        matcher = LLMatcher(self._library, make(grammar.text))
        ids = self._tokenizer.encode(text).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def dialect(self, **fields: Any) -> Dialect:
        tags = {text: self._tokenizer.token_to_id(text) for text in SPECIAL[1:]}
        return Dialect(special={text: index for text, index in tags.items() if index is not None}, **fields)


@pytest.fixture(scope="module", params=["tags are text", "tags are special tokens"])
def judge(request: pytest.FixtureRequest) -> Judge:
    return Judge(SPECIAL if "special" in request.param else SPECIAL[:1])


def tool(name: str, parameters: dict[str, Any] | None = None, **fields: Any) -> Tool:
    function = {"name": name, **({"parameters": parameters} if parameters is not None else {}), **fields}
    return Tool.model_validate({"type": "function", "function": function})


ADD = tool(
    "add",
    {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/number"}},
        "required": ["a"],
        "$defs": {"number": {"type": "integer"}},
    },
)
LOOK = tool("look")


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CALL, OTHER = hermes("add", '{"a": 12}'), hermes("look", '{"x": ["</tool>"]}')
BAD = [hermes("add", "{}"), hermes("add", '{"a": 1, "b": 2}'), hermes("oops", "{}"), "<tool_call>x", CALL[:-1]]


def grammar_of(tools: list[Tool], choice: Any, parallel: bool | None, dialect: Dialect) -> Grammar | None:
    return answer_grammar(None, tool_use(tools, read_choice(choice), parallel), dialect)


def test_required_admits_calls_of_the_tools_and_nothing_else(judge):
    grammar = grammar_of([ADD, LOOK], "required", None, judge.dialect())
    for good in (CALL, OTHER, CALL + "\n" + OTHER + "\n" + CALL):
        assert judge.admits(grammar, good), good
    for bad in (*BAD, "", "hi", "hi " + CALL, CALL + " bye"):
        assert not judge.admits(grammar, bad), bad


def test_without_parallel_calls_one_is_all(judge):
    grammar = grammar_of([ADD, LOOK], "required", False, judge.dialect())
    assert judge.admits(grammar, CALL) and judge.admits(grammar, OTHER)
    assert not judge.admits(grammar, CALL + "\n" + CALL)
    grammar = grammar_of([ADD, LOOK], "auto", False, judge.dialect())
    for good in (CALL, "hi", "", "see: " + CALL):
        assert judge.admits(grammar, good), good
    for bad in (*BAD, CALL + "\n" + CALL, CALL + " bye"):
        assert not judge.admits(grammar, bad), bad


def test_a_named_tool_is_called_once(judge):
    grammar = grammar_of([ADD, LOOK], {"type": "function", "function": {"name": "add"}}, True, judge.dialect())
    assert judge.admits(grammar, CALL)
    for bad in (*BAD, OTHER, CALL + "\n" + CALL, "hi"):
        assert not judge.admits(grammar, bad), bad


def test_strict_tools_are_followed_where_the_model_chooses_to_call(judge):
    assert grammar_of([ADD, LOOK], "auto", None, judge.dialect()) is None
    strict = ADD.model_copy(update={"function": ADD.function.model_copy(update={"strict": True})})
    grammar = grammar_of([strict], "auto", None, judge.dialect())
    for good in ("", "1 < 2", CALL, f"so {CALL}\n{CALL} bye"):
        assert judge.admits(grammar, good), good
    for bad in BAD:
        assert not judge.admits(grammar, bad), bad


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_of_allowed_tools_only_those_are_called(judge, mode):
    names = [{"type": "function", "function": {"name": "look"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}
    grammar = grammar_of([ADD, LOOK], choice, None, judge.dialect())
    assert judge.admits(grammar, OTHER) and judge.admits(grammar, OTHER + "\n" + OTHER)
    assert judge.admits(grammar, "hi") == judge.admits(grammar, "") == (mode == "auto")
    for bad in (CALL, OTHER + "\n" + CALL, *BAD):
        assert not judge.admits(grammar, bad), bad
    assert not judge.admits(grammar_of([ADD, LOOK], choice, False, judge.dialect()), OTHER + "\n" + OTHER)


def test_llama_calls_are_bare_objects():
    judge = Judge(SPECIAL[:1])
    call = '{"name": "add", "parameters": {"a": 1}}'
    grammar = grammar_of([ADD], "required", None, Dialect("llama3_json"))
    assert judge.admits(grammar, call) and judge.admits(grammar, f"{call}; {call}")
    assert not judge.admits(grammar, "hi")
    grammar = grammar_of([ADD], "auto", False, Dialect("llama3_json"))
    for good in (call, "hi {}", ""):
        assert judge.admits(grammar, good), good
    for bad in (f"{call}; {call}", '{"x": 1}', " {"):
        assert not judge.admits(grammar, bad), bad


# fields of a request -> an answer that fits and one that does not
CONSTRAINTS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}},
        "12",
        "x",
    ),
    (
        {"guided_json": '{"type": "object", "properties": {"k": {"enum": ["v"]}}, "required": ["k"]}'},
        '{ "k" :\n"v"}',
        "{}",
    ),
    ({"guided_regex": "a/[0-9]+"}, "a/12", "a"),
    ({"guided_choice": ['x"y', "é"]}, "é", "e"),
    ({"guided_grammar": 'start: "a" b\nb: /[x-z]+/\n'}, "axyz", "b"),
    ({"structured_outputs": {"grammar": 'root ::= "a" b\nb ::= [0-9]+\n'}}, "a12", "b"),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, '{"a":1}', '{ "a":1}'),
    ({"structured_outputs": {"json": {"type": "array"}, "whitespace_pattern": "[ ]{1,3}"}}, "[   1]", "[    1]"),
]


@pytest.mark.parametrize(("fields", "good", "bad"), CONSTRAINTS)
def test_every_spelling_constrains_the_answer_with_and_without_a_thought(judge, fields, good, bad):
    constraint, dialect = StructuredFields.model_validate(fields).constraint(), judge.dialect(thinks=True)
    thoughts = [
        (NO_THOUGHT, ""),
        (OPENED, "hm < </b>\n</think>\n\n"),
        (MAY_THINK, ""),
        (MAY_THINK, "<think>\nhm</think>\n"),
    ]
    for thought, before in thoughts:
        grammar = answer_grammar(constraint, ToolUse(), dialect, thought=thought)
        assert judge.admits(grammar, before + good)
        assert not judge.admits(grammar, before + bad)
        either = answer_grammar(constraint, tool_use([ADD], "auto", None), dialect, thought=thought)
        assert judge.admits(either, before + good) and judge.admits(either, before + CALL)
        assert not judge.admits(either, before + bad) and not judge.admits(either, before + BAD[0])


def test_a_thought_opened_by_the_prompt_must_be_closed(judge):
    constraint = StructuredFields(guided_choice=["yes"]).constraint()
    grammar = answer_grammar(constraint, ToolUse(), judge.dialect(thinks=True), thought=OPENED)
    assert not judge.admits(grammar, "yes") and not judge.admits(grammar, "hm</think>no")


@pytest.mark.parametrize(
    ("prompt", "thought"),
    [("assistant\n<think>\n", OPENED), ("<think>\n\n</think>\n\n", NO_THOUGHT), ("assistant\n", MAY_THINK)],
)
def test_the_prompt_says_how_the_answer_stands_to_a_thought(prompt, thought):
    assert thought_after(Dialect(thinks=True), prompt) == thought
    assert thought_after(Dialect(thinks=False), prompt) == NO_THOUGHT


UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def schema_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"guided_regex": "a" * 300_000}, "guided_regex"),
        ({"guided_grammar": "start: x"}, "guided_grammar"),
        ({"guided_grammar": "root ::= (x"}, "guided_grammar"),
        ({"guided_grammar": "\0"}, "guided_grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": '{"a":' * 3000 + "1" + "}" * 3000}, "guided_json"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": "("}}, "structured_outputs.json"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (schema_format(None), "response_format.json_schema.schema"),
        (schema_format({"type": "nothing"}), "response_format.json_schema.schema"),
        (schema_format({"$ref": "#/$defs/gone"}), "response_format.json_schema.schema"),
        (schema_format(UNIQUE, strict=True), "response_format.json_schema.schema"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(fields, param):
    with pytest.raises(BadParams) as refused:
        answer_grammar(StructuredFields.model_validate(fields).constraint(), ToolUse(), Dialect())
    assert refused.value.param == param
    assert str(refused.value).startswith(param + ":") and "\n" not in str(refused.value)


def test_what_a_lax_schema_has_beyond_the_grammar_is_passed_over():
    judge = Judge(SPECIAL[:1])
    grammar = answer_grammar(StructuredFields.model_validate(schema_format(UNIQUE)).constraint(), ToolUse(), Dialect())
    assert judge.admits(grammar, '{"a": [1, 1]}')
    assert answer_grammar(None, tool_use([tool("f", UNIQUE)], "required", None), Dialect()) is not None
    with pytest.raises(BadParams, match=r"^tools\.1\.function\.parameters: "):
        answer_grammar(None, tool_use([ADD, tool("f", UNIQUE, strict=True)], "required", None), Dialect())


@pytest.mark.parametrize("kind", [{"type": "text"}, None])
def test_plain_text_is_no_constraint(kind):
    assert StructuredFields.model_validate({"response_format": kind}).constraint() is None


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([], "required", "tool_choice"),
        ([ADD], {"type": "function", "function": {"name": "gone"}}, "tool_choice.function.name"),
        ([ADD, LOOK, ADD], "auto", "tools.2.function.name"),
    ],
)
def test_tools_that_cannot_be_chosen_are_refused_by_name(tools, choice, param):
    with pytest.raises(BadParams) as refused:
        tool_use(tools, read_choice(choice), None)
    assert refused.value.param == param


def test_with_tool_choice_none_the_model_sees_no_tools():
    assert tool_use([ADD], "none", None) == ToolUse()
    assert tool_use([ADD], None, None).for_template() == [ADD.model_dump(exclude_unset=True)]


def test_closing_a_schema_admits_less_and_touches_no_data():
    schema = {
        "type": "object",
        "properties": {"properties": {"type": "string"}, "a": {"type": "object", "properties": {"b": {}}}},
        "default": {"properties": {"x": 1}},
        "$defs": {
            "open": {"properties": {"c": {}}, "additionalProperties": True},
            "either": {"anyOf": [{"properties": {}}]},
        },
    }
    found = closed(schema)
    assert found["additionalProperties"] is False and found["properties"]["a"]["additionalProperties"] is False
    assert found["default"] == schema["default"] and found["properties"]["properties"] == {"type": "string"}
    assert found["$defs"]["open"]["additionalProperties"] is True
    assert "additionalProperties" not in found["$defs"]["either"]
    assert "additionalProperties" not in json.dumps(schema["properties"])
