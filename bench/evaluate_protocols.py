"""Figures on the whole of WikiText-2's test file and LAMBADA, compared with lm-evaluation-harness and transformers.

    python bench/evaluate_protocols.py [MODEL ...]

Each MODEL is a folder that textmill and transformers open. Without one, two tiny GPT-2s with a vocabulary of 2,000 are
made: one trained for a hundred steps on the valid file, and one with fixed random weights.
The files are in ../shared/data next to the repository. Prints both figures of each protocol and how far they are from
each other; the bound is 1e-4.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import textmill
from textmill.checkpoints.folders import list_checkpoints
from textmill.config import EvaluateConfig, RunConfig
from textmill.evaluation.tasks.wikitext import detokenize, split_articles
from textmill.tokens.vocabulary.tokenizer import open_tokenizer
from textmill.where import open_where

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.support.lm_eval_reference import run_reference, write_tasks  # noqa: E402

DATA = ROOT.parent / "shared" / "data"
WIKITEXT, LAMBADA = DATA / "wikitext2" / "test.txt", DATA / "lambada" / "lambada_test.jsonl"
BATCH = 64
"""Texts that the reference reads at a time."""


def main() -> None:
    """Compare each model in each protocol."""
    if not DATA.is_dir():
        sys.exit("no ../shared/data next to the repository: nothing to read")
    with tempfile.TemporaryDirectory() as folder:
        given = [Path(one) for one in sys.argv[1:]]
        for model in given or make_models(Path(folder)):
            print(f"== {model.name}", flush=True)
            tasks = Path(folder) / f"tasks-{model.name}"
            tasks.mkdir()
            compare_lm_eval(model, tasks)
            net: Any = AutoModelForCausalLM.from_pretrained(model).eval()
            compare_streams(model, net)
            compare_last_tokens(model, net)


def make_models(folder: Path) -> list[Path]:
    """A tiny GPT-2 that was trained on WikiText-2's valid file, and one with fixed random weights."""
    tree = {
        "folder": str(folder),
        "corpus": {"sources": [str(WIKITEXT.with_name("valid.txt"))]},
        "tokenizer": {"vocab": 2000},
        "model": {"size": "nano", "shape": {"positions": 128}},
        "train": {"length": 128, "batch": 16, "steps": 100, "learning_rate": 5e-3},
        "engine": {"device": "cpu"},
        "runner": {"workers": 1},  # others would load transformers too
    }
    config = RunConfig.model_validate(tree)
    with redirect_stdout(StringIO()):
        for stage in (textmill.prepare, textmill.fit_tokenizer, textmill.tokenize, textmill.train):
            stage(config)
    trained, untrained = folder / "trained", folder / "random"
    list_checkpoints(folder / "run")[100].rename(trained)
    tokenizer = open_tokenizer(trained)
    torch.manual_seed(1)
    ends = {"bos_token_id": tokenizer.eos_id, "eos_token_id": tokenizer.eos_id}
    small = GPT2Config(
        vocab_size=tokenizer.vocab, n_layer=2, n_head=2, n_embd=32, n_positions=128, initializer_range=0.1, **ends
    )
    GPT2LMHeadModel(small).save_pretrained(untrained)
    tokenizer.save(untrained)
    return [untrained, trained]


def measure(model: Path, task: str, **settings: Any) -> dict[str, Any]:
    """Run one task of textmill."""
    config = open_where(str(model), ["engine.device=cpu", "engine.precision=fp32"]).config
    with redirect_stdout(StringIO()):
        chosen = EvaluateConfig(tasks=[task], **settings)
        result: dict[str, Any] = textmill.evaluate(config.model_copy(update={"evaluate": chosen}))
    return dict(result[task.partition(":")[0]])


def compare_lm_eval(model: Path, folder: Path) -> None:
    """Its wikitext and lambada_openai on these files."""
    pages = [{"page": page} for page in split_articles(WIKITEXT.read_text(encoding="utf-8"))]
    texts = [json.loads(line) for line in LAMBADA.read_text(encoding="utf-8").splitlines()]
    write_tasks(folder, {"local_wikitext": pages, "local_lambada": texts})
    reference = run_reference(folder, ["local_wikitext", "local_lambada"], model, batch=16)
    found = measure(model, f"wikitext:{WIKITEXT}")
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        show(f"wikitext, lm-eval, {name}", found[name], reference["local_wikitext"][name])
    found = measure(model, f"lambada:{LAMBADA}")
    show("lambada, accuracy", found["accuracy"], reference["local_lambada"]["acc"])
    show("lambada, perplexity", found["perplexity"], reference["local_lambada"]["perplexity"])


def compare_streams(model: Path, net: Any) -> None:
    """The file as one text, in windows: Megatron's protocol, and that of transformers' page on perplexity."""
    tokenizer, text = open_tokenizer(model), WIKITEXT.read_text(encoding="utf-8")
    positions = int(net.config.n_positions)
    words = len(text.strip().split(" ")) - 1
    plain, detokenised = tokenizer.encode(text), tokenizer.encode(detokenize(text))
    for stride in (positions // 2, positions):
        found = measure(model, f"wikitext:{WIKITEXT}", stride=stride, wikitext="transformers")
        loss, counted = window_losses(net, plain, positions, stride)
        show(f"wikitext, transformers, stride {stride}, loss", found["loss"], loss / counted)
    for stride in (32, positions):
        found = measure(model, f"wikitext:{WIKITEXT}", stride=stride, wikitext="megatron")
        # A window of Megatron has one token more: the last one is only predicted.
        loss, _ = window_losses(net, detokenised, positions + 1, stride)
        show(f"wikitext, megatron, stride {stride}, word_perplexity", found["word_perplexity"], math.exp(loss / words))


def window_losses(net: Any, ids: list[int], window: int, stride: int) -> tuple[float, int]:
    """The summed loss of windows; of the overlap nothing is counted, and a window's first token is never predicted."""
    windows, previous = [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        fresh = min(end - previous, end - begin - 1)
        windows += [(ids[begin:end], fresh)] if fresh > 0 else []
        previous = end
        if end == len(ids):
            break
    losses, _ = last_losses(net, windows)
    return math.fsum(losses), sum(fresh for _, fresh in windows)


@torch.inference_mode()
def last_losses(net: Any, texts: list[tuple[list[int], int]]) -> tuple[list[float], int]:
    """The summed loss of the last tokens of each text, and how many texts have only likeliest last tokens. Texts of one
    length form a batch, so there is no padding."""
    losses, right = [], 0
    for (_, fresh), group in itertools.groupby(sorted(texts, key=_size), key=_size):
        rows = torch.tensor([text for text, _ in group])
        for begin in range(0, len(rows), BATCH):
            inputs = rows[begin : begin + BATCH]
            logits = net.lm_head(net.transformer(inputs[:, :-1]).last_hidden_state[:, -fresh:]).double()
            labels = inputs[:, -fresh:]
            found = torch.nn.functional.cross_entropy(logits.mT, labels, reduction="none").sum(1)
            losses += found.tolist()
            right += int((logits.argmax(-1) == labels).all(1).sum())
    return losses, right


def _size(text: tuple[list[int], int]) -> tuple[int, int]:
    return len(text[0]), text[1]


def compare_last_tokens(model: Path, net: Any) -> None:
    """LAMBADA's last token."""
    tokenizer, positions = open_tokenizer(model), int(net.config.n_positions)
    texts = [json.loads(line)["text"] for line in LAMBADA.read_text(encoding="utf-8").splitlines()]
    losses, right = last_losses(net, [(tokenizer.encode(text)[-positions - 1 :], 1) for text in texts])
    found = measure(model, f"lambada:{LAMBADA}")
    show("lambada, last token, accuracy", found["last_token_accuracy"], right / len(losses))
    wanted = math.exp(math.fsum(losses) / len(losses))
    show("lambada, last token, perplexity", found["last_token_perplexity"], wanted)


def show(name: str, ours: float | None, theirs: float) -> None:
    """One line; nothing to compare is an error."""
    if ours is None:
        sys.exit(f"{name}: no figure")
    difference = abs(ours / theirs - 1) if theirs else abs(ours)
    verdict = "" if difference < 1e-4 else "  TOO FAR"
    print(f"{name}: textmill {ours:.8g}, reference {theirs:.8g}, difference {difference:.1e}{verdict}", flush=True)


if __name__ == "__main__":
    main()
