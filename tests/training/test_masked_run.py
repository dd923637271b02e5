"""Runs of a BERT: resumed runs equal uninterrupted ones, TFRecords train, and changed token counts are noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from textmill.cli import main

CONFIG = """
corpus: {sources: [text.txt], documents: block, sentences: split, dedup: none, split: "80,10,10"}
tokenizer: {kind: wordpiece, vocab: 300}
tokens: {level: sentence, append_end: false}
model: {family: bert, shape: {layers: 1, heads: 2, width: 16}}
train: {layout: masked, length: 32, batch: 4, steps: 4, save_every: 2, warmup: 0, evaluate_batches: 1}
engine: {device: cpu}
"""

pytestmark = pytest.mark.long


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    blocks = [
        " ".join(f"The wheel number {word} of mill {number} turns slowly." for word in range(6)) for number in range(60)
    ]
    Path("text.txt").write_text("\n\n".join(blocks), encoding="utf-8")
    Path("bert.yaml").write_text(CONFIG, encoding="utf-8")
    assert main(["prepare", "bert.yaml"]) == 0
    return tmp_path


def weights(run: str, step: int) -> bytes:
    return (Path(run) / f"step-{step:07d}" / "model.safetensors").read_bytes()


def test_a_resumed_run_equals_an_uninterrupted_one(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", "bert.yaml"]) == 0
    assert main(["show", "bert.yaml", "--counts", "counts.json"]) == 0
    counts = "train.masked.counts=counts.json"
    assert main(["train", "bert.yaml", counts, "train.folder=whole"]) == 0
    for steps in (2, 4):
        schedule = "train.decay_steps=4"
        assert main(["train", "bert.yaml", counts, schedule, "train.folder=parts", f"train.steps={steps}"]) == 0
    assert weights("whole", 4) == weights("parts", 4)
    capsys.readouterr()
    assert main(["evaluate", "bert.yaml", "train.folder=whole"]) == 2, "it has no perplexity of the next token"
    assert "tokens, not the next one, so it has no perplexity" in capsys.readouterr().err
    changed = json.loads(Path("counts.json").read_text())
    changed["counts"][50] += 1
    Path("counts.json").write_text(json.dumps(changed))
    capsys.readouterr()
    assert main(["train", "bert.yaml", counts, "train.folder=whole", "train.steps=6"]) == 2
    assert "train.masked.counts" in capsys.readouterr().err


def test_a_bert_trains_on_its_tfrecords(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", "bert.yaml", "tokens.kind=tfrecord", "train.masked.max_predictions=5"]) == 0
    use = ["tokens.use=runs/bert/tokens/tfrecord", "tokenizer.use=runs/bert/tokenizer", "folder=again"]
    assert main(["run", "bert.yaml", *use]) == 0, capsys.readouterr().err
    assert "All stages are done. The model is again/run/step-0000004" in capsys.readouterr().out
