"""Generation speed on the CPU, compared with transformers' `generate` on the same weights in the same run.

    python bench/generate.py [new tokens] [tiny]
    python bench/generate.py llama.cpp [new tokens] [tiny] [llama]

GPT-2 124M with random weights, fp32, greedy, prompts of 32 tokens, one text and sixteen. Prints tokens/s of both, the
ratio, and the fraction of new tokens that are equal. `tiny` uses a net of two small layers, to test the script.

llama.cpp: nets of 0.3 and 26 million parameters on one thread, next to llama.cpp on the exported GGUF file in fp32 and
q8_0: tokens per CPU second of the whole process, which hardly depends on the load of the machine. `tiny`: the smaller.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from load_server import write_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from textmill.config import ModelConfig, SampleConfig, TokenizerConfig
from textmill.generation.generator import Generator
from textmill.generation.requests import Request, Token
from textmill.models import open_family
from textmill.models.nets_torch import open_net
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit

CORPUS = Path(__file__).parents[1] / "textmill" / "corpora"
PROMPT, ROUNDS, VOCAB = 32, 3, 50257
Ids = list[list[int]]


def main() -> None:
    """Measure one text and sixteen."""
    arguments = sys.argv[1:]
    new = next((int(one) for one in arguments if one.isdigit()), 24)
    if "llama.cpp" in arguments:
        for size in ("nano",) if "tiny" in arguments else ("nano", "mini"):
            compare_llama_cpp("llama" if "llama" in arguments else "gpt2", size, new)
        return
    ours, theirs = open_both(torch.device("cpu"), torch.float32, "tiny" in arguments)
    threads = torch.get_num_threads()
    print(f"prompts of {PROMPT} tokens, {new} new tokens, fp32, {threads} threads, median of {ROUNDS} rounds")
    for batch in (1, 16):
        compare(
            random_prompts(batch, PROMPT),
            new,
            {
                "textmill": lambda ids: our_tokens(ours, ids, new),
                "transformers": lambda ids: their_tokens(theirs, ids, new),
            },
        )


def compare_llama_cpp(family: str, size: str, new: int) -> None:
    """Print the tokens per CPU second of textmill and llama.cpp on the same weights, one thread, greedy."""
    torch.set_num_threads(1)
    tokenizer = fit(iter([[(CORPUS / "tinyshakespeare.txt").read_text()]]), TokenizerConfig(vocab=1000))
    model = ModelConfig(family=family, size=size)
    shape: Any = open_family(family).shape_of(model, vocab=tokenizer.vocab, eos_id=tokenizer.eos_id, length=256)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape, tokenizer)
        checkpoint = next((Path(folder) / "run").glob("step-*")).rename(f"{folder}/model")
        for name in ("progress.json", "manifest.json"):  # what is left is a folder of transformers
            (checkpoint / name).unlink(missing_ok=True)
        generator = Generator(open_net(checkpoint, torch.device("cpu")), tokenizer)
        parameters = sum(parameter.numel() for parameter in generator.net.parameters())
        methods: dict[str, Callable[[Ids], Ids]] = {
            "textmill": lambda ids: our_tokens(generator, ids, new),
            "textmill, sampled": lambda ids: our_tokens(generator, ids, new, temperature=0.8, top_p=0.9),
        }
        servers = []
        for precision in ("fp32", "q8_0"):
            target = f"{folder}/{precision}"
            command = [sys.executable, "-m", "textmill", "export", str(checkpoint), "export.kind=gguf"]
            subprocess.run(
                [*command, f"export.precision={precision}", f"export.folder={target}", "export.reader=false"],
                check=True,
            )
            servers.append(open_llama_cpp(next(Path(target).glob("*.gguf"))))
            methods[f"llama.cpp, {precision}"] = partial(llama_cpp_tokens, servers[-1], new=new)
        for batch in (1, 8):
            dice = random.Random(batch)
            prompts = [[dice.randrange(shape.vocab - 1) for _ in range(PROMPT)] for _ in range(batch)]
            print(f"{family} with {parameters / 1e6:.2f} M parameters, one thread, tokens per CPU second", flush=True)
            compare(prompts, new, methods, clock=time.process_time)


def open_llama_cpp(file: Path) -> Any:
    """Open a GGUF file in llama.cpp's server, in this process."""
    import xllamacpp

    params: Any = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.port, params.n_ctx, params.n_parallel, params.verbosity = 0, 256 * 8, 8, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    return xllamacpp.Server(params)


def llama_cpp_tokens(server: Any, prompts: Ids, new: int) -> Ids:
    """Return the new tokens of each prompt; all are sent at once."""
    settings = {"n_predict": new, "temperature": 0, "top_k": 1, "return_tokens": True, "ignore_eos": True}

    def complete(ids: list[int]) -> list[int]:
        body = json.dumps({"prompt": ids, "cache_prompt": False, **settings}).encode()
        call = urllib.request.Request(server.listening_address + "/completion", body)
        found: list[int] = json.load(urllib.request.urlopen(call, timeout=600))["tokens"]
        return found

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(complete, prompts))


def open_both(device: torch.device, dtype: torch.dtype, tiny: bool, family: str = "gpt2") -> tuple[Generator, Any]:
    """Open the same random weights as our generator and as a transformers model."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        size = ModelConfig(family=family, size="nano" if tiny else "small")
        shape = open_family(family).shape_of(size, vocab=VOCAB, eos_id=VOCAB - 1, length=1024)
        config = AutoConfig.for_model(**open_family(family).hf_config_of(shape))
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        net: Any = open_net(Path(folder), device)
    return Generator(net.to(dtype), new_tokenizer()), theirs


def new_tokenizer() -> TextTokenizer:
    """Return a byte-level tokenizer with GPT-2's vocabulary size, whose tokens are one or two bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(first + second for first in letters for second in letters)][:50256]
    inner = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(tokens)}, []))
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>"])
    return TextTokenizer(inner, inner.token_to_id("<|endoftext|>"))


def our_tokens(generator: Generator, prompts: Ids, new: int, **settings: Any) -> Ids:
    """Return the new tokens of each prompt; all texts run at once and are decoded to text."""
    sample = SampleConfig(temperature=0, max_tokens=new, min_tokens=new).model_copy(update=settings)
    found: Ids = [[] for _ in prompts]
    for index, event in generator.run([Request(tuple(ids), sample) for ids in prompts], len(prompts)):
        if isinstance(event, Token):
            found[index].append(event.id)
    return found


def their_tokens(model: Any, prompts: Ids, new: int, **settings: Any) -> Ids:
    """The same with transformers, without decoding to text."""
    ids = torch.tensor(prompts, device=model.device)
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 50256, **settings}
    found: Ids = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, ids.shape[1] :].tolist()
    return found


def random_prompts(batch: int, length: int) -> Ids:
    """Return random prompts of equal length, so that transformers needs no padding."""
    dice = random.Random(batch)
    return [[dice.randrange(50000) for _ in range(length)] for _ in range(batch)]


def compare(
    prompts: Ids,
    new: int,
    methods: dict[str, Callable[[Ids], Ids]],
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return each method's tokens/s, measured in turns after a warm-up round; compare the others with the first."""
    batch, seconds = len(prompts), {name: [] for name in methods}
    found: dict[str, Ids] = {}
    for number in range(rounds + 1):
        for name, method in methods.items():
            started = clock()
            found[name] = method(prompts)
            if number:
                seconds[name].append(clock() - started)
    rates = {name: batch * new / statistics.median(times) for name, times in seconds.items()}
    first = next(iter(methods))
    for name, rate in rates.items():
        line = f"  batch {batch:>3}  {name:<28}{rate:>10,.1f} tokens/s"
        if name != first:
            equal = equal_fraction(found[first], found[name])
            line += f"; {first} is {rates[first] / rate:.2f} times as fast, {equal:.1%} of tokens equal"
        print(line, flush=True)
    return rates


def equal_fraction(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Return the fraction of tokens before the first difference; after it the texts are unrelated."""
    equal = 0
    for one, other in zip(ours, theirs, strict=True):
        equal += next(
            (index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
            min(len(one), len(other)),
        )
    return equal / sum(map(len, ours))


if __name__ == "__main__":
    main()
