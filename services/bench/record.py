"""Records what a real engine's rounds looked like, for the simulator: confidences, how many were verified and accepted.

Sits between the scheduler and its workers as a pair of ports; changes nothing that passes through.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from scheduler.ports import ROWS_PER_REQUEST, Drafter, Features, Verifier
from scheduler.wire import Draft, DraftAsk, DrafterInfo, Grammar, Plan, Verdict, VerifierInfo
from services.engine import Launch, Workers
from services.settings import Settings
from services.whole_file import write_whole


class Tape:
    """Rounds by request, in the form that scheduler.simulate_traces reads. `kind`: of the requests that begin from now on."""

    def __init__(self) -> None:
        self.kind = ""
        self._requests: dict[str, dict[str, Any]] = {}
        self._drafts: dict[str, Draft] = {}

    def drafted(self, drafts: Sequence[Draft]) -> None:
        self._drafts = {draft.request_id: draft for draft in drafts}

    def verified(self, plan: Plan, verdicts: Sequence[Verdict]) -> None:
        for extension, verdict in zip(plan.extensions, verdicts, strict=True):
            draft = self._drafts.get(extension.request_id)
            if draft is None or not len(draft.token_ids) or not extension.samples:
                continue
            confidence = draft.confidence if draft.confidence is not None else np.full(len(draft.token_ids), np.nan)
            request = self._requests.setdefault(
                extension.request_id,
                {"kind": self.kind, "prompt": extension.start + 1 - extension.output_index, "rounds": []},
            )
            request["rounds"].append(
                {
                    "confidence": [round(float(c), 4) for c in confidence],
                    "verified": extension.num_draft,
                    "accepted": verdict.num_accepted,
                }
            )
        self._drafts = {}

    def write(self, path: str) -> int:
        """One request a line; returns how many."""
        lines = [json.dumps(request) for request in self._requests.values()]
        write_whole(path, "".join(line + "\n" for line in lines))
        return len(lines)


class Watcher(Protocol):
    def drafted(self, drafts: Sequence[Draft]) -> None: ...

    def verified(self, plan: Plan, verdicts: Sequence[Verdict]) -> None: ...


def recording(launch: Launch, watchers: Sequence[Watcher]) -> Launch:
    """`launch`, its workers watched."""

    async def launched(settings: Settings) -> Workers:
        workers = await launch(settings)
        drafter = WatchedDrafter(workers.drafter, watchers) if workers.drafter is not None else None
        return dataclasses.replace(workers, verifier=WatchedVerifier(workers.verifier, watchers), drafter=drafter)

    return launched


class WatchedDrafter:
    def __init__(self, drafter: Drafter, watchers: Sequence[Watcher]) -> None:
        self._drafter = drafter
        self._watchers = watchers

    async def describe(self) -> DrafterInfo:
        return await self._drafter.describe()

    async def progress(self) -> int:
        return await self._drafter.progress()

    async def propose(self, asks: Sequence[DraftAsk], width: int, features: Sequence[Features]) -> list[Draft]:
        drafts = await self._drafter.propose(asks, width, features)
        for watcher in self._watchers:
            watcher.drafted(drafts)
        return drafts

    async def measure(self, num_requests: Sequence[int], widths: Sequence[int]) -> list[list[float]]:
        return await self._drafter.measure(num_requests, widths)


class WatchedVerifier:
    def __init__(self, verifier: Verifier, watchers: Sequence[Watcher]) -> None:
        self._verifier = verifier
        self._watchers = watchers

    async def describe(self) -> VerifierInfo:
        return await self._verifier.describe()

    async def progress(self) -> int:
        return await self._verifier.progress()

    async def verify(self, plan: Plan) -> tuple[list[Verdict], Features | None]:
        verdicts, features = await self._verifier.verify(plan)
        for watcher in self._watchers:
            watcher.verified(plan, verdicts)
        return verdicts, features

    async def check_grammar(self, grammar: Grammar) -> None:
        await self._verifier.check_grammar(grammar)

    async def measure(
        self, num_tokens: Sequence[int], context_lens: Sequence[int], rows_per_request: int = ROWS_PER_REQUEST
    ) -> list[list[float]]:
        return await self._verifier.measure(num_tokens, context_lens, rows_per_request)
