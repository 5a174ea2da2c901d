"""A request's own say about its drafts, within what the deployment allows. The body's field wins over the header."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.admit import parse_planner
from scheduler.errors import BadParams, SettingsError
from scheduler.wire import Speculation
from services.gateway.fields import SpeculationFields

HEADER = "x-speculation"
RULES = ("auto", "algorithm1", "fixed", "threshold", "off")


@dataclass(frozen=True, slots=True)
class SpeculationPolicy:
    """modes: rules (the part of a planner before its colon) that requests may choose; none lets the deployment's setting
    hold for all. max_draft_tokens: requests that ask for more get this many; 0 is no bound."""

    modes: tuple[str, ...] = RULES
    max_draft_tokens: int = 0

    def granted(self, fields: SpeculationFields | None, header: str | None) -> Speculation | None:
        """What is in force for the request; None when it has no say of its own. Raises BadParams."""
        if fields is None or (fields.mode is None and fields.max_draft_tokens is None):
            mode, most, source = *_read_header(header), HEADER
        else:
            mode, most, source = fields.mode or "", fields.max_draft_tokens, "speculation.mode"
        if not mode and most is None:
            return None
        if mode:
            self._check(mode, source)
        if most is not None and self.max_draft_tokens:
            most = min(most, self.max_draft_tokens)
        elif most is None:
            most = self.max_draft_tokens or None
        return Speculation(mode, most)

    def _check(self, mode: str, source: str) -> None:
        try:
            parse_planner(mode)
        except SettingsError as error:
            raise BadParams(f"{source}: {str(error).removeprefix('scheduler.planner ')}", source) from None
        rule = mode.strip().partition(":")[0]
        if rule not in self.modes:
            allowed = ", ".join(self.modes) or "none"
            raise BadParams(f"{source}: {rule} is not allowed by this deployment; allowed are: {allowed}", source)


ALL_ALLOWED = SpeculationPolicy()


def _read_header(header: str | None) -> tuple[str, int | None]:
    """`off`, `fixed:3`, `max_draft_tokens=2` or `auto; max_draft_tokens=2`."""
    mode, most = "", None
    for part in (header or "").split(";"):
        name, equals, value = part.strip().partition("=")
        if not equals:
            mode = name or mode
        elif name.strip() == "max_draft_tokens" and value.strip().isascii() and value.strip().isdigit():
            most = int(value.strip()[:9])
        else:
            raise BadParams(f"{HEADER}: write a mode, max_draft_tokens=N or both separated by a semicolon", HEADER)
    return mode[:64], most
