"""The cost curve: seconds of a verify step and of a draft, measured on this machine, looked up by the planner in microseconds.

Owns: measuring through the ports, making the points monotone, interpolation, the file and when it may be trusted. Must not
know how a step is computed.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from scheduler import kernels
from scheduler.ports import ROWS_PER_REQUEST
from scheduler.wire import DrafterInfo, VerifierInfo

Seconds = npt.NDArray[np.float64]

FORMAT_VERSION = 2
_DENSE_TOKENS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
# Beyond those, on devices that run the last of them in no more than this; on others it takes too long, and only prompts get
# there.
_FAR_TOKENS = (384, 512, 768, 1024, 1536, 2048, 4096)
_FAR_WITHIN_S = 0.05
_SPARSE_TOKENS = (1, 8, 32, 128)
_SPOT_TOKENS = (1, 16, 64)
_SPOT_REQUESTS = (1, 8)
_SPOT_FACTOR = 1.5
# A draft is short, and is timed so often that less of a difference is no noise.
_SPOT_DRAFT_FACTOR = 1.3
_CONTEXTS = (256, 1024, 4096)
_KV_REQUESTS = 16
_REQUESTS = (1, 2, 4, 8, 16, 32)
_WIDTHS = (1, 2, 4)
_LARGEST = 1 << 20  # of any axis: tables are dense
_AS_MEASURED: Seconds = np.ones(1)


class CurveRejected(Exception):
    """The file is not a curve for this machine, model or version; the message says what differs."""


@dataclass(frozen=True, slots=True)
class CurvePoints:
    """What was measured. verify_s: [contexts][tokens], with a request for every 8 tokens; draft_s: [requests][widths]; all axes
    ascending. kv_token_s: how much longer a step takes for each cached token that one more request of as many tokens reads.

    Without a drafter the draft axes are empty.
    """

    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    verify_s: tuple[tuple[float, ...], ...]
    requests: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    draft_s: tuple[tuple[float, ...], ...] = ()
    kv_token_s: float = 0.0


class CostCurve:
    """Dense tables over the points. Verify seconds never fall with more tokens or more context, draft seconds never with more
    requests or width: noise must not make a token look cheaper than free."""

    def __init__(self, points: CurvePoints, measured_at: float, *, from_file: bool = False) -> None:
        """measured_at: wall clock, seconds since 1970."""
        self.points = points
        self.measured_at = measured_at
        self.from_file = from_file
        self._contexts = np.asarray(points.contexts, dtype=np.float64)
        rows = _monotone_grid(np.asarray(points.verify_s, dtype=np.float64))
        self._max_tokens = points.tokens[-1]
        every = np.arange(self._max_tokens + 1)
        self._verify = np.stack([np.interp(every, points.tokens, row) for row in rows])
        self._slope = _tail_slope(np.asarray(points.tokens), rows)
        self._draft = _dense_draft(points)
        self._tables = kernels.Held(self._verify, self._contexts, self._slope)

    def verify_seconds(
        self,
        first: int,
        count: int,
        context_len: float,
        kv_tokens: float | None = None,
        *,
        factors: Seconds = _AS_MEASURED,
    ) -> Seconds:
        """[count] seconds of a verify step of first, first + 1, ... tokens that have `context_len` tokens before them.

        kv_tokens: cached tokens that the step reads, once per request; None: as many as there were when it was measured. Sixteen
        requests with a token each read eight times as much as two with eight, and drafts read nothing more. factors: on the
        seconds of 0, 1, 2 ... tokens, the last on those of all more.
        """
        if (native := kernels.load()) is not None and count > 0:
            known = np.empty(count)
            native.dspark_seconds(
                *self._tables,
                len(self._contexts),
                self._max_tokens,
                self.points.kv_token_s,
                context_len,
                math.nan if kv_tokens is None else kv_tokens,
                ROWS_PER_REQUEST,
                kernels.doubles(factors),
                len(factors),
                first,
                count,
                kernels.doubles(known),
            )
            return known
        seconds = self._corrected(first, count, context_len, kv_tokens)
        scaled: Seconds = np.maximum.accumulate(
            seconds * factors[np.minimum(np.arange(first, first + count), len(factors) - 1)]
        )
        return scaled

    def _corrected(self, first: int, count: int, context_len: float, kv_tokens: float | None) -> Seconds:
        seconds = self._measured(first, count, context_len)
        if kv_tokens is None or self.points.kv_token_s == 0.0:
            return seconds
        requests = np.maximum(1.0, np.arange(first, first + count) / ROWS_PER_REQUEST)
        more = self.points.kv_token_s * (kv_tokens - requests * max(context_len, self._contexts[0]))
        corrected: Seconds = np.maximum.accumulate(np.maximum(seconds + more, self._verify[0, 1]))
        return corrected

    def _measured(self, first: int, count: int, context_len: float) -> Seconds:
        low, weight = self._locate(context_len)
        known = max(0, min(first + count, self._max_tokens + 1) - first)
        seconds = _mix(self._verify[:, first : first + known], low, weight)
        if known == count:
            return seconds
        beyond = np.arange(max(first, self._max_tokens + 1), first + count) - self._max_tokens
        tail = _mix(self._verify[:, -1:], low, weight) + _mix(self._slope[:, None], low, weight) * beyond
        return np.concatenate((seconds, tail))

    def draft_seconds(self, num_requests: int, width: int) -> float:
        """Seconds of one propose; 0 for nobody or nothing, and when no drafter was measured."""
        return float(self.draft_table(num_requests, width)[num_requests, width])

    def draft_table(self, num_requests: int, width: int) -> Seconds:
        """[> num_requests, > width] the same for all sizes up to these."""
        have_requests, have_width = self._draft.shape
        if num_requests >= have_requests or width >= have_width:
            self._draft = _widened(self._draft, num_requests, width)
        return self._draft

    def _locate(self, context_len: float) -> tuple[int, float]:
        """Index of the measured context below, and how far beyond it in intervals (above 1 past the last)."""
        if len(self._contexts) == 1 or context_len <= self._contexts[0]:
            return 0, 0.0
        low = min(int(np.searchsorted(self._contexts, context_len)) - 1, len(self._contexts) - 2)
        gap = self._contexts[low + 1] - self._contexts[low]
        return low, float((context_len - self._contexts[low]) / gap)


class Timed(Protocol):
    """What can be measured: a worker's port, or how one waits for it."""

    async def measure(self, rows: Sequence[int], columns: Sequence[int], /) -> list[list[float]]: ...


class TimedVerifier(Protocol):
    """The same; a third argument says how many of a step's tokens are one request's."""

    async def measure(
        self, num_tokens: Sequence[int], context_lens: Sequence[int], rows_per_request: int = ROWS_PER_REQUEST, /
    ) -> list[list[float]]: ...


async def measure_curve(
    verifier: TimedVerifier,
    drafter: Timed | None,
    *,
    verifier_info: VerifierInfo,
    drafter_info: DrafterInfo | None,
    max_live: int,
    max_step_tokens: int,
) -> CostCurve:
    """Times real steps through the ports, a few seconds' worth. max_step_tokens: sizes above it are not measured."""
    tokens = _sizes(_DENSE_TOKENS, max_step_tokens)
    sparse = [n for n in _SPARSE_TOKENS if n <= tokens[-1]]
    contexts = [c for c in _CONTEXTS if c < verifier_info.max_model_len] or [max(1, verifier_info.max_model_len // 2)]
    dense_s = await verifier.measure(tokens, contexts[:1])
    if dense_s[0][-1] <= _FAR_WITHIN_S and (far := [n for n in _FAR_TOKENS if tokens[-1] < n <= max_step_tokens]):
        far_s = await verifier.measure(far, contexts[:1])
        tokens, dense_s = [*tokens, *far], [[*dense_s[0], *far_s[0]]]
    sparse_s = await verifier.measure(sparse, contexts[1:]) if len(contexts) > 1 else []
    sparse_base = np.interp(sparse, tokens, dense_s[0])
    rows = [np.asarray(dense_s[0])]
    # Other contexts are timed at few sizes: what context adds is smooth in the number of tokens, and never negative.
    rows += [rows[0] + np.interp(tokens, sparse, np.asarray(row) - sparse_base).clip(min=0.0) for row in sparse_s]
    kv_token_s = await _kv_token_seconds(verifier, min(_KV_REQUESTS, max_live, max_step_tokens), contexts[0])
    requests: list[int] = []
    widths: list[int] = []
    draft_s: list[list[float]] = []
    if drafter is not None and drafter_info is not None:
        requests = _sizes(_REQUESTS, max_live)
        fewer = [w for w in _WIDTHS if drafter_info.variable_width and w < drafter_info.width]
        widths = [*fewer, drafter_info.width]
        draft_s = await drafter.measure(requests, widths)
    points = CurvePoints(
        tokens=tuple(tokens),
        contexts=tuple(contexts),
        verify_s=_nested(rows),
        requests=tuple(requests),
        widths=tuple(widths),
        draft_s=_nested(draft_s),
        kv_token_s=kv_token_s,
    )
    check_points(points, width=drafter_info.width if drafter_info else 0)
    return CostCurve(points, time.time())


async def _kv_token_seconds(verifier: TimedVerifier, num_requests: int, context_len: int) -> float:
    """From steps of as many tokens in many requests and in few; never negative, whatever the noise."""
    few = -(-num_requests // ROWS_PER_REQUEST)
    if num_requests == few:
        return 0.0
    ((apart,),) = await verifier.measure([num_requests], [context_len], 1)
    ((together,),) = await verifier.measure([num_requests], [context_len], ROWS_PER_REQUEST)
    return max(0.0, apart - together) / ((num_requests - few) * context_len)


async def still_holds(curve: CostCurve, verifier: TimedVerifier, drafter: Timed | None) -> bool:
    """Whether a saved curve agrees with a few steps and drafts timed now: a machine may have been busy then, or be another now,
    and so may the code that computes."""
    context_len = curve.points.contexts[0]
    tokens = [n for n in _SPOT_TOKENS if n <= curve.points.tokens[-1]]
    (seconds,) = await verifier.measure(tokens, [context_len])
    saved = np.array([curve.verify_seconds(n, 1, context_len)[0] for n in tokens])
    if not _agree(seconds, saved, _SPOT_FACTOR):
        return False
    if drafter is None or not curve.points.draft_s:
        return True
    width = curve.points.widths[-1]
    requests = [n for n in _SPOT_REQUESTS if n <= curve.points.requests[-1]]
    drafts_s = [row[0] for row in await drafter.measure(requests, [width])]
    return _agree(drafts_s, np.array([curve.draft_seconds(n, width) for n in requests]), _SPOT_DRAFT_FACTOR)


def _agree(seconds: Sequence[float], saved: Seconds, factor: float) -> bool:
    ratios = np.asarray(seconds) / saved
    return bool(np.all((ratios > 1 / factor) & (ratios < factor)))


def check_points(points: CurvePoints, *, width: int) -> None:
    """Raises CurveRejected when the points cannot be a curve of a drafter that drafts up to `width` tokens."""
    axes = {"tokens": points.tokens, "contexts": points.contexts}
    tables = {"verify_s": (points.verify_s, len(points.contexts), len(points.tokens))}
    if width:
        axes |= {"requests": points.requests, "widths": points.widths}
        tables["draft_s"] = (points.draft_s, len(points.requests), len(points.widths))
    for name, axis in axes.items():
        if not axis or axis[0] < 1 or any(b <= a for a, b in itertools.pairwise(axis)):
            raise CurveRejected(f"{name} must be positive and ascending, not {list(axis)}")
        if axis[-1] > _LARGEST:
            raise CurveRejected(f"{name} reach up to {axis[-1]}, which nobody measures")
    for name, (table, num_rows, num_columns) in tables.items():
        if len(table) != num_rows or any(len(row) != num_columns for row in table):
            raise CurveRejected(f"{name} is not {num_rows} rows of {num_columns}")
        if not all(np.isfinite(seconds) and seconds > 0 for row in table for seconds in row):
            raise CurveRejected(f"{name} holds a time that is not positive")
    if not 0.0 <= points.kv_token_s < np.inf:
        raise CurveRejected("kv_token_s is not a time")
    if width and points.widths[-1] < width:
        raise CurveRejected(f"drafts were measured up to width {points.widths[-1]} and the drafter drafts {width}")


def save_curve(path: str | os.PathLike[str], curve: CostCurve, key: Mapping[str, str]) -> None:
    """Writes the points whole or not at all."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "version": FORMAT_VERSION,
        "key": dict(key),
        "measured_at": curve.measured_at,
        "points": asdict(curve.points),
    }
    scratch = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(json.dumps(document, indent=1))
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def load_curve(path: str | os.PathLike[str], key: Mapping[str, str], *, width: int) -> CostCurve:
    """The saved curve; raises CurveRejected when there is none, or it is another machine's, model's or version's."""
    try:
        document = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise CurveRejected("no curve has been saved yet") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CurveRejected(f"the file cannot be read: {error}") from None
    try:
        _check_key(document, key)
        points = _points(document["points"])
        check_points(points, width=width)
        measured_at = float(document["measured_at"])
        if not np.isfinite(measured_at):
            raise CurveRejected("measured_at is no time")
        return CostCurve(points, measured_at, from_file=True)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CurveRejected(f"the file is not a curve: {type(error).__name__} {error}") from None


def isotonic(values: Seconds) -> Seconds:
    """The nondecreasing sequence nearest to `values` in squares: an outlier moves its neighbours a little, not all above it."""
    means: list[float] = []
    counts: list[int] = []
    for value in values:
        means.append(float(value))
        counts.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            total = counts[-2] + counts[-1]
            means[-2] = (means[-2] * counts[-2] + means[-1] * counts[-1]) / total
            counts[-2] = total
            del means[-1], counts[-1]
    return np.repeat(means, counts)


def _check_key(document: Mapping[str, object], key: Mapping[str, str]) -> None:
    if document["version"] != FORMAT_VERSION:
        raise CurveRejected(f"the file has format {document['version']}, not {FORMAT_VERSION}")
    saved = document["key"]
    if not isinstance(saved, dict):
        raise CurveRejected("the file has no key")
    for name in sorted({*saved, *key}):
        if saved.get(name) != key.get(name):
            raise CurveRejected(f"it was measured with {name} {saved.get(name)!r}, and this is {key.get(name)!r}")


def _points(raw: Mapping[str, Sequence[object]]) -> CurvePoints:
    def ints(name: str) -> tuple[int, ...]:
        return tuple(int(x) for x in raw[name])  # type: ignore[call-overload]

    return CurvePoints(
        tokens=ints("tokens"),
        contexts=ints("contexts"),
        verify_s=_nested(raw["verify_s"]),
        requests=ints("requests"),
        widths=ints("widths"),
        draft_s=_nested(raw["draft_s"]),
        kv_token_s=float(raw["kv_token_s"]),  # type: ignore[arg-type]
    )


def _nested(rows: Sequence[object]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(seconds) for seconds in row) for row in rows)  # type: ignore[attr-defined]


def _sizes(candidates: Sequence[int], limit: int) -> list[int]:
    """The candidates below `limit`, then the limit itself or, past the largest candidate, that one."""
    below = [n for n in candidates if n < limit]
    return [*below, limit] if limit <= candidates[-1] else below


def _monotone_grid(table: Seconds) -> Seconds:
    """Nondecreasing along both axes."""
    rows = np.stack([isotonic(row) for row in table])
    return np.maximum.accumulate(rows, axis=0)


def _tail_slope(tokens: npt.NDArray[np.int64], rows: Seconds) -> Seconds:
    """[contexts] seconds per token beyond the last size, over the upper half so that one noisy pair does not decide."""
    if len(tokens) == 1:
        return rows[:, 0] / tokens[0]
    middle = len(tokens) // 2 if len(tokens) > 2 else 0
    return (rows[:, -1] - rows[:, middle]) / (tokens[-1] - tokens[middle])


def _dense_draft(points: CurvePoints) -> Seconds:
    """[requests + 1, widths + 1], row 0 and column 0 zero; a width below the smallest measured costs as much as that."""
    if not points.draft_s:
        return np.zeros((1, 1))
    grid = _monotone_grid(np.asarray(points.draft_s, dtype=np.float64))
    by_width = np.stack([np.interp(np.arange(1, points.widths[-1] + 1), points.widths, row) for row in grid])
    requests = np.arange(1, points.requests[-1] + 1)
    dense = np.stack([np.interp(requests, points.requests, column) for column in by_width.T], axis=1)
    return np.pad(dense, ((1, 0), (1, 0)))


def _widened(draft: Seconds, num_requests: int, width: int) -> Seconds:
    """`draft` extended to more requests by the mean cost of one, and to more widths by repeating the last."""
    have_requests, have_width = draft.shape
    draft = np.pad(draft, ((0, 0), (0, max(0, width + 1 - have_width))), mode="edge")
    more = np.arange(have_requests, num_requests + 1)
    per_request = draft[-1] / max(1, have_requests - 1)
    return np.concatenate((draft, draft[-1] + per_request * (more - have_requests + 1)[:, None]))


def _mix(rows: Seconds, low: int, weight: float) -> Seconds:
    if weight == 0.0:
        return rows[low]
    return rows[low] + weight * (rows[low + 1] - rows[low])
