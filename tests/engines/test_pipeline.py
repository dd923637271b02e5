"""Pipeline parallelism: which stage has what, what is refused, and the plan; test_layouts.py compares the numbers."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.kill_train import hash_checkpoint, read_metrics, textmill, train_arguments
from tests.support.fake_meshes import config_of as fake_config
from tests.support.fake_meshes import shape_of as fake_shape
from tests.support.fake_meshes import started as fake_started
from tests.support.layout_process import VOCAB, batch_of, config_of, shape_of
from tests.support.masked_batches import masked_batch
from tests.support.together import run_together
from textmill.commands.plan import communication_of
from textmill.config import DistilConfig, ModelConfig, ShapeConfig
from textmill.engines.memory import Device, Estimator, fake_ranks
from textmill.engines.meshes import Mesh, check_pipeline, mesh_of, stage_blocks
from textmill.engines.on_torch import check_settings
from textmill.engines.parallel_torch import Parallel
from textmill.errors import TextmillError
from textmill.models import open_family
from textmill.models.nets_torch import build_net
from textmill.training.loop import TrainingStep

STAGES = 3


@given(st.integers(1, 100), st.integers(1, 100), st.sampled_from(["1f1b", "interleaved"]))
def test_stages_share_the_blocks_in_order(layers: int, stages: int, schedule: str) -> None:
    mesh = Mesh(pipeline=stages, schedule=schedule)
    stages_blocks = [stage_blocks(mesh, layers, stage) for stage in range(stages)]
    chunks = [blocks[number] for number in range(mesh.chunks) for blocks in stages_blocks]
    assert [layer for chunk in chunks for layer in chunk] == list(range(layers))
    sizes = [len(chunk) for chunk in chunks]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize(
    ("family", "first", "last", "on_both"),
    [
        ("gpt2", "transformer.wpe.weight", "transformer.ln_f.weight", "transformer.wte.weight"),
        ("llama", "model.embed_tokens.weight", "model.norm.weight", "model.embed_tokens.weight"),
        (
            "bert",
            "bert.embeddings.token_type_embeddings.weight",
            "cls.predictions.bias",
            "bert.embeddings.word_embeddings.weight",
        ),
    ],
)
def test_every_weight_is_on_one_stage_and_a_tied_head_on_two(family: str, first: str, last: str, on_both: str) -> None:
    size = "tiny" if family == "bert" else "nano" if family == "gpt2" else "small"
    model = ModelConfig(family=family, size=size, shape=ShapeConfig(layers=5, heads=4, width=32, positions=24))
    shape = open_family(family).shape_of(model, vocab=VOCAB, eos_id=0)
    present: dict[str, list[int]] = {weight.name: [] for weight in shape.weights()}
    with fake_ranks(STAGES):
        for stage in range(STAGES):
            parallel = Parallel(Mesh(pipeline=STAGES), stage, torch.device("cpu"))
            with torch.device("meta"):
                net = build_net(shape)
                parallel.shard_net(net)
            for weight in shape.weights():
                if weight.parameter not in net.absent:
                    present[weight.name].append(stage)
    tied = not getattr(shape, "untied", False)
    assert present[first][0] == 0
    assert present[last] == [STAGES - 1]
    assert present[on_both] == ([0, STAGES - 1] if tied else [0])
    assert all(len(stages) == 1 for name, stages in present.items() if name != on_both)
    of_layer = {weight.depth: present[weight.name] for weight in shape.weights() if 1 <= weight.depth <= 5}
    assert [of_layer[5 - layer] for layer in range(5)] == [[0], [0], [1], [1], [2]]


@pytest.mark.parametrize(
    ("mesh", "world", "settings", "message"),
    [
        ({"pipeline": 3}, 3, {}, r"3 stages cannot share 2 blocks; set engine\.mesh\.pipeline=2 or less"),
        ({"pipeline": 2}, 2, {"engine.micro_batch": 8}, "2 stages need as many micro-batches in a step, found 1"),
        ({"pipeline": 2}, 2, {"train.ema_window": 10.0}, r"does not work with train\.ema_window"),
        ({"pipeline": 2}, 2, {"train.freeze": ["wte"]}, r"does not work with train\.freeze"),
        ({"pipeline": 2}, 2, {"engine.compile": True}, r"does not work with engine\.compile=true"),
        ({"pipeline": 2}, 2, {"engine.precision": "fp8"}, r"does not work with engine\.precision=fp8"),
        ({"pipeline": 2}, 2, {"engine.precision": "fp16"}, r"does not work with engine\.precision=fp16"),
        ({"pipeline": 2}, 2, {"train.optimizer": "./lion.py"}, r"does not work with train\.optimizer=\./lion\.py"),
        ({"pipeline": 2}, 2, {"train.loss": "./focal.py"}, r"does not work with train\.loss=\./focal\.py"),
        ({"pipeline": 2}, 2, {"train.batch_rampup": [4, 4, 100]}, r"does not work with train\.batch_rampup"),
        ({"pipeline": 2}, 2, {"train.distil": DistilConfig(teachers=["./large"])}, r"does not work with train\.distil"),
        (
            {"pipeline": 2, "schedule": "interleaved"},
            2,
            {},
            "2 stages of two chunks cannot share 2 blocks; set .*=1 or",
        ),
    ],
)
def test_what_a_pipeline_does_not_work_with_is_refused(
    mesh: dict[str, Any], world: int, settings: dict[str, Any], message: str
) -> None:
    config = config_of({})
    sections = {"engine": config.engine.model_copy(update={"mesh": config_of(mesh).engine.mesh}), "train": config.train}
    sections["engine"] = sections["engine"].model_copy(update={"micro_batch": 1})
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections[section] = sections[section].model_copy(update={name: value})
    with pytest.raises(TextmillError, match=f"engine.mesh.pipeline: .*{message}"):
        mesh_of(sections["engine"], sections["train"], shape_of(config), world)


def test_a_net_of_ones_own_is_refused() -> None:
    config = config_of({"pipeline": 2}, "llama")
    family = open_family("./examples/mynet.py")
    shape = replace(shape_of(config), family=family.NAME)
    with pytest.raises(TextmillError, match=r"engine\.mesh\.pipeline: does not work with model\.family=mynet"):
        check_pipeline(config.engine, config.train, shape, Mesh(pipeline=2))


def test_a_bert_with_labels_is_refused() -> None:
    config = config_of({"pipeline": 2}, "bert")
    shape = replace(shape_of(config), masked_head=False)
    with pytest.raises(TextmillError, match=r"engine\.mesh\.pipeline: does not work with a model without a head for"):
        check_pipeline(config.engine, config.train, shape, Mesh(pipeline=2))


def test_fp16_of_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of({"pipeline": 2})
    engine = config.engine.model_copy(update={"precision": "auto"})
    monkeypatch.setattr("textmill.devices._best_precision", lambda _: "fp16")
    with pytest.raises(TextmillError, match=r"engine\.mesh\.pipeline: does not work in fp16"):
        check_settings(engine, config.train, shape_of(config), 2)


def test_a_loop_of_ones_own_is_refused() -> None:
    engine: Any = SimpleNamespace(
        open_step=None, scaler=None, parallel=SimpleNamespace(tensor=None, mesh=Mesh(pipeline=2))
    )
    with pytest.raises(TextmillError, match=r"an own loss in a loop does not work with engine\.mesh\.pipeline"):
        next(iter(TrainingStep(engine, batch_of(0, "gpt2"), 1, 1e-3)))


def test_the_plan_counts_a_stage_and_what_it_passes_on() -> None:
    """The first of two stages: half of the blocks, both embeddings; a residual stream for each micro-batch."""
    memory = Device(False, 1 << 34, "fp32")
    found = {}
    for name, mesh in (("one", {}), ("pipeline", {"pipeline": 2})):
        config = fake_config(mesh, 2 if mesh else 1)
        shape = fake_shape(config)
        estimator = Estimator(shape, config.train)
        estimate = estimator.estimate(config.engine, 2 if mesh else 1, memory)
        found[name] = estimate, communication_of(config.engine, estimator, estimate)
    one, _ = found["one"]
    pipeline, sent = found["pipeline"]
    blocks = one.state.weights - one.state.outside_blocks
    last_norm = 2 * 64 * 4
    assert pipeline.state.weights == one.state.weights - blocks // 2 - last_norm
    tokens = config.train.batch * config.train.length
    assert sent["pipeline: residual stream"] == tokens * 64 * 4
    assert sent["pipeline: tied head"] == shape.padded_vocab * 64 * 4


def test_the_first_stage_of_a_bert_adds_zeros_to_every_sum_of_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """An all-reduce whose ranks do not have equally many numbers never ends."""
    found: list[list[float]] = []
    for mesh, world in (({}, 1), ({"pipeline": 2}, 2)):
        with fake_ranks(world):
            engine = fake_started(fake_config(mesh, world, "bert"), world)
            monkeypatch.setattr(engine.ranks, "all_reduce", lambda values: found.append(values) or values)
            for pairs in (False, True):
                engine.eval_step(masked_batch(0, pairs=pairs))
    alone, alone_with_pairs, first_stage, first_stage_with_pairs = found
    assert first_stage == [0.0] * 4 + alone[4:]
    assert first_stage_with_pairs == [0.0] * 4 + alone_with_pairs[4:]
    assert [len(alone), len(alone_with_pairs)] == [5, 6], "four sums, then the loss tokens and the pairs"


@pytest.mark.long
def test_a_run_of_two_stages_is_that_of_one_process_and_resumes_bit_for_bit(tokenized: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(tokenized, tmp_path / "root"))
    alone, stages = root / "alone", root / "stages"
    more = [
        "train.warmup=0",
        "train.save_every=2",
        "train.evaluate_every=2",
        "train.sample_prompts=ROMEO:",
        "engine.timeout=120",
    ]
    done = textmill(*train_arguments(root, alone, 4), *more)
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-m", "textmill", *train_arguments(root, stages, 4), *more, "engine.mesh.pipeline=2"]
    assert run_together(command, 2) == "ok"
    for one, other in zip(read_metrics(stages), read_metrics(alone), strict=True):
        measured = [name for name in other if name.endswith("loss")]
        assert measured
        assert {name: one[name] for name in measured} == pytest.approx(
            {name: other[name] for name in measured}, rel=1e-6
        )
    wanted = hash_checkpoint(stages, 4)
    shutil.rmtree(stages / "step-0000004")
    assert run_together(command, 2) == "ok"
    assert hash_checkpoint(stages, 4) == wanted
