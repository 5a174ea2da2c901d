"""Keys, their limits and the access log on the real application: who gets in, what is counted, what is written down."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.errors import SettingsError
from services.access import AccessLogSettings, AuthSettings, LimitSettings, auth_config, check_exposure
from services.cli import main
from services.gateway.access_log import AccessLogConfig, LineWriter
from services.gateway.auth import OPEN_PATHS, ApiKey, AuthConfig, digest_of
from services.gateway.limits import WINDOW_S, Limiter, Limits, Refusal
from services.settings import load_settings

CHAT = "/v1/chat/completions"
ALICE, BOB, EVE, PROM = (f"sk-{name}-0123456789" for name in ("alice", "bob", "eve", "prom"))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def keys(**limits: Limits) -> AuthConfig:
    none = Limits()
    return AuthConfig(
        (
            ApiKey("alice", digest_of(ALICE), limits=limits.get("alice", none)),
            ApiKey("bob", digest_of(BOB), limits=limits.get("bob", none)),
            ApiKey("eve", digest_of(EVE), enabled=False),
            ApiKey("prom", digest_of(PROM), scopes=frozenset({"metrics"})),
        ),
        metrics_need_key=True,
    )


@pytest.fixture
def serve(bench, make_script):
    def start(script=None, **config):
        return bench.serve(script or make_script(bench.rounds("Hi there")), replace(bench.config, **config))

    return start


def check_refusal(response: httpx.Response, status: int, code: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == code and error["message"] and set(error) == {"message", "type", "param", "code"}
    assert "x-request-id" in response.headers
    if status in (401, 403):
        assert response.headers["www-authenticate"].startswith('Bearer realm="dspark"')


async def test_without_keys_everything_is_open(serve, body):
    async with serve() as (client, _):
        assert (await client.post(CHAT, json=body())).status_code == 200
        assert (await client.get("/metrics")).status_code == 200


async def test_a_key_opens_what_it_is_for(serve, body):
    async with serve(auth=keys()) as (client, _):
        assert (await client.post(CHAT, json=body(), headers=bearer(ALICE))).status_code == 200
        assert (await client.get("/v1/models", headers={"authorization": f"bearer {BOB}"})).status_code == 200
        assert (await client.get("/metrics", headers=bearer(PROM))).status_code == 200
        page = (await client.get("/metrics", headers=bearer(PROM))).text
    assert 'code="invalid_api_key"' not in page


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer  "},
        {"authorization": f"Basic {ALICE}"},
        {"authorization": ALICE},
        {"x-api-key": ALICE},
        bearer(ALICE[:-1]),
        bearer(ALICE + "x"),
        bearer(ALICE.upper()),
        [("authorization", f"Bearer {ALICE}"), ("authorization", f"Bearer {BOB}")],
        [("authorization", b"Bearer \xff\xfe")],
    ],
)
async def test_without_a_valid_key_the_answer_is_401(serve, body, headers):
    async with serve(auth=keys()) as (client, scheduler):
        for stream in (False, True):
            check_refusal(await client.post(CHAT, json=body(stream=stream), headers=headers), 401, "invalid_api_key")
        check_refusal(await client.get("/metrics", headers=headers), 401, "invalid_api_key")
        page = (await client.get("/metrics", headers=bearer(PROM))).text
    assert not scheduler.requests
    assert 'code="invalid_api_key"' in page
    assert ALICE not in page


async def test_a_key_that_is_known_but_not_for_this_is_403(serve, body):
    async with serve(auth=keys()) as (client, scheduler):
        check_refusal(await client.post(CHAT, json=body(), headers=bearer(EVE)), 403, "permission_denied")
        check_refusal(await client.post(CHAT, json=body(), headers=bearer(PROM)), 403, "permission_denied")
        refused = await client.get("/metrics", headers=bearer(ALICE))
        check_refusal(refused, 403, "permission_denied")
    assert 'scope="metrics"' in refused.headers["www-authenticate"]
    assert not scheduler.requests


async def test_every_path_but_the_open_ones_needs_a_key(serve):
    async with serve(auth=keys()) as (client, _):
        document = (await client.get("/openapi.json")).json()
        for path in [*document["paths"], "/nowhere", "/health/", "//health", "/V1/models", "/ready/../v1/models"]:
            response = await client.request("GET", httpx.URL("http://test", raw_path=path.encode()))
            expected = 200 if path in OPEN_PATHS else 401
            assert response.status_code == expected, path
        for path in OPEN_PATHS:
            assert (await client.get(path)).status_code == 200


async def test_metrics_are_open_unless_a_setting_says_otherwise(serve):
    async with serve(auth=replace(keys(), metrics_need_key=False)) as (client, _):
        assert (await client.get("/metrics")).status_code == 200


async def test_the_rate_of_a_key_is_exact_with_many_at_once(serve, body):
    async with serve(auth=keys(alice=Limits(requests_per_minute=5))) as (client, scheduler):
        answers = await asyncio.gather(
            *(client.post(CHAT, json=body(), headers=bearer(ALICE)) for _ in range(12)),
            *(client.post(CHAT, json=body(), headers=bearer(BOB)) for _ in range(3)),
        )
        assert sum(answer.status_code == 200 for answer in answers[:12]) == 5 and len(scheduler.requests) == 8
        refused = [answer for answer in answers[:12] if answer.status_code != 200]
        assert (await client.get("/v1/models", headers=bearer(ALICE))).status_code == 200
    for answer in refused:
        check_refusal(answer, 429, "rate_limit_exceeded")
        assert "'alice'" in answer.json()["error"]["message"]
        assert 55 <= int(answer.headers["retry-after"]) <= 60
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    left = sorted(int(answer.headers["x-ratelimit-remaining-requests"]) for answer in answers[:12])
    assert left == [0] * 8 + [1, 2, 3, 4]
    assert "x-ratelimit-limit-requests" not in answers[12].headers


async def test_live_requests_of_a_key_are_counted_until_their_last_byte(serve, bench, make_script, body):
    slow = make_script(bench.rounds("Hi there, how are you?"), step_s=0.02)
    async with serve(slow, auth=keys(alice=Limits(max_live=2))) as (client, _):
        answers = await asyncio.gather(
            *(client.post(CHAT, json=body(stream=True), headers=bearer(ALICE)) for _ in range(5))
        )
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        check_refusal(refused, 429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "1" and refused.headers["x-ratelimit-remaining-live"] == "0"
        assert (await client.post(CHAT, json=body(), headers=bearer(ALICE))).status_code == 200
        bad = await asyncio.gather(*(client.post(CHAT, json={}, headers=bearer(ALICE)) for _ in range(5)))
        assert {answer.status_code for answer in bad} <= {400, 429}
        assert (await client.post(CHAT, json=body(), headers=bearer(ALICE))).status_code == 200


async def test_without_keys_the_limits_are_of_all_together(serve, body):
    async with serve(anonymous_limits=Limits(requests_per_minute=1)) as (client, _):
        assert (await client.post(CHAT, json=body())).status_code == 200
        check_refusal(await client.post(CHAT, json=body()), 429, "rate_limit_exceeded")


@given(st.lists(st.tuples(st.floats(0, 30), st.booleans()), max_size=40), st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_no_minute_has_more_than_its_share_and_no_more_are_live(steps, rate, most_live):
    """Against the plain reading: the list of all that was let in."""
    now, let_in, live = 0.0, [], 0
    limiter = Limiter(lambda: now)
    limits = Limits(rate, most_live)
    for pause_s, ends in steps:
        now += pause_s
        if ends and live:
            limiter.give_back("a")
            live -= 1
        in_window = [begun for begun in let_in if begun > now - WINDOW_S]
        allowed = len(in_window) < rate and not (most_live and live >= most_live)
        found = limiter.take("a", limits)
        assert isinstance(found, Refusal) is not allowed
        if allowed:
            let_in.append(now)
            live += 1
        elif len(in_window) >= rate:
            assert found.retry_after_s == pytest.approx(in_window[-rate] + WINDOW_S - now)
        assert limiter.num_live("a") == live


async def log_lines(path: Path, count: int) -> list[dict]:
    """Once as many are of answers: a probe that came too early has a line too."""
    for _ in range(1000):
        lines = await asyncio.to_thread(lambda: path.read_text().splitlines())
        if sum(CHAT in line for line in lines) >= count:
            break
        await asyncio.sleep(0.01)
    assert sum(CHAT in line for line in lines) >= count
    return [json.loads(line) for line in lines]


async def test_the_access_log_says_who_and_how_long_and_never_what(serve, body, tmp_path):
    path = tmp_path / "access.log"
    asked = body(messages=[{"role": "user", "content": "SECRET-PROMPT"}], stream=True)
    async with serve(auth=keys(), access_log=AccessLogConfig(str(path))) as (client, _):
        assert (await client.get("/health")).status_code == 200
        await client.post(CHAT + "?q=SECRET-QUERY", json=asked, headers={**bearer(ALICE), "x-request-id": "mine-1"})
        await client.post(CHAT, json={"model": "tiny-chat"}, headers=bearer(BOB))
        await client.post(CHAT, json=asked, headers=bearer("SECRET-KEY-0123456789"))
        lines = await log_lines(path, 3)
    good, bad, unknown = (line for line in lines if line["path"] == CHAT)
    assert good["request_id"] == "mine-1" and good["key"] == "alice" and good["status"] == 200
    assert good["method"] == "POST" and good["path"] == CHAT and good["model"] == "tiny-chat" and good["stream"] is True
    assert good["prompt_tokens"] > 0 and good["output_tokens"] > 0 and good["cached_tokens"] == 3
    assert good["finish_reason"] == "stop" and 0 < good["first_token_ms"] <= good["duration_ms"]
    assert (bad["key"], bad["status"], bad["finish_reason"]) == ("bob", 400, "rejected")
    assert (unknown["key"], unknown["status"], unknown["finish_reason"]) == (None, 401, "rejected")
    assert "/health" not in {line["path"] for line in lines}
    text = path.read_text()
    assert "SECRET" not in text and "Hi there" not in text and ALICE not in text


async def test_prompts_are_logged_only_when_a_setting_says_so(serve, body, tmp_path):
    path = tmp_path / "access.log"
    asked = body(messages=[{"role": "user", "content": "my prompt \ud83d"}])
    async with serve(access_log=AccessLogConfig(str(path), prompts=True)) as (client, _):
        await client.post(CHAT, content=json.dumps(asked))
        await client.post(CHAT, content=b'{"messages": ' + b"[" * 100_000)
        lines = await log_lines(path, 2)
    assert lines[-2]["messages"] == asked["messages"]
    assert "messages" not in lines[-1] and lines[-1]["status"] == 400


class Stalled:
    """A stream whose reader sleeps."""

    def __init__(self) -> None:
        self.go, self.lines = threading.Event(), []

    def write(self, line: str) -> None:
        self.go.wait(60)
        self.lines.append(json.loads(line))

    def flush(self) -> None:
        pass


def test_a_stalled_reader_costs_lines_and_not_time():
    stream = Stalled()
    writer = LineWriter(stream)
    for number in range(12_000):
        writer.write({"n": number})
    stream.go.set()
    writer.close()
    assert [line["n"] for line in stream.lines] == list(range(len(stream.lines)))
    num_lost = 12_000 - len(stream.lines)
    assert 1900 <= num_lost <= 2000


def test_the_log_file_that_cannot_be_written_is_refused(bench, tmp_path):
    from services.gateway.app import create_app

    config = replace(bench.config, access_log=AccessLogConfig(str(tmp_path)))
    with pytest.raises(SettingsError, match=r"^gateway\.access_log\.to: "):
        create_app(bench.scheduler(lambda request: None), config)


def test_keys_come_from_settings_and_from_a_file(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(f"bob: {BOB}\nprom: {{key: 'sha256:{digest_of(PROM).hex()}', scopes: [metrics], max_live: 2}}\n")
    auth = AuthSettings(keys={"alice": ALICE}, keys_file=str(file))
    found = auth_config(auth, LimitSettings(requests_per_minute=7, max_live=9))
    assert [key.name for key in found.keys] == ["alice", "bob", "prom"]
    assert found.find(ALICE).limits == Limits(7, 9)
    assert found.find(PROM).limits == Limits(7, 2) and found.find(PROM).scopes == {"metrics"}
    assert found.find("sha256:" + digest_of(PROM).hex()) is None
    assert ALICE not in repr(auth) and ALICE not in repr(found)


def test_keys_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("DSPARK_GATEWAY__AUTH__KEYS", json.dumps({"alice": ALICE}))
    monkeypatch.setenv("DSPARK_GATEWAY__LIMITS__MAX_LIVE", "3")
    config = load_settings().gateway_config()
    assert config.auth.find(ALICE).limits == Limits(0, 3)
    assert config.access_log == AccessLogSettings().config()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "No such file"),
        ("", "must be a mapping"),
        ("- a", "must be a mapping"),
        ("a: [", "not valid YAML"),
        ("alice: SHORTSECRET", "alice.key: must be 16 or more"),
        ("alice: {key: SECRET-0123456789, scope: [api]}", "alice.scope: Extra inputs"),
        ("alice: {key: SECRET-0123456789, scopes: [all]}", "alice.scopes.0: "),
        ("alice: {max_live: 2}", "alice.key: Field required"),
        ("alice: 12345678901234567890", "alice: "),
        ("'a b': SECRET-0123456789", "the name 'a b'"),
        ("a: SECRET-0123456789\nb: SECRET-0123456789", "'a' and 'b' are the same key"),
    ],
)
def test_a_key_file_that_cannot_be_used_is_refused_without_showing_a_key(tmp_path, text, complaint):
    file = tmp_path / "keys.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SettingsError) as refused:
        auth_config(AuthSettings(keys_file=str(file)), LimitSettings())
    message = str(refused.value)
    assert (
        complaint in message and message.startswith("gateway.auth") and "\n" not in message and "SECRET" not in message
    )


def test_a_bad_key_in_the_settings_is_refused_without_showing_it():
    for value in ("SECRET", {"key": "SECRET"}, ["SECRET"], 17):
        with pytest.raises(SettingsError) as refused:
            load_settings(args={"gateway": {"auth": {"keys": {"alice": value}}}})
        assert str(refused.value).startswith("gateway.auth.keys: alice") and "SECRET" not in str(refused.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", ""])
def test_a_public_address_without_keys_is_refused_with_what_to_do(host):
    with pytest.raises(SettingsError) as refused:
        check_exposure(host, AuthConfig(), allowed=False)
    for fix in ("gateway.auth.keys", "gateway.auth.keys_file", "gateway.allow_public_without_keys", "127.0.0.1"):
        assert fix in str(refused.value)
    check_exposure(host, AuthConfig(), allowed=True)
    check_exposure(host, keys(), allowed=False)
    with pytest.raises(SettingsError):
        check_exposure(
            host, AuthConfig((ApiKey("prom", digest_of(PROM), scopes=frozenset({"metrics"})),)), allowed=False
        )


@pytest.mark.parametrize("ray", [[], ["--no-ray"]], ids=["on Ray", "without Ray"])
def test_the_command_refuses_a_public_address_before_anything_starts(ray, capsys):
    assert main(["serve", *ray, "--set", "gateway.host=0.0.0.0"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("dspark: gateway.host: 0.0.0.0 can be reached")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1"])
def test_loopback_needs_no_keys(host):
    check_exposure(host, AuthConfig(), allowed=False)
