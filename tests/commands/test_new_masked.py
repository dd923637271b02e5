"""`textmill new --family`: the plan of a model that predicts masked tokens, and its run; the plan of a Llama."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForPreTraining, AutoTokenizer

from tests.support.machines import H200, TWO_CORES
from textmill.cli import main
from textmill.config import ModelConfig, RunConfig, ShapeConfig
from textmill.corpus.inspection import RecordFacts
from textmill.models import open_family
from textmill.models.llama.family import Shape as LlamaShape
from textmill.models.nets_torch import build_net
from textmill.planning.plan import MachineProfile, TextProfile, auto_family, limit_vocabs, plan_for
from textmill.planning.project_file import Project, project_yaml
from textmill.where import open_where

BYTES = {512: 2.1, 1024: 2.8, 2048: 3.3, 4096: 3.7, 8192: 4.0, 16384: 4.3, 32000: 4.5}


@pytest.mark.parametrize(
    ("text", "least", "pairs"),
    [
        (TextProfile(10**6, 300, 0.0, BYTES, {"Latin": 1.0}), 2048, "next"),
        (TextProfile(10**6, 300, 0.0, BYTES, {"Hangul": 0.9, "Latin": 0.1}), 8192, "next"),
        (TextProfile(10**8, 10**6, 0.0, BYTES, {"Cjk": 1.0}), 8192, "none"),
    ],
)
@pytest.mark.parametrize("machine", [TWO_CORES, H200], ids=["cpu", "gpu"])
def test_the_config_accepts_the_plan(text: TextProfile, least: int, pairs: str, machine: MachineProfile) -> None:
    facts = limit_vocabs(text)
    assert min(facts.bytes_per_token) == least
    plan = plan_for(facts, machine, 5, "bert")
    written = project_yaml(Project("x", ["a.txt"], RecordFacts(), facts, machine, plan, "bert"))
    config = RunConfig.model_validate(yaml.safe_load(written) | {"corpus": {"sources": ["a.txt"]}})
    assert config.model.family == "bert"
    assert config.tokenizer.vocab >= least
    assert (config.tokenizer.kind, config.tokens.level, config.train.layout) == ("wordpiece", "sentence", "masked")
    assert config.train.masked.pairs == pairs
    assert not config.tokens.append_end


def test_the_head_costs_as_much_as_the_masked_tokens_need() -> None:
    """The planned seconds are the FLOPs of the family, which counts its head for 15% of the tokens."""
    text = limit_vocabs(TextProfile(2 * 10**8, 10**4, 0.0, BYTES, {"Latin": 1.0}))
    plan, entire = plan_for(text, H200, 8, "bert"), plan_for(text, H200, 8)
    assert plan.vocab > entire.vocab
    assert (plan.length, entire.length) == (128, 1024)
    shape = ShapeConfig(layers=plan.layers, width=plan.width, heads=plan.heads, positions=plan.length)
    net = open_family("bert").shape_of(ModelConfig(family="bert", shape=shape), vocab=plan.vocab, eos_id=0)
    tokens = plan.epochs * plan.train_tokens
    computed = 12 * plan.layers * plan.width**2 + 0.15 * plan.width * plan.vocab
    assert plan.seconds * H200.flops(computed) == pytest.approx(tokens * net.flops_per_token(plan.length), rel=0.1)


@pytest.mark.parametrize("machine", [TWO_CORES, H200], ids=["cpu", "gpu"])
@pytest.mark.parametrize(("size", "untied"), [(10**8, True), (10**5, False)], ids=["few epochs", "many epochs"])
def test_a_llama_has_the_size_that_was_planned(machine: MachineProfile, size: int, untied: bool) -> None:
    """An untied head, in few epochs, comes on top: it takes no more time."""
    text = TextProfile(size, 10**4, 0.0, BYTES, {"Latin": 1.0})
    plan = plan_for(text, machine, 5)
    written = project_yaml(Project("x", ["a.txt"], RecordFacts(), text, machine, plan, "llama"))
    config = RunConfig.model_validate(yaml.safe_load(written) | {"corpus": {"sources": ["a.txt"]}})
    assert config.model.family == "llama"
    shape = open_family("llama").shape_of(config.model, vocab=plan.vocab, eos_id=0)
    assert isinstance(shape, LlamaShape)
    assert shape.untied == untied
    assert (config.train.embedding_rate_factor > 1) == untied
    assert shape.parameters - untied * plan.vocab * plan.width == pytest.approx(plan.parameters, rel=0.08)
    assert ("embeddings and biases learn at 0.01" in written) == (not untied)


@pytest.mark.parametrize(
    ("machine", "size", "minutes", "family"),
    [
        (TWO_CORES, 10**8, 5, "llama"),
        (H200, 10**8, 5, "llama"),
        (H200, 10**8, 0.8, "gpt2"),
        (H200, 10**7, 1, "llama"),
        (H200, 10**6, 0.8, "llama"),
    ],
    ids=["cpu", "compiled", "not compiled", "not compiled, repeated", "not compiled, repeated often"],
)
def test_the_family_is_chosen_for_text_and_machine(
    machine: MachineProfile, size: int, minutes: float, family: str
) -> None:
    assert auto_family(TextProfile(size, 10**4, 0.0, BYTES, {"Latin": 1.0}), machine, minutes) == family


@pytest.mark.long
def test_a_bert_from_three_files(
    tiny_texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tiny_texts.parent)
    assert main(["new", "mine", "--text", "texts", "--family", "bert", "--minutes", "1"]) == 0
    config = open_where("mine", []).config
    assert config.corpus.section_chars == 1000
    quick = ["train.steps=2", "train.batch=4", "train.evaluate_batches=1", "train.warmup=0"]
    assert main(["run", "mine", *quick]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "fill: no sample.prompt" in out
    assert "All stages are done. The model is mine/run/step-0000002" in out
    assert "--family bert" in out.partition("Next:")[2], "what to try next is of the same family"
    model = AutoModelForPreTraining.from_pretrained("mine/run/step-0000002")
    assert type(model).__name__ == "BertForPreTraining"
    tokenizer = AutoTokenizer.from_pretrained("mine/run/step-0000002")
    ids = tokenizer("The mill", "turns")["input_ids"]
    assert ids[0] == tokenizer.cls_token_id
    assert ids.count(tokenizer.sep_token_id) == 2


def test_mistakes_are_named(
    tiny_texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tiny_texts.parent)
    assert main(["new", "mine", "--text", "texts", "--family", "t5"]) == 2
    assert "--family: no family 't5'; choose one of auto, gpt2, bert, llama" in capsys.readouterr().err
    Path("chat.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n' * 30, encoding="utf-8")
    assert main(["new", "mine", "--text", "chat.jsonl", "--family", "bert"]) == 2
    assert "conversations" in capsys.readouterr().err
    assert not Path("mine").exists()


@pytest.mark.parametrize("machine", [TWO_CORES, H200], ids=["cpu", "gpu"])
@pytest.mark.parametrize("size", [10**8, 10**5], ids=["few epochs", "many epochs"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_the_parameters_that_are_named_are_all_of_the_model(machine: MachineProfile, size: int, family: str) -> None:
    """Those of the net that is trained: its embeddings of tokens and positions too."""
    masked = family == "bert"
    text = TextProfile(size, 10**4, 0.0, BYTES, {"Latin": 1.0})
    text = limit_vocabs(text) if masked else text
    plan = plan_for(text, machine, 5, family)
    written = project_yaml(Project("x", ["a.txt"], RecordFacts(), text, machine, plan, family))
    config = RunConfig.model_validate(yaml.safe_load(written) | {"corpus": {"sources": ["a.txt"]}})
    shape = open_family(family).shape_of(config.model, vocab=plan.vocab, eos_id=0, length=config.train.length)
    with torch.device("meta"):
        net = build_net(shape)
    assert f" {sum(one.numel() for one in net.parameters()) / 1e6:.1f}M parameters" in written
