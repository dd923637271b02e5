"""On a GPU the captured steps give the CPU's texts; skipped where there is none."""

from __future__ import annotations

import queue

import pytest
import torch

from textmill.checkpoint import Checkpoint
from textmill.config import SampleConfig, TorchEngine
from textmill.generation.generator import Generator, open_generator
from textmill.generation.requests import Done, Token
from textmill.generation.scheduler import Scheduler

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
PROMPTS = ["The mill", "물레방아는", "", "Değirmen köprünün üstünde", "a"] * 4
SAMPLES = [
    SampleConfig(temperature=0, max_tokens=40), SampleConfig(max_tokens=40, seed=3),
    SampleConfig(max_tokens=150, min_tokens=150, temperature=0),
    SampleConfig(max_tokens=30, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3, stop=["e"]),
    SampleConfig(max_tokens=12, beams=3),
]  # fmt: skip


@pytest.fixture(scope="module")
def on_gpu(checkpoint: Checkpoint) -> Generator:
    return open_generator(checkpoint, TorchEngine(device="cuda", precision="fp32"))


@pytest.mark.parametrize("number", range(len(SAMPLES)))
def test_texts_are_those_of_the_cpu(generator: Generator, on_gpu: Generator, number: int) -> None:
    sample = SAMPLES[number]
    assert on_gpu.texts(PROMPTS, sample) == generator.texts(PROMPTS, sample)
    assert on_gpu.sample(PROMPTS[0], sample) == generator.sample(PROMPTS[0], sample)


def test_the_scheduler_gives_them_too(generator: Generator, on_gpu: Generator) -> None:
    scheduler, found = Scheduler(on_gpu, slots=5, queue=100), queue.Queue()
    texts, left = [""] * len(PROMPTS), len(PROMPTS)
    for place, prompt in enumerate(PROMPTS):
        request = on_gpu.request_of(prompt, SAMPLES[1].model_copy(update={"seed": 3 + place}))

        def deliver(event: Token | Done, place: int = place) -> None:
            found.put((place, event))

        scheduler.submit(request, deliver)
    while left:
        place, event = found.get(timeout=120)
        texts[place] += event.text
        left -= isinstance(event, Done)
    scheduler.close(0)
    assert texts == generator.texts(PROMPTS, SAMPLES[1])


def test_half_precision_works(checkpoint: Checkpoint) -> None:
    generator = open_generator(checkpoint, TorchEngine(device="cuda", precision="bf16"))
    sample = SampleConfig(max_tokens=20, min_tokens=20, seed=8)
    assert generator.texts(PROMPTS, sample) == generator.texts(PROMPTS, sample)
