"""Tools, thoughts and structured output through the whole gateway: what the engine is asked, what the client is told.

The engine is scripted: it answers a text in rounds of every width, so that blocks end anywhere in it.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from scheduler.wire import FinishReason
from tests.openai_schemas import check_answer, check_chunk, check_error

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "東京 </tool_call> 😀"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
HERMES_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools> say <tool_call>{% endif %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}{{ message.tool_calls or '' }};{% endfor %}"
)
THINKING_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}|<think>\n"
    "{% if enable_thinking is false %}\n</think>\n\n{% endif %}"
)


def accumulate(chunks: list[dict]) -> dict[int, dict]:
    """Per choice: the message a client puts together from a stream, and its finish reason."""
    found: dict[int, dict] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            entry = found.setdefault(choice["index"], {"content": "", "reasoning": "", "calls": {}, "finish": None})
            delta = choice["delta"]
            entry["content"] += delta.get("content") or ""
            entry["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                known = entry["calls"].setdefault(call["index"], {"name": "", "arguments": "", "id": None})
                assert ("id" in call) == (known["id"] is None), "an id with the first delta of a call, and no other"
                known["id"] = known["id"] or call["id"]
                known["name"] += call["function"].get("name", "")
                known["arguments"] += call["function"]["arguments"]
            entry["finish"] = choice["finish_reason"] or entry["finish"]
    return found


def allowed(mode: str, *names: str) -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.fixture
def ask(bench, make_script, body, events):
    """Asks for a whole answer and for a stream in rounds of `width`, and checks that both say the same; gives the choices and
    the requests the engine saw."""

    bench.card = replace(bench.card, max_model_len=4000)

    async def run(text, width=3, *, card=None, eos=True, config=None, **fields):
        if card is not None:
            bench.card = replace(bench.card, **card)
        script = make_script(bench.rounds(text, width, eos=eos), FinishReason.STOP if eos else FinishReason.LENGTH)
        async with bench.serve(script, replace(bench.config, **(config or {}))) as (client, scheduler):
            whole = await client.post(CHAT, json=body(**fields))
            assert whole.status_code == 200, whole.text
            streamed = await client.post(CHAT, json=body(stream=True, **fields))
        check_answer(whole.json())
        chunks = [event for event in events(streamed.text) if event != "[DONE]"]
        for chunk in chunks:
            check_chunk(chunk)
        choices = accumulate(chunks)
        for choice in whole.json()["choices"]:
            message, told = choice["message"], choices[choice["index"]]
            calls = [
                (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []
            ]
            assert calls == [(call["name"], call["arguments"]) for call in told["calls"].values()]
            assert (message["content"] or "", message.get("reasoning_content", "")) == (
                told["content"],
                told["reasoning"],
            )
            assert choice["finish_reason"] == told["finish"]
        return choices, scheduler.requests

    return run


@pytest.mark.parametrize("width", [1, 2, 3, 7, 100])
async def test_calls_come_out_of_blocks_of_every_width(ask, width):
    choices, _ = await ask(f"Let me see.\n{CALL}\n{OTHER}", width, tools=[WEATHER, CLOCK])
    (choice,) = choices.values()
    assert choice["content"] == "Let me see." and choice["finish"] == "tool_calls"
    assert json.loads(choice["calls"][0]["arguments"]) == {"city": "東京 </tool_call> 😀"}
    assert [call["name"] for call in choice["calls"].values()] == ["weather", "clock"]
    assert len({call["id"] for call in choice["calls"].values()}) == 2


async def test_content_is_null_when_there_are_only_calls(bench, make_script, body):
    bench.card = replace(bench.card, max_model_len=4000)
    async with bench.serve(make_script(bench.rounds(CALL))) as (client, _):
        message = (await client.post(CHAT, json=body(tools=[WEATHER]))).json()["choices"][0]["message"]
    assert message["content"] is None and message["tool_calls"][0]["type"] == "function"
    assert message["tool_calls"][0]["id"].startswith("call_")


async def test_every_choice_has_its_own_calls(ask):
    choices, _ = await ask(CALL, n=3, tools=[WEATHER])
    assert [len(choice["calls"]) for choice in choices.values()] == [1, 1, 1]
    assert {choice["finish"] for choice in choices.values()} == {"tool_calls"}


async def test_a_call_that_max_tokens_cuts_ends_with_length(ask):
    choices, _ = await ask(CALL[:-30], eos=False, tools=[WEATHER])
    assert choices[0]["finish"] == "length" and choices[0]["calls"][0]["name"] == "weather"
    choices, _ = await ask(CALL[:20], eos=False, tools=[WEATHER])
    assert choices[0]["finish"] == "length" and choices[0]["content"] == CALL[:20]


async def test_a_malformed_call_is_content_and_no_text_is_lost(ask):
    text = "<tool_call>\n{'name': 'weather'}\n</tool_call> sorry"
    choices, _ = await ask(text, tools=[WEATHER])
    assert choices[0]["content"] == text and choices[0]["finish"] == "stop" and not choices[0]["calls"]


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}])
async def test_without_tools_to_call_a_call_is_content(ask, fields):
    choices, requests = await ask(CALL, **fields)
    assert choices[0]["content"] == CALL and choices[0]["finish"] == "stop"
    assert requests[0].params.grammar is None


async def test_logprobs_beside_calls_are_of_every_token(bench, make_script, body):
    bench.card = replace(bench.card, max_model_len=4000)
    async with bench.serve(make_script(bench.rounds(CALL))) as (client, _):
        asked = body(tools=[WEATHER], logprobs=True, top_logprobs=1)
        answer = (await client.post(CHAT, json=asked)).json()
    check_answer(answer)
    assert len(answer["choices"][0]["logprobs"]["content"]) == answer["usage"]["completion_tokens"]


async def test_llama_writes_bare_objects(ask):
    card = {"chat_template": "{% if tools %}<|python_tag|>{{ tools }}{% endif %}{{ messages[0].content }}"}
    choices, requests = await ask('{"name": "weather", "parameters": {"city": "Oslo"}}', card=card, tools=[WEATHER])
    assert choices[0]["calls"][0]["arguments"] == '{"city": "Oslo"}' and choices[0]["finish"] == "tool_calls"
    choices, requests = await ask('{"city": "Oslo"}', tools=[WEATHER], tool_choice="required")
    assert choices[0]["content"] == '{"city": "Oslo"}' and choices[0]["finish"] == "stop"
    assert '\\"parameters\\": ' in requests[0].params.grammar.text


FAMILIES = {
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\n東京 😀\n</parameter>\n</function>\n</tool_call>",
    "pythonic": "[weather(city='東京 😀')]",
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "東京 😀"}}]',
    "mistral_args": '[TOOL_CALLS]weather[ARGS]{"city": "東京 😀"}',
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("width", [1, 3, 100])
async def test_every_family_s_calls_come_out_of_blocks_of_every_width(ask, family, width):
    for choice in ("auto", "required"):
        choices, requests = await ask(
            FAMILIES[family], width, config={"tool_format": family}, tools=[WEATHER, CLOCK], tool_choice=choice, n=2
        )
        for found in choices.values():
            assert found["finish"] == "tool_calls" and found["content"] == ""
            assert [json.loads(call["arguments"]) for call in found["calls"].values()] == [{"city": "東京 😀"}]
        assert (requests[0].params.grammar is None) == (choice == "auto")


async def test_the_setting_overrules_the_template(ask):
    choices, _ = await ask(
        '{"name": "weather", "parameters": {}}', config={"tool_format": "llama3_json"}, tools=[WEATHER]
    )
    assert choices[0]["calls"][0]["name"] == "weather"


async def test_tags_that_are_special_tokens_are_seen_by_the_parsers(ask, bench, rust_tokenizer):
    tokenizer = RustTokenizer.from_str(rust_tokenizer.to_str())
    tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in ("<tool_call>", "</tool_call>", "</think>")])
    bench.tokenizer = tokenizer
    card = {"tokenizer_json": tokenizer.to_str()}
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    choices, _ = await ask(f"<think>hm</think>{call}", card=card, tools=[CLOCK])
    assert choices[0]["reasoning"] == "hm" and choices[0]["calls"][0]["name"] == "clock" and choices[0]["content"] == ""
    choices, requests = await ask(call, tools=[CLOCK], tool_choice="required")
    assert "answer: <tool_call> " in requests[0].params.grammar.text


def prompt(bench, request) -> str:
    return bench.tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False)


async def test_a_template_that_knows_tools_shows_them_itself(ask, bench):
    _, requests = await ask("Hi", card={"chat_template": HERMES_TEMPLATE}, tools=[WEATHER])
    text = prompt(bench, requests[0])
    assert text.startswith("<tools>" + json.dumps(WEATHER)) and "# Tools" not in text


async def test_a_template_that_knows_no_tools_gets_them_in_the_system_message(ask, bench):
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Oslo?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    _, requests = await ask("Hi", tools=[WEATHER], messages=history)
    text = prompt(bench, requests[0])
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n") and json.dumps(WEATHER) in text
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in text
    )
    assert "<|im_start|>user\n<tool_response>\nrain\n</tool_response>" in text
    _, requests = await ask("Hi", tools=[WEATHER], tool_choice="none", messages=history[:2])
    assert "# Tools" not in prompt(bench, requests[0])


async def test_allowed_tools_leave_the_prompt_as_it_is_and_the_grammar_knows_no_others(ask, bench):
    seen = []
    for choice in ("auto", allowed("auto", "clock"), allowed("required", "clock"), allowed("auto", "clock", "weather")):
        choices, requests = await ask(OTHER, tools=[WEATHER, CLOCK], tool_choice=choice)
        assert [call["name"] for call in choices[0]["calls"].values()] == ["clock"]
        seen.append(requests[0])
    assert len({request.prompt_ids for request in seen}) == 1
    everything, some, forced, all_of_them = (request.params.grammar for request in seen)
    assert everything is all_of_them is None
    assert all("clock" in each.text and "weather" not in each.text for each in (some, forced))


async def test_tokenize_counts_the_tools_too(bench, make_script, body):
    bench.card = replace(bench.card, max_model_len=4000)
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, _):
        asked = body(tools=[WEATHER])
        with_tools = (await client.post("/tokenize", json=asked)).json()
        without = (await client.post("/tokenize", json=body())).json()
        not_shown = (await client.post("/tokenize", json=asked | {"tool_choice": "none"})).json()
    assert not_shown["tokens"] == without["tokens"]
    assert with_tools["count"] > without["count"] + 50
    assert "# Tools" in bench.tokenizer.decode(with_tools["tokens"])


# Values that a field might be given by mistake or by malice.
junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "function", "required", "("]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "function", "name", "parameters", "json_schema", "schema", "regex", "choice", "json"]
            )
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)
FIELDS = [
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "chat_template_kwargs",
]


@given(st.lists(st.dictionaries(st.sampled_from(FIELDS), junk, min_size=1, max_size=3), min_size=20, max_size=20))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_nonsense_in_any_field_is_an_answer_or_a_named_400(bench, make_script, body, fields):
    async def ask_all() -> None:
        async with bench.serve(make_script(bench.rounds("Hi"))) as (client, _):
            for each in fields:
                response = await client.post(CHAT, content=json.dumps(body(**each)))
                assert response.status_code in (200, 400), (each, response.text)
                assert response.status_code == 200 or response.json()["error"]["param"], (each, response.text)

    asyncio.run(ask_all())


@pytest.mark.parametrize("width", [1, 4, 50])
async def test_a_thought_is_split_from_the_answer(ask, width):
    card = {"chat_template": THINKING_TEMPLATE}
    choices, _ = await ask("so 1 < 2\n</think>\n\nYes 😀.", width, card=card)
    assert (choices[0]["reasoning"], choices[0]["content"]) == ("so 1 < 2", "Yes 😀.")
    choices, _ = await ask("Yes.", width, chat_template_kwargs={"enable_thinking": False})
    assert (choices[0]["reasoning"], choices[0]["content"]) == ("", "Yes.")
    choices, _ = await ask("Yes.", width, reasoning_effort="none")
    assert (choices[0]["reasoning"], choices[0]["content"]) == ("", "Yes.")
    choices, _ = await ask("so 1 <", width, eos=False)
    assert (choices[0]["reasoning"], choices[0]["content"], choices[0]["finish"]) == ("so 1 <", "", "length")


@pytest.mark.parametrize("width", [1, 3, 7, 100])
@pytest.mark.parametrize("thought", ["so 1 < 2 😀", "<think>\n東京</think> no", ""])
@pytest.mark.parametrize("logprobs", [None, True])
async def test_the_tokens_of_a_thought_are_counted(bench, make_script, body, events, width, thought, logprobs):
    """The slow twin: the first number of tokens whose text has the closing tag in it; twice that for two choices."""
    bench.card = replace(bench.card, chat_template=THINKING_TEMPLATE, max_model_len=4000)
    text = f"{thought}</think>\n\nYes <b> 😀."
    ids = bench.ids(text)
    expected = next(n for n in range(len(ids) + 1) if "</think>" in bench.tokenizer.decode(ids[:n]))
    async with bench.serve(make_script(bench.rounds(text, width))) as (client, _):
        asked = body(n=2, logprobs=logprobs, stop=["never"])
        usage = (await client.post(CHAT, json=asked)).json()["usage"]
        streamed = await client.post(CHAT, json=asked | {"stream": True, "stream_options": {"include_usage": True}})
        last = [event for event in events(streamed.text) if event != "[DONE]"][-1]
        plain = (await client.post(CHAT, json=body(chat_template_kwargs={"enable_thinking": False}))).json()["usage"]
        cut = (await client.post(CHAT, json=body(stop=[text[4:6]]))).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * expected}
    assert usage["completion_tokens"] == 2 * (len(ids) + 1) and last["usage"] == usage
    if not thought.startswith("<think>"):
        assert plain["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert cut["completion_tokens_details"]["reasoning_tokens"] == cut["completion_tokens"] > 0


async def test_a_model_that_does_not_think_has_no_reasoning_tokens(bench, make_script, body):
    async with bench.serve(make_script(bench.rounds("Hi"))) as (client, _):
        assert "completion_tokens_details" not in (await client.post(CHAT, json=body())).json()["usage"]


async def test_a_call_inside_a_thought_is_a_thought(ask):
    choices, _ = await ask(f"{OTHER}</think>{CALL}", card={"chat_template": THINKING_TEMPLATE}, tools=[WEATHER, CLOCK])
    assert choices[0]["reasoning"] == OTHER and [call["name"] for call in choices[0]["calls"].values()] == ["weather"]


async def test_reasoning_can_be_switched_off(ask):
    card = {"chat_template": THINKING_TEMPLATE}
    choices, _ = await ask("a</think>b", card=card, config={"reasoning": "off"})
    assert choices[0]["content"] == "a</think>b" and choices[0]["reasoning"] == ""


async def test_a_thinking_template_puts_the_thought_before_the_grammar(ask):
    card = {"chat_template": THINKING_TEMPLATE}
    format_ = {"type": "json_object"}
    choices, requests = await ask('hm</think>{"a": 1}', card=card, response_format=format_)
    assert choices[0]["content"] == '{"a": 1}' and requests[0].params.grammar.text.startswith("start: thought answer")
    _, requests = await ask("{}", response_format=format_, chat_template_kwargs={"enable_thinking": False})
    assert requests[0].params.grammar.kind == "json_schema"


async def test_a_stop_string_inside_a_call_leaves_what_was_before_it(ask):
    choices, _ = await ask(CALL, tools=[WEATHER], stop=["東京"])
    assert choices[0]["calls"][0]["arguments"] == '{"city": "' and choices[0]["finish"] == "tool_calls"


async def test_completions_take_grammars_too(bench, make_script, body):
    async with bench.serve(make_script(bench.rounds("yes"))) as (client, scheduler):
        asked = {"model": "tiny-chat", "prompt": "Is it?", "structured_outputs": {"choice": ["yes", "no"]}}
        assert (await client.post("/v1/completions", json=asked)).status_code == 200
    assert scheduler.requests[0].params.grammar.text == 'start: "yes" | "no"\n'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools.0.function.parameters",
        ),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.function.name"),
        ({"tools": [WEATHER] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": ["function"]}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": allowed("auto")}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": allowed("none", "weather")}, "tool_choice"),
        ({"tools": [], "tool_choice": allowed("auto", "weather")}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": allowed("auto", "weather", "x")},
            "tool_choice.allowed_tools.tools.1.function.name",
        ),
        ({"tools": [WEATHER, CLOCK], "tool_choice": allowed("auto", "clock"), "ignore_eos": True}, "ignore_eos"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [WEATHER], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": [WEATHER], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
    ],
)
async def test_what_cannot_be_done_is_a_400_that_names_it(bench, make_script, body, fields, param):
    async with bench.serve(make_script()) as (client, scheduler):
        response = await client.post(CHAT, json=body(**fields))
    assert response.status_code == 400, response.text
    check_error(response.json())
    assert response.json()["error"]["param"] == param and not scheduler.requests
