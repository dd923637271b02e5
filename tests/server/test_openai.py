"""The real openai client completes, chats and streams against a live server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.live_server import Live

openai = pytest.importorskip("openai", reason="the openai client is in the extra dev")
HANGUL = "강가에 서 있다"


@pytest.fixture(scope="module")
def client(live: Live) -> Any:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0)


def test_list_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["mill"]
    assert client.models.retrieve("mill").id == "mill"


def test_completion(client: Any) -> None:
    reply = client.completions.create(
        model="mill",
        prompt=HANGUL,
        max_tokens=20,
        n=2,
        temperature=0.5,
        top_p=0.9,
        seed=5,
        stop=["zzz"],
        logprobs=2,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"5": 1},
        user="someone",
        extra_body={"top_k": 5},
    )
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert all(choice.text.startswith(HANGUL[:5]) and choice.finish_reason == "length" for choice in reply.choices)
    assert reply.usage.completion_tokens == 40
    assert len(reply.choices[0].logprobs.tokens) == 20


def test_chat(client: Any) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": HANGUL}]},
    ]
    reply = client.chat.completions.create(
        model="mill", messages=messages, max_completion_tokens=80, logprobs=True, top_logprobs=2
    )
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content.startswith(f"system: be brief\nuser: {HANGUL}\nassistant:")
    assert reply.choices[0].logprobs.content[0].top_logprobs[0].logprob == pytest.approx(-0.6931, abs=1e-3)
    turn = reply.choices[0].message.model_dump()
    again = client.chat.completions.create(model="mill", messages=[*messages, turn, messages[1]], max_tokens=2)
    assert again.usage.prompt_tokens > reply.usage.prompt_tokens, "a reply can be sent back as it came"


def test_streamed_chat(client: Any) -> None:
    body = {"model": "mill", "messages": [{"role": "user", "content": HANGUL}], "max_tokens": 40}
    chunks = list(client.chat.completions.create(**body, n=2, stream=True, stream_options={"include_usage": True}))
    full = client.chat.completions.create(**body)
    for index in (0, 1):
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == full.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 80


def test_streamed_choices_with_logprobs_and_usage(client: Any) -> None:
    body = {
        "model": "mill",
        "prompt": HANGUL,
        "max_tokens": 12,
        "n": 3,
        "stop": ["zzz", "yyy"],
        "seed": 5,
        "logprobs": 1,
        "user": "someone",
    }
    full = client.completions.create(**body)
    *chunks, last = client.completions.create(**body, stream=True, stream_options={"include_usage": True})
    for index in range(3):
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(part.text for part in parts) == full.choices[index].text
        assert [token for part in parts if part.logprobs for token in part.logprobs.tokens] == full.choices[
            index
        ].logprobs.tokens
        assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]
    assert (last.choices, last.usage) == ([], full.usage)


def test_unsupported_options_are_refused_unless_they_have_no_effect(client: Any) -> None:
    body = {"model": "mill", "messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 2}
    fine = {
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "tools": None,
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "seed": 1,
        "stop": ["q", "z"],
    }
    assert client.chat.completions.create(**body, **fine).choices[0].message.content
    with client.chat.completions.stream(**{**body, "max_completion_tokens": 40}, stop=["\n"]) as events:
        [choice] = events.get_final_completion().choices
    assert choice.message.content == "user: x"
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    for more, message in [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: is missing"),
        ({"extra_body": {"regex": "("}}, "regex: no text can follow it"),
        ({"extra_body": {"regex": "a", "choices": ["a"]}}, "choices: not together with regex"),
        ({"functions": [tool["function"]]}, "functions: is not supported"),
        ({"reasoning_effort": "low"}, "reasoning_effort: is not supported"),
        ({"extra_body": {"guided_regex": "a+"}}, "guided_regex: unknown field"),
        ({"extra_body": {"temprature": 1}}, "did you mean 'temperature'"),
    ]:
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(**body, **more)


def test_constrained_output(client: Any, small_model: Path, new_live: Callable[..., Live]) -> None:
    live = new_live({"model": str(small_model), "chat": False})
    own = openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0)
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 22]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "pair", "strict": True, "schema": schema}}
    body = {"model": "mill", "prompt": "x", "max_tokens": 80, "seed": 1}
    reply = own.completions.create(**body, extra_body={"response_format": wanted})
    assert reply.choices[0].finish_reason == "stop"
    found = json.loads(reply.choices[0].text)
    assert found["a"] in (1, 22)
    assert type(found["b"]) is bool
    streamed = own.completions.create(**body, extra_body={"response_format": wanted}, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == reply.choices[0].text
    one = own.completions.create(**body, n=3, extra_body={"choices": ["yes", "no"]})
    assert {choice.text for choice in one.choices} <= {"yes", "no"}
    assert len(own.completions.create(**body, extra_body={"regex": "[0-9]{3}"}).choices[0].text) == 3
    tree = own.completions.create(**body, extra_body={"grammar": 'start: "(" start? ")"'})
    assert tree.choices[0].text.startswith("(")
    chat = {"model": "mill", "messages": [{"role": "user", "content": "x"}]}
    assert client.chat.completions.create(**chat, response_format=wanted, max_tokens=2).choices[0].message.content
    wrong = {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "minimum": 2, "maximum": 1}}}
    with pytest.raises(openai.BadRequestError, match="greater than maximum") as error:
        client.chat.completions.create(**chat, response_format=wrong)
    assert error.value.param == "response_format"


def test_client_errors_have_the_servers_messages(client: Any, new_live: Callable[..., Live]) -> None:
    with pytest.raises(openai.BadRequestError, match="must be at most 1; found 3"):
        client.completions.create(model="mill", prompt="x", top_p=3)
    with pytest.raises(openai.NotFoundError, match="this server has 'mill'"):
        client.completions.create(model="other", prompt="x")
    guarded = new_live({}, {"TEXTMILL_API_KEY": "a-long-secret"})
    with pytest.raises(openai.AuthenticationError, match="the key is wrong"):
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="another", max_retries=0).models.list()
    right = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="a-long-secret", max_retries=0)
    assert right.completions.create(model="mill", prompt="x", max_tokens=1).choices[0].text == "x"
