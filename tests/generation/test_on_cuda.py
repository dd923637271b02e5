"""Captured steps on a GPU give the same texts as the CPU; skipped without a GPU."""

from __future__ import annotations

import gc
import queue
from typing import Any

import pytest
import torch

from tests.support.small_models import write_model
from textmill.checkpoints.folders import Checkpoint
from textmill.config import ModelConfig, SampleConfig, TorchEngine
from textmill.generation.generator import Generator, open_generator
from textmill.generation.requests import Done, Token
from textmill.generation.scheduler import Scheduler
from textmill.models import open_family
from textmill.models.decode_torch import CapturedSlots, NetSlots
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
PROMPTS = ["The mill", "물레방아는", "", "Değirmen köprünün üstünde", "a"] * 4
SAMPLES = [
    SampleConfig(temperature=0, max_tokens=40),
    SampleConfig(max_tokens=40, seed=3),
    SampleConfig(max_tokens=150, min_tokens=150, temperature=0),
    SampleConfig(max_tokens=60, min_tokens=20, temperature=0.7, top_k=9),
    SampleConfig(max_tokens=60, temperature=1.3, top_k=0, seed=11),
    SampleConfig(
        max_tokens=30, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3, stop=["e"]
    ),
    SampleConfig(max_tokens=12, beams=3),
]


SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"heads": 2, "width": 32},
    "llama": {"heads": 4, "kv_heads": 2, "width": 32},
    "qwen3": {"heads": 4, "kv_heads": 2, "width": 32, "head_width": 16, "qk_norm": True},
}


@pytest.fixture(scope="module", params=SHAPES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: Any, tokenizer: TextTokenizer) -> Checkpoint:
    """A small model of each family that has fast decoding."""
    family = "gpt2" if request.param == "gpt2" else "llama"
    numbers = {"layers": 2, "inner": 128, "positions": 96, **SHAPES[request.param]}
    model = ModelConfig(family=family, size="nano", shape=numbers)  # type: ignore[arg-type]
    shape = open_family(family).shape_of(model, vocab=tokenizer.vocab, eos_id=tokenizer.eos_id)
    return write_model(tmp_path_factory.mktemp(request.param) / "run", tokenizer, shape)


@pytest.fixture(scope="module")
def generator(checkpoint: Checkpoint) -> Generator:
    return open_generator(checkpoint, TorchEngine(device="cpu", precision="fp32"))


@pytest.fixture(scope="module")
def on_gpu(checkpoint: Checkpoint) -> Generator:
    return open_generator(checkpoint, TorchEngine(device="cuda", precision="fp32"))


@pytest.mark.parametrize("number", range(len(SAMPLES)))
def test_texts_equal_those_of_the_cpu(generator: Generator, on_gpu: Generator, number: int) -> None:
    sample = SAMPLES[number]
    assert on_gpu.texts(PROMPTS, sample) == generator.texts(PROMPTS, sample)
    assert on_gpu.sample(PROMPTS[0], sample) == generator.sample(PROMPTS[0], sample)


def test_scheduler_gives_the_texts_of_the_cpu(generator: Generator, on_gpu: Generator) -> None:
    scheduler, found = Scheduler(on_gpu, slots=5, queue=100), queue.Queue()
    texts, left = [""] * len(PROMPTS), len(PROMPTS)
    for place, prompt in enumerate(PROMPTS):
        request = on_gpu.new_request(prompt, SAMPLES[1].model_copy(update={"seed": 3 + place}))

        def deliver(event: Token | Done, place: int = place) -> None:
            found.put((place, event))

        scheduler.submit(request, deliver)
    while left:
        place, event = found.get(timeout=120)
        texts[place] += event.text
        left -= isinstance(event, Done)
    scheduler.close(0)
    assert texts == generator.texts(PROMPTS, SAMPLES[1])


@pytest.mark.parametrize("texts", [3, 9])
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-4), ("fp16", 2e-2), ("bf16", 2e-1)])
def test_fused_kernels_give_the_logits_of_plain_torch(
    checkpoint: Checkpoint, precision: str, bound: float, texts: int
) -> None:
    """The same contexts and ids, with few and many texts, against torch's operations in fp32: within the bound, or
    twice the error that torch's operations make in the same precision."""
    kinds = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    exact, rounded, fused = (open_generator(checkpoint, TorchEngine(device="cuda", precision="fp32")) for _ in range(3))
    for generator in (rounded, fused):
        generator.net.to(kinds[precision])
    slots: list[NetSlots] = [NetSlots(one.net, texts + 1, 96) for one in (exact, rounded)]
    slots.append(fused.new_slots(texts + 1, 96))
    assert isinstance(slots[2], CapturedSlots)
    places, errors = [2, 5, 40] * (texts // 3), []
    for one in slots:
        one.prefill(0, [[1, 2], [4, 5, 6, 7, 8], [9] * 40] * (texts // 3))
    ids = torch.tensor([5, 6, 7] * (texts // 3), device="cuda")
    for _ in range(20):
        wanted, *others = (one.decode(ids, list(places)).float() for one in slots)
        errors.append([float((found - wanted).abs().max() / wanted.abs().max()) for found in others])
        ids, places = wanted.argmax(1), [place + 1 for place in places]
    by_torch, found = (max(one) for one in zip(*errors, strict=True))
    assert found < max(bound, 2 * by_torch)


def test_captured_steps_keep_their_own_workspaces(checkpoint: Checkpoint) -> None:
    """torch's compiler frees the workspaces of cuBLAS; captured steps must still work."""
    generator = open_generator(checkpoint, TorchEngine(device="cuda", precision="bf16"))
    sample = SampleConfig(max_tokens=20, min_tokens=20, temperature=0)
    before = generator.texts(PROMPTS, sample)
    for _ in range(2):
        torch._C._cuda_clearCublasWorkspaces()
        gc.collect()
        torch.cuda.empty_cache()
        spoil = torch.full((2**28,), float("nan"), device="cuda")
        assert generator.texts(PROMPTS, sample) == before
        del spoil


def test_half_precision_works(checkpoint: Checkpoint) -> None:
    generator = open_generator(checkpoint, TorchEngine(device="cuda", precision="bf16"))
    sample = SampleConfig(max_tokens=20, min_tokens=20, seed=8)
    assert generator.texts(PROMPTS, sample) == generator.texts(PROMPTS, sample)
