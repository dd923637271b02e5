"""`textmill serve WHERE` answers, stops on a signal, and reports in one line why it cannot start."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from tests.support import web
from tests.support.live_server import COMMAND, ROOT
from tests.support.small_models import TEXT, write_model
from tests.support.waiting import LONGEST, wait_for
from textmill.checkpoints.folders import Checkpoint
from textmill.config import RunConfig, ServeConfig, TokenizerConfig
from textmill.errors import TextmillError
from textmill.models.gpt2 import family as gpt2
from textmill.server.lifecycle import find_model_name, open_service
from textmill.tokens.vocabulary.tokenizer import fit
from textmill.where import open_where


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = fit(iter([TEXT * 3]), TokenizerConfig(vocab=300))
    shape = gpt2.Shape(
        layers=1, heads=2, width=32, inner=64, positions=64, vocab=tokenizer.vocab, eos_id=tokenizer.eos_id
    )
    root = tmp_path_factory.mktemp("serve") / "river-mill"
    write_model(root / "run", tokenizer, shape)
    (root / "mill.yaml").write_text("folder: .\n", encoding="utf-8")
    return root / "mill.yaml"


@pytest.mark.long_with(signal.SIGINT)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_answers_until_a_signal(where: Path, number: signal.Signals) -> None:
    arguments = [str(where), "serve.port=0", "sample.max_tokens=5", "engine.device=cpu"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*COMMAND, *arguments], **pipes, text=True, cwd=ROOT, start_new_session=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(r"serving river-mill at step 7 at (http://127\.0\.0\.1:\d+)/ ; ctrl-C stops\n", line)
    if not found:
        process.kill()
    assert found, line + "".join(process.communicate())
    generated = web.get(f"{found[1]}/generate", params={"sentence": "The mill"}).json()
    assert generated["response"].startswith("The mill")
    first = web.post(f"{found[1]}/v1/completions", json={"prompt": "The mill", "seed": 3}).json()
    assert first["model"] == "river-mill"
    again = web.post(f"{found[1]}/v1/completions", json={"prompt": "The mill", "seed": 3}).json()
    assert first["choices"] == again["choices"], "the same seed gives the same text"
    os.killpg(process.pid, number)  # all that it started in its group too, as a terminal does
    out, err = process.communicate(timeout=LONGEST)
    assert (process.returncode, out) == (0, "stopped\n")
    assert "Traceback" not in err


@pytest.mark.long
def test_a_second_ctrl_c_ends_running_texts_at_once(where: Path) -> None:
    endless = 10**9
    settings = ["serve.shutdown_grace=3600", "serve.request_timeout=3600", f"serve.max_tokens={endless}"]
    settings += ["serve.port=0", "engine.device=cpu"]
    process = subprocess.Popen([*COMMAND, str(where), *settings], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+:\d+", process.stdout.readline())
        assert found
        body = {"prompt": "The mill", "max_tokens": endless, "min_tokens": endless, "stream": True}
        with web.stream("POST", f"{found[0]}/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            assert next(lines)
            process.send_signal(signal.SIGINT)
            wait_for(lambda: web.get(f"{found[0]}/ready").status_code == 503)
            process.send_signal(signal.SIGINT)
            events = [line for line in lines if line]
        assert '"finish_reason":null' in events[-3]
        assert "the server is stopping; the text was ended early" in events[-2]
        assert (events[-1], process.wait(LONGEST)) == ("data: [DONE]", 0)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long
def test_failed_start_gives_one_line(where: Path, tmp_path: Path) -> None:
    bent, good = tmp_path / "bent", next((where.parent / "run").glob("step-*"))
    bent.mkdir()
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(good / name, bent)
    (bent / "config.json").write_text(json.dumps({**json.loads((good / "config.json").read_text()), "n_layer": 2}))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments, message in [
            ([str(where), f"serve.port={port}"], f"serve.port: cannot listen on 127.0.0.1:{port}"),
            ([str(where), "serve.host=no such host"], "serve.host: 'no such host' is not an address of this machine"),
            ([str(where), "serve.key_file=nowhere"], "nowhere: cannot be read"),
            ([str(where), "serve.port=70000"], "serve.port: found 70000; give a value at most 65535"),
            ([str(bent), "serve.port=0", "engine.device=cpu"], "lacks 12 weights"),
            (
                [str(where), "serve.allowed_origins=[example.org]"],
                "serve.allowed_origins: 'example.org' is no web origin",
            ),
        ]:
            done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, cwd=ROOT)
            assert (done.returncode, done.stdout) == (2, ""), done.stderr
            assert message in done.stderr
            assert done.stderr.count("\n") == 1


def test_beam_search_is_refused_before_the_model_is_opened(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> NoReturn:
        raise AssertionError("the model was opened")

    monkeypatch.setattr("textmill.server.lifecycle.new_model_process", never)
    config = open_where(str(where), ["sample.beams=4"]).config
    with pytest.raises(TextmillError, match=r"the server has no beam search; set sample\.beams=1"):
        open_service(config)


def test_model_name_is_the_name_of_its_run() -> None:
    for place, name in [
        ("runs/tale/run/step-0000007", "tale"),
        ("runs/tale/step-0000007", "tale"),
        ("models/gpt2", "gpt2"),
    ]:
        assert find_model_name(Checkpoint(Path(place), 7, {})) == name


def test_serve_settings_do_not_change_a_run() -> None:
    assert RunConfig().results("serve") == {}
    with pytest.raises(TextmillError, match="no web origin"):
        ServeConfig(allowed_origins=["https://example.org/page"])
