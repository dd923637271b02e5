"""The forecast of a step: its arithmetic by hand, that it only grows where it must, and measured steps on an H200."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.plan_published import RUNS, forecast, published_rate, table
from textmill.config import RunConfig
from textmill.engines.meshes import Mesh
from textmill.engines.speed import (
    MATMUL,
    MEMORY,
    Cluster,
    Layout,
    attention_seconds,
    bubble_seconds,
    cluster_of,
    matmul_seconds,
    ring_seconds,
    step_time,
    transfer_seconds,
    waiting_in_pass,
    waiting_seconds,
)
from textmill.models import Shape, open_family

ROUND = Cluster(
    flops=100e12,
    best_matmul=1.0,
    memory=1e12,
    multiprocessors=100,
    exponentials=1e12,
    link=100e9,
    network=10e9,
    per_node=8,
)
H200 = cluster_of("H200", 989e12, 8)


def shape_of(family: str, size: str, length: int = 1024) -> Shape:
    config = RunConfig.model_validate({"model": {"family": family, "size": size}})
    return open_family(family).shape_of(config.model, vocab=50257, eos_id=0, length=length)


def test_a_matmul_of_whole_waves_runs_at_the_measured_fraction_of_the_peak() -> None:
    """1,280 x 2,560 outputs are 10 x 10 tiles, one for each multiprocessor; one more row starts a second wave."""
    seconds = 2 * 1280 * 4096 * 2560 / 100e12
    assert matmul_seconds(ROUND, 1280, 4096, 2560) == pytest.approx(seconds / MATMUL)
    more = matmul_seconds(ROUND, 1281, 4096, 2560)
    assert more == pytest.approx(2 * 1281 * 4096 * 2560 / 100e12 / MATMUL * 200 / 110)
    assert matmul_seconds(ROUND, 1281, 4096, 2560, split_sums=True) == pytest.approx(seconds * 1281 / 1280 / MATMUL)


def test_a_thin_matmul_is_limited_by_memory() -> None:
    assert matmul_seconds(ROUND, 1, 1000, 1000) == pytest.approx(2 * (1000 + 1e6 + 1000) / 1e12 / MEMORY)


def test_rings() -> None:
    """A gigabyte: 7/8 over links of 80 GB/s inside a machine; half of it over 8 cards of 7.5 GB/s, or over one."""
    gigabyte = 1e9
    assert ring_seconds(ROUND, gigabyte, 1, 1) == 0
    assert ring_seconds(ROUND, gigabyte, 8, 1) == pytest.approx(7 / 8 / 80, rel=0.01)
    assert ring_seconds(ROUND, gigabyte, 16, 1) == pytest.approx(max(15 / 16 / 80, 1 / 2 / 60), rel=0.01)
    slow = replace(ROUND, network=1e9)
    assert ring_seconds(slow, gigabyte, 16, 1) == pytest.approx(1 / 2 / 6, rel=0.01)
    assert ring_seconds(slow, gigabyte, 2, 8) == pytest.approx(1 / 2 / 0.75, rel=0.01), "one rank of each machine"


def test_attention_of_twice_the_length_takes_almost_four_times_as_long_and_is_divided_by_heads() -> None:
    shape = shape_of("gpt2", "small", 16384)
    layout = Layout(Mesh(), 8192, 1)
    half, full = (
        sum(attention_seconds(shape, ROUND, replace(layout, length=length), causal=True)) for length in (8192, 16384)
    )
    assert 3.8 < full / half < 4
    divided = sum(attention_seconds(shape, ROUND, replace(layout, mesh=Mesh(tensor=4)), causal=True))
    assert divided == pytest.approx(half / 4)


@pytest.mark.parametrize(
    ("family", "size", "batch", "rate"),
    [
        ("gpt2", "small", 64, 582_900),
        ("gpt2", "medium", 32, 210_600),
        ("gpt2", "xl", 8, 48_046),
        ("llama", "small", 64, 556_400),
    ],
)
def test_measured_steps_on_one_h200(family: str, size: str, batch: int, rate: float) -> None:
    """bench/LOG.md, 2026-11-18, and docs/benchmarks.md for xl: what the constants were taken from."""
    found = step_time(shape_of(family, size), H200, Layout(Mesh(), 1024, batch))
    assert batch * 1024 / found.total == pytest.approx(rate, rel=0.06)
    assert found.waiting == 0


@pytest.mark.parametrize("field", ["flops", "memory", "exponentials", "link", "network"])
def test_a_faster_cluster_is_not_slower(field: str) -> None:
    shape = shape_of("gpt2", "small")
    layouts = [
        Layout(mesh, 1024, 4, passes=2)
        for mesh in (Mesh(replicate=16), Mesh(shard=16), Mesh(replicate=4, shard=4), Mesh(tensor=4, shard=4))
    ]
    slow = [step_time(shape, ROUND, layout).total for layout in layouts]
    faster = replace(ROUND, **{field: 2 * getattr(ROUND, field)})
    fast = [step_time(shape, faster, layout).total for layout in layouts]
    assert all(after <= before for before, after in zip(slow, fast, strict=True))
    assert sum(fast) < sum(slow)


@pytest.mark.parametrize(
    "change",
    [{"recompute": 0.5}, {"recompute": 1.0}, {"compiled": False}, {"passes": 3}, {"muon": True}, {"micro_batch": 16}],
)
def test_more_work_takes_longer(change: dict[str, Any]) -> None:
    shape = shape_of("llama", "small")
    layout = Layout(Mesh(shard=8), 1024, 8)
    assert step_time(shape, H200, replace(layout, **change)).total > step_time(shape, H200, layout).total
    assert step_time(shape, H200, replace(layout, fp8=True)).total < step_time(shape, H200, layout).total


def test_a_frozen_net_has_no_gradients_of_weights() -> None:
    shape = shape_of("gpt2", "small")
    layout = Layout(Mesh(), 1024, 64)
    full = step_time(shape, H200, layout)
    frozen = step_time(shape, H200, layout, trained=[])
    assert frozen.matmuls == pytest.approx(full.matmuls * 2 / 3, rel=0.02)
    assert frozen.optimizer == 0


def test_communication_that_fits_beside_computing_is_not_waited_for() -> None:
    """FSDP on a fast link waits for what has nothing beside it: the embedding, the first gathers, the last sums."""
    shape = shape_of("gpt2", "small")
    layout = Layout(Mesh(shard=8), 1024, 8)
    every = shape.weights()
    size = sum(weight.size for weight in every if weight.depth == 1)
    rest = 2 * ring_seconds(H200, 4.0 * (sum(weight.size for weight in every) - 12 * size), 8, 1)
    block = ring_seconds(H200, 4.0 * size, 8, 1)
    kept = replace(layout, mesh=Mesh(shard=8, keep_gathered=True))
    assert waiting_seconds(shape, every, H200, layout, 1.0, 1.0) == pytest.approx(rest + 3 * block)
    assert waiting_seconds(shape, every, H200, kept, 1.0, 1.0) == pytest.approx(rest + 2 * block)
    # If computing takes no time, each block is gathered twice and summed once.
    assert waiting_seconds(shape, every, H200, layout, 0.0, 0.0) == pytest.approx(rest + 3 * 12 * block)
    assert waiting_seconds(shape, every, H200, kept, 0.0, 0.0) == pytest.approx(rest + 2 * 12 * block)


def blocks_alone(layers: int) -> Shape:
    """A net with a small vocabulary, so that embedding and head hardly count."""
    config = RunConfig.model_validate({"model": {"shape": {"layers": layers, "width": 1024, "heads": 16}}})
    return open_family("gpt2").shape_of(config.model, vocab=64, eos_id=0, length=1024)


def test_the_bubble_of_a_pipeline() -> None:
    """Narayanan et al. 2021: with p stages, m micro-batches and v chunks, (p - 1) / (v m) of the time without it."""
    assert bubble_seconds([0.25], 1) == 0
    assert bubble_seconds([0.25] * 4, 1) / (8 * 0.25) == pytest.approx(3 / 8)
    assert bubble_seconds([0.25] * 4, 2) / (8 * 0.25) == pytest.approx(3 / 16)
    assert bubble_seconds([2.0, 2.0, 2.0, 1.0], 1) == 5.0, "a stage with fewer blocks is waited for less"


@pytest.mark.parametrize(
    ("layers", "schedule", "share"),
    [
        (8, "1f1b", (8 + 3) / 8 / 4),
        (8, "gpipe", (8 + 3) / 8 / 4),
        (8, "interleaved", (8 + 3 / 2) / 8 / 4),
        (7, "1f1b", (2 * 8 + 5) / (7 * 8)),  # stages of 2, 2, 2 and 1 blocks
    ],
)
def test_four_stages_take_a_quarter_of_the_time_and_their_bubble(layers: int, schedule: str, share: float) -> None:
    """Eight micro-batches; links cost nothing."""
    shape = blocks_alone(layers)
    fast = replace(ROUND, link=1e18)
    layout = Layout(Mesh(), 1024, 4, passes=8)
    one = step_time(shape, fast, layout)
    four = step_time(shape, fast, replace(layout, mesh=Mesh(pipeline=4, schedule=schedule)))
    assert (four.total - four.optimizer) / (one.total - one.optimizer) == pytest.approx(share, rel=0.01)
    part = 2 / layers
    assert four.attention == pytest.approx(part * one.attention)
    assert four.optimizer < one.optimizer / 3


def test_stages_wait_for_the_residual_stream_of_each_micro_batch() -> None:
    """4 x 1,024 tokens of 1,024 channels in bf16 over 80 GB/s or 7.5 GB/s: forward and backward, of each chunk."""
    shape = blocks_alone(8)
    layout = Layout(Mesh(pipeline=4), 1024, 4, passes=8)
    link, network = 8_388_608 / 80e9, 8_388_608 / 7.5e9
    assert transfer_seconds(shape, ROUND, replace(layout, mesh=Mesh())) == 0
    assert transfer_seconds(shape, ROUND, layout) == pytest.approx(link, rel=0.05)
    across = replace(layout, mesh=Mesh(replicate=4, pipeline=4))
    assert transfer_seconds(shape, ROUND, across) == pytest.approx(network, rel=0.01), "stages of two machines"
    divided = replace(layout, mesh=Mesh(tensor=4, sequence=True, pipeline=4))
    assert transfer_seconds(shape, ROUND, divided) == pytest.approx(network / 4, rel=0.02)
    every = shape.weights()
    one = transfer_seconds(shape, ROUND, layout)
    assert waiting_in_pass(shape, every, ROUND, layout, 1.0, 1.0) == pytest.approx(2 * one)
    two_chunks = replace(layout, mesh=Mesh(pipeline=4, schedule="interleaved"))
    assert waiting_in_pass(shape, every, ROUND, two_chunks, 1.0, 1.0) == pytest.approx(4 * one)


def test_published_runs_have_a_source_each_and_the_log_has_the_table() -> None:
    known = yaml.safe_load(RUNS.read_text())
    assert len(known["runs"]) >= 20
    for run in known["runs"]:
        assert known["sources"][run["source"]].startswith("https://github.com/")
        assert published_rate(run, known["nets"][run["net"]]) > 0
    log = (Path(__file__).parents[2] / "bench" / "LOG.md").read_text()
    for line in table(known):
        assert line in log, "run python bench/plan_published.py and put its table into bench/LOG.md"


def test_a_published_rate_follows_from_what_was_published() -> None:
    """llm.c: 524,288 tokens in 0.3 s on 8 GPUs. Megatron: 11.28 GFLOP for a token by its own count."""
    known = yaml.safe_load(RUNS.read_text())
    rates = {run["net"]: published_rate(run, known["nets"][run["net"]]) for run in known["runs"]}
    assert rates["gpt2-124m"] == pytest.approx(524_288 / 0.3 / 8)
    assert rates["megatron-1.7b"] == pytest.approx(408.8e12 / 11.28e9, rel=0.001)
    first = known["runs"][0]
    rate, found = forecast(first, known)
    assert rate == pytest.approx(2 * 8192 / found.total)
