"""A model whose head has weights of its own writes the greedy texts of transformers; test_import.py exports it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.model_folders import korean_tokenizer, write_folder
from textmill.cli import main


def test_greedy_texts_are_those_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, prompt = korean_tokenizer(), "물레방아"
    source = write_folder(tmp_path / "source", tokenizer, layers=2, heads=2, width=32, positions=20, untied=True)
    ids = torch.tensor([tokenizer.encode(prompt)])
    net = AutoModelForCausalLM.from_pretrained(source)
    assert net.lm_head.weight.data_ptr() != net.transformer.wte.weight.data_ptr(), "the head is untied"
    theirs = net.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist()
    capsys.readouterr()
    sample = [f"sample.prompt={prompt}", "sample.max_tokens=8", "sample.temperature=0", "engine.device=cpu"]
    assert main(["generate", str(source), *sample]) == 0
    assert tokenizer.decode(theirs).strip() in capsys.readouterr().out
