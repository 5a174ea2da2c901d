"""What a check found, and how a list of that is shown. Must not know what is checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from scheduler.errors import ServingError, SettingsError

_NAME_WIDTH = 13
State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """check: its name, one word. said: what is so. todo: what to do about it; empty when all is well."""

    check: str
    state: State
    said: str
    todo: str = ""


def ok(check: str, said: str) -> Finding:
    return Finding(check, "ok", said)


def warn(check: str, said: str, todo: str) -> Finding:
    return Finding(check, "warn", said, todo)


def fail(check: str, said: str, todo: str) -> Finding:
    return Finding(check, "fail", said, todo)


def age(seconds: float) -> str:
    """In the unit in which it is some."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    minutes = round(seconds / 60)
    return "1 minute" if minutes == 1 else f"{minutes} minutes"


def found(check: str, look: Callable[[], Finding]) -> Finding:
    """What `look` finds. A refusal of ours says itself what to do."""
    try:
        return look()
    except (SettingsError, ServingError) as error:
        return fail(check, _one_line(error), "correct it; the server would not start")
    except Exception as error:  # one check that cannot be made must not hide the others
        return fail(check, f"could not be checked: {type(error).__name__}: {_one_line(error)}", "report this line")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def status_of(findings: Sequence[Finding]) -> int:
    return int(any(each.state == "fail" for each in findings))


def as_lines(findings: Sequence[Finding]) -> list[str]:
    return [
        f"{each.state:<5} {each.check:<{_NAME_WIDTH}} {each.said}" + (f" -> {each.todo}" if each.todo else "")
        for each in findings
    ]


def summary(findings: Sequence[Finding]) -> str:
    counts = {state: sum(each.state == state for each in findings) for state in ("ok", "warn", "fail")}
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def as_json(findings: Sequence[Finding]) -> str:
    return json.dumps({"status": status_of(findings), "checks": [asdict(each) for each in findings]})
