"""What one request may draft: its own planner and limits, beside the deployment's planner. Pure."""

from __future__ import annotations

from functools import lru_cache

from scheduler.admit import Planner, Rule, parse_planner
from scheduler.live import Live
from scheduler.wire import DrafterInfo

_planner_named = lru_cache(maxsize=256)(parse_planner)


def planner_of(live: Live, deployment: Planner) -> Planner:
    wish = live.request.speculation
    return _planner_named(wish.planner) if wish is not None and wish.planner else deployment


def most_drafts(live: Live, deployment: Planner) -> int:
    """Drafted tokens of it that may be verified in a round; the last output token is the target's own."""
    most = live.num_remaining - 1
    wish = live.request.speculation
    if wish is None:
        return most
    if planner_of(live, deployment).rule is Rule.OFF:
        return 0
    return most if wish.max_draft_tokens is None else min(most, wish.max_draft_tokens)


def may_draft(live: Live, deployment: Planner, info: DrafterInfo) -> bool:
    """More than one token is still to come, and its context is one that the drafter can have."""
    able = live.num_remaining > 1 and live.num_computed <= info.max_len
    return able and (live.request.speculation is None or most_drafts(live, deployment) > 0)


def insists(live: Live, deployment: Planner) -> bool:
    """It drafts whatever that costs, though the deployment weighs it."""
    wish = live.request.speculation
    return wish is not None and not planner_of(live, deployment).adaptive and most_drafts(live, deployment) > 0


def fixed_width(live: Live, deployment: Planner, info: DrafterInfo, *, weighed: bool) -> int | None:
    """The width that its planner fixes; None where drafts are weighed against what they cost, as those of adaptive planners are
    if `weighed`."""
    planner = planner_of(live, deployment)
    if planner.adaptive and weighed:
        return None
    if not info.variable_width:
        return info.width
    width = min(info.width, int(planner.value)) if planner.rule is Rule.FIXED else info.width
    return min(width, most_drafts(live, deployment))
