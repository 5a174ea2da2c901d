"""Text completions over HTTP: forms of the prompt, wire order, the older logprobs, refusals."""

from __future__ import annotations

import pytest

from scheduler.wire import FinishReason
from tests.openai_schemas import check_answer, check_chunk, check_error

URL = "/v1/completions"
TEXT = "Hello there, naïve café 😀 done."


def ask(prompt="Once", **changes):
    return {"model": "tiny-chat", "prompt": prompt, **changes}


def script_by_prompt(bench, make_script):
    """Each prompt is answered by itself, so that answers cannot be mixed up unseen."""

    def answer(request):
        text = bench.tokenizer.decode(list(request.prompt_ids))
        return make_script(bench.rounds(f"after {text} and more of it", eos=True), step_s=0.001)

    return answer


async def test_unary_and_streamed_completions_satisfy_the_schemas_and_agree(bench, make_script, events, choices):
    async with bench.serve(make_script(bench.rounds(TEXT))) as (client, scheduler):
        unary = (await client.post(URL, json=ask())).json()
        streamed = await client.post(URL, json=ask(stream=True, stream_options={"include_usage": True}))
    check_answer(unary)
    assert unary["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
    assert unary["usage"]["prompt_tokens"] == len(scheduler.requests[0].prompt_ids)
    *chunks, done = events(streamed.text)
    assert done == "[DONE]"
    for chunk in chunks:
        check_chunk(chunk)
    assert choices(chunks)[0] == {"text": TEXT, "logprobs": [], "finish_reason": "stop"}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == unary["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-2]["choices"][0]["text"] == ""
    assert unary["metrics"]["speculative_decoding"] == chunks[-1]["metrics"]["speculative_decoding"]


async def test_the_four_forms_of_a_prompt_reach_the_engine_as_they_are(bench, make_script):
    ids = bench.ids("one two")
    forms = {
        "one two": [ids],
        ("one two", "three"): [ids, bench.ids("three")],
        (5, 6): [[5, 6]],
        ((5, 6), (7,)): [[5, 6], [7]],
    }
    for form, expected in forms.items():
        prompt = [list(each) if isinstance(each, tuple) else each for each in form] if isinstance(form, tuple) else form
        async with bench.serve(make_script(bench.rounds("Hi"))) as (client, scheduler):
            response = await client.post(URL, json=ask(prompt))
        assert response.status_code == 200
        assert [list(request.prompt_ids) for request in scheduler.requests] == expected


async def test_several_prompts_with_several_choices_are_numbered_prompt_by_prompt(bench, make_script, events, choices):
    prompts = ["red", "green", "blue"]
    async with bench.serve(script_by_prompt(bench, make_script)) as (client, scheduler):
        unary = (await client.post(URL, json=ask(prompts, n=2, seed=1))).json()
        streamed = await client.post(URL, json=ask(prompts, n=2, seed=1, stream=True))
    check_answer(unary)
    expected = [f"after {prompt} and more of it" for prompt in prompts for _ in range(2)]
    assert [choice["text"] for choice in unary["choices"]] == expected
    assert [choice["index"] for choice in unary["choices"]] == list(range(6))
    found = choices(events(streamed.text)[:-1])
    assert [found[index]["text"] for index in range(6)] == expected
    num_prompt = sum(len(bench.ids(prompt)) for prompt in prompts)
    assert unary["usage"]["prompt_tokens"] == num_prompt and unary["metrics"] is None
    assert unary["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 * len(prompts)
    assert sorted(request.params.seed for request in scheduler.requests[:6]) == [1, 1, 1, 2, 2, 2]


async def test_without_a_limit_sixteen_tokens_are_asked_for(bench, make_script):
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, scheduler):
        await client.post(URL, json=ask())
        await client.post(URL, json=ask(max_tokens=3))
    assert [request.params.max_tokens for request in scheduler.requests] == [16, 3]


@pytest.mark.parametrize("width", [1, 3, 7])
@pytest.mark.parametrize("stop", [None, "café", "ïve c", "done"])
async def test_tokens_logprobs_offsets_and_usage_end_together(bench, make_script, events, choices, width, stop):
    text = TEXT + " More text after all of that."
    script = make_script(bench.rounds(text, width), step_s=0.001)
    async with bench.serve(script) as (client, _):
        unary = (await client.post(URL, json=ask(logprobs=2, stop=stop))).json()
        request = ask(logprobs=2, stop=stop, stream=True, stream_options={"include_usage": True})
        chunks = events((await client.post(URL, json=request)).text)[:-1]
    check_answer(unary)
    shown, found = unary["choices"][0]["text"], unary["choices"][0]["logprobs"]
    assert shown == (text if stop is None else text[: text.index(stop)])
    count = unary["usage"]["completion_tokens"]
    assert {len(each) for each in found.values()} == {count}
    assert found["text_offset"] == sorted(found["text_offset"]) and found["text_offset"][0] == 0
    assert found["text_offset"][-1] <= len(shown)
    ids = [*bench.ids(text), bench.eos][:count]
    assert found["token_logprobs"] == [-0.01 * (token_id % 50) for token_id in ids]
    for name, top, logprob in zip(found["tokens"], found["top_logprobs"], found["token_logprobs"], strict=True):
        assert top[name] == logprob and 2 <= len(top) <= 3
    for chunk in chunks:
        check_chunk(chunk)
    streamed = choices(chunks)[0]
    assert streamed["text"] == shown
    for key in found:
        assert [each for part in streamed["logprobs"] for each in part[key]] == found[key]


async def test_offsets_point_at_the_text_of_each_token(bench, make_script):
    ids = bench.ids("Hello there, how are you today?")
    async with bench.serve(make_script([ids[:2], ids[2:]], FinishReason.LENGTH)) as (client, _):
        choice = (await client.post(URL, json=ask(logprobs=0))).json()["choices"][0]
    found = choice["logprobs"]
    ends = [*found["text_offset"][1:], len(choice["text"])]
    assert [choice["text"][start:end] for start, end in zip(found["text_offset"], ends, strict=True)] == found["tokens"]
    assert all(list(top) == [name] for top, name in zip(found["top_logprobs"], found["tokens"], strict=True))


async def test_halves_of_a_character_are_named_by_their_bytes(bench, make_script):
    ids = [bench.tokenizer.token_to_id(character) for character in ("ð", "Ł", "ĺ", "Ģ")]
    async with bench.serve(make_script([ids], FinishReason.LENGTH)) as (client, _):
        choice = (await client.post(URL, json=ask(logprobs=0))).json()["choices"][0]
    assert choice["text"] == "😀"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "\ud83d"}, "prompt"),
        ({"prompt": "x", "n": 65}, "n"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": "é" * 300}, "prompt"),
        ({"speculation": {"mark_drafted": True}, "logprobs": 1}, "speculation.mark_drafted"),
    ],
)
async def test_a_wrong_or_unsupported_field_is_a_400_that_names_it(bench, make_script, change, param):
    import json

    async with bench.serve(make_script()) as (client, scheduler):
        response = await client.post(URL, content=json.dumps(ask() | change))
    check_error(response.json())
    assert response.status_code == 400 and response.json()["error"]["param"] == param and not scheduler.requests


async def test_best_of_that_says_what_n_says_is_taken(bench, make_script):
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, _):
        answer = await client.post(URL, json=ask(n=2, best_of=2, echo=False, suffix=None))
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 2
