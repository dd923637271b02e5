"""Finetuning on examples with labels: tiny runs that learn, resume, open in transformers, and give predictions."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.labelled_files import ANSWERS, SEQUENCES, WORDS, write_project
from tests.support.together import run_together
from textmill.checkpoints.folders import open_model
from textmill.cli import main
from textmill.config import TorchEngine
from textmill.corpus.labelled import Example
from textmill.errors import TextmillError
from textmill.evaluation.labelled.predictor_torch import Predictor
from textmill.storage.files import read_json
from textmill.storage.tensor_files import read_model

STEPS = {SEQUENCES: 80, WORDS: 24, ANSWERS: 40}
CHANCE = {SEQUENCES: math.log(2), WORDS: math.log(3), ANSWERS: math.log(7)}
"""The loss of a guess: of two classes, of three labels, of a word of the context."""


_PROJECTS: dict[str, Path] = {}


def open_project(task: str, factory: pytest.TempPathFactory) -> Path:
    """A run of all stages, once for each task."""
    if task not in _PROJECTS:
        folder = factory.mktemp(task)
        assert main(["run", str(write_project(folder, task, STEPS[task]))]) == 0
        _PROJECTS[task] = folder
    return _PROJECTS[task]


@pytest.fixture(params=[SEQUENCES, WORDS, ANSWERS])
def task(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def project(task: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return open_project(task, tmp_path_factory)


@pytest.fixture
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return last_checkpoint(open_project(SEQUENCES, tmp_path_factory))


def last_checkpoint(project: Path) -> Path:
    return max((project / "run").glob("step-*"))


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_run_learns_and_is_measured(project: Path, task: str) -> None:
    valid = [line for line in metrics(project / "run") if "valid_loss" in line]
    assert valid[-1]["valid_loss"] < CHANCE[task] / 2
    assert valid[-1]["valid_accuracy"] > 0.9
    (saved,) = (project / "run" / "evaluation").glob(f"*-{task}-valid-??????.json")
    found = read_json(saved)[task]
    assert found["card"]["examples"] == found["card"]["labelled"] == 60
    wanted = {SEQUENCES: ("accuracy", "macro_f1", "matthews"), WORDS: ("entity_f1",), ANSWERS: ("exact_match", "f1")}
    assert all(found[name] > (90 if task == ANSWERS else 0.8) for name in wanted[task])


def test_transformers_opens_the_checkpoint_and_predicts_the_same(project: Path, task: str) -> None:
    import transformers

    folder = last_checkpoint(project)
    (path,) = (project / "run" / "evaluation").glob("*predictions*")
    folder = project / "run" / path.name[: len(folder.name)]  # the best one
    kinds = {SEQUENCES: "SequenceClassification", WORDS: "TokenClassification", ANSWERS: "QuestionAnswering"}
    net, notes = getattr(transformers, f"AutoModelFor{kinds[task]}").from_pretrained(folder, output_loading_info=True)
    assert not any(notes.values()), "every weight of the file is used, and none is new"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id

    def logits_of(*segments: list[int]) -> Any:
        ids = [cls] + [id_ for segment in segments for id_ in [*segment, sep]]
        types = [0] * (len(segments[0]) + 2) + [1] * (len(ids) - len(segments[0]) - 2)
        with torch.no_grad():
            return net(torch.tensor([ids]), token_type_ids=torch.tensor([types]))

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    if task == ANSWERS:
        predictions = read_json(path)
        for paragraph in read_json(project / "valid.json")["data"][0]["paragraphs"][:10]:
            question = paragraph["qas"][0]
            question_ids, context = (
                encode(question["question"]),
                tokenizer(paragraph["context"], add_special_tokens=False),
            )
            out, before = logits_of(question_ids, context["input_ids"]), len(question_ids) + 2
            first, last = (int(one[0, before:-1].argmax()) for one in (out.start_logits, out.end_logits))
            spans = [context.token_to_chars(place) for place in (first, last)]
            assert predictions[question["id"]] == paragraph["context"][spans[0].start : spans[1].end]
        return
    assert net.config.id2label == {number: name for name, number in net.config.label2id.items()}
    for row in map(json.loads, path.read_text().splitlines()[:10]):
        if task == SEQUENCES:
            chances = logits_of(encode(row["texts"][0])).logits[0].softmax(-1)
            assert net.config.id2label[int(chances.argmax())] == row["label"]
            assert float(chances.max()) == pytest.approx(row["probability"], abs=1e-5)
        else:
            pieces = [encode(word) for word in row["words"]]
            found = logits_of([id_ for piece in pieces for id_ in piece]).logits[0].argmax(-1).tolist()
            starts = np.cumsum([1, *(len(piece) for piece in pieces[:-1])]).tolist()
            assert [net.config.id2label[found[start]] for start in starts] == row["labels"]


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    config = str(write_project(tmp_path, SEQUENCES, 6, dropout=0.1))
    assert main(["run", config]) == 0
    again = tmp_path / "again"
    words = ["train", config, f"train.folder={again}", "train.schedule=constant"]
    alone = ["train", config, f"train.folder={tmp_path / 'alone'}", "train.schedule=constant"]
    assert main(alone) == 0
    assert main([*words, "train.steps=3"]) == 0
    assert main(words) == 0
    wanted = dict(read_model(tmp_path / "alone" / "step-0000006"))
    for name, values in read_model(again / "step-0000006"):
        assert np.array_equal(values, wanted[name]), name
    losses = [[line.get("loss") for line in metrics(tmp_path / run) if "loss" in line] for run in ("alone", "again")]
    assert losses[0] == losses[1]


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["replicate", "shard", "tensor"])
def test_two_processes_equal_one(mesh: str, tmp_path: Path) -> None:
    config = write_project(tmp_path, ANSWERS, 6, dropout=0.1)
    assert main(["run", str(config), "train.optimizer=adamw", "train.learning_rate=1e-3"]) == 0
    words = [sys.executable, "-m", "textmill", "train", str(config), "train.optimizer=adamw"]
    words += ["train.learning_rate=1e-3", f"train.folder={tmp_path / 'two'}", f"engine.mesh.{mesh}=2"]
    assert run_together(words, 2) == "ok"
    alone, two = (metrics(tmp_path / run) for run in ("run", "two"))
    for one, other in zip(alone, two, strict=True):
        for name in one.keys() & {"loss", "valid_loss", "valid_accuracy"}:
            assert other[name] == pytest.approx(one[name], rel=1e-6), name
    assert sum("valid_loss" in line for line in two) == 2


def test_files_without_labels_get_predictions_only(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new.jsonl").write_text('{"text": "a lovely story"}\n{"text": "the awful music was bad"}\n')
    out = tmp_path / "out" / "predicted.jsonl"
    words = ["evaluate", str(classifier), "engine.device=cpu", f"evaluate.text={tmp_path / 'new.jsonl'}"]
    capsys.readouterr()
    assert main([*words, f"evaluate.predictions={out}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[SEQUENCES]
    assert (found["card"]["examples"], found["card"]["labelled"]) == (2, 0)
    assert "accuracy" not in found
    assert [json.loads(line)["label"] for line in out.read_text().splitlines()] == ["pos", "neg"]
    assert main([*words, "evaluate.sample=2"]) == 0
    printed = capsys.readouterr()
    assert "sequence-classification" in printed.out
    assert "evaluate.sample: is ignored" in printed.err
    assert main([*words, f"evaluate.predictions={tmp_path}"]) == 2
    assert f"evaluate.predictions: {tmp_path} is a folder; name a file in it" in capsys.readouterr().err


def test_a_finetuned_model_no_longer_predicts_tokens(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["fill", str(classifier), "sample.prompt=a [MASK]", "engine.device=cpu"]) == 2
    assert "has no head for masked tokens" in capsys.readouterr().err
    (tmp_path / "text.txt").write_text("A king. A queen.\n" * 20)
    (tmp_path / "masked.yaml").write_text(
        "corpus: {sources: [text.txt]}\ntrain: {layout: masked, length: 16, masked: {pairs: none}}\n"
        f"model: {{family: bert, init_from: {classifier}}}\ntokenizer: {{use: {classifier}}}"
    )
    assert main(["run", str(tmp_path / "masked.yaml"), f"folder={tmp_path}"]) == 2
    assert "model.init_from: was finetuned for sequence-classification" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["ForPreTraining", "ForMaskedLM", "Model"])
def test_a_pretrained_encoder_gets_a_new_head(kind: str, classifier: Path, tmp_path: Path) -> None:
    import transformers

    source = read_json(classifier / "config.json") | {"architectures": None, "id2label": None, "label2id": None}
    theirs = getattr(transformers, f"Bert{kind}")(transformers.BertConfig(**source))
    theirs.save_pretrained(tmp_path / "pretrained")
    for path in classifier.glob("tokenizer*"):
        (tmp_path / "pretrained" / path.name).write_bytes(path.read_bytes())
    config = str(write_project(tmp_path, SEQUENCES, 2))
    given = f"model={{family: bert, init_from: {tmp_path / 'pretrained'}}}"
    words = [given, f"tokenizer={{use: {tmp_path / 'pretrained'}}}", "train.learning_rate=1e-9", "train.weight_decay=0"]
    assert main(["run", config, *words]) == 0
    found = dict(read_model(tmp_path / "run" / "step-0000002"))
    kept = {name if name.startswith("bert.") else f"bert.{name}": one for name, one in theirs.state_dict().items()}
    shared = found.keys() & kept.keys()
    assert len(shared) == len(found) - (4 if kind == "ForMaskedLM" else 2), "classifier, and pooler if there is none"
    assert all(np.allclose(found[name], kept[name].numpy(), atol=1e-6) for name in shared)
    assert found["classifier.weight"].std() == pytest.approx(0.02, rel=0.3)


def test_a_model_of_one_segment_takes_no_pairs(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    source = read_json(classifier / "config.json") | {"type_vocab_size": 1}
    config = transformers.BertConfig(**source)
    transformers.BertForPreTraining(config).save_pretrained(tmp_path / "pretrained")
    for path in classifier.glob("tokenizer*"):
        (tmp_path / "pretrained" / path.name).write_bytes(path.read_bytes())
    model = [f"model={{family: bert, init_from: {tmp_path / 'pretrained'}}}", "train.warmup=0"]
    model += [f"tokenizer={{use: {tmp_path / 'pretrained'}}}"]
    known = "makes samples of two texts, and the model knows 1 segment (type_vocab_size in its config.json)"
    (tmp_path / "answers").mkdir()
    answers = str(write_project(tmp_path / "answers", ANSWERS, 2))
    texts = str(write_project(tmp_path, SEQUENCES, 2))
    (tmp_path / "text.txt").write_text("A king. A queen.\n" * 20)
    masked = tmp_path / "masked.yaml"
    masked.write_text("corpus: {sources: [text.txt]}\ntrain: {layout: masked, length: 16}")
    capsys.readouterr()
    for words, setting in (
        ([answers], "corpus.labels: question-answering"),
        ([texts, "corpus.text_key=text+label"], "corpus.text_key: text+label"),
        ([str(masked), "folder=" + str(tmp_path / "masked")], "train.masked.pairs: next"),
    ):
        assert main(["run", *words, *model]) == 2
        assert f"{setting} {known}".replace(" makes", ": makes") in capsys.readouterr().err
    assert main(["run", texts, *model]) == 0, capsys.readouterr().err
    pairs = ["corpus.text_key=text+label", f"evaluate.text={tmp_path / 'valid.csv'}"]
    assert main(["evaluate", str(tmp_path / "run"), *pairs, "engine.device=cpu"]) == 2
    assert f"corpus.text_key: a pair: {known}" in capsys.readouterr().err


def test_a_finetuned_head_is_continued(classifier: Path, tmp_path: Path) -> None:
    config = str(write_project(tmp_path, SEQUENCES, 2))
    words = [f"model={{family: bert, init_from: {classifier}}}", f"tokenizer={{use: {classifier}}}"]
    assert main(["run", config, *words, "train.learning_rate=1e-9", "train.weight_decay=0"]) == 0
    assert next(line["valid_accuracy"] for line in metrics(tmp_path / "run") if "valid_accuracy" in line) > 0.9


def test_gpt2_has_no_head_for_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(write_project(tmp_path, SEQUENCES, 2))
    assert main(["run", config, "model.family=gpt2", "model.size=nano", "model.shape.width=96"]) == 2
    assert "model.family: gpt2 has no head for corpus.labels" in capsys.readouterr().err


def test_other_commands_on_a_finetuned_model(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = str(classifier.parents[1])
    assert main(["plan", project, "plan.probe_steps=2"]) == 0
    assert "timed here: 2 steps" in capsys.readouterr().out
    refused = {
        ("evaluate", project, "evaluate.tasks=pseudo_perplexity"): "evaluate.tasks: a model with a finetuned head",
        ("evaluate", project, "evaluate.split=test"): "the test split has no examples",
        ("generate", project, "sample.prompt=x"): "cannot generate text; use: textmill evaluate",
        (
            "merge",
            str(tmp_path / "out"),
            f"{project}/tokens",
            f"{project}/tokens",
        ): "examples with labels, which cannot",
    }
    for words, message in refused.items():
        assert main(list(words)) == 2
        assert message in capsys.readouterr().err


def test_damaged_weights_predict_nothing(classifier: Path) -> None:
    predictor = Predictor(open_model(str(classifier)), TorchEngine(device="cpu"), batch=8, length=None, overlap=0)
    with torch.no_grad():
        dict(predictor.net.named_parameters())["classifier.bias"].fill_(torch.nan)
    with pytest.raises(TextmillError, match="a prediction is not finite; the weights are damaged"):
        list(predictor.predict(iter([Example("f", "line 1", ("a lovely story",))])))
