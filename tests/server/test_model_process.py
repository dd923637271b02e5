"""The model in its own process: same replies as in this process, and each process notices when the other dies."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import web
from tests.support.live_server import COMMAND, Live, list_children, read_stat
from tests.support.server_process import in_process
from tests.support.waiting import LONGEST, wait_for
from textmill.checkpoints.folders import open_checkpoint
from textmill.config import EmbedConfig, SampleConfig, ServeConfig, TorchEngine
from textmill.server.app import new_app
from textmill.server.model_process import new_model_process
from textmill.server.service import ServedModels, Service

pytestmark = pytest.mark.long

ENDLESS = 10**9
LONG = {"prompt": "The mill", "max_tokens": ENDLESS, "min_tokens": ENDLESS}
MANY = {"prompt": ["물레방아는", "Değirmen"], "seed": 5, "n": 2, "max_tokens": 15, "logprobs": 3}
BODIES: list[dict[str, Any]] = [
    {"prompt": "The mill", "temperature": 0, "max_tokens": 20},
    {"prompt": "물레방아는", "seed": 5, "max_tokens": 15, "logprobs": 3},
    {"prompt": "The wheel begins", "temperature": 0, "max_tokens": 4, "logprobs": 2, "echo": True},
    {"prompt": "The wheel begins", "max_tokens": 0, "logprobs": 1, "echo": True},
    {
        "prompt": [40, 41, 42],
        "seed": 1,
        "logit_bias": {"50": -100, "60": 5.5},
        "top_p": 0,
        "repetition_penalty": 1.3,
        "max_tokens": 12,
    },
    {
        "prompt": "a",
        "seed": 2,
        "stop": ["e", "물"],
        "stop_token_ids": [70, 71],
        "min_tokens": 3,
        "max_tokens": 40,
        "logprobs": 0,
    },
]


@pytest.fixture(scope="module")
def model(new_live: Callable[..., Live], small_model: Path) -> Live:
    """A server with a real model."""
    return new_live({"model": str(small_model), "serve": {"slots": 3, "queue": 9, "max_tokens": ENDLESS}})


async def replies_in_process(folder: Path) -> list[Any]:
    """Return the choices for every body with the model in this process."""
    serve = ServeConfig(slots=3, queue=9)
    engine = TorchEngine(device="cpu", precision="fp32")
    model = in_process(open_checkpoint(folder), engine, serve, EmbedConfig())
    service = Service(model, serve, SampleConfig(), "mill")
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=new_app(ServedModels([service]))),
        base_url="http://127.0.0.1",
        timeout=LONGEST,
    ) as client:
        found = [(await client.post("/v1/completions", json=body)).json()["choices"] for body in BODIES]
    await service.model.close(0)
    return found


def nearly_equal(one: Any, other: Any) -> bool:
    """True if two replies are equal except for the last digits of log-probabilities, which depend on threads."""
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, abs=1e-4)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(nearly_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(nearly_equal, one, other))
    return bool(one == other)


def test_replies_equal_those_of_a_model_in_this_process(model: Live, small_model: Path) -> None:
    there = [web.post(f"{model.url}/v1/completions", json=body).json()["choices"] for body in BODIES]
    assert nearly_equal(there, asyncio.run(replies_in_process(small_model)))
    assert any(choice["logprobs"] for choices in there for choice in choices)


def read_stream(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the chunks of a stream."""
    with web.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_streamed_chunks_join_to_the_full_text_of_the_model(model: Live) -> None:
    for body in (BODIES[0], MANY):
        choices, chunks = (
            web.post(f"{model.url}/v1/completions", json=body).json()["choices"],
            read_stream(model.url, body),
        )
        for choice in choices:
            parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
            assert "".join(part["text"] for part in parts) == choice["text"]
            assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
            names = [name for part in parts if part["logprobs"] for name in part["logprobs"]["tokens"]]
            assert names == (choice["logprobs"]["tokens"] if choice["logprobs"] else [])


def test_disconnected_client_frees_its_slot(model: Live) -> None:
    for _ in range(4):  # one more than there are slots
        with web.stream("POST", f"{model.url}/v1/completions", json={**LONG, "stream": True}) as reply:
            assert next(reply.iter_raw())
    stats = model.wait_idle()
    assert stats["cancelled_total"] >= 4
    assert len(read_stream(model.url, {"prompt": "The mill", "max_tokens": 2})) > 0
    assert model.stats()["generated_tokens_total"] == stats["generated_tokens_total"] + 2


def test_full_queue_refuses_at_once(model: Live) -> None:
    [worker] = list_children(model.process.pid)
    body = {"prompt": "The mill", "max_tokens": 3}
    os.kill(worker, signal.SIGSTOP)  # a stopped model finishes none of them
    try:
        with ThreadPoolExecutor(2) as pool:
            requests = [pool.submit(web.post, f"{model.url}/v1/completions", json={**body, "n": n}) for n in (1, 11)]
            model.wait_for_stats(lambda stats: (stats["active"], stats["waiting"]) == (3, 9))
            assert web.post(f"{model.url}/v1/completions", json=body).status_code == 429
            os.kill(worker, signal.SIGCONT)
            assert [one.result().status_code for one in requests] == [200, 200]
    finally:
        os.kill(worker, signal.SIGCONT)
    model.wait_idle()


def test_model_process_exits_when_the_server_is_killed(model: Live) -> None:
    """The last test of this server: SIGKILL leaves no model process, busy or not."""
    [worker] = list_children(model.process.pid)
    with web.stream("POST", f"{model.url}/v1/completions", json={**LONG, "stream": True}) as reply:
        assert next(reply.iter_raw())
        model.process.kill()
        model.process.wait()
    wait_for(lambda: not (stat := read_stat(worker)) or " Z " in stat)


KILLS = 4


def test_hung_model_is_reported_and_a_killed_one_restarts(small_model: Path, tmp_path: Path) -> None:
    """`textmill serve` reports it on /health and to every client, and answers again after each restart.

    Modules in the current folder are not imported.
    """
    (tmp_path / "torch.py").write_text("raise SystemExit('not the real one')")
    (tmp_path / "mill.yaml").write_text(f"folder: {small_model.parents[1]}\n")
    settings = [
        "serve.port=0",
        "serve.slots=3",
        "serve.step_timeout=10",
        f"serve.max_tokens={ENDLESS}",
        "engine.device=cpu",
    ]
    arguments = [str(tmp_path / "mill.yaml"), *settings]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=log, text=True, cwd=tmp_path)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+:\d+", process.stdout.readline())
        assert found, (tmp_path / "log").read_text()
        url, [worker] = found[0], list_children(process.pid)
        os.kill(worker, signal.SIGSTOP)
        status = wait_for(lambda: (reply := web.get(f"{url}/health")).status_code == 503 and reply.json()["status"])
        assert "has been in one step" in status
        os.kill(worker, signal.SIGCONT)
        wait_for(lambda: web.get(f"{url}/health").status_code == 200)
        with ThreadPoolExecutor(4) as pool:
            requests = [
                pool.submit(web.post, f"{url}/v1/completions", json={**LONG, "n": 2}),
                pool.submit(read_stream, url, LONG),
            ]
            wait_for(lambda: "\ntextmill_active 3\n" in web.get(f"{url}/metrics").text)
            os.kill(worker, signal.SIGKILL)
            complete, chunks = requests[0].result(), requests[1].result()
        died = "the model's process has died (SIGKILL) and is being restarted; try again soon"
        assert (complete.status_code, complete.json()["error"]["message"]) == (500, died)
        assert chunks[-1]["error"]["message"] == died
        for path in ("/health", "/ready"):
            assert (web.get(f"{url}{path}").status_code, web.get(f"{url}{path}").json()["status"]) == (503, died)
        refused = web.post(f"{url}/v1/completions", json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_broken")
        assert int(refused.headers["retry-after"]) > 0
        for kill in range(KILLS):  # under clients that try again
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(lambda _: ask_until_answered(url), range(8)))
            assert [one["choices"][0]["finish_reason"] for one in answers] == ["length"] * 8
            [worker] = list_children(process.pid)
            if kill < KILLS - 1:
                os.kill(worker, signal.SIGKILL)
        process.terminate()
        assert process.wait(LONGEST) == 0
        assert (tmp_path / "log").read_text().count("has been started again") == KILLS
        assert "Traceback" not in (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()


def ask_until_answered(url: str) -> Any:
    """Send a request until the model is back; meanwhile every reply is an error that tells to try again."""

    def answered() -> Any:
        reply = web.post(f"{url}/v1/completions", json={"prompt": "The mill", "max_tokens": 3, "min_tokens": 3})
        if reply.status_code == 200:
            return reply.json()
        assert reply.status_code in (500, 503)
        assert "is being restarted" in reply.json()["error"]["message"]
        return None

    return wait_for(answered)


def test_model_process_that_cannot_start_again_is_given_up(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deleted checkpoint: the server says so, and closing it ends the restarts."""
    monkeypatch.setattr("textmill.server.model_process.RESTART_SECONDS", (0, 0))
    folder = shutil.copytree(small_model, tmp_path / "model")
    serve, engine = ServeConfig(), TorchEngine(device="cpu", precision="fp32")

    async def kill() -> str:
        model = new_model_process(open_checkpoint(folder), engine, serve, EmbedConfig())
        await model.load()
        shutil.rmtree(folder)
        model.process.kill()
        async with asyncio.timeout(LONGEST):
            while "restarts failed" not in model.problem(LONGEST):
                await asyncio.sleep(0.01)
        problem = model.problem(LONGEST)
        await model.close(0)
        return problem

    assert asyncio.run(kill()).endswith("and restarts failed; restart the server")
