"""What verify rounds say about a drafter: accepted length, acceptance by position. Pure bookkeeping on finished rounds.

Symbols: N rounds, γ draft positions (0-based k). A round proposes drafts, the target accepts a prefix of them and adds one token
of its own (the bonus). The first token of an answer is no round.

* emitted: accepted drafts + 1. A stop id inside the accepted drafts ends the answer: what is up to and with it counts, and
  there is no bonus.
* proposed: drafts that were verified; those behind an accepted stop id are left out, for nobody can tell about them.
* accepted: the accepted ones among the proposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Round:
    """logits: [w] raw confidence logits of the drafts; None when the drafter has no confidence head. num_verified of the
    drafts went through the target. token_ids: the accepted drafts, then the target's own token."""

    logits: Sequence[float] | None
    num_drafted: int
    num_verified: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rounds:
    """All [N]; logits [N, γ], NaN where there is none. verified: drafts that the target ran, stop ids or not.
    answer: number of the answer that a round belongs to."""

    logits: Floats
    verified: Counts
    proposed: Counts
    accepted: Counts
    emitted: Counts
    answer: Counts

    def __len__(self) -> int:
        return len(self.emitted)

    @property
    def width(self) -> int:
        return self.logits.shape[1]

    def take(self, rows: npt.NDArray[np.bool_]) -> Rounds:
        return Rounds(
            self.logits[rows],
            self.verified[rows],
            self.proposed[rows],
            self.accepted[rows],
            self.emitted[rows],
            self.answer[rows],
        )


def tabulate(answers: Iterable[Iterable[Round]], width: int, stop_ids: Sequence[int]) -> Rounds:
    """The rounds of each answer, in any order. width: γ."""
    rows = [(number, each) for number, answer in enumerate(answers) for each in answer]
    logits = np.full((len(rows), width), np.nan)
    counts = np.zeros((len(rows), 5), dtype=np.int64)
    stops = frozenset(stop_ids)
    for row, (number, each) in enumerate(rows):
        if each.logits is not None:
            logits[row, : each.num_drafted] = each.logits
        counts[row] = (each.num_verified, *_outcome(each, stops), number)
    return Rounds(logits, *(np.ascontiguousarray(column) for column in counts.T))


def _outcome(each: Round, stops: frozenset[int]) -> tuple[int, int, int]:
    """Proposed, accepted, emitted."""
    num_accepted = len(each.token_ids) - 1
    stop = next((k for k, token in enumerate(each.token_ids[:-1]) if token in stops), None)
    if stop is None:
        return each.num_verified, num_accepted, num_accepted + 1
    return stop + 1, stop + 1, stop + 1


def joined(parts: Sequence[Rounds]) -> Rounds:
    """Several tables as one; answers are numbered on."""
    firsts = np.cumsum([0, *(int(part.answer.max(initial=-1)) + 1 for part in parts)])
    return Rounds(
        np.concatenate([part.logits for part in parts]),
        np.concatenate([part.verified for part in parts]),
        np.concatenate([part.proposed for part in parts]),
        np.concatenate([part.accepted for part in parts]),
        np.concatenate([part.emitted for part in parts]),
        np.concatenate([part.answer + first for part, first in zip(parts, firsts, strict=False)]),
    )


def accepted_length(rounds: Rounds) -> float:
    """Tokens emitted per round, the target's own one included; 1 (plain decoding) without rounds."""
    return float(rounds.emitted.sum() / len(rounds)) if len(rounds) else 1.0


def verified_per_round(rounds: Rounds) -> float:
    """Draft tokens that the target ran per round."""
    return float(rounds.verified.mean()) if len(rounds) else 0.0


def survival(rounds: Rounds) -> list[float | None]:
    """[γ] share of the rounds with draft k proposed in which drafts 0..k were all accepted (DeepSpec's accept_rate@k).
    None where no round proposed so many."""
    return [_ratio(rounds.accepted > k, rounds.proposed > k) for k in range(rounds.width)]


def conditional_acceptance(rounds: Rounds) -> list[float | None]:
    """[γ] share of accepted k among the rounds in which it was proposed and 0..k-1 were accepted (the paper's Fig. 2)."""
    return [_ratio(rounds.accepted > k, (rounds.proposed > k) & (rounds.accepted >= k)) for k in range(rounds.width)]


def _ratio(hits: npt.NDArray[np.bool_], trials: npt.NDArray[np.bool_]) -> float | None:
    return float((hits & trials).sum() / trials.sum()) if trials.any() else None
