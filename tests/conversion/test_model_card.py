"""The model card of a run: its figures are those that the run and `evaluate` recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.support.bert_models import write_bert
from tests.support.model_folders import TEXT, korean_tokenizer, write_folder
from tests.support.small_models import single_process_snapshot
from textmill.checkpoints.writing import write_checkpoint
from textmill.cli import main
from textmill.models.pooling import Pooling, pooling_files
from textmill.storage.tensor_files import read_model

TRAIN = [
    "train.steps=4",
    "train.warmup=0",
    "train.batch=2",
    "train.length=16",
    "train.evaluate_every=2",
    "train.log_every=1",
    "train.save_every=2",
    "train.evaluate_batches=1",
]
MODEL = ["model.size=nano", "model.shape.layers=1", "model.shape.heads=2", "model.shape.width=16"]


@pytest.mark.long
def test_a_run_with_its_data_curve_and_scores(tmp_path: Path) -> None:
    (tmp_path / "mill.txt").write_text("\n\n".join(f"{number}. {text}" for number in range(60) for text in TEXT))
    (tmp_path / "my.yaml").write_text(
        "corpus: {sources: [mill.txt], documents: block, dedup: none, split: [80, 10, 10]}\ntokenizer: {vocab: 320}\n"
    )
    where = [str(tmp_path / "my.yaml"), f"folder={tmp_path / 'mine'}", "engine.device=cpu", "runner.workers=1"]
    for command in ("prepare", "fit-tokenizer", "tokenize"):
        assert main([command, *where]) == 0
    assert main(["train", *where, *TRAIN, *MODEL]) == 0
    run = str(tmp_path / "mine" / "run")
    assert main(["evaluate", run, "evaluate.tasks=perplexity", "--step", "4"]) == 0
    assert main(["export", run, f"export.folder={tmp_path / 'out'}", "export.license=mit", "--step", "4"]) == 0
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    head = yaml.safe_load(card.split("---")[1])
    assert head["license"] == "mit"
    assert head["pipeline_tag"] == "text-generation"
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", card, re.M))
    assert rows["sources"] == "mill.txt"
    tokens = json.loads((tmp_path / "mine" / "tokens" / "manifest.json").read_text())["splits"]["train"]
    assert rows["train split"].startswith(f"{tokens['documents']:,} documents, {tokens['tokens']:,} tokens")
    assert rows["steps"] == "4"
    assert rows["tokens seen"] == f"{4 * 2 * 16:,}"
    metrics = [json.loads(line) for line in (tmp_path / "mine" / "run" / "metrics.jsonl").read_text().splitlines()]
    valid = {row["step"]: row["valid_loss"] for row in metrics if "valid_loss" in row}
    losses = {row["step"]: row["loss"] for row in metrics if "loss" in row}
    for step in (2, 4):
        assert f"| {step} | {losses[step]:.4f} | {valid[step]:.4f} |" in card
    (measured,) = (tmp_path / "mine" / "run" / "evaluation").glob("step-0000004*.json")
    figures = json.loads(measured.read_text())
    assert "## Scores" in card
    assert "Protocol: " in card
    found = [
        value
        for part in figures.values()
        if isinstance(part, dict)
        for value in part.values()
        if isinstance(value, float)
    ]
    assert any(f"| {value:.6g} |" in card for value in found)
    assert str(tmp_path) not in card, "no folder of the machine"


HEADS = {
    "BertForMaskedLM": ("fill-mask", 'pipeline("fill-mask"'),
    "BertModel": ("feature-extraction", 'pipeline("feature-extraction"'),
    "BertForQuestionAnswering": ("question-answering", "AutoModelForQuestionAnswering"),
    "BertForSequenceClassification": ("text-classification", 'pipeline("text-classification"'),
    "sentence-transformers": ("sentence-similarity", "SentenceTransformer("),
}


@pytest.mark.long_with("sentence-transformers")
@pytest.mark.parametrize("kind", HEADS)
def test_the_pipeline_is_that_of_the_head_and_the_snippet_runs(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    write_bert(folder, kind if kind.startswith("Bert") else "BertModel")
    if kind == "sentence-transformers":
        for name, text in pooling_files(Pooling(), 32).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
    card = export_card(folder, tmp_path / "out")
    tag, snippet = HEADS[kind]
    assert yaml.safe_load(card.split("---")[1])["pipeline_tag"] == tag
    assert snippet in card
    assert "trained with textmill" not in card
    assert "converted with textmill" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    exec(code.replace("FOLDER", str(tmp_path / "out")), {})


def test_a_model_of_others_keeps_its_card_and_its_licence(tmp_path: Path) -> None:
    folder, out, again = (tmp_path / name for name in ("model", "out", "again"))
    write_folder(folder, korean_tokenizer())
    (folder / "README.md").write_text(
        "---\nlicense: apache-2.0\nlanguage: [ko]\nbase_model: mills/grain-7b\n---\n\n# Grain\n\nMade by a mill.\n"
    )
    (folder / "LICENSE").write_text("Do as you like.")
    for source, target in ((folder, out), (out, again)):
        card = export_card(source, target)
        head = yaml.safe_load(card.split("---")[1])
        assert (head["license"], head["language"], head["base_model"]) == ("apache-2.0", ["ko"], "mills/grain-7b")
        assert card.endswith("\n# Grain\n\nMade by a mill.\n")
        assert (target / "LICENSE").read_text() == "Do as you like."
    gguf = pytest.importorskip("gguf", reason="needs the extra export")
    assert main(["export", str(folder), f"export.folder={tmp_path / 'file'}", "export.kind=gguf"]) == 0
    file = tmp_path / "file" / "file.gguf"
    keys = {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}
    assert keys["general.license"] == "apache-2.0"
    assert keys["general.base_model.0.name"] == "mills/grain-7b"
    assert keys["general.languages"] == ["ko"]
    assert main(["import", str(file), str(tmp_path / "back")]) == 0
    assert (tmp_path / "back" / "README.md").read_text() == (out / "README.md").read_text()


def test_a_run_names_its_base_model_and_takes_its_licence(tmp_path: Path) -> None:
    base = write_folder(tmp_path / "grain-7b", korean_tokenizer())
    (base / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n# Grain\n")
    run = tmp_path / "mine" / "run"
    files = {name: (base / name).read_bytes() for name in ("config.json", "tokenizer.json", "tokenizer_config.json")}
    settings = f"model: {{init_from: {base}}}\ntrain: {{folder: {run}}}\n"
    snapshot = single_process_snapshot(
        7, list(read_model(base)), [], {"step": 7, "tokens": 640}, files | {"run.yaml": settings.encode()}
    )
    write_checkpoint(run, snapshot)
    (run / "evaluation").mkdir()
    measured = {
        "step": 7,
        "pairs": {
            "accuracy": 0.75,
            "intervals": {"accuracy": [0.5, 0.875]},
            "card": {"task": "pairs", "file": f"{tmp_path}/minimal.jsonl", "items": 120, "device": "cpu"},
        },
    }
    (run / "evaluation" / "any-name.json").write_text(json.dumps(measured))
    texts = {"card": {"task": "perplexity", "text": [f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"]}, "loss": 2.5}
    (run / "evaluation" / "texts.json").write_text(json.dumps({"step": 7, "perplexity": texts}))
    (run / "evaluation" / "other.json").write_text(json.dumps({**measured, "step": 6}))
    card = export_card(run / "step-0000007", tmp_path / "out")
    head = yaml.safe_load(card.split("---")[1])
    assert (head["base_model"], head["license"]) == ("grain-7b", "cc-by-4.0")
    assert "finetuned from grain-7b with textmill" in card
    assert "## Finetuning" in card
    assert card.count("| pairs | accuracy | 0.75 | 0.5 to 0.875 |") == 1
    assert "file minimal.jsonl" in card
    assert "text a.txt, b.txt" in card
    assert str(tmp_path) not in card


def export_card(source: Path, out: Path) -> str:
    assert main(["export", str(source), f"export.folder={out}"]) == 0
    return (out / "README.md").read_text(encoding="utf-8")
