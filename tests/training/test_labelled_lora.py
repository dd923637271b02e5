"""LoRA on examples with labels: the head is trained and saved completely; PEFT opens the folder, and we open PEFT's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from tests.support.labelled_files import ANSWERS, SEQUENCES, WORDS, write_project
from tests.support.together import run_together
from tests.support.weights import open_with_adapters
from textmill.checkpoints.folders import open_model
from textmill.cli import main
from textmill.models.base_torch import BaseNet
from textmill.models.nets_torch import open_net
from textmill.storage.files import read_json
from textmill.storage.tensor_files import read_tensors

KINDS = {SEQUENCES: "SequenceClassification", WORDS: "TokenClassification", ANSWERS: "QuestionAnswering"}
HEADS = {SEQUENCES: ["pooler", "classifier"], WORDS: ["classifier"], ANSWERS: ["qa_outputs"]}
IDS = torch.tensor([[2, 17, 100, 31, 8, 3], [2, 1, 4, 1, 5, 3]])
NEAR = 1e-5
CPU = torch.device("cpu")


def write_base(folder: Path, task: str, steps: int) -> list[str]:
    """A project and a pretrained model with random weights; return the words of its command after the name."""
    config = str(write_project(folder, task, steps, dropout=0.1))
    assert main(["prepare", config]) == 0
    assert main(["fit-tokenizer", config]) == 0
    torch.manual_seed(1)
    vocab = len(transformers.AutoTokenizer.from_pretrained(folder / "tokenizer"))
    numbers = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    theirs = transformers.BertConfig(vocab_size=vocab, max_position_embeddings=32, **numbers)
    transformers.BertForPreTraining(theirs).save_pretrained(folder / "base")
    for path in (folder / "tokenizer").glob("tokenizer*"):
        (folder / "base" / path.name).write_bytes(path.read_bytes())
    lora = "{rank: 4, alpha: 8, dropout: 0.1}"
    model = f"model={{family: bert, init_from: {folder / 'base'}, lora: {lora}, shape: {{dropout: 0.1}}}}"
    return [config, model, "train.optimizer=adamw", "train.learning_rate=1e-2", "train.schedule=constant"]


def logits_of(out: Any) -> torch.Tensor:
    """Of answers, the first and the last position."""
    return torch.stack([out.start_logits, out.end_logits], 1) if "start_logits" in out else out.logits


@torch.no_grad()
def our_logits(net: BaseNet, task: str) -> torch.Tensor:
    x_NTE = net(IDS)
    every = torch.arange(IDS.numel()).view(IDS.shape)
    logits = net.label_logits(x_NTE, every[:, :1] if task == SEQUENCES else every, None, None)
    return logits[:, 0] if task == SEQUENCES else logits


@pytest.mark.parametrize("task", [SEQUENCES, WORDS, ANSWERS])
def test_peft_opens_the_adapter(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write_base(tmp_path, task, 6)
    assert main(["run", *words]) == 0, capsys.readouterr().err
    folder = tmp_path / "run" / "step-0000006"
    saved = read_json(folder / "adapter_config.json")
    assert saved["modules_to_save"] == HEADS[task]
    base = getattr(transformers, f"AutoModelFor{KINDS[task]}").from_pretrained(
        tmp_path / "base", num_labels={SEQUENCES: 2, WORDS: 3, ANSWERS: 2}[task]
    )
    wanted = PeftModel.from_pretrained(base, str(folder)).eval()
    with torch.no_grad():
        logits = logits_of(wanted(IDS))
    for net in (open_net(folder, CPU), open_with_adapters(folder)):
        assert torch.allclose(our_logits(net, task), logits, atol=NEAR)
    adapters = {name: one for name, one in read_tensors(folder / "adapter_model.safetensors") if "lora_B" in name}
    assert len(adapters) == 2 * 6, "query, key, value, output and two of the MLP in each block"
    assert all(values.any() for values in adapters.values()), "trained"
    merged = tmp_path / "merged"
    assert main(["export", str(folder), f"export.folder={merged}"]) == 0, capsys.readouterr().err
    whole, notes = getattr(transformers, f"AutoModelFor{KINDS[task]}").from_pretrained(merged, output_loading_info=True)
    assert not any(notes.values())
    with torch.no_grad():
        assert torch.allclose(logits_of(whole.eval()(IDS)), logits, atol=NEAR)


@pytest.mark.long
@pytest.mark.parametrize("settings", ["engine.mesh.shard=2", "engine.mesh.tensor=2", "engine.kind=deepspeed"])
def test_two_processes_equal_one(settings: str, tmp_path: Path) -> None:
    words = write_base(tmp_path, SEQUENCES, 4)
    assert main(["run", *words]) == 0
    two = tmp_path / "two"
    command = [sys.executable, "-m", "textmill", "train", *words, f"train.folder={two}", settings]
    assert run_together(command, 2) == "ok"
    alone, both = (
        dict(read_tensors(run / "step-0000004" / "adapter_model.safetensors")) for run in (tmp_path / "run", two)
    )
    assert alone.keys() == both.keys()
    for name, values in both.items():
        assert np.allclose(values, alone[name], rtol=1e-4, atol=1e-6), name


def test_a_folder_of_peft_opens(tmp_path: Path) -> None:
    write_base(tmp_path, SEQUENCES, 2)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)
    base.save_pretrained(tmp_path / "labelled")
    for path in (tmp_path / "tokenizer").glob("tokenizer*"):
        (tmp_path / "labelled" / path.name).write_bytes(path.read_bytes())
    base = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "labelled")
    net = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])).eval()
    with torch.no_grad():
        for name, values in net.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                values.normal_()
        wanted = net(IDS).logits
    net.save_pretrained(tmp_path / "peft")
    assert torch.allclose(our_logits(open_net(tmp_path / "peft", CPU), SEQUENCES), wanted, atol=10 * NEAR)
    assert open_model(str(tmp_path / "peft")).tokenizer == tmp_path / "labelled"


def test_other_entire_modules_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write_base(tmp_path, SEQUENCES, 2)
    assert main(["run", *words]) == 0
    path = tmp_path / "run" / "step-0000002" / "adapter_config.json"
    (tmp_path / "copy").mkdir()
    for one in path.parent.glob("adapter*"):
        (tmp_path / "copy" / one.name).write_bytes(one.read_bytes())
    words = ["evaluate", str(tmp_path / "copy"), "engine.device=cpu", f"evaluate.text={tmp_path / 'valid.csv'}"]
    capsys.readouterr()
    assert main(words) == 2
    assert "which its base" in (error := capsys.readouterr().err), error
    assert "merge it with PEFT (merge_and_unload)" in error
    settings = read_json(path) | {"task_type": "CAUSAL_LM", "modules_to_save": ["lm_head"]}
    (tmp_path / "copy" / path.name).write_text(json.dumps(settings))
    capsys.readouterr()
    assert (
        main(["evaluate", str(tmp_path / "copy"), "engine.device=cpu", f"evaluate.text={tmp_path / 'valid.csv'}"]) == 2
    )
    assert "modules_to_save is ['lm_head']; textmill reads entire modules of heads" in capsys.readouterr().err
