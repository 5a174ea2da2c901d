"""What a prompt's text is like: code, math or chat. A hint for estimates of acceptance and for metrics, not a judgement:
marks and a few words are counted in the text that stands nearest to the answer."""

from __future__ import annotations

import re

_TAIL_CHARS = 2000
_MATH_MARKS = re.compile(r"[0-9]+|[+*/=^%<>√∑∫π≤≥]|\\(?:frac|sum|int|sqrt)")
_CODE_MARKS = re.compile(
    r"[{}\[\];_`]|\w\(|\)\.|=>|->|==|!=|::|//|#include|^\s*(?:def|class|import|return|for|if)\b", re.M
)
_CODE_WORDS = re.compile(
    r"\b(?:python|javascript|typescript|java|c\+\+|rust|golang|sql|bash|regex|code|program|script|function|method|class|"
    r"compile|debug|refactor|json|html|css|api)\b",
    re.I,
)
_MATH_WORDS = re.compile(
    r"\b(?:solve|equations?|calculat\w*|comput\w*|sum|product|how many|how much|how long|percent|average|area|perimeter|"
    r"probabilit\w*|integers?|proof|prove|derivative|integral|triangles?|speed)\b",
    re.I,
)
_WORD_WEIGHT = 3.0
_ENOUGH = 2.5


def text_class(text: str) -> str:
    """`code`, `math` or `chat`; empty for no text. Marks count per hundred characters: long prose with a few numbers in it
    is still prose."""
    tail = text[-_TAIL_CHARS:]
    if not tail.strip():
        return ""
    scale = 100 / max(100, len(tail))
    code = scale * len(_CODE_MARKS.findall(tail)) + _words(_CODE_WORDS, tail, scale)
    math = scale * len(_MATH_MARKS.findall(tail)) + _words(_MATH_WORDS, tail, scale)
    if max(code, math) < _ENOUGH:
        return "chat"
    return "code" if code >= math else "math"


def _words(words: re.Pattern[str], text: str, scale: float) -> float:
    return _WORD_WEIGHT * len(set(map(str.lower, words.findall(text)))) * max(scale, 0.5)
