"""Every command as a function: `textmill.NAME` of the table of commands."""

from __future__ import annotations

import inspect
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2LMHeadModel

import textmill
from textmill.commands.table import COMMANDS
from textmill.config import CorpusConfig, ModelConfig, SampleConfig, TokenizerConfig, TrainConfig
from textmill.errors import TextmillError
from textmill.where import open_where


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_function_that_takes_what_its_row_says(name: str) -> None:
    row = COMMANDS[name]
    # `import` and `from` are words of Python itself.
    function = getattr(textmill, {"import": "import_model", "from": "translate"}.get(name, name.replace("-", "_")))
    assert row.python_name in dir(textmill)
    arguments = ["config"] if row.opens is not None else list(row.arguments)
    options = {flag.parameter: flag.value for flag in row.flags if not flag.function}
    if row.opens is None and row.takes_settings:
        options["settings"] = []
    inspect.signature(function).bind(*arguments, **options)
    if row.opens == "model":
        assert inspect.signature(function).parameters["step"].default is None, "the best, or the latest"


def test_all_stages_in_python(tiny_texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_texts.parent)
    config = textmill.RunConfig(
        folder="mine",
        corpus=CorpusConfig(sources=["texts/*.txt"], section_chars=300),
        tokenizer=TokenizerConfig(vocab=300),
        model=ModelConfig(size="nano"),
        train=TrainConfig(steps=2, warmup=0, batch=2, length=32),
        sample=SampleConfig(prompt="The mill", max_tokens=4),
    )
    textmill.prepare(config)
    textmill.fit_tokenizer(config)
    textmill.tokenize(config)
    textmill.train(config)
    assert textmill.evaluate(config)["perplexity"]["bits_per_byte"] > 0
    assert isinstance(textmill.generate(config)[0], str)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = textmill.trian
    Path("base.yaml").write_text(config.to_yaml())
    textmill.train("base.yaml", settings={"train.steps": 3})
    assert textmill.evaluate("mine", step=3)["perplexity"]["bits_per_byte"] > 0
    own_tokens = {"tokens.use": ["mine/tokens"], "tokenizer.use": "mine/tokenizer", "train.folder": "again"}
    textmill.train("base.yaml", settings=own_tokens)
    first, second = (Path(run, "metrics.jsonl").read_text().splitlines()[0] for run in ("mine/run", "again"))
    assert json.loads(first)["bits_per_byte"] == json.loads(second)["bits_per_byte"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: textmill.train("nothing.yaml"), "nothing.yaml: no such file or folder"),
        (lambda: textmill.train("quickstart", settings={"train.stpes": 3}), "train.stpes: no such key; did you mean"),
        (lambda: textmill.train("quickstart", settings={"train.steps": "x"}), "train.steps: found 'x'; give a whole"),
        (lambda: textmill.RunConfig(train={"stpes": 3}), "train.stpes: no such key; did you mean 'train.steps'?"),
        (lambda: textmill.train(textmill.RunConfig(), settings={"train.steps": 3}), "settings: override those of"),
    ],
)
def test_mistakes_in_python_are_those_of_the_command_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TextmillError) as caught:
        call()
    assert str(caught.value).startswith(message)


def test_new_writes_a_config(tiny_texts: Path) -> None:
    path = textmill.new(str(tiny_texts.parent / "mine"), text=str(tiny_texts))
    assert path == tiny_texts.parent / "mine" / "textmill.yaml"
    assert open_where(str(path), []).config.corpus.sources == [str(tiny_texts)]


@pytest.mark.long
def test_verify_runs(capsys: pytest.CaptureFixture[str]) -> None:
    textmill.verify(open_where("quickstart", ["engine.precision=fp32", "engine.mesh.replicate=2"]).config)
    assert "gives the numbers of" in capsys.readouterr().out


def test_serve_opens_its_port_first(tiny_texts: Path) -> None:
    """The server's own tests run it to the end; here its port is taken, which it reports before it opens a model."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = open_where("quickstart", [f"serve.port={taken.getsockname()[1]}"]).config
        with pytest.raises(TextmillError, match=r"serve\.port: cannot listen on"):
            textmill.serve(config)


@pytest.mark.long
def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells run in order; its attention is that of transformers for the same weights."""
    notebook = json.loads((Path(__file__).parents[2] / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "notebook.ipynb", "exec"), names)
    output = capsys.readouterr().out
    assert "nats per token" in output
    assert "looks at" in output
    model = GPT2LMHeadModel.from_pretrained(names["run"].checkpoint.folder, attn_implementation="eager")
    attention = model(names["ids"], output_attentions=True).attentions[0][0]
    assert (names["attention"] - attention).abs().max() < 1e-5
    documents = names["documents"]
    mean = sum(one["loss"] for one in documents) / sum(one["tokens"] for one in documents)
    assert mean == pytest.approx(best_loss(tmp_path / "runs/notebook/run"), rel=1e-3)


def best_loss(run: Path) -> float:
    """The valid loss that was logged at the best step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return min(float(line["valid_loss"]) for line in lines if "valid_loss" in line)
