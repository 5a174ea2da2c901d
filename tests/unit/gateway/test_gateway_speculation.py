"""A request's own say about its drafts: body, header, policy, and what is reported back."""

from __future__ import annotations

import pytest

from scheduler.wire import Speculation
from services.gateway.config import GatewayConfig
from services.gateway.speculation import SpeculationPolicy

CHAT = "/v1/chat/completions"


async def granted(bench, make_script, body, *, fields=None, header=None, policy=None):
    config = GatewayConfig(speculation=policy or SpeculationPolicy())
    headers = {"x-speculation": header} if header is not None else {}
    request = body(speculation=fields) if fields is not None else body()
    async with bench.serve(make_script(bench.rounds("Hello there")), config) as (client, scheduler):
        response = await client.post(CHAT, json=request, headers=headers)
    return response, scheduler.requests[0].speculation if scheduler.requests else None


@pytest.mark.parametrize(
    ("fields", "header", "expected"),
    [
        (None, None, None),
        ({}, None, None),
        ({"mode": "off"}, None, Speculation("off")),
        ({"mode": "fixed:3"}, "off", Speculation("fixed:3")),
        ({"max_draft_tokens": 2}, None, Speculation("", 2)),
        ({"mode": "threshold:0.5", "max_draft_tokens": 0}, None, Speculation("threshold:0.5", 0)),
        (None, "off", Speculation("off")),
        (None, "algorithm1; max_draft_tokens=4", Speculation("algorithm1", 4)),
        (None, "max_draft_tokens=4", Speculation("", 4)),
        (None, "", None),
    ],
)
async def test_body_and_header_reach_the_engine_and_the_body_wins(bench, make_script, body, fields, header, expected):
    response, found = await granted(bench, make_script, body, fields=fields, header=header)
    assert response.status_code == 200 and found == expected
    numbers = response.json()["metrics"]["speculative_decoding"]
    if expected is None:
        assert "mode" not in numbers
    else:
        assert (numbers["mode"] or "", numbers["max_draft_tokens"]) == (expected.planner, expected.max_draft_tokens)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_draft_tokens": 9}, Speculation("", 4)),
        ({"max_draft_tokens": 3}, Speculation("", 3)),
        ({"mode": "fixed:9"}, Speculation("fixed:9", 4)),
        (None, None),
    ],
)
async def test_the_policy_bounds_what_is_asked_and_says_so(bench, make_script, body, fields, expected):
    policy = SpeculationPolicy(max_draft_tokens=4)
    response, found = await granted(bench, make_script, body, fields=fields, policy=policy)
    assert found == expected
    if expected is not None:
        assert response.json()["metrics"]["speculative_decoding"]["max_draft_tokens"] == expected.max_draft_tokens


async def test_a_mode_the_policy_leaves_out_is_refused_by_name(bench, make_script, body):
    policy = SpeculationPolicy(modes=("off",))
    for fields, header, param in (({"mode": "fixed:3"}, None, "speculation.mode"), (None, "fixed:3", "x-speculation")):
        response, found = await granted(bench, make_script, body, fields=fields, header=header, policy=policy)
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == param and found is None
        assert "fixed" in error["message"] and "off" in error["message"]
    assert (await granted(bench, make_script, body, fields={"mode": "off"}, policy=policy))[0].status_code == 200


@pytest.mark.parametrize(
    ("fields", "header", "param"),
    [
        ({"mode": "fast"}, None, "speculation.mode"),
        ({"mode": 3}, None, "speculation.mode"),
        ({"mode": f"fixed:{10**20}"}, None, "speculation.mode"),
        ({"mode": ""}, "off", "speculation.mode"),
        ({}, "fixed:0", "x-speculation"),
        ({"max_draft_tokens": -1}, None, "speculation.max_draft_tokens"),
        ({"max_draft_tokens": True}, None, "speculation.max_draft_tokens"),
        ({"max_drafts": 3}, None, "speculation.max_drafts"),
        ("off", None, "speculation"),
        (None, "off; width=3", "x-speculation"),
        (None, "max_draft_tokens=many", "x-speculation"),
    ],
)
async def test_a_wrong_say_is_named(bench, make_script, body, fields, header, param):
    response, found = await granted(bench, make_script, body, fields=fields, header=header)
    assert response.status_code == 400 and response.json()["error"]["param"] == param and found is None


async def test_every_choice_of_a_text_completion_has_the_say_too(bench, make_script):
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, scheduler):
        request = {"model": "tiny-chat", "prompt": ["a", "b"], "n": 2, "speculation": {"mode": "off"}}
        await client.post("/v1/completions", json=request)
    assert [request.speculation for request in scheduler.requests] == [Speculation("off")] * 4


@pytest.mark.parametrize("stop", [None, "lazy", "over the", "qu"])
@pytest.mark.parametrize("width", [1, 3, 7])
async def test_accepted_plus_one_over_rounds_adds_up_to_the_tokens_also_where_the_end_cuts_a_block(
    bench, make_script, body, stop, width
):
    rounds = bench.rounds("The quick brown fox jumps over the lazy dog.", width)
    config = GatewayConfig(speculation_metrics="detailed")
    async with bench.serve(make_script(rounds), config) as (client, _):
        answer = (await client.post(CHAT, json=body(stop=stop))).json()
    numbers = answer["metrics"]["speculative_decoding"]
    steps, accepted = numbers["num_spec_steps"], numbers["per_step_accepted"]
    assert 1 + sum(each + 1 for each in accepted) == answer["usage"]["completion_tokens"]
    assert sum(numbers["acceptance_histogram"]) == steps == len(accepted) == len(numbers["per_step_drafted"])
    assert sum(j * n for j, n in enumerate(numbers["acceptance_histogram"])) == numbers["num_accepted_draft_tokens"]
    assert len(numbers["acceptance_histogram"]) == numbers["num_spec_tokens"] + 1
    assert numbers["num_proposed_draft_tokens"] == 7 * steps and numbers["num_draft_tokens"] == 5 * steps
