"""Pseudo-log-likelihoods of a BERT against a straight loop over transformers, and the tasks that use them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.bert_models import write_bert
from tests.support.small_models import TEXT
from textmill.checkpoints.folders import open_model
from textmill.cli import main
from textmill.engines import scoring_torch
from textmill.evaluation.scorer_torch import MaskedScorer, masked_batches, new_scorer
from textmill.evaluation.task import Share
from textmill.models.nets_torch import open_net
from textmill.tokens.vocabulary.tokenizer import open_tokenizer

SENTENCES = [
    "the mill",
    "The wheel begins to turn.",
    "물레방아는 강가에 서 있다.",
    "river",
    "the river and the wheel",
    TEXT[2][:40],
]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("models") / "bert"
    return folder, *write_bert(folder)


def scorer_of(folder: Path, batch: int = 4, share: Share | None = None) -> MaskedScorer:
    checkpoint = open_model(str(folder))
    net, tokenizer = open_net(folder, torch.device("cpu")), open_tokenizer(folder)
    scorer = new_scorer(checkpoint, net, tokenizer, "fp32", batch, *([share] if share else []))
    assert isinstance(scorer, MaskedScorer)
    return scorer


def loop(bert: tuple[Path, Any, Any], context: list[int], text: list[int]) -> tuple[list[float], list[int]]:
    """Mask each token in turn, one forward pass each: its log-likelihood, and the likeliest token there."""
    _, net, tokenizer = bert
    ids = [tokenizer.cls_id, *context, *text, tokenizer.sep_id]
    log_likelihoods, likeliest = [], []
    for place in range(1 + len(context), 1 + len(context) + len(text)):
        masked = torch.tensor([ids])
        masked[0, place] = tokenizer.mask_id
        with torch.no_grad():
            logits = net(masked).logits[0, place].double()
        log_likelihoods.append(float(logits.log_softmax(-1)[ids[place]]))
        likeliest.append(int(logits.argmax()))
    return log_likelihoods, likeliest


def test_scores_equal_a_loop_over_transformers(bert: tuple[Path, Any, Any]) -> None:
    dice, most = np.random.default_rng(8), bert[2].vocab
    pairs = [
        (dice.integers(5, most, size=int(dice.integers(0, 9))).tolist(), dice.integers(5, most, size=length).tolist())
        for length in (1, 2, 5, 5, 5, 17, 30)
    ]
    for context, text in (pairs[0], pairs[-1]):
        text[-1] = loop(bert, context, text)[1][-1]
    wanted = [loop(bert, *pair) for pair in pairs]
    for batch in (1, 64):
        scores = scorer_of(bert[0], batch).score_tokens(pairs)
        for score, (log_likelihoods, likeliest), (_, text) in zip(scores, wanted, pairs, strict=True):
            assert score.log_likelihood == pytest.approx(sum(log_likelihoods), abs=1e-4)
            assert score.last_log_likelihood == pytest.approx(log_likelihoods[-1], abs=1e-4)
            assert (score.tokens, score.greedy) == (len(text), likeliest == text)
            assert score.last_greedy == (likeliest[-1] == text[-1])
        assert [score.last_greedy for score in scores] == [True, *[False] * 5, True]


def test_batches_have_no_padding_and_every_mask_once(bert: tuple[Path, Any, Any]) -> None:
    pairs: list[Any] = [([9] * (number % 3), list(range(10, 11 + number % 7))) for number in range(50)]
    seen: list[tuple[int, int]] = []
    for batch in masked_batches(pairs, positions=46, special=(2, 3, 4), batch_tokens=40):
        rows, width = batch.ids_NT.shape
        assert rows == 1 or rows * width <= 40
        for row, number in enumerate(batch.numbers_N.tolist()):
            context, text = pairs[number]
            place = int(batch.places_N[row]) - row * width
            whole = [2, *context, *text, 3]
            assert len(whole) == width
            assert whole[place] == batch.labels_N[row]
            whole[place] = 4
            assert batch.ids_NT[row].tolist() == whole
            seen.append((number, place - 1 - len(context)))
    assert sorted(seen) == [(number, place) for number, (_, text) in enumerate(pairs) for place in range(len(text))]


def test_two_processes_find_what_one_finds(bert: tuple[Path, Any, Any]) -> None:
    """Each computes its batches; a text of several batches is joined from the parts of both."""
    pairs: list[Any] = [((), list(range(10, 12 + number))) for number in range(20)]
    whole = scorer_of(bert[0], 1).score_tokens(pairs)
    parts = [scorer_of(bert[0], 1, Share(part=part, parts=2)).score_tokens(pairs) for part in (0, 1)]
    for one, first, second in zip(whole, *parts, strict=True):
        assert first.log_likelihood + second.log_likelihood == pytest.approx(one.log_likelihood, abs=1e-5)
        assert first.log_likelihood < 0 or second.log_likelihood < 0


def evaluate(folder: Path, task: str, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    capsys.readouterr()
    words = ["evaluate", str(folder), f"evaluate.tasks={task}", "engine.device=cpu", "--json", *more]
    assert main(words) == 0
    return json.loads(capsys.readouterr().out)


def test_pseudo_perplexity_of_files_and_texts(
    bert: tuple[Path, Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _, tokenizer = bert
    texts = [*SENTENCES, " ".join(SENTENCES * 3)]
    (tmp_path / "texts.txt").write_text("\n".join([*texts, "", " "]), encoding="utf-8")
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    pieces = [ids[begin : begin + 46] for ids in map(tokenizer.encode, texts) for begin in range(0, len(ids), 46)]
    loss, tokens = -sum(sum(loop(bert, [], piece)[0]) for piece in pieces), sum(map(len, pieces))
    assert len(pieces) > len(texts), "one text is longer than the model"
    for name in ("texts.txt", "texts.jsonl"):
        found = evaluate(folder, f"pseudo_perplexity:{tmp_path / name}", capsys)["pseudo_perplexity"]
        assert found["pseudo_loss"] == pytest.approx(loss / tokens, abs=1e-5)
        assert found["pseudo_perplexity"] == pytest.approx(math.exp(loss / tokens), rel=1e-4)
        octets = sum(len(text.encode()) for text in texts)
        assert found["pseudo_bits_per_byte"] == pytest.approx(loss / octets / math.log(2), rel=1e-4)
        assert not {"bits_per_byte", "perplexity", "token_perplexity"} & set(found), "all figures say pseudo"
        assert found["card"]["tokens"] == tokens
    whole = evaluate(folder, "pseudo_perplexity", capsys, f"evaluate.text={tmp_path / 'texts.txt'}")
    assert whole["pseudo_perplexity"]["pseudo_bits_per_byte"] > 0
    assert main(["evaluate", str(folder), f"evaluate.tasks=pseudo_perplexity:{tmp_path / 'texts.txt'}"]) == 0
    assert "pseudo_bits_per_byte" in capsys.readouterr().out


def test_minimal_pairs(bert: tuple[Path, Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _, tokenizer = bert
    rows = [(SENTENCES[number], SENTENCES[(number + 1) % 6]) for number in range(6)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps({"sentence_good": good, "sentence_bad": bad}) for good, bad in rows))
    totals = [sum(loop(bert, [], tokenizer.encode(text))[0]) for text in SENTENCES]
    right = [totals[number] > totals[(number + 1) % 6] for number in range(6)]
    found = evaluate(folder, f"pairs:{path}", capsys)["pairs"]
    assert found["acc"] == pytest.approx(sum(right) / 6)
    assert "pseudo_bits_per_byte" in found
    assert "bits_per_byte" not in found
    assert "pseudo-log-likelihoods: each token is masked in turn" in found["card"]["protocol"]


def test_what_a_model_cannot_be_measured_by_is_one_line(
    bert: tuple[Path, Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, empty = tmp_path / "text.txt", tmp_path / "empty.txt"
    text.write_text("the mill\n")
    empty.write_text(" \n")
    plain = tmp_path / "plain"
    write_bert(plain, "BertModel")
    short = tmp_path / "short"
    write_bert(short, positions=2)
    only = "predicts masked tokens, not the next one, so it has no "
    for folder, task, more, message in (
        (bert[0], "perplexity", [f"evaluate.text={text}"], only + "perplexity; use evaluate.tasks=pseudo_perplexity"),
        (bert[0], f"lambada:{text}", [], only + "lambada; use evaluate.tasks=pseudo_perplexity, pairs:FILE or choices"),
        (bert[0], f"pseudo_perplexity:{empty}", [], "empty.txt: has no token to predict; give it more text"),
        (bert[0], "pseudo_perplexity:nowhere.txt", [], "nowhere.txt: no such file"),
        (
            short,
            f"pseudo_perplexity:{text}",
            [],
            "has 2 positions, and [CLS] and [SEP] take two; use a model with more",
        ),
        (plain, f"pseudo_perplexity:{text}", [], "has no head for masked tokens, so it cannot predict them; use a"),
    ):
        capsys.readouterr()
        assert main(["evaluate", str(folder), f"evaluate.tasks={task}", "engine.device=cpu", *more]) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("textmill: ")]
        assert len(errors) == 1
        assert message in errors[0]


def test_a_loss_beyond_all_perplexities_has_none(
    bert: tuple[Path, Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """e to the power of 710 is no double; the loss itself still says what is wrong."""
    folder = tmp_path / "diverged"
    net, tokenizer = write_bert(folder)
    word = tokenizer.encode("river")[0]
    with torch.no_grad():
        net.cls.predictions.bias[word] -= 5000
    net.save_pretrained(folder)
    (tmp_path / "text.txt").write_text("river\n")
    found = evaluate(folder, f"pseudo_perplexity:{tmp_path / 'text.txt'}", capsys)["pseudo_perplexity"]
    assert found["pseudo_loss"] > 710
    assert found["pseudo_perplexity"] is None
    assert main(["evaluate", str(folder), f"evaluate.tasks=pseudo_perplexity:{tmp_path / 'text.txt'}"]) == 0


def test_ranks_that_share_the_head_compute_what_it_multiplies(
    bert: tuple[Path, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of one rank, which has all rows of the head: its matrix, its LayerNorm and its biases count too."""
    folder, theirs, _ = bert
    net, group = open_net(folder, torch.device("cpu")), SimpleNamespace(count=1, group=None)
    monkeypatch.setattr(scoring_torch.dist, "all_gather", lambda parts, own, group: parts[0].copy_(own))
    scoring_torch.gather_logits(net, group)  # type: ignore[arg-type]
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert (net.logits(net(ids)) - theirs(ids).logits).abs().max() < 1e-4
