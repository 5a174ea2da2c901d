"""How a model writes calls and thoughts is read off what its chat template and tokenizer hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from services.gateway.dialect import Dialect, dialect_of

# What marks the templates of each family.
QWEN3 = "{%- if tools %}<tools>{{ tool | tojson }}</tools> <tool_call></tool_call>{% endif %}{{ m.tool_calls }}<think></think>"
QWEN25 = "{%- if tools %}<tools>{{ tool | tojson }}</tools> <tool_call></tool_call>{% endif %}{{ m.tool_calls }}"
QWEN3_CODER = (
    "{%- if tools %}<tool_call><function=name><parameter=x></function></tool_call>{% endif %}{{ m.tool_calls }}"
)
LLAMA31 = '{%- if tools is not none %}{"name": f, "parameters": d} <|python_tag|> ipython{% endif %}{{ m.tool_calls }}'
LLAMA32 = '{%- if tools is not none %}{"name": f, "parameters": d} ipython{% endif %}{{ m.tool_calls }}'
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}{% endif %}[TOOL_CALLS]{{ m.tool_calls }}"
R1 = "{{ m.content.split('</think>')[-1] }}<think>\n"
SMOL = "{{ m.content }}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN3, Dialect("hermes", native_tools=True, native_calls=True, thinks=True)),
        (QWEN25, Dialect("hermes", native_tools=True, native_calls=True)),
        (QWEN3_CODER, Dialect("hermes", native_tools=False, native_calls=True)),
        (LLAMA31, Dialect("llama3_json", native_tools=True, native_calls=True)),
        (LLAMA32, Dialect("llama3_json", native_tools=True, native_calls=True)),
        (MISTRAL, Dialect("hermes", native_tools=False, native_calls=True)),
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


def test_the_tokenizer_tells_of_thoughts_and_of_tags_that_are_special(card, rust_tokenizer):
    tokenizer = RustTokenizer.from_str(rust_tokenizer.to_str())
    tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in ("</tool_call>", "<|python_tag|>")])
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in ("<think>", "</think>")])
    found = dialect_of(replace(card, tokenizer_json=tokenizer.to_str()))
    assert found.thinks and found.special == {"</tool_call>": tokenizer.token_to_id("</tool_call>")}
    assert found.shown_ids == {tokenizer.token_to_id("</tool_call>")}
