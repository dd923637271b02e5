"""Distillation in JAX, on one device and on a mesh, gives the numbers of torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_runs import VOCAB, batch_of, config_of, started
from tests.support.teachers import distilling, write_teacher
from textmill.config import DistilConfig, JaxEngine, JaxMesh

MESH_SETTINGS: list[dict[str, Any]] = [{"cosine": 0.5, "mse": 0.001}, {"top_k": 5}]


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [{"divergence": "reverse", "top_k": 4}, {"divergence": "jensen_shannon"}, {"top_k": 7, "temperature": 1.5}],
)
def test_jax_equals_torch(settings: dict[str, Any], tmp_path: Path) -> None:
    """The torch engine is compared with straight torch above; labels are smoothed and have z-loss too."""
    names = [write_teacher(tmp_path / "a"), write_teacher(tmp_path / "b", vocab=VOCAB + 200)]
    configs = [
        config_of(
            kind, micro_batch=2, distil=DistilConfig(teachers=names, **settings), label_smoothing=0.1, z_loss=0.01
        )
        for kind in ("torch", "jax")
    ]
    engines = [started(config) for config in configs]
    for step in range(2):
        one, other = (engine.train_step(batch_of(step), step, 1e-3) for engine in engines)
        assert other.loss == pytest.approx(one.loss, rel=2e-6)
        assert other.terms == pytest.approx(one.terms, rel=1e-5, abs=5e-7)
        assert other.norm == pytest.approx(one.norm, rel=1e-4)


@pytest.mark.long
def test_a_mesh_of_jax_devices_equals_torch(tmp_path: Path) -> None:
    """Devices that divide samples, weights and vocabulary give the numbers of one torch process."""
    name, here = write_teacher(tmp_path / "a"), Path(__file__)
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join([str(here.parents[2]), str(here.parent)]),
    }
    child = [sys.executable, "-c", f"import test_distillation_jax as test; test.print_steps_on_a_mesh({name!r})"]
    done = subprocess.run(child, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for settings in MESH_SETTINGS:
        engine = started(distilling("torch", [name], **settings))
        for step in range(2):
            one, (loss, norm, terms) = engine.train_step(batch_of(step), step, 1e-3), found.pop(0)
            assert loss == pytest.approx(one.loss, rel=2e-6)
            assert norm == pytest.approx(one.norm, rel=1e-4)
            assert terms == pytest.approx(one.terms, rel=1e-5, abs=5e-7)


def print_steps_on_a_mesh(teacher: str) -> None:
    """What the test above starts in a process of its own, since the number of devices is settled once."""
    found = []
    for settings in MESH_SETTINGS:
        config = distilling("jax", [teacher], **settings)
        engine = JaxEngine(device="cpu", micro_batch=2, mesh=JaxMesh(shard=2, tensor=2))
        opened = started(config.model_copy(update={"engine": engine}))
        steps = [opened.train_step(batch_of(step), step, 1e-3) for step in range(2)]
        found += [(one.loss, one.norm, one.terms) for one in steps]
    print(json.dumps(found))
