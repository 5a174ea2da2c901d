"""One automaton per live request with a grammar: which tokens are allowed at every row that a step will judge.

An automaton's state is a cache. It is brought to the request's committed output at each step, whatever happened since: rejected
drafts are rolled back, and after a preemption, or in a new process, it is built anew from the grammar and the output. So the
scheduler need not know that it exists, and an automaton that is dropped too early costs time, nothing else.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from scheduler.errors import InternalFault, ServingError
from scheduler.wire import Extension, Grammar, IntArray, SamplingParams
from verifier.grammar import GrammarCompiler
from verifier.masks import Constraint, Words, has, num_words, put, tokens_of

logger = logging.getLogger(__name__)

# A request decodes in every step or nearly so; one that is not seen for so many has ended, or will be built anew.
_FORGET_AFTER = 64


@dataclass(slots=True)
class _Automaton:
    grammar: Grammar
    matcher: LLMatcher
    consumed: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    last_step: int = 0


class Automata:
    """max_live: automata kept at most, beyond those of the step under way."""

    def __init__(self, compiler: GrammarCompiler, max_live: int) -> None:
        self._compiler = compiler
        self._max_live = max_live
        self._automata: OrderedDict[str, _Automaton] = OrderedDict()
        self._step = 0

    def __len__(self) -> int:
        return len(self._automata)

    def constrain(self, extensions: Sequence[Extension]) -> tuple[dict[str, Constraint], dict[str, ServingError]]:
        """By request id: the constraints of the extensions that sample under a grammar, and why some of them cannot go on."""
        self._step += 1
        constraints: dict[str, Constraint] = {}
        failures: dict[str, ServingError] = {}
        for extension in extensions:
            if extension.params.grammar is None or not extension.samples:
                continue
            try:
                constraints[extension.request_id] = self._constrain(extension, extension.params.grammar)
            except ServingError as error:
                failures[extension.request_id] = error
            except Exception as error:
                logger.exception("a grammar failed", extra={"request_ids": (extension.request_id,)})
                failures[extension.request_id] = InternalFault(f"the grammar failed: {error}")
        self._forget(failures)
        return constraints, failures

    def _constrain(self, extension: Extension, grammar: Grammar) -> Constraint:
        automaton = self._at(extension, grammar)
        drafts = extension.token_ids[len(extension.token_ids) - extension.num_draft :].tolist()
        words = np.zeros((len(drafts) + 1, num_words(self._compiler.num_ids)), dtype=np.int32)
        for k in range(len(drafts) + 1):
            self._fill(automaton.matcher, words[k], extension.params, extension.output_index + k)
            if not words[k].any():
                reason = _why_dead(automaton.matcher)
                return Constraint(words[:k], num_judged=k, num_run=k, dead_from=k, dead_reason=reason)
            if k == len(drafts):
                break
            if not has(words[k], drafts[k]):
                return Constraint(words[: k + 1], num_judged=k + 1, num_run=k)
            if drafts[k] in extension.params.stop_ids:
                return Constraint(words[: k + 1], num_judged=k + 1, num_run=k + 1)
            _consume(automaton, np.array(drafts[k : k + 1], dtype=np.int32))
        return Constraint(words, num_judged=len(drafts), num_run=len(drafts))

    def _fill(self, matcher: LLMatcher, words: Words, params: SamplingParams, position: int) -> None:
        """Writes the tokens allowed next; none where there is none, or where the automaton has met a limit.

        Stop ids are allowed where the automaton accepts, from min_tokens on or when nothing else is left: then the grammar is
        at its end and so is the request. Elsewhere one is allowed only if its text is all that may follow.
        """
        fill_next_token_bitmask(matcher, words[None])
        if matcher.is_error():
            words[:] = 0
            return
        put(words, self._compiler.end_id, False)
        if self._compiler.unwritable:
            _drop_misspelt(matcher, words, self._compiler.unwritable)
        with_stops = words.copy()
        for stop in params.stop_ids:
            put(words, stop, False)
        accepting = matcher.is_accepting()
        if words.any() and not (accepting and position >= params.min_tokens):
            return
        if not accepting:
            words[:] = with_stops
            return
        for stop in params.stop_ids:
            put(words, stop, True)

    def _at(self, extension: Extension, grammar: Grammar) -> _Automaton:
        """The request's automaton, having consumed exactly its committed output."""
        history = extension.history_ids
        if history is None or len(history) <= extension.output_index:
            raise InternalFault("a grammar needs the history: all known tokens of the request")
        output = history[len(history) - extension.output_index :] if extension.output_index else history[:0]
        automaton = self._automata.get(extension.request_id)
        if automaton is None or automaton.grammar != grammar or not _roll_back(automaton, output):
            automaton = _Automaton(grammar, self._compiler.compile(grammar))
        self._automata[extension.request_id] = automaton
        self._automata.move_to_end(extension.request_id)
        automaton.last_step = self._step
        _consume(automaton, output[len(automaton.consumed) :])
        return automaton

    def _forget(self, failures: dict[str, ServingError]) -> None:
        for request_id in failures:
            self._automata.pop(request_id, None)
        while self._automata:
            oldest = next(iter(self._automata.values()))
            idle = self._step - oldest.last_step
            if idle == 0 or (idle < _FORGET_AFTER and len(self._automata) <= self._max_live):
                return
            self._automata.popitem(last=False)


def _drop_misspelt(matcher: LLMatcher, words: Words, unwritable: bytes) -> None:
    """Where the grammar asks for certain bytes, the library allows the tokens they are made of; for bytes that the model has no
    token for, those are others."""
    forced = matcher.compute_ff_bytes()
    if any(byte in unwritable for byte in forced):
        for token_id in tokens_of(words):
            if not matcher.validate_tokens([token_id]):
                put(words, token_id, False)


def _roll_back(automaton: _Automaton, output: IntArray) -> bool:
    """To the longest prefix of `output` that it has consumed; False when it cannot."""
    shared = min(len(automaton.consumed), len(output))
    differs = np.flatnonzero(automaton.consumed[:shared] != output[:shared])
    shared = int(differs[0]) if len(differs) else shared
    surplus = len(automaton.consumed) - shared
    if surplus and not automaton.matcher.rollback(surplus):
        return False
    automaton.consumed = automaton.consumed[:shared]
    return not automaton.matcher.is_error()


def _consume(automaton: _Automaton, token_ids: IntArray) -> None:
    if not len(token_ids):
        return
    if not automaton.matcher.consume_tokens(token_ids.tolist()):
        raise InternalFault(f"the grammar does not allow its own output: {_one_line(automaton.matcher.get_error())}")
    automaton.consumed = np.concatenate((automaton.consumed, token_ids), dtype=np.int32)


def _why_dead(matcher: LLMatcher) -> str:
    if not matcher.is_error() or "NoExtension" in matcher.get_error():
        return "the grammar has come to a point where no token of this model may follow"
    return f"the grammar is too complex to follow: {_one_line(matcher.get_error())}"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
