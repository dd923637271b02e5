"""The examples of the contributing pages work: each is put in place for one test and run."""

from __future__ import annotations

import gzip
import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import textmill.commands
import textmill.config.usage
import textmill.corpus.formats
import textmill.engines.optimizers
import textmill.evaluation.tasks
from tests.support.engine_runs import batch_of, config_of, started
from textmill.cli import main
from textmill.commands import table
from textmill.config import TokenizerConfig
from textmill.corpus import source
from textmill.corpus.shards import open_corpus
from textmill.tokens.vocabulary.tokenizer import fit

PAGES = Path(__file__).resolve().parents[2] / "docs" / "contributing"


def code_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (PAGES / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 that transformers wrote, with a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = fit(iter([["Is water wet? Answer: yes no. Is fire cold?"] * 3]), TokenizerConfig(vocab=280))
    tokenizer.save(folder)
    torch.manual_seed(1)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=64, vocab_size=tokenizer.vocab)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_add_a_command(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, row = code_blocks("add-a-command.md")
    (tmp_path / "size.py").write_text(file, encoding="utf-8")
    monkeypatch.setattr(textmill.commands, "__path__", [*textmill.commands.__path__, str(tmp_path)])
    monkeypatch.setattr(table, "COMMANDS", dict(table.COMMANDS))
    exec(row, vars(table))
    monkeypatch.setattr("textmill.cli.COMMANDS", table.COMMANDS)
    parameters = GPT2LMHeadModel.from_pretrained(model).num_parameters()
    assert main(["size", str(model), "--bytes"]) == 0
    assert capsys.readouterr().out == f"{model}: {4 * parameters:,} bytes\n"
    assert main(["size", str(model)]) == 0
    assert capsys.readouterr().out == f"{model}: {parameters:,} parameters\n"
    assert main(["size", "--help"]) == 0
    assert "  --bytes    print bytes instead of parameters" in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert "  size           print the number of parameters of a model" in capsys.readouterr().out
    monkeypatch.delitem(sys.modules, "textmill.commands.size")


def test_add_an_evaluation_task(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = code_blocks("add-an-evaluation-task.md")
    (tmp_path / "yes_no.py").write_text(file, encoding="utf-8")
    monkeypatch.setattr(textmill.evaluation.tasks, "__path__", [*textmill.evaluation.tasks.__path__, str(tmp_path)])
    monkeypatch.setattr(textmill.config.usage, "TASKS", tmp_path)
    importlib.invalidate_caches()
    on_cpu = ["engine.device=cpu", "engine.precision=fp32"]
    assert main(["evaluate", str(model), "evaluate.tasks=yes_no", "evaluate.batch=2", "--json", *on_cpu]) == 0
    result = json.loads(capsys.readouterr().out)
    card = result["yes_no"]["card"]
    assert (card["examples"], card["device"], card["precision"]) == (3, "cpu", "float32")
    assert result["yes_no"]["accuracy"] in (0, 1 / 3, 2 / 3, 1)
    assert result["step"] == 0
    assert main(["evaluate", str(model), "evaluate.tasks=yes_no", *on_cpu]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"yes_no\n  accuracy  {result['yes_no']['accuracy']:.1%}  (")
    assert re.search(r"^protocol +the likelier of two answers$", out, re.MULTILINE)
    monkeypatch.delitem(sys.modules, "textmill.evaluation.tasks.yes_no")


def test_add_a_data_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, entry = code_blocks("add-a-data-format.md")
    (tmp_path / "fortune.py").write_text(file, encoding="utf-8")
    monkeypatch.setattr(textmill.corpus.formats, "__path__", [*textmill.corpus.formats.__path__, str(tmp_path)])
    monkeypatch.setattr(source, "FORMATS", dict(source.FORMATS))
    exec(entry, vars(source))
    importlib.invalidate_caches()
    quotes = b"A mill grinds.\nSlowly.\n%\n\xff\n%\n%\nThe last one.\n"
    (tmp_path / "plain.fortune").write_bytes(quotes)
    (tmp_path / "packed.fortune.gz").write_bytes(
        gzip.compress(quotes.replace(b"mill", b"stone").replace(b"last", b"end"))
    )
    settings = [f"folder={tmp_path}", f"corpus.sources={tmp_path}/*.fortune*", "runner.workers=1"]
    assert main(["prepare", "quickstart", *settings, "corpus.max_unreadable=1"]) == 0
    found = {(Path(document.source).name, document.id): document.text for document in open_corpus(tmp_path / "corpus")}
    assert found == {
        ("plain.fortune", "line 1"): "A mill grinds.\nSlowly.",
        ("plain.fortune", "line 7"): "The last one.",
        ("packed.fortune.gz", "line 1"): "A stone grinds.\nSlowly.",
        ("packed.fortune.gz", "line 7"): "The end one.",
    }
    account = json.loads((tmp_path / "corpus" / "account.json").read_text(encoding="utf-8"))
    assert (account["records"], account["dropped"], account["quarantined"]) == (8, {"empty": 2}, 2)
    bad = [json.loads(line) for line in (tmp_path / "corpus" / "quarantine.jsonl").read_text("utf-8").splitlines()]
    assert {row["place"] for row in bad} == {"line 4"}
    monkeypatch.delitem(sys.modules, "textmill.corpus.formats.fortune")


def test_add_an_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = code_blocks("add-an-optimizer.md")
    (tmp_path / "lion_torch.py").write_text(file, encoding="utf-8")
    folders = [*textmill.engines.optimizers.__path__, str(tmp_path)]
    monkeypatch.setattr(textmill.engines.optimizers, "__path__", folders)
    importlib.invalidate_caches()
    config = config_of("torch", learning_rate=1e-3, weight_decay=0.0)
    train = config.train.model_copy(update={"optimizer": "lion"})
    engine = started(config.model_copy(update={"train": train}))
    matrix = "transformer.h.0.mlp.c_fc.weight"
    before = dict(engine.weights())[matrix].copy()
    losses = [engine.train_step(batch_of(0), 0, 1e-3).loss]
    change = np.abs(dict(engine.weights())[matrix] - before)
    assert change == pytest.approx(1e-3, rel=1e-2), "every number moves by the learning rate"
    losses += [engine.train_step(batch_of(step), step, 1e-3).loss for step in range(1, 40)]
    assert losses[-1] < losses[0] - 0.3
    assert any("momentum" in name and matrix in name for name, _ in engine.optimizer_state())
    monkeypatch.delitem(sys.modules, "textmill.engines.optimizers.lion_torch")
