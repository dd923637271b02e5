"""The speed that `textmill plan` forecasts for published runs, next to what was published: a table for bench/LOG.md.

    python bench/plan_published.py

The runs are in bench/published_runs.yaml, which was written before the first forecast. `PRECISIONS` has what their
programs send; everything else is in the file.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from textmill.config import RunConfig
from textmill.engines.meshes import Mesh
from textmill.engines.speed import Cluster, Layout, StepTime, cluster_of, step_time
from textmill.models import Shape, open_family

RUNS = Path(__file__).parent / "published_runs.yaml"
PRECISIONS = {
    "torchtitan-2024": (2, 4),
    "torchtitan-2025": (2, 4),
    "megatron": (2, 3),  # a reduce-scatter of fp32 gradients and an all-gather of bf16 weights
    "mpt": (2, 4),
    "llm.c": (2, 2),
    "flash-attention": (4, 4),
    "nanochat": (4, 4),
    "tinyllama": (2, 2),
}
"""Bytes of a gathered weight and of a summed gradient, by source."""


def cluster_in(numbers: dict[str, Any]) -> Cluster:
    """A cluster of the file."""
    known = cluster_of(numbers["gpu"], 1e12 * numbers["tflops"], numbers["per_node"], 1e9 * numbers["network"])
    return replace(known, link=1e9 * numbers["link"], memory=1e12 * numbers["memory_tb_s"])


def shape_in(numbers: dict[str, Any], length: int) -> Shape:
    """A net of the file, as one of this program's families."""
    numbers = dict(numbers)
    vocab = numbers.pop("vocab")
    gated = numbers.pop("gated", False)
    family = "llama" if gated else "gpt2"
    if gated:
        numbers["untied"] = True
    config = RunConfig.model_validate({"model": {"family": family, "shape": {**numbers, "positions": length}}})
    return open_family(family).shape_of(config.model, vocab=vocab, eos_id=0)


def layout_in(run: dict[str, Any]) -> Layout:
    """The layout of a run of the file."""
    mesh = Mesh(
        run.get("replicate", 1), run.get("shard", 1), run.get("tensor", 1), True, run.get("keep_gathered", False)
    )
    gather, reduce = PRECISIONS[run["source"]]
    return Layout(
        mesh,
        run["length"],
        run["micro_batch"],
        passes=run["batch"] // (mesh.data_ranks * run["micro_batch"]),
        recompute=run.get("recompute", 0.0),
        compiled=run.get("compiled", True),
        muon=run.get("muon", False),
        gather_bytes=gather,
        reduce_bytes=reduce,
        optimizer_ranks=mesh.replicate if run.get("zero1") else 1,
    )


def published_rate(run: dict[str, Any], net: dict[str, Any]) -> float:
    """Tokens/s of one GPU."""
    length = run["length"]
    if "published_step_s" in run:
        return float(run["batch"] * length / run["published_step_s"] / run["gpus"])
    if "published_tflops" in run:
        layers, width = net["layers"], net["width"]
        flops = 72 * layers * width**2 + 12 * layers * length * width + 6 * net["vocab"] * width
        return 1e12 * float(run["published_tflops"]) / flops
    return float(run["published"])


def forecast(run: dict[str, Any], known: dict[str, Any]) -> tuple[float, StepTime]:
    """Tokens/s of one GPU, and the time of a step."""
    shape = shape_in(known["nets"][run["net"]], run["length"])
    found = step_time(shape, cluster_in(known["clusters"][run["cluster"]]), layout_in(run))
    return run["batch"] * run["length"] / found.total / run["gpus"], found


def table(known: dict[str, Any]) -> list[str]:
    """The lines of the table, and a last one with the errors of all."""
    lines = ["| source | net | GPUs | length | mesh | published | forecast | error |", "|---" * 8 + "|"]
    errors = []
    for run in known["runs"]:
        expected = published_rate(run, known["nets"][run["net"]])
        rate, _ = forecast(run, known)
        errors.append(rate / expected - 1)
        mesh = " ".join(f"{axis} {run[axis]}" for axis in ("replicate", "shard", "tensor") if run.get(axis, 1) > 1)
        details = ["recompute" * (run.get("recompute", 0) > 0), "eager" * (not run.get("compiled", True))]
        about = ", ".join(part for part in (mesh, *details) if part)
        cells = [run["source"], run["net"], f"{run['gpus']} {run['cluster']}", f"{run['length']:,}", about]
        lines.append(f"| {' | '.join(cells)} | {expected:,.0f} | {rate:,.0f} | {errors[-1]:+.0%} |")
    sizes = sorted(map(abs, errors))
    median, mean = statistics.median(sizes), statistics.mean(errors)
    return [*lines, f"Median error {median:.1%}, worst {sizes[-1]:.1%}; mean with its sign {mean:+.1%}."]


def main() -> None:
    """Print the table."""
    print("\n".join(table(yaml.safe_load(RUNS.read_text()))))


if __name__ == "__main__":
    main()
