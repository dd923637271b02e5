"""Chat from end to end: mistakes are refused before the first step; a small model learns a few answers and stops."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.chat_runs import PAIRS, config_of, prepare_and_tokenize, write_pairs
from textmill.checkpoints.folders import list_checkpoints
from textmill.cli import main
from textmill.commands.evaluate import evaluate
from textmill.config import RunConfig
from textmill.errors import TextmillError
from textmill.evaluation import format_tables
from textmill.server.app import new_app
from textmill.server.lifecycle import open_service
from textmill.server.service import ServedModels
from textmill.storage.tensor_files import read_model
from textmill.tokens.batches.chat import ChatLayout, example_conversations, print_conversation
from textmill.tokens.store import loss_mask_path, open_store
from textmill.tokens.vocabulary.tokenizer import open_tokenizer
from textmill.training.loop import train

END = "<|endoftext|>"


def answers(checkpoint: Path) -> dict[str, tuple[str, bool]]:
    """The answers of transformers' generate with its own rendering of the template, and whether each one stopped."""
    tokenizer, model = AutoTokenizer.from_pretrained(checkpoint), AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    found = {}
    for question in PAIRS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
        )
        out = model.generate(**prompt, max_new_tokens=48, do_sample=False, pad_token_id=tokenizer.eos_token_id)[0]
        new = out[prompt["input_ids"].shape[1] :].tolist()
        found[question] = tokenizer.decode(new, skip_special_tokens=True), new[-1] == tokenizer.eos_token_id
    return found


def test_a_chat_model_answers_and_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs(tmp_path, "pairs.jsonl", list(PAIRS.items()))
    config = config_of(
        tmp_path,
        train={"steps": 150, "learning_rate": 5e-3, "weight_decay": 0.0, "evaluate_every": 150, "save_every": 150},
    )
    prepare_and_tokenize(config)
    checkpoint = list_checkpoints(train(config))[150]
    output = capsys.readouterr()
    assert "sample 1: <|user|>" in output.out
    assert "<|assistant|>{+" in output.out
    assert "truncated 0.0% (longer than 49), without loss 0.0%, middle of a question cut out 0.0%" in output.out
    assert f"stop token {END} has loss in 100.0%" in output.out
    assert "no valid split" in output.err
    found = answers(checkpoint)
    assert {question: text for question, (text, _) in found.items()} == PAIRS
    assert all(stopped for _, stopped in found.values())
    assert asyncio.run(served(config)) == {question: (text, "stop") for question, text in PAIRS.items()}


async def served(config: RunConfig) -> dict[str, tuple[str, str]]:
    """The answers of our server, and why each one ends."""
    service, found = open_service(config), {}
    await service.model.load()
    try:
        transport = httpx.ASGITransport(app=new_app(ServedModels([service])))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            info = (await client.get("/tokenizer_info")).json()
            theirs = AutoTokenizer.from_pretrained(list_checkpoints(config.folder_of("train"))[150])
            assert (info["chat_template"], info["eos_token"]) == (theirs.chat_template, END)
            for question in PAIRS:
                body = {
                    "model": service.name,
                    "messages": [{"role": "user", "content": question}],
                    "temperature": 0,
                    "max_tokens": 48,
                }
                choice = (await client.post("/v1/chat/completions", json=body, timeout=60)).json()["choices"][0]
                found[question] = choice["message"]["content"], choice["finish_reason"]
    finally:
        await service.model.close(0)
    return found


def test_accuracy_is_logged_with_the_loss(tmp_path: Path) -> None:
    write_pairs(tmp_path, "pairs.jsonl", [(f"number {number}?", f"{number} it is") for number in range(60)])
    config = config_of(tmp_path, corpus={"split": [8, 2, 0]}, train={"evaluate_every": 1})
    folder = prepare_and_tokenize(config)
    run = train(config)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    valid = [line for line in lines if "valid_loss" in line]
    assert len(valid) == 2
    assert [line["perplexity"] for line in lines if "loss" in line] == [
        pytest.approx(math.exp(line["loss"])) for line in lines if "loss" in line
    ]
    assert valid[-1]["valid_perplexity"] == pytest.approx(math.exp(valid[-1]["valid_loss"]))
    assert 0 <= valid[-1]["train_accuracy"] <= 1
    # Compared with transformers: the fraction of loss tokens to which its logits give the highest value.
    model, store = AutoModelForCausalLM.from_pretrained(list_checkpoints(run)[2]), open_store(folder / "valid")
    assert store.loss_mask is not None
    right = loss_tokens = 0
    losses = 0.0
    for number in range(len(store)):
        begin, end = store.document_starts(np.array([number, number + 1])).tolist()
        ids = torch.from_numpy(np.asarray(store.ids[begin:end], np.int64))[None]
        marks = torch.from_numpy(np.array(store.loss_mask[begin + 1 : end])) > 0
        with torch.no_grad():
            logits = model(ids).logits[0, :-1][marks]
        labels = ids[0, 1:][marks]
        right += int((logits.argmax(-1) == labels).sum())
        loss_tokens += len(labels)
        losses += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
    assert valid[-1]["valid_accuracy"] == pytest.approx(right / loss_tokens, abs=1e-9)
    assert valid[-1]["valid_loss"] == pytest.approx(losses / loss_tokens, rel=1e-4)
    # The evaluation at the end measures the same tokens.
    result = evaluate(config, "latest")
    assert result["perplexity"]["card"]["assistant_tokens"] == loss_tokens == np.count_nonzero(store.loss_mask)
    assert result["perplexity"]["loss"] == pytest.approx(losses / loss_tokens, rel=1e-4)
    assert result["perplexity"]["accuracy"] == pytest.approx(right / loss_tokens, abs=1e-9)
    table = format_tables(result)
    assert f"{right / loss_tokens:.1%}" in table
    # A unigram model of the answers alone: their tokens are fewer than those of the conversations.
    answers = [
        np.asarray(open_store(folder / split).ids)[np.asarray(open_store(folder / split).loss_mask) > 0]
        for split in ("train", "valid")
    ]
    counts = np.bincount(answers[0], minlength=model.config.vocab_size) + 1.0
    unigram = -np.log(counts[answers[1]] / (len(answers[0]) + model.config.vocab_size)).mean()
    assert result["perplexity"]["loss/unigram"] == pytest.approx(unigram)
    assert result["perplexity"]["loss/bigram"] < result["perplexity"]["loss/unigram"]


def test_long_questions_and_answers_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [(f"question {number} " + "that goes on and on " * 8, f"answer {number}") for number in range(8)]
    write_pairs(tmp_path, "pairs.jsonl", [*pairs, ("tell me", "a tale that never ends and " * 20)])
    config = config_of(tmp_path, train={"length": 16})
    prepare_and_tokenize(config)
    train(config)
    output = capsys.readouterr()
    assert "middle of a question cut out 100.0%; stop token" in output.out
    assert "9 conversations have a question and an answer that together are longer than train.length=16" in output.err


def test_all_labels_masked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"messages": [{"role": "user", "content": f"only the user speaks, {number}"}]} for number in range(9)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "run.yaml").write_text(config_of(tmp_path, corpus={"chat": "messages"}).to_yaml())
    for command in ("prepare", "fit-tokenizer", "tokenize"):
        assert main([command, str(tmp_path / "run.yaml")]) == 0
    assert main(["train", str(tmp_path / "run.yaml")]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("textmill: no token has loss: none of 9 conversations has an assistant's turn")
    assert "; check the roles" in err


def test_the_stop_token_has_no_loss(tmp_path: Path) -> None:
    write_pairs(tmp_path, "pairs.jsonl", list(PAIRS.items()))
    config = config_of(tmp_path)
    folder = prepare_and_tokenize(config)
    ids, path = np.asarray(open_store(folder / "train").ids), loss_mask_path(folder / "train")
    mask = np.fromfile(path, np.uint8)
    mask[ids == open_tokenizer(tmp_path / "out" / "tokenizer").eos_id] = 0
    mask.tofile(path)
    with pytest.raises(
        TextmillError,
        match=r"the stop token <\|endoftext\|> never has loss, so the model would never stop; make the tokens",
    ):
        train(config)


def test_some_stop_tokens_have_no_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs(tmp_path, "pairs.jsonl", [*PAIRS.items(), ("tell me", "a tale that never ends and " * 20)])
    config = config_of(tmp_path)
    prepare_and_tokenize(config)
    train(config)
    output = capsys.readouterr()
    assert "in 1 conversations the stop token has no loss" in output.err
    assert "1 conversations are truncated at their start to train.length=48" in output.err
    assert "+}[-" in output.out, "the truncation is shown"


def test_the_samples_show_what_is_truncated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs(tmp_path, "pairs.jsonl", [("tell me", "a tale that never ends and " * 20)])
    folder = prepare_and_tokenize(config_of(tmp_path))
    layout = ChatLayout(open_store(folder / "train"), length=16, seed=None, pad_id=0)
    (pieces,) = example_conversations(layout, open_tokenizer(tmp_path / "out" / "tokenizer"))
    capsys.readouterr()
    print_conversation("sample 1", pieces)
    assert [kind for kind, _ in pieces] == ["no loss", "truncated", "no loss", "loss", "truncated"]
    answer = ("a tale that never ends and " * 20).strip()
    assert "".join(text for _, text in pieces) == f"<|user|>tell me{END}<|assistant|>{answer}{END}"
    out = capsys.readouterr().out
    assert out.startswith("sample 1: <|user|>t[-")
    assert "{+a tale" in out


def test_conversations_trained_on_as_plain_text_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pairs(tmp_path, "pairs.jsonl", list(PAIRS.items()))
    config = config_of(tmp_path, train={"layout": "packed"})
    prepare_and_tokenize(config)
    train(config)
    assert (
        "train.layout=packed has loss on every token, questions included; set train.layout=chat"
        in capsys.readouterr().err
    )


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of plain text, whose tokenizer has no chat template."""
    folder = tmp_path_factory.mktemp("pretrained")
    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"{q} {a}"}) + "\n" for q, a in PAIRS.items()), encoding="utf-8"
    )
    corpus = {"sources": [str(folder / "a.jsonl")], "chat": None}
    config = config_of(folder, corpus=corpus, tokenizer={"chat": None}, train={"layout": "packed"})
    prepare_and_tokenize(config)
    return list_checkpoints(train(config))[2]


def test_new_tokens_start_as_the_mean_of_their_old_tokens(
    pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pairs(tmp_path, "pairs.jsonl", list(PAIRS.items()))
    config = config_of(
        tmp_path,
        tokenizer={"use": str(pretrained)},
        model={"init_from": str(pretrained)},
        train={"learning_rate": 1e-12},
    )
    prepare_and_tokenize(config)
    checkpoint = list_checkpoints(train(config))[2]
    assert (
        "3 new tokens get vectors, each the mean of the old tokens of its text: <|system|>, <|user|>"
        in capsys.readouterr().out
    )
    old, new = AutoTokenizer.from_pretrained(pretrained), AutoTokenizer.from_pretrained(checkpoint)
    before, after = (dict(read_model(folder))["transformer.wte.weight"] for folder in (pretrained, checkpoint))
    assert len(new) == len(after) == len(before) + 3
    assert after[: len(before)] == pytest.approx(before, abs=1e-6)
    for token in ("<|system|>", "<|user|>", "<|assistant|>"):
        pieces = old(token, add_special_tokens=False)["input_ids"]
        assert len(pieces) > 1
        assert after[new.convert_tokens_to_ids(token)] == pytest.approx(before[pieces].mean(0), abs=1e-6)


def test_a_run_with_a_grown_vocabulary_resumes(pretrained: Path, tmp_path: Path) -> None:
    write_pairs(tmp_path, "pairs.jsonl", list(PAIRS.items()))
    sections: dict[str, Any] = {"tokenizer": {"use": str(pretrained)}, "model": {"init_from": str(pretrained)}}
    prepare_and_tokenize(config_of(tmp_path, **sections))
    train(config_of(tmp_path, **sections))
    assert list(list_checkpoints(train(config_of(tmp_path, train={"steps": 4}, **sections)))) == [2, 4]


@pytest.mark.parametrize("vocab", [280, 700])
def test_another_vocabulary_is_warned_of(
    pretrained: Path, tmp_path: Path, vocab: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tokenizer smaller or larger than the embedding is never used as the model's own without a warning."""
    write_pairs(
        tmp_path, "pairs.jsonl", [(q * 3 + chr(0xAC00 + number), a) for number, (q, a) in enumerate(PAIRS.items())]
    )
    config = config_of(tmp_path, tokenizer={"vocab": vocab}, model={"init_from": str(pretrained)})
    prepare_and_tokenize(config)
    train(config)
    output = capsys.readouterr().err
    assert f"the tokenizer is not that of {pretrained}" in output
    assert f"to use the model's own tokenizer, set tokenizer.use={pretrained}" in output
