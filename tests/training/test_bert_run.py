"""A BERT on the command line: run, resume, transformers, fill, and what a masked model cannot do."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.model_folders import korean_tokenizer, write_folder
from textmill.cli import main
from textmill.config import RunConfig
from textmill.errors import TextmillError
from textmill.storage.tensor_files import read_model
from textmill.tokens.store import open_store
from textmill.tokens.vocabulary.tokenizer import open_tokenizer

YAML = """
folder: .
corpus: {sources: [text.txt], sentences: split, split: "80,20,0", documents: block}
tokenizer: {kind: wordpiece, vocab: 260}
tokens: {level: sentence, append_end: false}
model: {family: bert, size: tiny, shape: {width: 32, dropout: 0.1}}
train: {layout: masked, length: 32, batch: 8, steps: 4, save_every: 2, evaluate_every: 2, log_every: 1,
        schedule: constant, warmup: 0}
engine: {device: cpu}
"""
WORDS = "the a king queen sees hears loves fears old young wise foolish man woman castle garden".split()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps on a few sentences."""
    folder = tmp_path_factory.mktemp("bert")
    dice = np.random.default_rng(1)
    documents = [" ".join(" ".join(dice.choice(WORDS, 6)).capitalize() + "." for _ in range(4)) for _ in range(60)]
    (folder / "text.txt").write_text("\n\n".join(documents))
    (folder / "bert.yaml").write_text(YAML)
    assert main(["run", str(folder / "bert.yaml")]) == 0
    return folder


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_both_losses_are_logged(project: Path) -> None:
    lines = metrics(project / "run")
    steps = [line for line in lines if "loss" in line]
    assert all(0.3 < line["pair_loss"] < 1.5 for line in steps)
    assert steps[0]["loss"] == pytest.approx(np.log(117), rel=0.1)
    valid = [line for line in lines if "valid_loss" in line]
    assert [line["step"] for line in valid] == [2, 4]
    assert valid[-1].keys() >= {"valid_accuracy", "valid_pair_loss", "valid_pair_accuracy"}


def test_run_evaluates_the_configured_tasks(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", str(project / "bert.yaml")]
    capsys.readouterr()
    assert main(words) == 0
    out = capsys.readouterr().out.partition("Next:")[2]
    assert all(f"textmill {name} " in out for name in ("fill", "embed", "evaluate"))
    words += ["evaluate.tasks=pseudo_perplexity", "evaluate.sample=5", "sample.prompt=a [MASK]"]
    assert main(words) == 0
    first = capsys.readouterr().out
    (saved,) = (project / "run" / "evaluation").glob("*-pseudo_perplexity-*.json")
    found = json.loads(saved.read_text())["pseudo_perplexity"]["pseudo_perplexity"]
    assert 50 < found < 250, "about the vocabulary's size, after four steps"
    assert f"{found:.2f}" in first
    assert "textmill evaluate" not in first.partition("Next:")[2]
    assert main(words) == 0
    again = capsys.readouterr().out
    assert "evaluate: done already" in again
    assert "fill: done already" in again
    assert f"{found:.2f}" in again


def test_run_knows_a_bert_that_it_starts_from(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its config.json names the family: model.family need not be set."""
    sources = [f"tokenizer.use={project / 'tokenizer'}", f"corpus.sources=[{project / 'text.txt'}]"]
    text = YAML.replace("folder: .", f"folder: {project / 'more'}").replace("kind: wordpiece, vocab: 260", "")
    start = f"model: {{init_from: {project / 'run'}}}"
    text = "\n".join(start if line.startswith("model:") else line for line in text.splitlines())
    (project / "more.yaml").write_text(text)
    capsys.readouterr()
    assert main(["run", str(project / "more.yaml"), *sources]) == 0
    assert "textmill fill" in capsys.readouterr().out.partition("Next:")[2]


@pytest.mark.parametrize(("words", "evaluates"), [([], False), (["evaluate.tasks=pseudo_perplexity"], True)])
def test_minutes_reserve_time_for_an_evaluation_only_if_there_is_one(
    project: Path, words: list[str], evaluates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a pass over a large valid split, which nobody does, could take most of `train.minutes`."""
    seen: list[bool] = []

    def stop(_config: RunConfig, _force: str, *, started: float, evaluates: bool) -> None:
        seen.append(evaluates)
        raise TextmillError("enough")

    monkeypatch.setattr("textmill.commands.run.train", stop)
    assert main(["run", str(project / "bert.yaml"), *words]) == 2
    assert seen == [evaluates]


def test_texts_of_the_same_name_have_results_of_their_own(project: Path) -> None:
    for folder, text in (("a", "The old king sees a castle.\n"), ("b", "A queen.\nThe young man fears a garden.\n")):
        (project / folder).mkdir()
        (project / folder / "new.txt").write_text(text)
        words = ["evaluate", str(project / "bert.yaml"), "evaluate.tasks=pseudo_perplexity"]
        for _ in range(2):  # the same file twice has one result
            assert main([*words, f"evaluate.text={project / folder / 'new.txt'}"]) == 0
    saved = sorted((project / "run" / "evaluation").glob("*pseudo_perplexity-new-*.json"))
    cards = [json.loads(path.read_text())["pseudo_perplexity"]["card"] for path in saved]
    assert sorted(card["text"] for card in cards) == [[str(project / name / "new.txt")] for name in "ab"]
    pairs = '{"sentence_good": "A king.", "sentence_bad": "King a."}\n'
    for folder in "ab":
        (project / folder / "pairs.jsonl").write_text(pairs * (1 if folder == "a" else 3))
    tasks = ",".join(f"pairs:{project / folder / 'pairs.jsonl'}" for folder in "ab")
    assert main(["evaluate", str(project / "bert.yaml"), f"evaluate.tasks=[{tasks}]"]) == 0
    found = [json.loads(path.read_text()) for path in (project / "run" / "evaluation").glob("*-pairs-*.json")]
    counts = [one["card"]["examples"] for tree in found for name, one in tree.items() if name.startswith("pairs")]
    assert sorted(counts) == [1, 3]


def test_a_resumed_run_equals_an_uninterrupted_one(project: Path) -> None:
    again = project / "again"
    for steps in (2, 4):
        assert main(["train", str(project / "bert.yaml"), f"train.folder={again}", f"train.steps={steps}"]) == 0
    wanted = dict(read_model(project / "run" / "step-0000004"))
    for name, values in read_model(again / "step-0000004"):
        assert np.array_equal(values, wanted[name]), name
    assert [line.get("loss") for line in metrics(again)] == [line.get("loss") for line in metrics(project / "run")]


def test_fill_gives_the_tokens_of_transformers(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    folder = project / "run" / "step-0000004"
    prompts = ["The [MASK] king loves the [MASK] woman.", "A wise [MASK]."]
    (project / "prompts.txt").write_text("\n".join(prompts))
    words = ["fill", str(folder), "sample.top_k=3", "engine.device=cpu"]
    capsys.readouterr()
    assert main([*words, f"sample.prompts_file={project / 'prompts.txt'}", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    theirs, tokenizer = AutoModelForMaskedLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    for one, prompt in zip(found, prompts, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            chances = theirs(ids).logits.softmax(-1)[0, ids[0] == tokenizer.mask_token_id]
        assert len(one["masks"]) == prompt.count("[MASK]")
        for choices, row in zip(one["masks"], chances, strict=True):
            best = row.topk(3)
            assert [choice["id"] for choice in choices] == best.indices.tolist()
            assert [choice["probability"] for choice in choices] == pytest.approx(best.values.tolist(), rel=1e-4)
        assert one["text"] == prompt.replace("[MASK]", one["masks"][0][0]["token"].removeprefix("##"), 1).replace(
            "[MASK]", one["masks"][-1][0]["token"].removeprefix("##")
        )
    assert main([*words, f"sample.prompt={prompts[1]}"]) == 0
    text, choices = capsys.readouterr().out.splitlines()
    assert text == found[1]["text"]
    assert choices.count("%") == 3


def test_piped_lines_are_filled(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "lines").write_text("The [MASK] king.\nA [MASK] sees.\n")
    with (tmp_path / "lines").open() as lines:
        monkeypatch.setattr("sys.stdin", lines)
        assert main(["fill", str(project / "run"), "engine.device=cpu"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 4
    assert out[0].startswith("The ")
    assert out[2].startswith("A ")


def test_pseudo_perplexity_of_a_split(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each sentence of the split alone, as transformers scores it; the result is saved in the run."""
    run, name = project / "run", "pseudo_perplexity"
    capsys.readouterr()
    assert main(["evaluate", str(run), f"evaluate.tasks={name}", "engine.device=cpu", "--json", "--step", "4"]) == 0
    found = json.loads(capsys.readouterr().out)[name]
    from transformers import BertForPreTraining

    net = BertForPreTraining.from_pretrained(run / "step-0000004").eval()
    tokenizer, store = open_tokenizer(run / "step-0000004"), open_store(project / "tokens" / "valid")
    loss, start = 0.0, 0
    for length in store.lengths.tolist():
        ids = store.ids[start : start + length].tolist()
        start += length
        rows = torch.tensor([[tokenizer.cls_id, *ids, tokenizer.sep_id]] * length)
        rows[torch.arange(length), torch.arange(1, length + 1)] = tokenizer.mask_id
        with torch.no_grad():
            logits = net(rows).prediction_logits[torch.arange(length), torch.arange(1, length + 1)]
        loss -= float(logits.double().log_softmax(-1)[torch.arange(length), torch.tensor(ids)].sum())
    assert found["pseudo_loss"] == pytest.approx(loss / store.tokens, abs=1e-5)
    assert found["card"]["examples"] == len(store.lengths)
    assert list((run / "evaluation").glob(f"step-0000004-{name}-*.json"))
    assert main(["evaluate", str(run), f"evaluate.tasks={name}", "engine.device=cpu", "evaluate.sample=5"]) == 0
    assert "pseudo_bits_per_byte" not in capsys.readouterr().out, "the bytes of a sample are not known"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fill", "sample.prompt=no mask"], "'no mask' has no [MASK]; write it where a token is missing"),
        (["fill", "sample.prompt=" + "[MASK] king " * 40], "has 82 tokens, the model reads 32; shorten it"),
        (["generate", "sample.prompt=x"], "so it cannot generate text; use: textmill fill"),
        (["chat"], "so it cannot chat; use: textmill fill"),
        (["evaluate"], "so it has no perplexity; use evaluate.tasks=pseudo_perplexity"),
        (["train", "--force", "train.layout=packed"], "train.layout: packed has labels for next_token, but a bert"),
        (
            ["train", "--force", "train.masked.pairs=order", "model.shape.pair_head=false"],
            "train.masked.pairs: order needs a pair head",
        ),
        (["train", "--force", "model.family=gpt2", "model.size=nano", "model.shape.heads=2"], "trained for next_token"),
    ],
)
def test_what_it_cannot_do_is_one_line(
    words: list[str],
    message: str,
    project: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    where = project / "bert.yaml" if words[0] == "train" else project / "run"
    other = [f"train.folder={tmp_path / 'other'}"] if words[0] == "train" else []
    capsys.readouterr()
    assert main([words[0], str(where), *words[1:], *other, "engine.device=cpu"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]


def test_fill_refuses_a_model_for_the_next_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "model", korean_tokenizer())
    assert main(["fill", str(folder), "sample.prompt=a [MASK]", "engine.device=cpu"]) == 2
    assert "use: textmill generate" in capsys.readouterr().err
