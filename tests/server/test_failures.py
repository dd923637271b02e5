"""A model that hangs or fails, and slow tokenizing: /health reports it, and no request waits for ever."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import load_file, save_file

from tests.support.server_process import in_process
from tests.support.small_models import TEXT, write_model
from tests.support.waiting import LONGEST
from textmill.checkpoints.folders import Checkpoint
from textmill.config import EmbedConfig, RunConfig, ServeConfig, TokenizerConfig, TorchEngine
from textmill.errors import TextmillError
from textmill.models.gpt2 import family as gpt2
from textmill.server.app import new_app
from textmill.server.bodies import CompletionBody
from textmill.server.lifecycle import open_service
from textmill.server.service import ServedModels, Service
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit

BODY = {"prompt": "The mill", "max_tokens": 3, "min_tokens": 3}


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A service with a real model, whose steps a test may slow down."""
    tokenizer = fit(iter([TEXT * 3]), TokenizerConfig(vocab=300))
    shape = gpt2.Shape(
        layers=1, heads=2, width=32, inner=64, positions=64, vocab=tokenizer.vocab, eos_id=tokenizer.eos_id
    )
    write_model(tmp_path / "run", tokenizer, shape)
    engine = {"device": "cpu", "precision": "fp32"}
    config = RunConfig.model_validate(
        {"folder": str(tmp_path), "serve": {"step_timeout": 1000, "request_timeout": 86400}, "engine": engine}
    )
    monkeypatch.setattr("textmill.server.lifecycle.new_model_process", in_process)
    service = open_service(config)
    yield service
    asyncio.run(service.model.close(0))


async def requests_while_hung(service: Service, hung: threading.Event) -> dict[str, Any]:
    """Return the replies while the model hangs, and after it continues."""
    transport = httpx.ASGITransport(app=new_app(ServedModels([service])))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=LONGEST) as client:
        found: dict[str, Any] = {"before": (await client.get("/health")).status_code}
        found["complete"], found["stream"] = await asyncio.gather(
            client.post("/v1/completions", json=BODY), client.post("/v1/completions", json={**BODY, "stream": True})
        )
        for path in ("/health", "/ready"):
            found[path] = await client.get(path)
        found["next"] = await client.post("/v1/completions", json=BODY)
        hung.set()
        while service.problem():
            await asyncio.sleep(0.01)
        found["after"] = [
            (await client.get("/health")).status_code,
            (await client.post("/v1/completions", json=BODY)).status_code,
        ]
    return found


def test_hung_model_is_reported_until_it_continues(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, slots, hung = [0.0], service.model.inner._batch.slots, threading.Event()  # type: ignore[attr-defined]
    decode = slots.decode

    def hang(*args: Any) -> Any:
        if not hung.is_set():
            ahead[0] += 2 * service.config.step_timeout
            hung.wait(LONGEST)
        return decode(*args)

    monkeypatch.setattr(slots, "decode", hang)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    monkeypatch.setattr("textmill.generation.scheduler.time", clock)
    monkeypatch.setattr("textmill.server.service.QUIET_SECONDS", 0.05)
    found = asyncio.run(requests_while_hung(service, hung))
    assert (found["before"], found["after"]) == (200, [200, 200])
    for path in ("/health", "/ready"):
        assert found[path].status_code == 503
        assert "has been in one step" in found[path].json()["status"]
    for name in ("complete", "next"):
        assert found[name].status_code == 503
        assert found[name].json()["error"]["code"] == "model_broken"
    lines = [line for line in found["stream"].text.splitlines() if line.startswith("data: ")]
    assert '"code":"model_broken"' in lines[-2]
    assert lines[-1] == "data: [DONE]"


def test_model_with_nan_weights_is_reported(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = service.model.inner._batch.slots  # type: ignore[attr-defined]
    decode = slots.decode
    monkeypatch.setattr(slots, "decode", lambda *args: decode(*args) * float("nan"))

    async def ask() -> tuple[list[httpx.Response], httpx.Response]:
        transport = httpx.ASGITransport(app=new_app(ServedModels([service])))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=LONGEST) as client:
            replies = [await client.post("/v1/completions", json={**BODY, "stream": one > 0}) for one in range(3)]
            async with asyncio.timeout(LONGEST):  # the count may follow the last reply
                while not service.problem():
                    await asyncio.sleep(0.01)
            return replies, await client.get("/health")

    [complete, *streams], health = asyncio.run(ask())
    assert complete.status_code == 500
    for stream in streams:
        assert '"finish_reason":"' not in stream.text, "a text that failed did not stop"
        assert '"code":"model_error"' in stream.text
    assert (health.status_code, health.json()["status"]) == (503, "the model's last 3 steps failed; restart the server")


def test_model_with_nan_weights_is_refused_at_the_start(service: Service, tmp_path: Path) -> None:
    [file] = tmp_path.glob("run/step-*/model.safetensors")
    weights = {name: values * np.float32("nan") for name, values in load_file(file).items()}
    save_file(weights, file)
    engine = TorchEngine(device="cpu", precision="fp32")
    with pytest.raises(TextmillError, match="not finite"):
        in_process(Checkpoint(file.parent, 0, {}), engine, ServeConfig(), EmbedConfig())


def test_internal_error_gives_one_sentence_and_one_log_line(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    service.token_texts = service.sample = None  # type: ignore[assignment]

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=new_app(ServedModels([service])), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=LONGEST) as client:
            return [await client.post("/tokenize", json={"prompt": "x"}), await client.get("/v1/models")]

    for reply in asyncio.run(ask()):
        assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
        assert "internal server error" in reply.json()["error"]["message"]
    log = capsys.readouterr().err
    assert " POST /tokenize 500 " in log
    assert " GET /v1/models 500 " in log


async def health_during_request(
    service: Service, path: str, body: dict[str, Any], started: threading.Event, free: threading.Event
) -> tuple[int, int]:
    """Return the statuses of a long request, and of /health while the tokenizer works on it."""
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=new_app(ServedModels([service]))),
        base_url="http://127.0.0.1",
        timeout=LONGEST,
    ) as client:
        request = asyncio.create_task(client.post(path, json=body))
        while not started.is_set():
            await asyncio.sleep(0.01)
        health = (await client.get("/health")).status_code
        free.set()
        return (await request).status_code, health


@pytest.mark.parametrize(
    ("path", "body", "work"),
    [
        ("/tokenize", {"text": "The mill " * 3000}, "encode_many"),
        ("/detokenize", {"tokens": [100] * 30_000}, "decode_many"),
    ],
)
def test_tokenizing_long_texts_does_not_block_the_server(
    service: Service, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], work: str
) -> None:
    started, free, in_time = threading.Event(), threading.Event(), list[bool]()
    real = getattr(TextTokenizer, work)

    def held(self: TextTokenizer, many: Any) -> Any:
        started.set()
        in_time.append(free.wait(LONGEST))
        return real(self, many)

    monkeypatch.setattr(TextTokenizer, work, held)
    assert asyncio.run(health_during_request(service, path, body, started, free)) == (200, 200)
    assert in_time == [True], "the server answered others meanwhile"


def test_long_invalid_list_gives_few_errors() -> None:
    for wrong in (
        {"prompt": [1] * 50_000 + ["x"]},
        {"prompt": ["x"] * 50_000 + [1]},
        {"prompt": "x", "stop": [1] * 50_000},
    ):
        with pytest.raises(ValidationError) as error:
            CompletionBody.model_validate(wrong)
        assert error.value.error_count() < 8
