"""Several models in one server, and a server that follows a training run."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import web
from tests.support.live_server import COMMAND, ROOT, list_children
from tests.support.small_models import TEXT, write_model
from tests.support.waiting import LONGEST, wait_for
from textmill.config import SampleConfig, ServeConfig, TokenizerConfig
from textmill.errors import TextmillError
from textmill.generation.requests import MemoryShort, ModelStats
from textmill.models.gpt2 import family as gpt2
from textmill.server.errors import HttpError
from textmill.server.service import ServedModels, Service
from textmill.tokens.vocabulary.tokenizer import fit

ENDLESS = 10**9


def write_run(root: Path, layers: int = 1, step: int = 7) -> Path:
    """Write a checkpoint of a run."""
    tokenizer = fit(iter([TEXT * 3]), TokenizerConfig(vocab=300))
    shape = gpt2.Shape(
        layers=layers, heads=2, width=32, inner=64, positions=64, vocab=tokenizer.vocab, eos_id=tokenizer.eos_id
    )
    write_model(root / "run", tokenizer, shape, step)
    (root / "textmill.yaml").write_text("folder: .\n", encoding="utf-8")
    return root


@contextmanager
def serving(log: Path, *arguments: str) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """Run `textmill serve`; yield its first line, its address and its process."""
    settings = ["serve.port=0", "engine.device=cpu", "serve.slots=2", f"serve.max_tokens={ENDLESS}"]
    with open(log, "w") as errors:
        process = subprocess.Popen(
            [*COMMAND, *arguments, *settings], stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+:\d+", line)
        assert found, log.read_text()
        yield line, found[0], process
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONGEST) == 0, log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()
        process.wait()


def complete(url: str, **body: Any) -> Any:
    reply = web.post(f"{url}/v1/completions", json={"prompt": "The mill", "temperature": 0, "max_tokens": 5, **body})
    return reply.json() if reply.status_code == 200 else reply.json()["error"]["message"]


@pytest.mark.long
def test_models_are_loaded_when_they_are_used_and_unloaded_for_others(tmp_path: Path) -> None:
    for number, name in enumerate(("alpha", "beta", "gamma"), 1):
        write_run(tmp_path / name, layers=number)
    folders = [str(tmp_path / name) for name in ("alpha", "beta", "gamma")]
    with serving(tmp_path / "log", *folders, "serve.loaded_models=2") as (line, url, process):
        assert line.startswith("serving alpha at step 7, beta, gamma at http")
        assert len(list_children(process.pid)) == 1, "only the first one is in memory"
        assert [one["id"] for one in web.get(f"{url}/v1/models").json()["data"]] == ["alpha", "beta", "gamma"]
        assert complete(url)["model"] == "alpha"
        wanted = "model: unknown model 'delta'; this server has 'alpha', 'beta', 'gamma'"
        assert complete(url, model="delta") == wanted
        with ThreadPoolExecutor(12) as pool:  # each of them is unloaded again and again
            names = ("alpha", "beta", "gamma") * 6
            answers = list(pool.map(lambda name: complete(url, model=name), names))
        assert [one["model"] for one in answers] == list(names)
        texts = {one["model"]: one["choices"][0]["text"] for one in answers}
        assert {one["choices"][0]["text"] for one in answers} == set(texts.values()), "the same model, the same text"
        assert len(list_children(process.pid)) == 2
        assert web.get(f"{url}/health").status_code == 200
        info = re.findall(r'textmill_model_info{model="(\w+)"', web.get(f"{url}/metrics").text)
        assert len(info) == 2
    assert "unloaded " in (tmp_path / "log").read_text()


@pytest.mark.long
def test_newer_checkpoints_are_taken_over_without_dropping_a_request(tmp_path: Path) -> None:
    root = write_run(tmp_path / "tale")
    with serving(tmp_path / "log", str(root), "--follow") as (_, url, process):
        replies: list[Any] = []
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                replies.append(complete(url, max_tokens=30, min_tokens=30))

        def step() -> int:
            return int(web.get(f"{url}/v1/models").json()["data"][0]["step"])

        with ThreadPoolExecutor(4) as pool:
            for _ in range(4):
                pool.submit(ask)
            try:
                wait_for(lambda: len(replies) > 4)
                [older] = list_children(process.pid)
                write_run(root, layers=2, step=9)
                wait_for(lambda: step() == 9)
                count = len(replies)
                wait_for(lambda: len(replies) > count + 8)
                wait_for(lambda: older not in list_children(process.pid))
            finally:
                stop.set()
        assert [one for one in replies if isinstance(one, str)] == [], "every request got its text"
        assert len({one["choices"][0]["text"] for one in replies}) == 2, "from the older model or from the newer one"


class FakeModel:
    """A model that cannot be loaded beside another one."""

    in_memory: list[FakeModel] = []

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.positions, self.vocab = 64, tokenizer.vocab

    @property
    def loaded(self) -> bool:
        return self in self.in_memory

    async def load(self) -> None:
        if self.in_memory:
            raise MemoryShort("the weights need 9 GiB, but 1 GiB are free")
        self.in_memory.append(self)

    async def unload(self) -> None:
        self.in_memory.remove(self)

    def stats(self) -> ModelStats:
        return ModelStats(0, 0, 1, 1, 0, 0, 0)


def test_a_model_without_space_takes_that_of_another_one() -> None:
    tokenizer = fit(iter([TEXT * 3]), TokenizerConfig(vocab=300))
    models: list[Any] = [FakeModel(tokenizer), FakeModel(tokenizer)]
    services = [Service(model, ServeConfig(), SampleConfig(), name) for model, name in zip(models, "ab", strict=True)]
    ServedModels(services)

    async def load(service: Service) -> None:
        assert service.load is not None
        await service.load()

    asyncio.run(load(services[0]))
    asyncio.run(load(services[1]))
    assert FakeModel.in_memory == [models[1]]

    async def fail() -> None:
        raise MemoryShort("the weights need 99 GiB")

    models[0].load = fail
    with pytest.raises(HttpError, match="'a' cannot be loaded: the weights need 99 GiB"):
        asyncio.run(load(services[0]))


def test_follow_and_names_are_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import textmill
    from textmill.server import lifecycle
    from textmill.where import open_where

    run: Callable[..., None] = textmill.serve
    monkeypatch.setattr(lifecycle, "run", lambda models, *_: models.title())
    monkeypatch.setattr("textmill.server.model_process.ModelProcess.start", lambda _: None)
    first, second = write_run(tmp_path / "one" / "tale"), write_run(tmp_path / "two" / "tale")
    ours = shutil.ignore_patterns("manifest.json", "progress.json")
    shutil.copytree(first / "run" / "step-0000007", tmp_path / "bare", ignore=ours)
    settings = ["serve.port=0"]
    with pytest.raises(TextmillError, match="two models are named 'tale-step-7'"):
        run(open_where(str(first), settings).config, [open_where(str(second), settings)])
    with pytest.raises(TextmillError, match="--follow: there is no run to follow"):
        run(open_where(str(tmp_path / "bare"), settings).config, follow=True)
