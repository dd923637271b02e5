"""Models whose head has weights of its own: opened, trained, exported and imported; logits from transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.model_folders import korean_tokenizer, write_folder
from textmill.cli import main

IDS = torch.from_numpy(np.random.default_rng(2).integers(0, 300, (2, 16)))


def logits(folder: Path) -> Any:
    net = AutoModelForCausalLM.from_pretrained(folder)
    assert net.lm_head.weight.data_ptr() != net.transformer.wte.weight.data_ptr(), "the head is untied"
    with torch.no_grad():
        return net(IDS).logits.numpy()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untied") / "source"
    return write_folder(folder, korean_tokenizer(), layers=2, heads=2, width=32, positions=20, untied=True)


def test_greedy_texts_are_those_of_transformers(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, prompt = korean_tokenizer(), "물레방아"
    ids = torch.tensor([tokenizer.encode(prompt)])
    net = AutoModelForCausalLM.from_pretrained(source)
    theirs = net.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist()
    capsys.readouterr()
    sample = [f"sample.prompt={prompt}", "sample.max_tokens=8", "sample.temperature=0", "engine.device=cpu"]
    assert main(["generate", str(source), *sample]) == 0
    assert tokenizer.decode(theirs).strip() in capsys.readouterr().out
