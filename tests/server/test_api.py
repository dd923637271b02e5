"""Replies of all routes: fields, limits, and one-sentence errors."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support import web
from tests.support.live_server import Live
from tests.support.waiting import LONGEST

HANGUL = "강가에 서 있다"


def post(live: Live, path: str, body: Any, **headers: str) -> httpx.Response:
    return web.post(live.url + path, json=body, headers=headers)


def streamed(live: Live, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the chunks of a stream, which must end with [DONE]."""
    with web.stream("POST", live.url + path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def ids_of(live: Live, text: str) -> list[int]:
    ids: list[int] = post(live, "/tokenize", {"text": text}).json()["tokens"]
    return ids


@pytest.mark.parametrize("text", ["The mill", HANGUL, "👩‍👩‍👧 çark", " "])
def test_tokenize_and_detokenize_round_trip(live: Live, text: str) -> None:
    reply = post(live, "/tokenize", {"text": text}).json()
    assert reply["count"] == len(reply["tokens"]) == len(reply["pieces"])
    assert post(live, "/detokenize", {"tokens": reply["tokens"]}).json() == {"text": text, "prompt": text}


def test_streamed_chunks_join_to_the_full_text(live: Live) -> None:
    body = {"prompt": HANGUL, "max_tokens": 40}
    full = post(live, "/v1/completions", body).json()
    chunks = streamed(live, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == full["choices"][0]["text"]
    assert (
        chunks[-1]["usage"]
        == full["usage"]
        == {
            "prompt_tokens": len(ids_of(live, HANGUL)),
            "completion_tokens": 40,
            "total_tokens": len(ids_of(live, HANGUL)) + 40,
        }
    )
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == "length"
    assert full["choices"][0]["text"].startswith(HANGUL), "the model echoes its prompt"


def test_every_prompt_gets_n_choices(live: Live) -> None:
    reply = post(live, "/v1/completions", {"prompt": ["one", "river"], "n": 2, "max_tokens": 3}).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    firsts = [choice["text"][:2] for choice in reply["choices"]]
    assert firsts == ["on", "on", "ri", "ri"]
    assert reply["usage"]["completion_tokens"] == 12


def test_prompt_may_be_token_ids(live: Live) -> None:
    ids = ids_of(live, "The mill")
    one = post(live, "/v1/completions", {"prompt": ids, "max_tokens": len(ids)}).json()
    many = post(live, "/v1/completions", {"prompt": [ids, ids], "max_tokens": len(ids)}).json()
    assert [choice["text"] for choice in one["choices"] + many["choices"]] == ["The mill"] * 3


def test_stop_string_ends_the_text(live: Live) -> None:
    reply = post(live, "/v1/completions", {"prompt": "The mill", "max_tokens": 50, "stop": ["il"]}).json()["choices"][0]
    assert (reply["text"], reply["finish_reason"]) == ("The m", "stop")


@pytest.fixture(scope="module")
def plain(new_live: Callable[..., Live]) -> Live:
    """A server without a chat template, with a stop string."""
    return new_live({"chat": False, "sample": {"stop": ["il"], "max_tokens": 50}})


def test_stop_strings_of_the_server_end_texts_unless_a_request_has_its_own(plain: Live) -> None:
    assert post(plain, "/v1/completions", {"prompt": "The mill"}).json()["choices"][0]["text"] == "The m"
    assert web.get(f"{plain.url}/generate", params={"sentence": "The mill"}).json()["response"] == "The millThe m"
    own, none = (
        post(plain, "/v1/completions", {"prompt": "The mill", "stop": stop, "max_tokens": 9}).json()["choices"][0]
        for stop in ("T", [])
    )
    assert (own["text"], own["finish_reason"]) == ("", "stop")
    assert none["text"].startswith("The mill")
    assert none["finish_reason"] == "length"


def test_logprobs_have_an_entry_for_every_token(live: Live) -> None:
    body = {"prompt": HANGUL, "max_tokens": 6, "logprobs": 2, "echo": True}
    choice = post(live, "/v1/completions", body).json()["choices"][0]
    reply = choice["logprobs"]
    count = len(ids_of(live, HANGUL))
    assert (
        len(reply["tokens"])
        == len(reply["token_logprobs"])
        == len(reply["top_logprobs"])
        == len(reply["text_offset"])
        == count + 6
    )
    assert reply["token_logprobs"][0] is None
    assert reply["text_offset"] == sorted(reply["text_offset"])
    assert reply["text_offset"][count] == len(HANGUL)
    assert choice["text"].startswith(HANGUL)
    assert len(reply["top_logprobs"][-1]) == 2


def test_chat_logprobs_have_bytes(live: Live) -> None:
    body = {"messages": [{"role": "user", "content": HANGUL}], "max_tokens": 30, "logprobs": True, "top_logprobs": 2}
    choice = post(live, "/v1/chat/completions", body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode(errors="ignore") == choice["message"][
        "content"
    ].rstrip("�")
    assert all(len(token["top_logprobs"]) == 2 for token in content)


def test_echo_gives_logprobs_of_the_prompt_alone(live: Live) -> None:
    choice = post(live, "/v1/completions", {"prompt": "The mill", "max_tokens": 0, "logprobs": 1, "echo": True}).json()
    assert choice["choices"][0]["text"] == "The mill"
    assert len(choice["choices"][0]["logprobs"]["tokens"]) == len(ids_of(live, "The mill"))
    assert choice["usage"]["completion_tokens"] == 0


def test_generate_route_has_the_original_format(plain: Live) -> None:
    reply = web.get(f"{plain.url}/generate", params={"sentence": HANGUL})
    assert reply.headers["cache-control"] == "no-cache,no-store,must-revalidate"
    assert reply.headers["content-type"].startswith("application/json")
    assert HANGUL.encode() in reply.content, "non-ASCII is not escaped"
    assert set(reply.json()) == {"input", "response"}
    assert reply.json()["input"] == HANGUL
    assert reply.json()["response"].startswith(HANGUL)
    missing = web.get(f"{plain.url}/generate")
    assert missing.status_code == 400
    assert "sentence: is missing" in missing.json()["error"]["message"]
    chat = post(plain, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})
    assert chat.status_code == 400
    assert chat.json()["error"]["message"] == "'mill' has no chat template; use /v1/completions to continue a text"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("sentence=x&temperature=0", "temperature"),
        ("sentense=x", "sentense"),
        ("sentence=x&sentence=y", "sentence: is given 2 times"),
    ],
)
def test_generate_route_refuses_parameters_it_would_ignore(live: Live, query: str, message: str) -> None:
    reply = web.get(f"{live.url}/generate?{query}")
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


def test_generate_route_uses_the_chat_template(live: Live) -> None:
    reply = web.get(f"{live.url}/generate", params={"sentence": "river"}).json()
    assert reply["input"] == "river"
    assert reply["response"].startswith("user: river\nassistant:"), "the model echoes what the template made"


@pytest.mark.parametrize("cut", [0, 5, 28])
def test_generate_route_takes_unescaped_text(live: Live, cut: int) -> None:
    """As curl sends a URL that was typed with Korean text; the request may arrive in parts, and another follows."""
    request = "GET /generate?sentence=점심 HTTP/1.1\r\nHost: localhost\r\n".encode()
    body = json.dumps({"text": "점심"}, ensure_ascii=False).encode()
    after = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=LONGEST) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(request[:cut])
        line.sendall(request[cut:] + b"\r\n")
        reply = b""
        while b'"response"' not in reply:
            part = line.recv(65536)
            assert part, reply
            reply += part
        line.sendall(after + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        second = b""
        while part := line.recv(65536):
            second += part
    assert reply.startswith(b"HTTP/1.1 200")
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["input"] == "점심"
    assert json.loads(second.partition(b"\r\n\r\n")[2])["tokens"] == ids_of(live, "점심"), "a body is not escaped"


def test_models_health_and_metrics(live: Live) -> None:
    reply = web.get(f"{live.url}/v1/models").json()["data"][0]
    assert (reply["id"], reply["object"], reply["step"], reply["max_model_len"], reply["chat"]) == (
        "mill",
        "model",
        7,
        512,
        True,
    )
    assert web.get(f"{live.url}/v1/models/mill").json() == reply
    assert web.get(f"{live.url}/v1/models/none").status_code == 404
    assert web.get(f"{live.url}/health").json() == {"status": "ok"}
    assert web.get(f"{live.url}/ready").json() == {"status": "ready"}
    before = live.stats()["answered_tokens_total"]
    post(live, "/v1/completions", {"prompt": "x", "max_tokens": 5})
    stats = live.stats()
    assert stats["answered_tokens_total"] - before == 5
    assert (stats["slots"], stats["queue"]) == (8, 64)


def test_openapi_description_and_docs_page(live: Live) -> None:
    api = web.get(f"{live.url}/openapi.json").json()
    wanted = {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/generate",
        "/health",
        "/ready",
        "/metrics",
    }
    assert wanted <= set(api["paths"])
    page = web.get(f"{live.url}/docs")
    assert all(path in page.text for path in wanted)
    assert "http://" not in page.text
    assert "https://" not in page.text


CHAT = {"messages": [{"role": "user", "content": "x"}]}
MISTAKES: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/completions", {}, 400, "prompt: is missing"),
    ("/v1/completions", {"prompt": 5}, 400, "prompt: must be a text, a list of texts"),
    ("/v1/completions", {"prompt": []}, 400, "prompt: is empty"),
    ("/v1/completions", {"prompt": [[]]}, 400, "prompt: is an empty list"),
    ("/v1/completions", {"prompt": [300]}, 400, "prompt: 300 is not a token id; ids are from 0 to 299"),
    ("/v1/completions", {"prompt": [-1]}, 400, "prompt: -1 is not a token id"),
    ("/v1/completions", {"prompt": [1, "a"]}, 400, "prompt: must be a text"),
    ("/v1/completions", {"prompt": "a" * 5000}, 400, "tokens; the limit is 511; send a shorter one"),
    (
        "/v1/completions",
        {"prompt": "x", "max_tokens": 99999},
        400,
        "max_tokens: 99999 is above the server's limit of 4096",
    ),
    ("/v1/completions", {"prompt": "x", "max_tokens": -1}, 400, "max_tokens: must be at least 0; found -1"),
    ("/v1/completions", {"prompt": "x", "max_tokens": "5"}, 400, "max_tokens: must be a valid integer; found '5'"),
    ("/v1/completions", {"prompt": "x", "n": 17}, 400, "n: 17 texts in one request (prompts times n); the limit is 16"),
    ("/v1/completions", {"prompt": ["x"] * 9, "n": 2}, 400, "n: 18 texts in one request"),
    ("/v1/completions", {"prompt": "x", "stop": ["a"] * 17}, 400, "stop: 17 stop strings; the limit is 16"),
    ("/v1/completions", {"prompt": "x", "stop": ""}, 400, "stop: has an empty string"),
    ("/v1/completions", {"prompt": "x", "stop": "a" * 201}, 400, "stop: a string of 201 characters"),
    ("/v1/completions", {"prompt": "x", "stop": 7}, 400, "stop: must be a text or a list of texts"),
    ("/v1/completions", {"prompt": "x", "temperature": -0.1}, 400, "temperature: must be at least 0; found -0.1"),
    ("/v1/completions", {"prompt": "x", "top_p": 1.5}, 400, "top_p: must be at most 1; found 1.5"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias: 'a' is not a token id"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"300": 1}}, 400, "logit_bias: 300 is not a token id"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"3": 101}}, 400, "logit_bias.3: must be at most 100; found 101"),
    ("/v1/completions", {"prompt": "x", "logprobs": 21}, 400, "logprobs: must be at most 20; found 21"),
    ("/v1/completions", {"prompt": "x", "best_of": 3}, 400, "best_of: is only supported with the value of n"),
    ("/v1/completions", {"prompt": "x", "min_tokens": 9, "max_tokens": 5}, 400, "min_tokens: 9 is above max_tokens, 5"),
    ("/v1/completions", {"prompt": "x", "seed": 2**70}, 400, "seed: must be less than"),
    ("/v1/completions", {"prompt": "x", "max_token": 5}, 400, "max_token: unknown field; did you mean 'max_tokens'?"),
    ("/v1/completions", {"prompt": "x", "model": "gpt-9"}, 404, "model: unknown model 'gpt-9'; this server has 'mill'"),
    (
        "/v1/completions",
        {"prompt": "x", "stream": True, "echo": True, "logprobs": 1},
        400,
        "stream: log-probabilities of an echoed",
    ),
    ("/v1/chat/completions", {"messages": []}, 400, "messages: List should have at least 1 item"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "cook", "content": "x"}]},
        400,
        "messages.0.role: must be 'system'",
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "messages.0.content: is missing"),
    ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}, 400, "top_logprobs: needs logprobs to be true"),
    (
        "/v1/chat/completions",
        {**CHAT, "max_tokens": 3, "max_completion_tokens": 4},
        400,
        "max_tokens: differs from max_completion_tokens",
    ),
    ("/v1/chat/completions", {**CHAT, "reasoning_effort": "low"}, 400, "reasoning_effort: is not supported; remove it"),
    (
        "/v1/chat/completions",
        {**CHAT, "tool_choice": "required"},
        400,
        "tool_choice: there are no tools; send them too",
    ),
    (
        "/v1/chat/completions",
        {**CHAT, "modalities": ["text", "audio"]},
        400,
        "modalities.1: must be 'text'; found 'audio'",
    ),
    (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "xml"}},
        400,
        "response_format.type: must be 'text', 'json_object' or 'json_schema'",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x", "mood": 1}]},
        400,
        "messages.0.mood: unknown field",
    ),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "suffix: is not supported; remove it"),
    ("/v1/completions", {"prompt": "x", "guided_regex": "a"}, 400, "guided_regex: unknown field; remove it"),
    ("/detokenize", {"tokens": [9999]}, 400, "tokens: 9999 is not a token id"),
    ("/tokenize", {"text": None}, 400, "text: send either text or prompt"),
    ("/tokenize", {"text": "x", "prompt": "y"}, 400, "send either text or prompt"),
    ("/tokenize", {"text": 5}, 400, "text: must be a valid string; found 5"),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), MISTAKES, ids=[message for *_, message in MISTAKES])
def test_invalid_request_gets_a_one_sentence_error(
    live: Live, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    reply = post(live, path, body)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert "\n" not in error["message"]


def test_bodies_that_are_not_json(live: Live) -> None:
    json_type = {"content-type": "application/json"}
    for content, headers, message in [
        (b"{", json_type, "the body is not JSON"),
        (b"[1]", json_type, "the body must be a JSON object"),
        (b"", json_type, "the body must be a JSON object"),
        (b'{"prompt": "x"}', {"content-type": "text/plain"}, "sent with Content-Type: application/json"),
        (b'{"prompt": "\xff"}', json_type, "the request cannot be read"),
        (b"[" * 100_000, json_type, "the request cannot be read"),
        (b'{"prompt": "\\ud800"}', json_type, "has a lone surrogate"),
        (b'{"prompt": "x", "stop": "\\ud800"}', json_type, "stop: has a lone surrogate"),
        (b'{"prompt": "x", "temperature": NaN}', json_type, "temperature: "),
        (b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}", json_type, "the request cannot be read"),
    ]:
        reply = web.post(f"{live.url}/v1/completions", content=content, headers=headers)
        assert reply.status_code == 400, content[:40]
        assert message in reply.json()["error"]["message"]


def test_body_may_use_any_unicode_encoding(live: Live) -> None:
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        content = json.dumps({"text": "k\u00f6pr\u00fc"}, ensure_ascii=False).encode(encoding)
        reply = web.post(
            f"{live.url}/tokenize", content=content, headers={"content-type": "application/ld+json; charset=x"}
        )
        assert "".join(reply.json()["pieces"]) == "k\u00f6pr\u00fc"


@pytest.fixture(scope="module")
def strict(new_live: Callable[..., Live]) -> Live:
    """A server with a small limit that shortens no conversation."""
    return new_live({"serve": {"max_body": 10_000, "drop_oldest": False}})


def test_body_size_is_limited_with_and_without_content_length(strict: Live) -> None:
    announced = post(strict, "/tokenize", {"text": "a" * 11_000})
    chunked = web.post(
        f"{strict.url}/tokenize", content=(b"a" * 100 for _ in range(110)), headers={"content-type": "application/json"}
    )
    for reply in (announced, chunked):
        assert reply.status_code == 413
        assert "limit of 10,000 bytes" in reply.json()["error"]["message"]
    assert post(strict, "/tokenize", {"text": "a" * 9_500}).status_code == 200


def test_full_server_sends_retry_after(new_live: Callable[..., Live]) -> None:
    narrow = new_live({"serve": {"slots": 1, "queue": 0, "max_tokens": 10**9}})
    with web.stream(
        "POST", f"{narrow.url}/v1/completions", json={"prompt": "x", "max_tokens": 10**9, "stream": True}
    ) as running:
        lines = running.iter_lines()
        next(lines)
        reply = post(narrow, "/v1/completions", {"prompt": "x"})
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert "the server's queue is full" in reply.json()["error"]["message"]
    narrow.wait_idle()
    assert post(narrow, "/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_request_ends_at_its_time_limit(new_live: Callable[..., Live]) -> None:
    slow = new_live({"serve": {"request_timeout": 0.5, "max_tokens": 10**9}})
    choice = post(slow, "/v1/completions", {"prompt": "x", "max_tokens": 10**9}).json()["choices"][0]
    assert (choice["finish_reason"], choice["ended"]) == ("length", "time limit")
    assert set(choice["text"]) <= {"x"}, "what was made by then"
    assert slow.stats()["timeouts_total"] == 1


def test_fields_of_front_ends_that_ask_for_nothing_are_accepted(live: Live) -> None:
    """What LibreChat, Open WebUI and llama.cpp's page add to a conversation."""
    message = {"role": "user", "content": "x", "name": "Ann", "reasoning_content": "", "timestamp": 1763400000}
    body = {**CHAT, "messages": [message], "seed": 3}
    extra = {"tools": [], "functions": None, "cache_prompt": True, "web_search": False, "files": [], "extra_body": {}}
    plain, odd = (post(live, "/v1/chat/completions", one).json() for one in ({**CHAT, "seed": 3}, {**body, **extra}))
    assert odd["choices"] == plain["choices"]


def test_the_log_has_request_ids_and_no_prompts(new_live: Callable[..., Live]) -> None:
    live = new_live({})
    post(live, "/v1/completions", {"prompt": "a secret river", "max_tokens": 3})
    web.get(f"{live.url}/generate", params={"sentence": "a secret river"})
    body = {"prompt": "x", "max_tokens": 1}
    ids = [post(live, "/v1/completions", one).headers["x-request-id"] for one in (body, {**body, "stream": True}, {})]
    assert len(set(ids)) == 3
    given = {"client-7": True, "two words": False, "a" * 101: False}
    for name, kept in given.items():
        reply = web.get(f"{live.url}/v1/models", headers={"X-Request-ID": name})
        ids.append(reply.headers["x-request-id"])
        assert (ids[-1] == name) == kept
    assert live.stop() == 0
    log = "".join(live.output)
    assert all(f'id="{one}"' in log for one in ids)
    assert "new_tokens=3" in log
    assert "secret" not in log


def test_oldest_turns_are_dropped(live: Live, strict: Live) -> None:
    """The echo model repeats its prompt, so its answer shows what was left of the conversation."""
    system = {"role": "system", "content": "be brief"}
    turns = [
        {"role": ("user", "assistant")[place % 2], "content": f"turn {place} " + "mill " * 20} for place in range(41)
    ]
    body = {"messages": [system, *turns], "max_tokens": 200}
    reply = post(live, "/v1/chat/completions", body)
    dropped = int(reply.headers["x-dropped-messages"])
    assert reply.json()["usage"]["dropped_messages"] == dropped
    assert 0 < dropped < 41
    assert dropped % 2 == 0, "a conversation starts with a message of the user"
    text = reply.json()["choices"][0]["message"]["content"]
    assert text.startswith(f"system: be brief\nuser: turn {dropped} ")
    assert reply.json()["usage"]["prompt_tokens"] <= 512 * 3 // 4, "there is space for an answer"
    with web.stream("POST", f"{live.url}/v1/chat/completions", json={**body, "stream": True}) as streamed:
        assert streamed.headers["x-dropped-messages"] == str(dropped)
        streamed.read()
    for kept in (dropped, dropped - 2):
        less = post(live, "/v1/chat/completions", {**body, "messages": [system, *turns[kept:]]})
        assert ("x-dropped-messages" in less.headers) == (kept < dropped), "no more than necessary"
    refused = post(strict, "/v1/chat/completions", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_too_long_text_is_refused_before_tokenizing(live: Live) -> None:
    long = "mill " * 40_000
    bodies = {
        "/v1/completions": {"prompt": long},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": long}]},
    }
    for path, body in bodies.items():
        reply = web.post(live.url + path, json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "200,000 characters, more than 511 tokens can hold" in reply.json()["error"]["message"]
    assert web.post(f"{live.url}/tokenize", json={"text": long}).json()["count"] > 511
