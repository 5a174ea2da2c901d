"""The clients that people use, unchanged, against a running server: openai, langchain-openai, litellm."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import openai
import pytest

from tests.integration.character_tokenizer import save_tokenizer
from tests.openai_schemas import check_answer, check_chunk
from tests.running_server import RunningServer, small_settings

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def server(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("clients")
    target = save_tokenizer(Path(shutil.copytree(golden / "target", folder / "target")), 48)
    settings = small_settings(
        target, str(golden / "dspark_vanilla"), folder / "cache", gateway={"served_names": "alias"}
    )
    with RunningServer(settings) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="unused", max_retries=0) as made:
        yield made


def greedy(**changes):
    return {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 24, **changes}


def test_openai_reads_a_whole_answer_and_the_list_of_models(client, server):
    answer = client.chat.completions.create(**greedy())
    check_answer(answer.model_dump(exclude_unset=True))
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 24
    assert answer.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] >= 1
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    raw = client.chat.completions.with_raw_response.create(**greedy(), extra_headers={"X-Request-Id": "mine-1"})
    assert raw.headers["x-request-id"] == "mine-1"


def test_openai_streams_what_it_reads_whole(client):
    whole = client.chat.completions.create(**greedy(logprobs=True, top_logprobs=3))
    chunks = list(
        client.chat.completions.create(
            **greedy(logprobs=True, top_logprobs=3), stream=True, stream_options={"include_usage": True}
        )
    )
    for chunk in chunks:
        check_chunk(chunk.model_dump(exclude_unset=True))
    deltas = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in deltas) == whole.choices[0].message.content
    entries = [entry for choice in deltas if choice.logprobs for entry in choice.logprobs.content]
    assert len(entries) == whole.usage.completion_tokens == chunks[-1].usage.completion_tokens
    for streamed, kept in zip(entries, whole.choices[0].logprobs.content, strict=True):
        assert streamed.token == kept.token and math.isclose(streamed.logprob, kept.logprob, abs_tol=1e-4)
        assert len(kept.top_logprobs) == 3
        assert kept.logprob == kept.top_logprobs[0].logprob, "greedy takes the most probable token"
    assert len([c for c in deltas if c.delta.content]) < 24, "a chunk carries a round's tokens, not one"


def test_openai_helper_for_streams_gathers_the_same_message(client):
    wanted = greedy(temperature=1.0, max_tokens=150, stop="e")
    whole = client.chat.completions.create(**wanted, n=2, seed=5)
    with client.chat.completions.stream(**wanted, n=2, seed=5) as stream:
        kinds = {event.type for event in stream}
        gathered = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.message.content for choice in gathered.choices] == texts and texts[0] != texts[1]
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    alone = client.chat.completions.create(**wanted, seed=6)
    assert alone.choices[0].message.content == texts[1], "choice i is what seed + i gives alone"
    with client.chat.completions.stream(**greedy()) as stream, pytest.raises(openai.LengthFinishReasonError):
        stream.get_final_completion()


def test_choices_of_one_prompt_compute_it_once(client, server):
    """Three choices: two find the prompt's whole blocks in the prefix cache, also when nobody asked for it before."""
    text = "choices share the blocks of this prompt, which is long enough to have several of them"
    before = server.ask(server.engine.snapshot())
    answer = client.chat.completions.create(**greedy(n=3, messages=[{"role": "user", "content": text}], max_tokens=4))
    after = server.ask(server.engine.snapshot())
    whole_blocks = (answer.usage.prompt_tokens - 1) // 16 * 16
    assert answer.usage.prompt_tokens_details.cached_tokens == 0, "the first computes it"
    assert after.prefix_hit_tokens - before.prefix_hit_tokens == 2 * whole_blocks > 0


async def test_openai_async_many_at_once(server):
    async with openai.AsyncOpenAI(base_url=server.url, api_key="unused", max_retries=0) as client:
        stream = await client.chat.completions.create(**greedy(), stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        whole = await client.chat.completions.create(**greedy())
    assert text == whole.choices[0].message.content


def test_openai_text_completions_of_strings_and_of_ids(client):
    whole = client.completions.create(model="tiny", prompt=["abc", "hello"], max_tokens=9, temperature=0, logprobs=2)
    check_answer(whole.model_dump(exclude_unset=True))
    assert [choice.index for choice in whole.choices] == [0, 1]
    for choice in whole.choices:
        assert len(choice.logprobs.tokens) == 9 and "".join(choice.logprobs.tokens) == choice.text
    ids = client.completions.create(model="tiny", prompt=[[1, 2, 3]], max_tokens=9, temperature=0)
    assert ids.choices[0].text == whole.choices[0].text, "a, b and c are ids 1, 2 and 3"
    stream = client.completions.create(model="tiny", prompt="abc", max_tokens=9, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


@pytest.mark.parametrize(
    ("change", "kind", "param"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 10_000}, openai.BadRequestError, "max_tokens"),
        ({"logit_bias": {"4000": 5}}, openai.BadRequestError, "logit_bias"),
        ({"extra_body": {"prediction": {"type": "content", "content": "x"}}}, openai.BadRequestError, "prediction"),
    ],
)
def test_openai_raises_its_own_error_that_names_the_field(client, change, kind, param):
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**greedy() | change)
    assert caught.value.param == param and caught.value.code and caught.value.type == "invalid_request_error"
    with pytest.raises(kind):
        client.chat.completions.create(**greedy(stream=True) | change)


def test_a_deadline_that_passes_is_an_error_and_not_half_an_answer(client):
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(**greedy(max_tokens=150), extra_body={"timeout": 0.01, "ignore_eos": True})
    assert caught.value.status_code == 504 and caught.value.code == "deadline_exceeded"


def test_langchain_invokes_streams_and_reads_logprobs(server):
    langchain_openai = pytest.importorskip("langchain_openai")
    chat = langchain_openai.ChatOpenAI(
        base_url=server.url, api_key="unused", model="tiny", temperature=0, max_tokens=16, max_retries=0
    )
    whole = chat.invoke([("system", "be brief"), ("human", "hello there")])
    streamed = list(chat.stream([("system", "be brief"), ("human", "hello there")]))
    assert "".join(chunk.content for chunk in streamed) == whole.content and whole.content
    assert whole.usage_metadata["output_tokens"] == 16
    assert whole.response_metadata["finish_reason"] == "length"
    told = chat.bind(logprobs=True).invoke("hello")
    assert len(told.response_metadata["logprobs"]["content"]) == 16


@pytest.mark.filterwarnings("ignore")
def test_litellm_completes_and_streams(server):
    litellm = pytest.importorskip("litellm")
    wanted = greedy(model="openai/tiny", api_base=server.url, api_key="unused", max_retries=0)
    whole = litellm.completion(**wanted)
    chunks = list(litellm.completion(**wanted, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and whole.usage.completion_tokens == 24
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**wanted | {"temperature": 3})
