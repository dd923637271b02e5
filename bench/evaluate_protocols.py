"""Figures on the whole of WikiText-2's test file and LAMBADA, compared with lm-evaluation-harness and transformers.

    python bench/evaluate_protocols.py [MODEL ...]

Each MODEL is a folder that textmill and transformers open; without one, a tiny GPT-2 with random weights is made. The
files are in ../shared/data next to the repository. Prints both figures of each protocol and how far they are from each
other; the bound is 1e-4.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import textmill
from textmill.config import EvaluateConfig, WikitextConfig
from textmill.evaluation.wikitext_text import detokenize, split_articles
from textmill.tokens.vocabulary.tokenizer import open_tokenizer
from textmill.where import open_where

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.support.lm_eval_reference import run_reference, write_tasks  # noqa: E402

DATA = ROOT.parent / "shared" / "data"
WIKITEXT, LAMBADA = DATA / "wikitext2" / "test.txt", DATA / "lambada" / "lambada_test.jsonl"


def main() -> None:
    """Compare each model in each protocol."""
    if not DATA.is_dir():
        sys.exit("no ../shared/data next to the repository: nothing to read")
    with tempfile.TemporaryDirectory() as folder:
        for model in [Path(one) for one in sys.argv[1:]] or [make_model(Path(folder) / "random")]:
            print(f"== {model.name}")
            compare_lm_eval(model, Path(folder))
            compare_transformers(model)


def make_model(folder: Path) -> Path:
    """A tiny GPT-2 with random weights and GPT-2's vocabulary."""
    torch.manual_seed(1)
    small = GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=128, initializer_range=0.1)
    GPT2LMHeadModel(small).save_pretrained(folder)
    open_tokenizer(DATA / "gpt2_bpe").save(folder)
    return folder


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


def compare_transformers(model: Path) -> None:
    """The file as one text, in windows: Megatron's protocol and that of transformers' page on perplexity."""
    net: Any = AutoModelForCausalLM.from_pretrained(model).eval()
    tokenizer, text = open_tokenizer(model), WIKITEXT.read_text(encoding="utf-8")
    positions = int(net.config.n_positions)
    words = len(text.strip().split(" ")) - 1
    for stride in (positions // 2, positions):
        found = measure(model, f"wikitext:{WIKITEXT}", stride=stride, wikitext=WikitextConfig(protocol="transformers"))
        loss, counted = window_losses(net, tokenizer.encode(text), positions, stride)
        show(f"wikitext, transformers, stride {stride}, loss", found["loss"], loss / counted)
    found = measure(model, f"wikitext:{WIKITEXT}", stride=positions, wikitext=WikitextConfig(protocol="megatron"))
    # A window of Megatron has one token more: the last one is only predicted.
    loss, _ = window_losses(net, tokenizer.encode(detokenize(text)), positions + 1, positions)
    wanted = torch.tensor(loss / words, dtype=torch.float64).exp()
    show("wikitext, megatron, word_perplexity", found["word_perplexity"], float(wanted))


@torch.inference_mode()
def window_losses(net: Any, ids: list[int], window: int, stride: int) -> tuple[float, int]:
    """The summed loss of windows; of the overlap nothing is counted, and a window's first token is never predicted."""
    total, counted, previous = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        inputs = torch.tensor([ids[begin:end]])
        fresh = min(end - previous, end - begin - 1)
        if fresh > 0:
            logits = net(inputs[:, :-1]).logits[0, -fresh:].double()
            total += float(torch.nn.functional.cross_entropy(logits, inputs[0, -fresh:], reduction="sum"))
            counted += fresh
        previous = end
        if end == len(ids):
            break
    return total, counted


def show(name: str, ours: float | None, theirs: float) -> None:
    """One line; nothing to compare is an error."""
    if ours is None:
        sys.exit(f"{name}: no figure")
    difference = abs(ours / theirs - 1) if theirs else abs(ours)
    verdict = "" if difference < 1e-4 else "  TOO FAR"
    print(f"{name}: textmill {ours:.8g}, reference {theirs:.8g}, difference {difference:.1e}{verdict}", flush=True)


if __name__ == "__main__":
    main()
