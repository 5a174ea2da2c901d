"""/tokenize and /detokenize: the very ids that a completion would have."""

from __future__ import annotations

import json

import pytest

from tests.openai_schemas import check_error

MESSAGES = [{"role": "user", "content": "naïve café 😀"}]


async def test_a_text_and_its_ids_are_each_others_inverse(bench, make_script):
    text = "naïve café 😀 日本語"
    async with bench.serve(make_script()) as (client, _):
        found = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
        back = (await client.post("/detokenize", json={"model": "tiny-chat", "tokens": found["tokens"]})).json()
    assert found["tokens"] == bench.ids(text) and found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 256 and len(found["token_strs"]) == found["count"]
    assert back == {"prompt": text}


async def test_messages_have_the_ids_of_the_chat_completion(bench, make_script, body):
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, scheduler):
        found = (await client.post("/tokenize", json={"model": "tiny-chat", "messages": MESSAGES})).json()
        await client.post("/v1/chat/completions", json=body(messages=MESSAGES))
        text = (await client.post("/detokenize", json={"tokens": found["tokens"]})).json()["prompt"]
    assert found["tokens"] == list(scheduler.requests[0].prompt_ids) and found["token_strs"] is None
    assert text == "<|im_start|>user\nnaïve café 😀<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("path", "wrong", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"prompt": "\ud83d"}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}, 400, "add_generation_prompt"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "tool_choice": "required"}, 400, "tool_choice"),
        ("/tokenize", {"messages": MESSAGES, "reasoning_effort": "high"}, 400, "reasoning_effort"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [10_000]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "\ud83d"}, 404, "model"),
    ],
)
async def test_a_wrong_body_is_named(bench, make_script, path, wrong, status, param):
    async with bench.serve(make_script()) as (client, _):
        response = await client.post(path, content=json.dumps(wrong))
    check_error(response.json())
    assert response.status_code == status and response.json()["error"]["param"] == param
