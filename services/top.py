"""`dspark top`: a running server as a page of text, again and again.

Reads its /metrics like anybody else; rates are what counters rose by between two readings, also across a restart of the server.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

import httpx

from scheduler.errors import Failed, SettingsError
from services.scrape import Scrape, parse_page

_TIMEOUT_S = 5.0
_LONGEST_S = 86400.0
_SIGNS_OF_WORK = ("dspark_steps_total", "dspark_requests_total")
_VERBS = ("draft", "plan", "verify", "apply")
_HOME, _LINE_END, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


@dataclass(frozen=True, slots=True)
class View:
    """now: the page; rose: its counters since the one before; seconds: between the two. sums: nothing rose, so `rose` is what
    they came to since the server's processes started, and there is no rate."""

    url: str
    now: Scrape
    rose: Scrape
    seconds: float
    sums: bool = False

    def of(self, rose: float, digits: int = 1) -> str:
        """A rate with its unit, or the sum."""
        return f"{rose:.0f}" if self.sums else f"{rose / self.seconds:.{digits}f}"

    @property
    def per_s(self) -> str:
        return "" if self.sums else "/s"

    def ratio(self, above: str, below: str) -> float | None:
        """Of what two counters rose by; None when the lower one did not."""
        divisor = self.rose.value(below)
        return self.rose.value(above) / divisor if divisor else None


def add_top(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--url", default="http://127.0.0.1:8000", metavar="URL", help="the server (default %(default)s)"
    )
    command.add_argument("--key", default="", help="API key of the scope `metrics`, where it needs one")
    command.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between pages (default 2)")
    command.add_argument("--once", action="store_true", help="one page, over one interval, and end")
    command.add_argument("--count", type=int, default=0, metavar="N", help="end after so many pages; 0 never ends")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not 0 < args.interval <= _LONGEST_S:
        raise SettingsError(f"--interval is {args.interval:g} and must be above 0, and at most {_LONGEST_S:g} seconds")
    if not args.key.isascii():
        raise SettingsError("--key has characters that no header can carry; give the key as it stands in the key file")
    if args.count < 0:
        raise SettingsError(f"--count is {args.count} and must be 0 or more")
    try:
        with httpx.Client(timeout=_TIMEOUT_S, headers=_headers(args.key)) as client:
            watch(
                client,
                args.url.rstrip("/").removesuffix("/v1"),
                args.interval,
                1 if args.once else args.count,
                sys.stdout,
            )
    except KeyboardInterrupt:
        pass  # how one leaves it
    return 0


def _headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def watch(
    client: httpx.Client,
    url: str,
    interval_s: float,
    count: int,
    out: TextIO,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Raises Failed when the server is not there at first, or not for the only page. One that goes away later is waited for.
    The only page of an idle server shows sums."""
    before, before_s, shown = _read(client, url), time.monotonic(), 0
    while not count or shown < count:
        sleep(interval_s)
        shown += 1
        try:
            now, now_s = _read(client, url), time.monotonic()
        except Failed as error:
            if count == 1:
                raise
            _show(out, [f"{error}; waiting for it"])
            continue
        rose = now.since(before)
        view = View(url, now, rose, now_s - before_s)
        if count == 1 and not any(rose.value(name) for name in _SIGNS_OF_WORK):
            view = View(url, now, now, now_s - before_s, sums=True)
        _show(out, page(view))
        before, before_s = now, now_s


def _read(client: httpx.Client, url: str) -> Scrape:
    try:
        answer = client.get(f"{url}/metrics")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Failed(f"no server answers at {url} ({str(error) or type(error).__name__})") from None
    if answer.status_code in (401, 403):
        raise Failed(f"{url}/metrics needs a key of the scope `metrics`: give --key")
    try:
        scrape = parse_page(answer.text)
    except ValueError:
        scrape = Scrape({})
    if answer.status_code != 200 or "dspark_scheduler_up" not in scrape.series:
        raise Failed(f"{url}/metrics is no page of a DSpark server (status {answer.status_code})")
    return scrape


def _show(out: TextIO, lines: list[str]) -> None:
    """A terminal is written over, anything else gets a block."""
    if out.isatty():
        out.write(_HOME + "".join(f"{line}{_LINE_END}\n" for line in lines) + _CLEAR_BELOW)
    else:
        out.write("\n".join(lines) + "\n\n")
    out.flush()


def page(view: View) -> list[str]:
    now = view.now
    model = now.label("dspark_scheduler_up", "model") or next(iter(now.by("dspark_scheduler_up", "model")), "")
    over = "idle: sums since it started" if view.sums else f"over {view.seconds:.1f} s"
    head = f"{view.url}  {model or 'no model yet'}  {time.strftime('%H:%M:%S')}  {over}"
    if not now.value("dspark_scheduler_up"):
        return [head, "the scheduler does not answer its gateway: it starts, restarts or is lost (see /ready)"]
    rows = (_requests, _tokens, _latency, _drafts, _positions, _verbs, _planner, _gate, _cache, _workers)
    return [head, *(f"{name:<12}{row}" for name, row in (each(view) for each in rows))]


def _requests(view: View) -> tuple[str, str]:
    now = view.now
    ended = view.rose.by("dspark_requests_total", "outcome")
    ways = ", ".join(f"{outcome} {view.of(n, 2)}{view.per_s}" for outcome, n in sorted(ended.items()) if n)
    running, waiting = now.value("dspark_requests_running"), now.value("dspark_requests_waiting")
    return (
        "requests",
        f"{running:.0f} running, {waiting:.0f} waiting; {view.of(sum(ended.values()), 2)}{view.per_s} ended"
        + (f" ({ways})" if ways else ""),
    )


def _tokens(view: View) -> tuple[str, str]:
    written, computed, through = (
        view.of(view.rose.value(f"dspark_{name}_tokens_total")) for name in ("emitted", "prefill", "step")
    )
    return f"tokens{view.per_s}", f"{written} written, {computed} of prompts computed, {through} through the target"


def _latency(view: View) -> tuple[str, str]:
    first = view.ratio("dspark_time_to_first_token_seconds_sum", "dspark_time_to_first_token_seconds_count")
    each = view.ratio("dspark_time_per_output_token_seconds_sum", "dspark_time_per_output_token_seconds_count")
    queue = view.ratio("dspark_queue_seconds_total", "dspark_admitted_requests_total")
    return "latency", f"first token {_ms(first)}, per token {_ms(each)}, in the queue {_ms(queue)} (means)"


def _drafts(view: View) -> tuple[str, str]:
    rounds = "dspark_verify_rounds_total"
    length, drafted = view.ratio("dspark_round_tokens_total", rounds), view.ratio("dspark_draft_tokens_total", rounds)
    verified, accepted = (
        view.ratio("dspark_verify_tokens_total", rounds),
        view.ratio("dspark_accepted_tokens_total", rounds),
    )
    budget = view.ratio("dspark_verify_budget_tokens_sum", "dspark_verify_budget_tokens_count")
    return "drafts", (
        f"accept length {_num(length)}, verify budget {_num(budget)}; a round drafts {_num(drafted)}, verifies {_num(verified)}, "
        f"accepts {_num(accepted)}"
    )


def _positions(view: View) -> tuple[str, str]:
    """Accepted of those verified, by draft position."""
    verified = view.rose.by("dspark_verify_tokens_per_pos_total", "position")
    accepted = view.rose.by("dspark_accepted_tokens_per_pos_total", "position")
    shares = [
        f"{int(k) + 1}: {accepted.get(k, 0) / n:.2f}" for k, n in sorted(verified.items(), key=lambda i: int(i[0])) if n
    ]
    return "by position", "  ".join(shares) or "-"


def _verbs(view: View) -> tuple[str, str]:
    """Seconds per second; above 1 together where two devices work at a time."""
    spent = {verb: view.rose.value("dspark_step_seconds_total", verb=verb) for verb in _VERBS}
    parts = [f"{verb} {s if view.sums else s / view.seconds:.2f}" for verb, s in spent.items()]
    step, steps = view.ratio("dspark_step_seconds_total", "dspark_steps_total"), view.rose.value("dspark_steps_total")
    name = "seconds" if view.sums else "s per s"
    return name, f"{', '.join(parts)}; {view.of(steps)} steps{view.per_s} of {_ms(step)}"


def _planner(view: View) -> tuple[str, str]:
    """Two factors: what is left between steps and the refined curve, and how far that has moved from the measured one."""
    real = view.ratio("dspark_measured_step_seconds_total", "dspark_predicted_step_seconds_total")
    trims = view.now.label("dspark_trim_off", "reason")
    said = f"{view.now.label('dspark_planner_info', 'planner')}; real over predicted seconds {_num(real)}{_refined(view.now)}"
    return "planner", f"{said}; trims nothing: {trims}" if trims else said


def _refined(now: Scrape) -> str:
    """Of every engine group that has a curve; the number that `dspark doctor --url` warns about."""
    loaded = now.by("dspark_cost_curve_loaded", "group")
    factors = now.by("dspark_cost_curve_factor", "group")
    told = ", ".join(f"{factors[group]:.2f}" for group in sorted(factors) if loaded.get(group))
    return f" (predicted by the refined curve: {told} times the measured one)" if told else ""


def _gate(view: View) -> tuple[str, str]:
    shut = view.ratio("dspark_gate_shut_steps_total", "dspark_steps_total")
    state = view.now.label("dspark_draft_gate", "state") or "-"
    return (
        "gate",
        f"{state}; shut in {_percent(shut)} of steps, {view.rose.value('dspark_gate_probes_total'):.0f} probes",
    )


def _cache(view: View) -> tuple[str, str]:
    now, blocks = view.now, view.now.value("dspark_kv_blocks_total")
    cached = now.value("dspark_kv_blocks_cached") / blocks if blocks else None
    held = now.value("dspark_kv_blocks_used") / blocks if blocks else None
    hits = view.ratio("dspark_prefix_cache_hit_tokens_total", "dspark_prefix_cache_query_tokens_total")
    return "KV", (
        f"{_percent(held)} of {blocks:.0f} blocks held, {_percent(cached)} kept for hits; "
        f"prefix hits {_percent(hits)} of prompt tokens, {view.rose.value('dspark_preemptions_total'):.0f} preemptions"
    )


def _workers(view: View) -> tuple[str, str]:
    """Of all engine groups that answer."""
    groups = view.now.value("dspark_scheduler_up")
    verifier = "up" if view.now.value("dspark_verifier_up") == groups else "LOST"
    drafter = (
        "up"
        if view.now.value("dspark_drafter_up") == groups
        else "LOST"
        if view.now.value("dspark_draft_width")
        else "none"
    )
    return "workers", f"verifier {verifier}, drafter {drafter}"


def _num(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
