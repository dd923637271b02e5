"""Every layout against one process, with dropout, samples of unequal length, isolated documents, gradient accumulation;
with GPT-2, with Llama's grouped queries, and with BERT on packed sentence pairs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import layout_process
from tests.support.layout_process import (
    LAYOUTS,
    MORE,
    SAVED,
    STEPS,
    VOCAB,
    config_of,
    depth_of,
    family_of,
    measured,
    processes_of,
    resumed,
    stepped,
)
from tests.support.together import run_together
from textmill.config import ModelConfig, RunConfig
from textmill.engines.meshes import Mesh, check_divides_net, mesh_of
from textmill.errors import TextmillError
from textmill.models import open_family

TWO = ("shard-2", "sequence-2", "pipeline-2")
"""Sharded, tensor and pipeline parallel: what `make test` sees of them all."""
Measured = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


@cache
def measured_alone(family: str, depth: int) -> Measured:
    """One process, on the same config."""
    return measured(config_of({}, family, depth, clip=0.0))


@pytest.fixture
def alone(layout: str) -> Measured:
    return measured_alone(family_of(layout), depth_of(layout))


def launched(folder: Path, names: Iterable[str]) -> Path:
    """One launch for each number of processes; the second goes on from what the first saved."""
    for family, depth in sorted({(family_of(name), depth_of(name)) for name in names}):
        prefix = ("" if family == "gpt2" else f"{family}-") + ("interleaved-" if depth == 4 else "")
        np.savez(folder / f"{prefix}one.state.npz", **measured_alone(family, depth)[2])
    for world in (2, 4, 8):
        if here := [name for name in names if processes_of(name) == world]:
            assert run_together([sys.executable, layout_process.__file__, str(folder), *here], world) == "ok"
    return folder


@pytest.fixture(scope="module")
def two_layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launched(tmp_path_factory.mktemp("two-layouts"), TWO)


@pytest.fixture(scope="module")
def other_layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launched(tmp_path_factory.mktemp("other-layouts"), [name for name in LAYOUTS if name not in TWO])


@pytest.fixture
def folder(layout: str, request: pytest.FixtureRequest) -> Path:
    """Where the numbers of a layout are."""
    found: Path = request.getfixturevalue("two_layouts" if layout in TWO else "other_layouts")
    return found


def losses(numbers: list[list[float]]) -> list[float]:
    return [loss for loss, _ in numbers]


@pytest.fixture(params=[pytest.param(name, marks=() if name in TWO else pytest.mark.long) for name in LAYOUTS])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_losses_norms_and_gradients_are_those_of_one_process(layout: str, folder: Path, alone: Measured) -> None:
    numbers, gradients, _ = alone
    ours = json.loads((folder / f"{layout}.json").read_text())
    assert len(ours["first"] + ours["losses"]) == STEPS
    assert losses(ours["first"] + ours["losses"]) == pytest.approx(
        losses(numbers["first"] + numbers["losses"]), rel=1e-6
    )
    norm = np.sqrt(sum(float((values.astype(np.float64) ** 2).sum()) for values in gradients.values()))
    assert ours["first"][0][1] == pytest.approx(norm, rel=1e-5)
    found = dict(np.load(folder / f"{layout}.gradients.npz"))
    assert found.keys() == gradients.keys()
    for name, values in gradients.items():
        assert np.abs(found[name] - values).max() < 1e-5 * norm, name


def test_evaluation_sums_over_every_part(layout: str, folder: Path, alone: Measured) -> None:
    """Batches of 8, 5 and 1 samples: the last ones leave processes without any."""
    for ours, wanted in zip(json.loads((folder / f"{layout}.json").read_text())["sums"], alone[0]["sums"], strict=True):
        assert ours == [pytest.approx(wanted[0], rel=1e-6), wanted[1], wanted[2]]


def test_a_process_holds_only_its_shard(layout: str, folder: Path, alone: Measured) -> None:
    mesh, whole = LAYOUTS[layout], alone[0]["parameters"]
    held = json.loads((folder / f"{layout}.json").read_text())["parameters"]
    assert whole / 8 < held <= 1.1 * whole / (mesh.get("shard", 1) * mesh.get("tensor", 1)), (
        "few weights are replicated in a tensor-parallel group"
    )


def test_a_saved_engine_resumes(layout: str, folder: Path, alone: Measured) -> None:
    """Bit for bit on the same layout; within the bound from another, and from this one on one process."""
    next_ones = slice(SAVED - 1, SAVED - 1 + MORE)
    ours, wanted = json.loads((folder / f"{layout}.json").read_text()), losses(alone[0]["losses"][next_ones])
    assert ours["own"] == ours["losses"][next_ones]
    assert losses(ours["after"]) == pytest.approx(wanted, rel=1e-6), ours["from"]
    family = family_of(layout)
    engine = resumed(config_of({}, family, depth_of(layout), clip=0.0), dict(np.load(folder / f"{layout}.state.npz")))
    found = stepped(engine, range(SAVED, SAVED + MORE), family)
    assert losses([list(one) for one in found]) == pytest.approx(wanted, rel=1e-6)


def test_sharded_muon_matches_one_process(layout: str, folder: Path, alone: Measured) -> None:
    """Its products are fp32 on a CPU; what it goes on from was gathered and cut again."""
    ours, wanted = json.loads((folder / f"{layout}.json").read_text())["muon"], alone[0]["muon"]
    assert losses(ours) == pytest.approx(losses(wanted), rel=5e-5)
    assert ours[-2:] == ours[-4:-2], "bit for bit after a resume"


def test_adapters_on_a_mesh_match_one_process(layout: str, folder: Path, alone: Measured) -> None:
    """Loss and norm; weights that tensor-parallel ranks replicate get gradients from all of them."""
    ours, wanted = json.loads((folder / f"{layout}.json").read_text())["lora"], alone[0]["lora"]
    assert losses(ours) == pytest.approx(losses(wanted), rel=1e-6)
    assert [norm for _, norm in ours] == pytest.approx([norm for _, norm in wanted], rel=1e-4)
    assert ours[-2:] == ours[-4:-2], "bit for bit after a resume"


def test_checkpoints_of_all_meshes_are_equal(layout: str, folder: Path, alone: Measured) -> None:
    ours = dict(np.load(folder / f"{layout}.state.npz"))
    assert {name: values.shape for name, values in ours.items()} == {
        name: values.shape for name, values in alone[2].items()
    }


@pytest.mark.parametrize(
    ("mesh", "world", "settings", "message"),
    [
        ({"replicate": 3}, 4, {}, "needs 3 processes, found 4; start 3"),
        ({"shard": 4}, 6, {}, "needs 4 processes, found 6; start 4 or 8"),
        ({"shard": 4, "tensor": 2}, 2, {}, "needs 8 processes, found 2; start 8"),
        ({}, 3, {}, "train.batch: 8 samples cannot be divided evenly by 3 processes; 6 or 9 can"),
        (
            {"shard": 4},
            4,
            {"engine.micro_batch": 4},
            "engine.micro_batch: 4 does not divide the 2 samples of a process; 2 does",
        ),
        ({"tensor": 3}, 3, {}, "engine.mesh.tensor: 3 does not divide model.shape.heads=4; 2, 4 would"),
        ({"tensor": 4}, 4, {"train.length": 22}, "set train.length=20 or 24, or engine.mesh.sequence_parallel=false"),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused_with_sizes_that_do(
    mesh: dict[str, Any], world: int, settings: dict[str, Any], message: str
) -> None:
    tree = config_of({}).model_dump()
    tree["engine"] |= {"mesh": mesh, "micro_batch": "auto"}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        tree[section][name] = value
    config = RunConfig(**tree)
    with pytest.raises(TextmillError, match=message):
        mesh_of(config.engine, config.train, open_family("gpt2").shape_of(config.model, vocab=VOCAB, eos_id=0), world)


def test_the_advice_for_a_net_with_one_head_of_keys_gives_a_net_that_divides() -> None:
    family, model = open_family("llama"), {"family": "llama", "shape": {"layers": 2, "heads": 1, "width": 64}}
    shape = family.shape_of(ModelConfig.model_validate(model), vocab=VOCAB, eos_id=0)
    with pytest.raises(TextmillError, match=r"kv_heads=1; set engine\.mesh\.tensor=1, or .* model\.shape\.heads=2$"):
        check_divides_net(shape, 2)
    advised = {**model, "shape": {"layers": 2, "heads": 2, "width": 64}}
    check_divides_net(family.shape_of(ModelConfig.model_validate(advised), vocab=VOCAB, eos_id=0), 2)


def test_replicate_defaults_to_the_remaining_processes() -> None:
    config = config_of({"shard": 2, "tensor": 2})
    shape = open_family("gpt2").shape_of(config.model, vocab=VOCAB, eos_id=0)
    assert mesh_of(config.engine, config.train, shape, 8) == Mesh(2, 2, 2, sequence=True)
    assert max(map(processes_of, LAYOUTS)) == 8
