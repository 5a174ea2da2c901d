"""Tool calls, structured output and keys with the real clients against a running server: a small random target, held to its
grammars while a drafter proposes blocks of seven.

A random model writes nonsense; what it writes under a grammar must still parse and fit the schema, every time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from services.gateway.tool_parsers.json_value import JsonValue, Step
from tests.openai_schemas import check_answer, check_chunk
from tests.running_server import RunningServer, small_settings

ALICE, LIMITED, FORMER = "sk-alice-0123456789", "sk-limited-0123456789", "sk-former-0123456789"
EOS = "<|im_end|>"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls or '' }}\n{% endfor %}assistant:"
)
CORPUS = [
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>',
    '{"name": "Ann", "age": 31, "tags": ["a", "b"], "nested": {"x": null, "y": true}}',
    "What is the weather in Oslo for the next days? yes no maybe 12-34-56",
]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Köln", "東京"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["city", "days"],
}
CLOCK = {"type": "object", "properties": {"zone": {"type": "string", "pattern": "^[A-Z]{3}$"}}, "required": ["zone"]}
SCHEMAS = {"weather": WEATHER, "clock": CLOCK}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"The {name}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


class Colour(StrEnum):
    RED, GREEN = "red", "green"


class Eyes(BaseModel):
    colour: Colour


class Person(BaseModel):
    name: str = Field(max_length=4)
    age: int = Field(ge=0, le=120)
    eyes: Eyes


def save_byte_tokenizer(folder: Path, vocab_size: int) -> Path:
    """Byte-level BPE with a few hundred tokens, so that JSON's punctuation falls inside tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", EOS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": EOS}))
    return folder


@pytest.fixture(scope="module")
def server(write_target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("structured")
    target = write_target(folder / "target", "qwen3", vocab_size=360, max_position_embeddings=2048)
    keys = {
        "alice": ALICE,
        "limited": {"key": LIMITED, "requests_per_minute": 2},
        "former": {"key": FORMER, "enabled": False},
    }
    settings = small_settings(
        save_byte_tokenizer(target, 360), "ngram", folder / "cache", gateway={"auth": {"keys": keys}}
    )
    with RunningServer(settings) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key=ALICE, max_retries=0) as made:
        yield made


def asked(**changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "The weather in Oslo?"}]
    return {"model": "tiny", "messages": messages, "max_tokens": 200, "temperature": 1.0, **changes}


def check_call(call: Any) -> None:
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("seed", range(2))
def test_a_required_call_fits_its_tool(client, seed):
    answer = client.chat.completions.create(
        **asked(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed)
    )
    check_answer(answer.model_dump(exclude_unset=True))
    (call,) = answer.choices[0].message.tool_calls
    check_call(call)
    assert answer.choices[0].message.content is None and answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("name", ["weather", "clock"])
def test_a_named_tool_is_the_one_that_is_called(client, name):
    choice = {"type": "function", "function": {"name": name}}
    for temperature in (0, 1):
        answer = client.chat.completions.create(**asked(tools=TOOLS, tool_choice=choice, temperature=temperature))
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == name
        check_call(call)


def test_parallel_calls_all_fit_and_the_last_may_be_cut(client):
    answer = client.chat.completions.create(**asked(tools=TOOLS, tool_choice="required", seed=1, n=2))
    found = 0
    for choice in answer.choices:
        calls = choice.message.tool_calls
        whole = calls if choice.finish_reason == "tool_calls" else calls[:-1]
        found += len(whole)
        for call in whole:
            check_call(call)
    assert found >= 2


def test_streamed_calls_are_those_of_the_whole_answer_with_speculation_on_and_off(client):
    arguments = asked(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=7)
    whole = client.chat.completions.create(**arguments).choices[0].message.tool_calls[0]
    for mode in ("off", "fixed:7"):
        chunks = list(
            client.chat.completions.create(**arguments, stream=True, extra_body={"speculation": {"mode": mode}})
        )
        for chunk in chunks:
            check_chunk(chunk.model_dump(exclude_unset=True))
        deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert deltas[0].function.name == whole.function.name and deltas[0].id and not any(d.id for d in deltas[1:])
        assert "".join(delta.function.arguments for delta in deltas) == whole.function.arguments
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_client_s_own_tool_helper_parses_a_streamed_call(client):
    tool = openai.pydantic_function_tool(Person, name="greet")
    with client.chat.completions.stream(
        **asked(tools=[tool], tool_choice="required", parallel_tool_calls=False)
    ) as stream:
        final = stream.get_final_completion()
    parsed = final.choices[0].message.tool_calls[0].function.parsed_arguments
    assert isinstance(parsed, Person)


@pytest.mark.parametrize("temperature", [0, 1])
def test_structured_output_parses_into_its_pydantic_model(client, temperature):
    answer = client.chat.completions.parse(**asked(response_format=Person, temperature=temperature))
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert answer.choices[0].finish_reason == "stop"


def test_any_json_object_is_the_beginning_of_one_also_when_it_is_cut(client):
    answer = client.chat.completions.create(**asked(response_format={"type": "json_object"}, max_tokens=60, n=4))
    for choice in answer.choices:
        text, value = choice.message.content.lstrip(" \n\r\t"), JsonValue()
        assert text.startswith("{")
        steps = [value.feed(char) for char in text.rstrip("\ufffd")]
        assert Step.BAD not in steps and (choice.finish_reason == "length" or steps[-1] is Step.DONE)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_regex": "[0-9]{2}-[a-f]{3}"}, "[0-9]{2}-[a-f]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no", "weiß nicht"]}}, "yes|no|weiß nicht"),
        ({"structured_outputs": {"grammar": 'root ::= "a" b "c"\nb ::= [x-z] | [0-9] [0-9]\n'}}, "a([x-z]|[0-9]{2})c"),
        ({"guided_grammar": 'start: "<" /[a-z]{3}/ ">"\n'}, "<[a-z]{3}>"),
    ],
)
def test_expressions_choices_and_grammars_hold_on_both_endpoints(client, extra, pattern):
    for seed in range(2):
        chat = client.chat.completions.create(**asked(extra_body=extra, seed=seed)).choices[0]
        text = client.completions.create(
            model="tiny", prompt="Say:", max_tokens=40, seed=seed, extra_body=extra
        ).choices[0]
        for found, reason in ((chat.message.content, chat.finish_reason), (text.text, text.finish_reason)):
            assert re.fullmatch(pattern, found) and reason == "stop"


def test_constrained_and_free_requests_share_a_batch(client):
    import concurrent.futures

    def one(number: int) -> Any:
        kind = number % 3
        extra = [{}, {"guided_regex": "[0-9]{12}"}, {"structured_outputs": {"json": Person.model_json_schema()}}][kind]
        found = client.chat.completions.create(**asked(extra_body=extra, max_tokens=120, seed=number)).choices[0]
        return kind, found.message.content, found.finish_reason

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(one, range(12)))
    for kind, text, reason in answers:
        if kind == 1:
            assert re.fullmatch("[0-9]{12}", text) and reason == "stop"
        elif kind == 2 and reason == "stop":
            Person.model_validate_json(text)
    assert sum(reason == "stop" for kind, _, reason in answers if kind == 2) >= 2


def test_langchain_binds_tools_and_reads_structured_output(server):
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=server.url, api_key=ALICE, model="tiny", temperature=1, max_tokens=200, max_retries=0)
    bound = model.bind_tools(TOOLS, tool_choice="weather").invoke("The weather?")
    jsonschema.validate(bound.tool_calls[0]["args"], WEATHER)
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Person, method=method).invoke("Who?"), Person)


def test_a_schema_that_cannot_be_enforced_is_an_error_of_the_client_s_kind(client):
    schema = {"name": "n", "strict": True, "schema": {"type": "array", "uniqueItems": True}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked(response_format={"type": "json_schema", "json_schema": schema}))
    assert refused.value.param == "response_format.json_schema.schema" and "uniqueItems" in refused.value.message


def test_keys_limits_and_refusals_are_errors_of_the_client_s_kinds(server):
    def client_of(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=server.url, api_key=key, max_retries=0)

    with client_of("sk-wrong-0123456789") as wrong, pytest.raises(openai.AuthenticationError) as refused:
        wrong.models.list()
    assert refused.value.code == "invalid_api_key"
    with client_of(FORMER) as former, pytest.raises(openai.PermissionDeniedError):
        former.chat.completions.create(**asked(max_tokens=1))
    with client_of(LIMITED) as limited:
        raw = [limited.chat.completions.with_raw_response.create(**asked(max_tokens=1)) for _ in range(2)]
        assert [each.headers["x-ratelimit-remaining-requests"] for each in raw] == ["1", "0"]
        with pytest.raises(openai.RateLimitError) as over:
            limited.chat.completions.create(**asked(max_tokens=1))
        assert int(over.value.response.headers["retry-after"]) > 50
        assert limited.models.list().data[0].id == "tiny"
