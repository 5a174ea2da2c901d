"""Chat logprobs: one entry for each token that is counted, wherever a block is cut and whatever is held back."""

from __future__ import annotations

import pytest

from tests.openai_schemas import check_answer, check_chunk

CHAT = "/v1/chat/completions"
TEXT = "Hello there, naïve café 😀 done. And some more text."


@pytest.mark.parametrize("width", [1, 2, 7])
@pytest.mark.parametrize("stop", [None, "café", "ve ca", "😀", "text.", "never seen"])
async def test_entries_text_and_usage_agree_streamed_or_not(bench, make_script, body, events, choices, width, stop):
    script = make_script(bench.rounds(TEXT, width), step_s=0.001)
    async with bench.serve(script) as (client, _):
        wanted = body(logprobs=True, top_logprobs=2, stop=stop)
        unary = (await client.post(CHAT, json=wanted)).json()
        wanted |= {"stream": True, "stream_options": {"include_usage": True}}
        chunks = events((await client.post(CHAT, json=wanted)).text)[:-1]
    check_answer(unary)
    for chunk in chunks:
        check_chunk(chunk)
    choice = unary["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == unary["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"]
    ids = [*bench.ids(TEXT), bench.eos][: len(entries)]
    assert [entry["logprob"] for entry in entries] == [-0.01 * (token_id % 50) for token_id in ids]
    assert all(
        len(entry["top_logprobs"]) == 2 and entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries
    )
    raw = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert raw.decode().startswith(choice["message"]["content"])
    streamed = choices(chunks)[0]
    assert streamed["text"] == choice["message"]["content"]
    assert [entry for part in streamed["logprobs"] for entry in part["content"]] == entries


async def test_the_token_that_ends_the_answer_has_its_entry_and_its_name(bench, make_script, body):
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, _):
        answer = (await client.post(CHAT, json=body(logprobs=True))).json()
    last = answer["choices"][0]["logprobs"]["content"][-1]
    assert last["token"] == "<|im_end|>" and bytes(last["bytes"]).decode() == last["token"]
    assert last["top_logprobs"] == []


async def test_tokens_of_half_a_character_come_with_the_text_they_are_part_of(bench, make_script, body, events):
    ids = [bench.tokenizer.token_to_id(character) for character in ("ð", "Ł", "ĺ", "Ģ")]
    script = make_script([[token_id] for token_id in ids] + [[bench.eos]], step_s=0.002)
    async with bench.serve(script) as (client, _):
        chunks = events((await client.post(CHAT, json=body(logprobs=True, stream=True))).text)[:-1]
    contents = [chunk["choices"][0] for chunk in chunks[1:-1]]
    assert [choice["delta"]["content"] for choice in contents] == ["😀", ""]
    assert [len(choice["logprobs"]["content"]) for choice in contents] == [4, 1]


async def test_without_being_asked_there_are_none(bench, make_script, body, events):
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, scheduler):
        answer = (await client.post(CHAT, json=body(logprobs=False))).json()
        await client.post(CHAT, json=body(logprobs=True))
        await client.post(CHAT, json=body(logprobs=True, top_logprobs=5))
    assert answer["choices"][0]["logprobs"] is None
    assert [request.params.num_logprobs for request in scheduler.requests] == [None, 0, 5]


async def test_accepted_drafts_can_be_marked(bench, make_script, body):
    rounds = bench.rounds("The quick brown fox jumps", width=4)
    async with bench.serve(make_script(rounds)) as (client, _):
        wanted = body(logprobs=True, speculation={"mark_drafted": True})
        entries = (await client.post(CHAT, json=wanted)).json()["choices"][0]["logprobs"]["content"]
    marks = [entry["drafted"] for entry in entries]
    expected = [False] + [at < len(ids) - 1 for ids in rounds[1:] for at in range(len(ids))]
    assert marks == expected and any(marks)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"speculation": {"mark_drafted": True}}, "speculation.mark_drafted"),
    ],
)
async def test_a_wrong_wish_is_named(bench, make_script, body, change, param):
    async with bench.serve(make_script()) as (client, _):
        response = await client.post(CHAT, json=body(**change))
    assert response.status_code == 400 and response.json()["error"]["param"] == param


async def test_a_probability_of_zero_is_a_number_in_json(bench, make_script, body):
    from scheduler.wire import TokenLogprob

    nothing = TokenLogprob(float("-inf"), ((3, float("-inf")),))
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, scheduler):
        play = scheduler._delta
        from dataclasses import replace

        scheduler._delta = lambda *a: replace(d := play(*a), logprobs=(nothing,) * len(d.token_ids))
        answer = (await client.post(CHAT, json=body(logprobs=True))).json()
    assert {entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]} == {-9999.0}
