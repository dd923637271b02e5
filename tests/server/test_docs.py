"""The examples of docs/serve.md, run unchanged against a live server."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_tools import write_hf
from tests.support import web
from tests.support.bert_models import write_bert
from tests.support.browser import Browser, missing
from tests.support.live_server import Live
from tests.tokens.test_jinja_template import QWEN

pytestmark = pytest.mark.long

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "serve.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


def example(kind: str, live: Live, number: int = 0) -> str:
    """Return an example in a language, with the live server's address."""
    found: list[str] = re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(found) == {"js": 1, "sh": 3, "python": 4}[kind], "for texts, embeddings, constrained output and tools"
    assert ADDRESS in found[number]
    return found[number].replace(ADDRESS, live.url)


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on PATH")
def test_curl(live: Live) -> None:
    done = subprocess.run(["bash", "-e", "-c", example("sh", live)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"finish_reason":"length"' in done.stdout
    assert "data: [DONE]" in done.stdout
    assert '{"input":"Once upon a time","response":' in done.stdout
    assert '"error"' not in done.stdout


def test_python(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai", reason="the openai client is in the extra dev")
    exec(compile(example("python", live), "docs/serve.md", "exec"), {})
    output = capsys.readouterr().out
    assert output.count("Once upon a time") >= 2, "the model echoes its prompt, whole and streamed"
    assert "user: Who are you?" in output


def test_constrained_output(small_model: Path, new_live: Callable[..., Live], capsys: Any) -> None:
    pytest.importorskip("openai", reason="the openai client is in the extra dev")
    live = new_live({"model": str(small_model), "chat": False})
    exec(compile(example("python", live, 2), "docs/serve.md", "exec"), {})
    assert capsys.readouterr().out.lstrip().startswith("{")
    if shutil.which("curl") is not None:
        done = subprocess.run(["bash", "-e", "-c", example("sh", live, 2)], capture_output=True, text=True)
        assert re.search(r'"text": ?"(yes|no)"', done.stdout), done.stdout


def test_tools(tmp_path: Path, new_live: Callable[..., Live], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai", reason="the openai client is in the extra dev")
    live = new_live({"where": str(write_hf(tmp_path, QWEN)), "sample": {"max_tokens": 1000}})
    exec(compile(example("python", live, 3), "docs/serve.md", "exec"), {})
    assert capsys.readouterr().out.startswith("weather {")


def test_embeddings_and_masks(
    new_live: Callable[..., Live], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bert(tmp_path / "bert-base")
    live = new_live({"where": str(tmp_path / "bert-base")})
    if shutil.which("curl") is not None:
        done = subprocess.run(["bash", "-e", "-c", example("sh", live, 1)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count('"object": "embedding"') == 2
        assert done.stdout.count('"probability"') == 3
    pytest.importorskip("openai", reason="the openai client is in the extra dev")
    capsys.readouterr()
    exec(compile(example("python", live, 1), "docs/serve.md", "exec"), {})
    assert capsys.readouterr().out == "2 32\n"


def test_javascript(live: Live) -> None:
    script = example("js", live)
    if node := shutil.which("node"):
        done = subprocess.run([node, "--input-type=module", "-e", script], capture_output=True, text=True)
        assert "Once upon a time" in done.stdout, done.stderr
        return
    if missing():
        pytest.skip(f"no node on PATH, {missing()}")
    browser = Browser()
    try:
        browser.open(live.url)
        script = script.replace("console.log(text)", "return text")
        output = browser.send(
            "execute/async",
            script=f"const done = arguments[0]; (async () => {{ {script} }})().then(done, (e) => done(String(e)))",
            args=[],
        )
        assert output.startswith("Once upon a time")
    finally:
        browser.close()


def test_every_route_is_on_the_page_and_every_setting_in_its_link(live: Live) -> None:
    from textmill.config import ServeConfig

    linked, _, heading = PAGE.partition("[reference](")[2].partition(")")[0].partition("#")
    section = (DOCS / linked).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    for key in ServeConfig.model_fields:
        assert f"`serve.{key}`" in section
    for path in web.get(f"{live.url}/openapi.json").json()["paths"]:
        assert path.replace("/{name}", "") in PAGE
