"""A request that generates is answered the same on the short way and by FastAPI's router, which a root path leads to."""

from __future__ import annotations

import httpx
import pytest

from services.gateway.app import create_app
from services.gateway.routes import GENERATING, router
from tests.unit.gateway.conftest import running

ROOT = "/behind"


def anonymous(value: object) -> object:
    """Without what is another for each answer."""
    if isinstance(value, dict):
        return {key: anonymous(each) for key, each in value.items() if key not in ("id", "created")}
    return [anonymous(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    "changes",
    [{}, {"stream": True}, {"temperature": 3}, {"model": "another"}, {"max_tokens": 10_000}, {"best_of": 4}],
    ids=lambda changes: next(iter(changes), "plain"),
)
async def test_both_ways_give_the_same_answer(bench, make_script, events, path, changes):
    prompt = {"prompt": "Hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hello"}]}
    app = create_app(bench.scheduler(make_script(bench.rounds("Hello there"))), bench.config)
    answers = []
    async with running(app) as short:
        transport = httpx.ASGITransport(app, root_path=ROOT)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as routed:
            for client, url in ((short, path), (routed, ROOT + path)):
                response = await client.post(url, json={"model": "tiny-chat", **prompt, **changes})
                data = events(response.text) if changes.get("stream") else response.json()
                kept = {k: v for k, v in response.headers.items() if k not in ("x-request-id", "content-length")}
                answers.append((response.status_code, kept, anonymous(data)))
    assert answers[0] == answers[1]
    assert answers[0][0] in (200, 400, 404)


def test_every_short_way_is_a_route_of_the_router_too():
    routed = {route.path: (route.endpoint, route.methods) for route in router.routes}
    for path, endpoint in GENERATING.items():
        assert routed[path] == (endpoint, {"POST"})


async def test_other_methods_are_refused_by_the_router(bench, make_script):
    async with bench.serve(make_script()) as (client, _):
        for path in GENERATING:
            response = await client.get(path)
            assert response.status_code == 405 and response.json()["error"]["code"] == "method_not_allowed"
