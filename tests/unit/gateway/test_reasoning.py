"""Thoughts are split from answers, wherever the text is cut and whoever opened the thought."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.events import Content, Event, Reasoning, joined
from services.gateway.reasoning import ReasoningSplitter, opened_by


def split(pieces: Iterable[str], *, opened: bool) -> list[Event]:
    splitter = ReasoningSplitter(opened=opened)
    events = [event for piece in pieces for event in splitter.push(piece)]
    return joined([*events, *splitter.finish()])


CASES = [
    ("<think>\nhm\n</think>\n\nHi", False, [Reasoning("hm"), Content("Hi")]),
    ("\n<think>a</think>b", False, [Reasoning("a"), Content("b")]),
    ("hm\n</think>\n\nHi", True, [Reasoning("hm"), Content("Hi")]),
    ("<think>\nhm</think>Hi", True, [Reasoning("hm"), Content("Hi")]),
    ("a < b </b> </thin> c</think> d </think>", True, [Reasoning("a < b </b> </thin> c"), Content("d </think>")]),
    ("Hi <think>no</think>", False, [Content("Hi <think>no</think>")]),
    ("Hi </think>", False, [Content("Hi </think>")]),
    ("<think></think>\n", False, []),
    ("<think>\n\n</think>\n\nHi", False, [Content("Hi")]),
    ("</think>Hi", True, [Content("Hi")]),
    ("never ends </thi", True, [Reasoning("never ends </thi")]),
    ("<think>never ends\n", False, [Reasoning("never ends")]),
    ("<thin", False, [Content("<thin")]),
    ("<thin", True, [Reasoning("<thin")]),
    ("\n \n", False, [Content("\n \n")]),
    ("\n \n", True, []),
    ("", True, []),
    ("  Hi\n", False, [Content("  Hi\n")]),
    ("思考 😀\n</think>\n<tool_call>", True, [Reasoning("思考 😀"), Content("<tool_call>")]),
]


@pytest.mark.parametrize(("text", "opened", "expected"), CASES)
def test_a_thought_is_the_same_at_every_pair_of_cuts(text, opened, expected):
    assert split(text, opened=opened) == expected
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        assert split([text[:first], text[first:second], text[second:]], opened=opened) == expected


def oracle(text: str, opened: bool) -> list[Event]:
    """The slow twin: the whole text at once."""
    space = " \t\r\n"
    start = text.lstrip(space)
    if start.startswith("<think>"):
        start, opened = start.removeprefix("<think>").lstrip(space), True
    elif not opened:
        return joined([Content(text)])
    thought, tag, answer = start.partition("</think>")
    if tag:
        return joined([Reasoning(thought.rstrip(space)), Content(answer.lstrip(space))])
    return joined([Reasoning(thought.rstrip(space))])


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "th", "ink>", " ", "\n", "a"]), max_size=12),
    st.booleans(),
)
def test_splitting_as_the_text_comes_equals_splitting_it_whole(pieces, opened):
    assert split(pieces, opened=opened) == oracle("".join(pieces), opened)


def test_a_thought_leaves_as_it_comes():
    splitter = ReasoningSplitter(opened=True)
    assert splitter.push("\nfirst ") == [Reasoning("first")]
    assert splitter.in_thought
    assert splitter.push("second") == [Reasoning(" second")]
    assert splitter.push("</think>\nHi") == [Content("Hi")]
    assert not splitter.in_thought


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|Assistant|><think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_the_prompt_says_whether_a_thought_is_open(prompt, opened):
    assert opened_by(prompt) is opened


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "th", "ink>", " ", "\n", "a"]), max_size=12),
    st.booleans(),
)
def test_the_thought_ends_with_its_closing_tag_wherever_the_text_is_cut(pieces, opened):
    """The characters of the thought, tags included, are those the whole text has up to there."""
    text, splitter = "".join(pieces), ReasoningSplitter(opened=opened)
    for piece in pieces:
        splitter.push(piece)
    splitter.finish()
    begins = opened or text.lstrip(" \t\r\n").startswith("<think>")
    end = text.find("</think>")
    expected = (None if end < 0 else end + len("</think>")) if begins else 0
    assert splitter.num_thought == expected
