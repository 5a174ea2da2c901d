"""The engine's grammar for one answer: the client's constraint, the tool calls that must or may come, a thought before.

Text is Lark as llguidance reads it; the verifier compiles it again with its tokenizer. `llguidance` checks it here, so that a
schema, an expression or a grammar that cannot be enforced is refused with its name before anything runs.
"""

from __future__ import annotations

from functools import lru_cache

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from scheduler.errors import BadParams
from scheduler.wire import Grammar
from services.gateway.call_grammar import CallRules
from services.gateway.dialect import Dialect
from services.gateway.reasoning import CLOSE, OPEN, opened_by
from services.gateway.structured import Constraint, quoted
from services.gateway.tools import ToolUse

MAX_CHARS = 256 * 1024
_ANY = "ANY: /(?s:.*)/"
# How the thought stands to the answer: there is none, the prompt opened it, or the model may.
NO_THOUGHT, OPENED, MAY_THINK = "none", "opened", "may"


def thought_after(dialect: Dialect, prompt: str) -> str:
    """How an answer to `prompt`, of which the end is enough, stands to a thought."""
    if not dialect.thinks or prompt.rstrip().endswith(CLOSE):
        return NO_THOUGHT
    return OPENED if opened_by(prompt) else MAY_THINK


def answer_grammar(
    constraint: Constraint | None, use: ToolUse, dialect: Dialect, *, thought: str = NO_THOUGHT
) -> Grammar | None:
    """None leaves the text to the model. Raises BadParams with the field that cannot be enforced."""
    if constraint is None and not use.constrains:
        return None
    if constraint is not None:
        constraint = _checked(constraint)
    if constraint is not None and not use.callable and thought == NO_THOUGHT:
        return Grammar(constraint.kind, constraint.text)
    rules = _Rules(dialect)
    answer = rules.answer(constraint, use)
    start = f"start: {rules.thought(thought)} answer\nanswer: {answer}\n"
    grammar = Grammar("ebnf", start + "\n".join(rules.lines) + "\n")
    _check(grammar, "tools" if use.callable else (constraint.param if constraint else "response_format"))
    return grammar


def _checked(constraint: Constraint) -> Constraint:
    if constraint.kind == "ebnf":
        try:
            constraint = Constraint("ebnf", any_to_lark(constraint.text), constraint.param)
        except Exception as error:
            # The converter raises what its parser trips over, KeyError and IndexError among it.
            raise BadParams(f"{constraint.param}: not a grammar: {error}", constraint.param) from None
    _check(Grammar(constraint.kind, constraint.text), constraint.param)
    return constraint


def _check(grammar: Grammar, param: str) -> None:
    if len(grammar.text) > MAX_CHARS:
        raise BadParams(f"{param}: {len(grammar.text)} characters of grammar are more than {MAX_CHARS}", param)
    problem = _problem(grammar)
    if problem:
        raise BadParams(f"{param}: {problem}", param)


@lru_cache(maxsize=64)
def _problem(grammar: Grammar) -> str:
    """Why a grammar cannot be enforced; empty when it can."""
    try:
        match grammar.kind:
            case "json_schema":
                spec = LLMatcher.grammar_from_json_schema(grammar.text)
            case "regex":
                spec = LLMatcher.grammar_from_regex(grammar.text)
            case _:
                spec = LLMatcher.grammar_from_lark(grammar.text)
        return " ".join(LLMatcher.validate_grammar(spec, None).split())[:400]
    except ValueError as error:
        return " ".join(str(error).split())[:400]


class _Rules:
    """Collects the rules under `start`; methods return right-hand sides."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self.lines: list[str] = [_ANY]

    def thought(self, kind: str) -> str:
        if kind == NO_THOUGHT:
            return ""
        self.lines.append(f"thought: {self._until(CLOSE, 'thought_end')} /[ \\t\\r\\n]*/")
        return "thought" if kind == OPENED else f"({self._tag(OPEN)} thought)?"

    def answer(self, constraint: Constraint | None, use: ToolUse) -> str:
        content = self._content(constraint) if constraint is not None else None
        if not use.callable:
            assert content is not None
            return content
        if use.required:
            return self._calls(use)
        if content is not None:
            return f"{content} | {self._calls(use)}"
        return self._text_and_calls(use)

    def _content(self, constraint: Constraint) -> str:
        match constraint.kind:
            case "regex":
                return f"/{regex_to_lark(constraint.text)}/"
            case "ebnf":
                return "%lark {\n" + constraint.text + "\n}"
        return f"%json {constraint.text}"

    def _tag(self, text: str) -> str:
        """A tag: as a special token where it is one, else as characters. Only names in angle brackets can be written out."""
        number = self._dialect.special.get(text)
        if number is None:
            return quoted(text)
        return text if text.startswith("<") and text.endswith(">") else f"<[{number}]>"

    def _until(self, tag: str, rule: str) -> str:
        """Any text up to and with the first `tag`."""
        if tag in self._dialect.special:
            return f"ANY {self._tag(tag)}"
        self.lines.append(f"{rule}[lazy]: /(?s:.*){_pattern(tag)}/")
        return rule

    def _call(self, use: ToolUse) -> str:
        """One call, without what stands around it."""
        rules = CallRules(self._dialect.calls, self.lines, self._tag, _check_schema)
        for index, tool in enumerate(use.callable):
            param = f"tools.{use.tools.index(tool)}.function.parameters"
            self.lines.append(f"call_{index}: {rules.call(tool, param)}")
        self.lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(use.callable))))
        return "call"

    def _group(self, use: ToolUse) -> str:
        """What follows the opening tag: one call, or several where only the call repeats."""
        frame, call = self._dialect.frame, self._call(use)
        several = use.parallel and not frame.repeats_tags
        calls = f"{call} ({quoted(frame.between)} {call})*" if several else call
        closer = self._tag(frame.closer) if frame.closer else ""
        return f"{_literal(frame.head)} {calls} {_literal(frame.tail)} {closer}"

    def _calls(self, use: ToolUse) -> str:
        """One call or, in parallel, several, and nothing else."""
        frame = self._dialect.frame
        if not frame.opener:
            return self._group(use)
        block = f"{self._tag(frame.opener)} {self._group(use)}"
        return f"{block} ({_literal(frame.between)} {block})*" if use.parallel and frame.repeats_tags else block

    def _text_and_calls(self, use: ToolUse) -> str:
        """What the model wants to say, and calls where it wants to call."""
        frame = self._dialect.frame
        if not frame.opener:
            # A bare call begins the answer, so a text must begin otherwise.
            self.lines.append(f"PLAIN: /([^{frame.first} \\t\\r\\n](?s:.*))?/")
            return f"PLAIN | {self._group(use)}"
        called = f"{self._until(frame.opener, 'opening')} {self._group(use)}"
        return f"({called})* ANY" if use.parallel and frame.repeats_tags else f"ANY | {called}"


def _pattern(tag: str) -> str:
    return "".join(f"\\{char}" if char in "/|[]" else char for char in tag)


def _literal(text: str) -> str:
    return quoted(text) if text else ""


def _check_schema(text: str, param: str) -> None:
    _check(Grammar("json_schema", text), param)
