"""A model that hangs, fails or is gone: /health says so, nobody waits for ever, and a passing trouble passes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.generation.conftest import _write_model
from tests.server.live import TEXT
from textmill.config import RunConfig, TokenizerConfig
from textmill.models import gpt2
from textmill.server.app import new_app
from textmill.server.opening import open_service
from textmill.server.service import Service
from textmill.tokens.tokenizer import fit

ASKED = {"prompt": "The mill", "max_tokens": 3, "min_tokens": 3}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A real model whose steps may take a second and a half."""
    tokenizer = fit(iter([TEXT * 3]), TokenizerConfig(vocab=300))
    shape = gpt2.Shape(layers=1, heads=2, width=32, inner=64, positions=64, vocab=tokenizer.vocab, end=tokenizer.end)
    _write_model(tmp_path / "run", tokenizer, shape)
    engine = {"device": "cpu", "precision": "fp32"}
    service = open_service(RunConfig.model_validate({"folder": str(tmp_path), "serve": {"patience": 1.5}, "engine": engine}))
    yield service
    service.scheduler.close(0)


async def seen(service: Service, hung: threading.Event) -> dict[str, Any]:
    """What a server whose model hangs answers, and what it answers when the model is back."""
    transport = httpx.ASGITransport(app=new_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
        found: dict[str, Any] = {"before": (await client.get("/health")).status_code}
        found["whole"], found["stream"] = await asyncio.gather(
            client.post("/v1/completions", json=ASKED), client.post("/v1/completions", json={**ASKED, "stream": True})
        )
        for path in ("/health", "/ready"):
            found[path] = await client.get(path)
        found["next"] = await client.post("/v1/completions", json=ASKED)
        hung.set()
        while service.trouble():
            await asyncio.sleep(0.01)
        found["after"] = [(await client.get("/health")).status_code, (await client.post("/v1/completions", json=ASKED)).status_code]
    return found


def test_a_hung_model(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    slots, hung = service.scheduler._batch.slots, threading.Event()  # type: ignore[attr-defined]
    decode = slots.decode

    def hang(*args: Any) -> Any:
        hung.wait(60)
        return decode(*args)

    monkeypatch.setattr(slots, "decode", hang)
    found = asyncio.run(seen(service, hung))
    assert (found["before"], found["after"]) == (200, [200, 200])
    for path in ("/health", "/ready"):
        assert found[path].status_code == 503
        assert "has not ended a step" in found[path].json()["status"]
    for name in ("whole", "next"):
        assert found[name].status_code == 503
        assert found[name].json()["error"]["code"] == "model_broken"
    lines = [line for line in found["stream"].text.splitlines() if line.startswith("data: ")]
    assert '"code":"model_broken"' in lines[-2]
    assert lines[-1] == "data: [DONE]"
