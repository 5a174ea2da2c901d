"""Checks of a running server, from what it says of itself over HTTP. Needs its address, and a key where it has keys."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

import httpx

from services.doctor.findings import Finding, age, fail, ok, warn
from services.scrape import Scrape, parse_page

_TIMEOUT_S = 10.0
_OLD_S = 30 * 24 * 3600.0
_STILL_S = 60.0
_FULL, _PREEMPTED, _FAILED = 0.95, 0.05, 0.01
_FACTOR = 1.5
# Below so many, a share says nothing.
_ENOUGH_ROUNDS, _ENOUGH_DRAFTS, _ENOUGH_REQUESTS = 200, 500, 50
_LEAST_LENGTH, _MOST_OFF = 1.1, 0.1


def check_deployment(url: str, key: str = "") -> Iterator[Finding]:
    """One finding per check; stops early where what follows could not be asked."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(base_url=base, headers=headers, timeout=_TIMEOUT_S) as client:
            page = yield from _asked(client, base)
    except UnicodeEncodeError:
        yield fail(
            "reach", "--key has characters that no header can carry", "give the key as it stands in the key file"
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        said = str(error) or type(error).__name__
        yield fail("reach", f"{base} does not answer: {said}", "start the server, or correct --url")
    except (ValueError, LookupError, TypeError, AttributeError):
        yield fail("reach", f"{base} answers as no DSpark server does", "correct --url")
    else:
        if page is not None:
            yield from _metrics(page)


def _asked(client: httpx.Client, base: str) -> Generator[Finding, None, Scrape | None]:
    """Its metrics, where they can be had. What another server answers raises whatever reading it raises."""
    answer = client.get("/health")
    if answer.status_code != 200 or "alive" not in answer.text:
        yield fail("reach", f"{base}/health answers {answer.status_code}: no DSpark server", "correct --url")
        return None
    ready, models, metrics = _ready(client), _models(client), client.get("/metrics")
    page = parse_page(metrics.text) if metrics.status_code == 200 else None
    if page is not None and "dspark_scheduler_up" not in page.series:
        raise ValueError("no metric of ours")
    yield ok("reach", f"{base} answers")
    yield ready
    yield models
    if page is None:
        locked = metrics.status_code in (401, 403)
        todo = "give --key one of the scope `metrics`" if locked else "wait until it is ready; docs/runbooks/absent.md"
        yield warn("metrics", f"/metrics answers {metrics.status_code}", todo)
    return page


def _ready(client: httpx.Client) -> Finding:
    answer = client.get("/ready")
    if answer.status_code != 200:
        told = answer.json()
        reason = told.get("reason") or told["error"]["message"]
        return fail("ready", reason, "wait while it loads; else read the scheduler's log lines")
    return ok("ready", "serves")


def _models(client: httpx.Client) -> Finding:
    answer = client.get("/v1/models")
    if answer.status_code in (401, 403):
        return fail("models", answer.json()["error"]["message"], "give --key one of the scope `api`")
    if answer.status_code != 200:
        return fail("models", answer.json()["error"]["message"], "wait until it is ready")
    served = answer.json()["data"]
    return ok("models", ", ".join(f"{each['id']} (context {each['max_model_len']})" for each in served))


def _metrics(page: Scrape) -> Iterator[Finding]:
    """Of each engine group by itself: a sum or a mean over groups hides the one that is not well."""
    groups = sorted(page.by("dspark_scheduler_up", "group"))
    for group in groups:
        for each in _engine(page.where("group", group)):
            yield each if len(groups) == 1 else replace(each, said=f"group {group}: {each.said}")
    yield _failures(page)


def _engine(page: Scrape) -> Iterator[Finding]:
    if page.value("dspark_scheduler_up") != 1:
        yield fail(
            "scheduler",
            "the scheduler does not answer the gateway",
            "read its log lines; docs/runbooks/scheduler-down.md",
        )
        return
    checks: tuple[Callable[[Scrape], Finding], ...] = (
        _workers, _progress, _queue, _memory, _curve, _acceptance, _calibration,
    )  # fmt: skip
    for check in checks:
        yield check(page)


def _workers(page: Scrape) -> Finding:
    if page.value("dspark_verifier_up") != 1:
        return fail("workers", "the verifier is lost", "read its log lines; docs/runbooks/worker-lost.md")
    if page.value("dspark_draft_width") and page.value("dspark_drafter_up") != 1:
        return warn("workers", "the drafter is lost: requests decode plainly", "docs/runbooks/worker-lost.md")
    lost = page.value("dspark_verifier_losses_total") + page.value("dspark_drafter_losses_total")
    if lost:
        return warn(
            "workers", f"up, after {lost:.0f} losses", "look for what ended them: memory, or a fault in their log"
        )
    return ok("workers", "verifier and drafter are up" if page.value("dspark_draft_width") else "the verifier is up")


def _progress(page: Scrape) -> Finding:
    running, age_s = page.value("dspark_requests_running"), page.value("dspark_last_step_age_seconds")
    if running and age_s > _STILL_S:
        return fail(
            "progress", f"{running:.0f} requests run and no step ended for {age_s:.0f} s", "docs/runbooks/stalled.md"
        )
    return ok("progress", f"{page.value('dspark_steps_total'):.0f} steps, {running:.0f} requests running")


def _queue(page: Scrape) -> Finding:
    waiting, running = page.value("dspark_requests_waiting"), page.value("dspark_requests_running")
    if waiting > running:
        return warn(
            "queue",
            f"{waiting:.0f} requests wait beside {running:.0f} that run",
            "add an engine; docs/runbooks/queue.md",
        )
    return ok("queue", f"{waiting:.0f} requests wait")


def _memory(page: Scrape) -> Finding:
    used, admitted = page.value("dspark_kv_cache_usage_ratio"), page.value("dspark_admitted_requests_total")
    preempted = page.value("dspark_preemptions_total")
    if used > _FULL or (admitted and preempted / admitted > _PREEMPTED):
        said = f"{used:.0%} of the KV blocks are held, {preempted:.0f} preemptions for {admitted:.0f} requests"
        return warn("memory", said, "raise kv.cache_bytes or lower scheduler.max_live; docs/runbooks/kv-exhausted.md")
    return ok("memory", f"{used:.0%} of the KV blocks are held")


def _curve(page: Scrape) -> Finding:
    if reason := page.label("dspark_trim_off", "reason"):
        return warn("curve", f"no draft is trimmed: {reason}", "docs/runbooks/cost-curve.md")
    if not page.value("dspark_cost_curve_loaded"):
        return ok("curve", f"the planner {page.label('dspark_planner_info', 'planner')} needs none")
    age_s, factor = page.value("dspark_cost_curve_age_seconds"), page.value("dspark_cost_curve_factor")
    said = f"a step of 16 tokens takes {factor:.2f} times as long as when the cost curve was measured, {age(age_s)} ago"
    if predicted_s := page.value("dspark_predicted_step_seconds_total"):
        real = page.value("dspark_measured_step_seconds_total") / predicted_s
        said += f"; the refined curve, which the planner uses, follows that: real over predicted seconds {real:.2f}"
    if not 1 / _FACTOR < factor < _FACTOR:
        return warn(
            "curve",
            said,
            "look what else uses the device; then restart: a start tries a few steps and measures the curve anew where they "
            "disagree; docs/runbooks/cost-curve.md",
        )
    if age_s > _OLD_S:
        return warn(
            "curve",
            said,
            "nothing while steps agree with it, and a restart keeps it then; to have it measured anew all the same, delete its "
            "file and restart; docs/runbooks/cost-curve.md",
        )
    return ok("curve", said)


def _acceptance(page: Scrape) -> Finding:
    rounds = page.value("dspark_draft_rounds_total")
    if not page.value("dspark_draft_width"):
        return ok("acceptance", "there is no drafter")
    if rounds < _ENOUGH_ROUNDS:
        return ok("acceptance", f"{rounds:.0f} rounds with drafts: too few to say")
    length = 1 + page.value("dspark_accepted_tokens_total") / rounds
    said = f"{length:.2f} tokens per round with drafts"
    if length < _LEAST_LENGTH:
        return warn(
            "acceptance", said, "train a drafter on texts like these, or use none; docs/runbooks/accept-length.md"
        )
    return ok("acceptance", f"{said}; the gate is {page.label('dspark_draft_gate', 'state') or 'open'}")


def _calibration(page: Scrape) -> Finding:
    drafts = page.value("dspark_confidence_drafts_total")
    if drafts < _ENOUGH_DRAFTS:
        return ok("calibration", f"{drafts:.0f} judged drafts: too few to say")
    stated, accepted = (page.value(f"dspark_confidence_{name}_total") / drafts for name in ("stated", "accepted"))
    said = f"the drafter states {stated:.2f} and {accepted:.2f} are accepted"
    if abs(stated - accepted) > _MOST_OFF:
        return warn("calibration", said, "run `dspark calibrate`; docs/runbooks/calibration.md")
    return ok("calibration", said)


def _failures(page: Scrape) -> Finding:
    every, failed = page.value("dspark_requests_total"), page.value("dspark_requests_total", outcome="failed")
    if every >= _ENOUGH_REQUESTS and failed / every > _FAILED:
        codes = ", ".join(f"{code} {n:.0f}" for code, n in page.by("dspark_request_errors_total", "code").items())
        return warn("requests", f"{failed:.0f} of {every:.0f} failed ({codes})", "docs/runbooks/errors.md")
    return ok("requests", f"{failed:.0f} of {every:.0f} failed")
