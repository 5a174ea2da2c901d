"""Detokenising and stop strings: whatever the cuts, the text is that of one decode of all ids; a gateway has no torch."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers

from scheduler.errors import BadParams, SettingsError
from services.gateway.template import ChatTemplate
from services.gateway.text import Detokeniser, OutputText, StopMatcher, Tokenizer, byte_level_alphabet

TEXTS = [
    "plain words, and more of them",
    "naïve café — déjà vu",
    "日本語のテキストと你好世界",
    "😀 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽",
    "\u200d\ufe0f\u0301 mixed \u0627\u0644\u0639\u0631\u0628\u064a\u0629 ไทย",
    "replacement \ufffd itself \ufffd\ufffd",
    "tabs\tand\r\nlines\n\n  indented",
]


def sentencepiece_like() -> RustTokenizer:
    """Llama's layout: a space mark before words, bytes for what has no piece, first space stripped when decoding."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁he",
        "llo",
        "▁world",
        "日",
        "é",
    ]
    pieces += [chr(code) for code in range(0x21, 0x7F)]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = RustTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def text_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokeniser = Detokeniser(tokenizer)
    return [*(detokeniser.push(token) for token in ids), detokeniser.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_text_add_up_to_the_text_and_no_piece_holds_half_a_character(card, rust_tokenizer, text):
    pieces = text_of(Tokenizer(card.tokenizer_json), rust_tokenizer.encode(text).ids)
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


@pytest.mark.parametrize("text", TEXTS)
def test_one_byte_tokens_show_a_character_only_when_it_is_complete(card, rust_tokenizer, text):
    alphabet = {byte: character for character, byte in byte_level_alphabet().items()}
    ids = [rust_tokenizer.token_to_id(alphabet[byte]) for byte in text.encode()]
    pieces = text_of(Tokenizer(card.tokenizer_json), ids)
    assert [piece for piece in pieces if piece] == list(text)


def test_a_character_cut_off_at_the_end_is_flushed_once_and_the_rest_is_not_lost(card, rust_tokenizer):
    tokenizer = Tokenizer(card.tokenizer_json)
    alphabet = {byte: character for character, byte in byte_level_alphabet().items()}
    whole = "ab 😀".encode()
    for cut in range(1, 4):
        ids = [rust_tokenizer.token_to_id(alphabet[byte]) for byte in whole[:-cut]]
        assert "".join(text_of(tokenizer, ids)) == "ab \ufffd" == rust_tokenizer.decode(ids)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids_give_the_text_of_one_decode(rust_tokenizer, card, data):
    tokenizer = Tokenizer(card.tokenizer_json)
    size = rust_tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=40))
    assert "".join(text_of(tokenizer, ids)) == rust_tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_comes_back_from_its_ids(rust_tokenizer, card, text):
    tokenizer = Tokenizer(card.tokenizer_json)
    assert "".join(text_of(tokenizer, tokenizer.encode(text))) == text


@pytest.mark.parametrize("text", ["he", "hello world", "日本 é 😀!", "  two", "a b  c"])
def test_a_sentencepiece_tokenizer_keeps_inner_spaces_and_drops_the_first(text):
    rust = sentencepiece_like()
    tokenizer = Tokenizer(rust.to_str())
    ids = rust.encode(text, add_special_tokens=False).ids
    assert tokenizer.strips_first_space
    assert "".join(text_of(tokenizer, ids)) == rust.decode(ids) == text


def test_special_tokens_and_ids_beyond_the_table_are_no_text(card, rust_tokenizer):
    tokenizer = Tokenizer(card.tokenizer_json)
    ids = [0, *rust_tokenizer.encode("hi").ids, 1, 100_000, -3]
    assert "".join(text_of(tokenizer, ids)) == "hi"


def test_an_added_token_that_is_not_special_is_shown(rust_tokenizer):
    spec = json.loads(rust_tokenizer.to_str())
    token = {"content": "<tool x>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    spec["added_tokens"].append({"id": 5000, **token, "special": False})
    tokenizer = Tokenizer(json.dumps(spec))
    assert tokenizer.piece(tokenizer.encode("<tool x>")[0]) == b"<tool x>"


def test_a_decoder_of_another_kind_is_refused_by_name(rust_tokenizer):
    spec = json.loads(rust_tokenizer.to_str()) | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}
    with pytest.raises(SettingsError, match="WordPiece"):
        Tokenizer(json.dumps(spec))


def cut_by_hand(text: str, stops: list[str], num_passed: int = 0) -> str:
    """The obvious twin: grow the text by one character and look whether it ends with a stop string."""
    for end in range(num_passed + 1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab ", max_size=30),
    stops=st.lists(st.text(alphabet="ab ", min_size=1, max_size=5), min_size=1, max_size=4),
    seed=st.integers(0, 2**16),
)
def test_stop_strings_are_found_the_same_wherever_the_text_is_cut(text, stops, seed):
    dice, matcher, shown, start = random.Random(seed), StopMatcher(stops), "", 0
    while start < len(text) and not matcher.matched:
        width = dice.randint(1, 4)
        shown += matcher.push(text[start : start + width])
        assert not any(stop in shown for stop in stops)
        assert text.startswith(shown)
        start += width
    shown += "" if matcher.matched else matcher.flush()
    assert shown == cut_by_hand(text, stops)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab ", max_size=30),
    stops=st.lists(st.text(alphabet="ab ", min_size=1, max_size=5), min_size=1, max_size=4),
    num_passed=st.integers(0, 30),
    seed=st.integers(0, 2**16),
)
def test_a_stop_string_may_begin_but_not_end_in_text_that_is_passed_over(text, stops, num_passed, seed):
    dice, matcher, shown, start = random.Random(seed), StopMatcher(stops), "", 0
    while start < len(text) and not matcher.matched:
        end = start + dice.randint(1, 4)
        end = min(end, num_passed) if start < num_passed else end
        shown += (matcher.pass_over if start < num_passed else matcher.push)(text[start:end])
        start = end
    shown += "" if matcher.matched else matcher.flush()
    assert shown == cut_by_hand(text, stops, num_passed)


def test_text_that_cannot_begin_a_stop_string_is_not_held_back():
    matcher = StopMatcher(["STOP", "\n\n"])
    assert matcher.push("hello S") == "hello "
    assert matcher.push("T") == "" and matcher.push("ART\n") == "START"
    assert matcher.push("x") == "\nx" and matcher.flush() == ""


@pytest.mark.parametrize(
    "stop", ["ll", "lo wor", "w" + "o" * 40, "the long stop string that goes on for forty characters"]
)
@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_a_stop_string_inside_or_across_blocks_cuts_text_and_count(card, rust_tokenizer, stop, width):
    text = f"hello world {stop} and more text after it that nobody may see"
    tokenizer = Tokenizer(card.tokenizer_json)
    ids = rust_tokenizer.encode(text).ids
    output, shown = OutputText(tokenizer, [stop]), ""
    for start in range(0, len(ids), width):
        shown += output.push(ids[start : start + width])
        if output.stopped:
            break
    assert output.stopped and output.finish() == "" and shown == text[: text.index(stop)]
    end = text.index(stop) + len(stop)
    assert end <= len(rust_tokenizer.decode(ids[: output.num_tokens]))
    assert end > len(rust_tokenizer.decode(ids[: output.num_tokens - 1]))


def test_what_was_held_back_is_given_out_at_the_end(card, rust_tokenizer):
    output = OutputText(Tokenizer(card.tokenizer_json), ["STOP"])
    assert output.push(rust_tokenizer.encode("almost STO").ids) + output.finish() == "almost STO"


def test_the_template_renders_as_transformers_does():
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index0 > 5 %}{% break %}{% endif %}\n"
        "  {% if m.role == 'assistant' %}{% generation %}{{ m['content'] | trim }}{% endgeneration %}\n"
        "  {%- else %}[{{ m.role }}] {{ m.content | tojson }}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}>>{% endif %}"
    )
    messages = [
        {"role": "user", "content": '<b>é</b> & "x"'},
        {"role": "assistant", "content": "  yes "},
        {"role": "user", "content": "go"},
    ]
    rendered, _ = transformers.render_jinja_template(
        conversations=[messages], chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(messages) == rendered[0]


def test_a_template_cannot_reach_out_of_its_sandbox():
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(BadParams, match="template"):
        template.render([{"role": "user", "content": "x"}])


def test_a_template_that_does_not_compile_refuses_the_start():
    with pytest.raises(SettingsError, match=r"model\.chat_template"):
        ChatTemplate("{% for x in %}", {})


@pytest.mark.parametrize("module", ["services.gateway.app", "services.app", "services.cli"])
def test_no_edge_process_brings_in_torch(module):
    code = f"import {module}, sys; bad = {{'torch', 'transformers'}} & set(sys.modules); assert not bad, bad"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
