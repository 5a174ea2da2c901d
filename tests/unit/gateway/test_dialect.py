"""How a model writes calls and thoughts is read off what its chat template and tokenizer hold."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from scheduler.errors import SettingsError
from services.gateway.call_grammar import FRAMES
from services.gateway.dialect import Dialect, dialect_of
from services.gateway.events import CallArguments, CallStart, joined
from services.gateway.tool_parsers.call_object import CallRules
from services.gateway.tool_prompt import calls_as_text, with_tools
from services.settings import load_settings

# What marks the templates of each family.
QWEN3 = "{%- if tools %}<tools>{{ tool | tojson }}</tools> <tool_call></tool_call>{% endif %}{{ m.tool_calls }}<think></think>"
QWEN25 = "{%- if tools %}<tools>{{ tool | tojson }}</tools> <tool_call></tool_call>{% endif %}{{ m.tool_calls }}"
QWEN3_CODER = (
    "{%- if tools %}<tool_call><function=name><parameter=x></function></tool_call>{% endif %}{{ m.tool_calls }}"
)
LLAMA31 = '{%- if tools is not none %}{"name": f, "parameters": d} <|python_tag|> ipython{% endif %}{{ m.tool_calls }}'
LLAMA32 = '{%- if tools is not none %}{"name": f, "parameters": d} ipython{% endif %}{{ m.tool_calls }}'
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}{% endif %}[TOOL_CALLS]{{ m.tool_calls }}"
MISTRAL_ARGS = "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}{% endif %}[TOOL_CALLS]{{ m.tool_calls }}[ARGS]"
LLAMA4 = "{% if tools %}[func_name1(params_name1=params_value1)] <|python_tag|>{% endif %}{{ m.tool_calls }}"
UNKNOWN = "{% if tools %}<｜tool▁calls▁begin｜>{{ tools }}{% endif %}{{ m.tool_calls }}"
R1 = "{{ m.content.split('</think>')[-1] }}<think>\n"
SMOL = "{{ m.content }}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN3, Dialect("hermes", native_tools=True, native_calls=True, thinks=True)),
        (QWEN25, Dialect("hermes", native_tools=True, native_calls=True)),
        (QWEN3_CODER, Dialect("qwen3_coder", native_tools=True, native_calls=True)),
        (LLAMA31, Dialect("llama3_json", native_tools=True, native_calls=True)),
        (LLAMA32, Dialect("llama3_json", native_tools=True, native_calls=True)),
        (LLAMA4, Dialect("pythonic", native_tools=True, native_calls=True)),
        (MISTRAL, Dialect("mistral", native_tools=True, native_calls=True)),
        (MISTRAL_ARGS, Dialect("mistral_args", native_tools=True, native_calls=True)),
        (UNKNOWN, Dialect("hermes", native_tools=False, native_calls=True)),
        (R1, Dialect("hermes", thinks=True)),
        (SMOL, Dialect("hermes")),
    ],
)
def test_the_template_tells(card, template, expected):
    assert dialect_of(replace(card, chat_template=template)) == expected


def test_settings_overrule_the_template(card):
    forced = dialect_of(replace(card, chat_template=QWEN3), tool_format="llama3_json", reasoning="off")
    assert forced == Dialect("llama3_json", native_tools=False, native_calls=True, thinks=False)
    assert dialect_of(card, reasoning="think").thinks


def test_a_format_that_is_set_is_what_a_template_we_cannot_read_is_taken_for(card):
    forced = dialect_of(replace(card, chat_template=UNKNOWN), tool_format="pythonic")
    assert forced == Dialect("pythonic", native_tools=True, native_calls=True)
    assert not dialect_of(replace(card, chat_template=SMOL), tool_format="pythonic").native_tools


@pytest.mark.parametrize("family", sorted(FRAMES))
def test_every_format_can_be_set_and_no_other(card, family):
    assert load_settings(flags={"gateway": {"tool_format": family}}).gateway.tool_format == family
    assert dialect_of(card, tool_format=family).calls == family
    with pytest.raises(SettingsError, match=r"gateway\.tool_format.*'qwen3_coder'"):
        load_settings(flags={"gateway": {"tool_format": family + "x"}})


@pytest.mark.parametrize("family", sorted(FRAMES))
def test_calls_told_as_text_are_read_back_as_they_were(family):
    """What our own words show the model for earlier calls is what the parser takes for calls."""
    given = {"city": "Köln 'x' \"y\"\n\\", "days": 3, "deep": {"a": [1.5, None, True]}}
    calls = [{"function": {"name": "f", "arguments": given}}, {"function": {"name": "g", "arguments": {}}}]
    (told,) = calls_as_text([{"role": "assistant", "content": "", "tool_calls": calls}], family)
    schemas = {"f": {"properties": {"city": {"type": "string"}}}}
    rules = CallRules(lambda: "id", frozenset({"f", "g"}), schemas=schemas)
    parser = Dialect(family).call_parser(rules)
    events = joined([*parser.push(told["content"]), *parser.finish()])
    starts = [event.name for event in events if isinstance(event, CallStart)]
    said = [json.loads(event.text) for event in events if isinstance(event, CallArguments)]
    assert starts == ["f", "g"] and said == [given, {}] and len(events) == 4
    (shown,) = with_tools([{"role": "system", "content": "Hi"}], [{"name": "f"}], family)
    assert shown["content"].startswith("Hi\n\n# Tools") and all(
        tag in shown["content"] for tag in required_tags(family)
    )


def required_tags(family: str) -> list[str]:
    frame = FRAMES[family]
    return [tag for tag in (frame.opener, frame.closer) if tag]


def test_the_tokenizer_tells_of_thoughts_and_of_tags_that_are_special(card, rust_tokenizer):
    tokenizer = RustTokenizer.from_str(rust_tokenizer.to_str())
    tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in ("</tool_call>", "<|python_tag|>")])
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in ("<think>", "</think>")])
    found = dialect_of(replace(card, tokenizer_json=tokenizer.to_str()))
    assert found.thinks and found.special == {"</tool_call>": tokenizer.token_to_id("</tool_call>")}
    assert found.shown_ids == {tokenizer.token_to_id("</tool_call>")}
