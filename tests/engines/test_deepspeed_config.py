"""What DeepSpeed is told, from our settings and from files that people have."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.damage import mutated
from textmill.config import RunConfig, TrainConfig
from textmill.config.engines import DeepSpeedEngine
from textmill.engines.deepspeed_config import json_of, read_file, settled
from textmill.errors import TextmillError

# dsGPT2's own file, as its README has it: fp16, a log warm-up and a decay to a tenth.
DSGPT2 = {
    "train_batch_size": 650, "gradient_accumulation_steps": 1, "fp16": {"enabled": True}, "gradient_clipping": 0.25,
    "optimizer": {"type": "AdamW", "params": {"lr": 3.5e-4, "betas": [0.95, 0.999], "eps": 1e-8, "weight_decay": 1e-5}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 300000, "warmup_min_lr": 3.5e-5, "warmup_max_lr": 3.5e-4, "warmup_num_steps": 1000},
    },
}  # fmt: skip
OURS = {
    "batch": 650, "clip": 0.25, "learning_rate": 3.5e-4, "min_learning_rate": 3.5e-5, "betas": [0.95, 0.999], "weight_decay": 1e-5,
    "schedule": "linear", "steps": 300000, "warmup": 1000, "warmup_shape": "log",
}  # fmt: skip
# The kind of file that goes with a Hugging Face run: ZeRO-3, both offloads, most left to the reader.
HUGGING = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": "auto", "stage3_max_live_parameters": 1e9, "sub_group_size": 1e9,
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
}  # fmt: skip


BLOCK = 1000
SIZES = {
    "reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": 1000,
    "stage3_max_live_parameters": 2000, "stage3_max_reuse_distance": 2000,
}  # fmt: skip


def told(
    tmp_path: Path, tree: Any, train: dict[str, Any], world: int = 1, micro: int = 1, auto: str = "fp32", **engine: Any
) -> Any:
    path = None
    if tree is not None:
        path = str(tmp_path / "ds_config.json")
        Path(path).write_text(json.dumps(tree))
    config = RunConfig(train=TrainConfig(**train), engine=DeepSpeedEngine(deepspeed_config=path, **engine))
    assert isinstance(config.engine, DeepSpeedEngine)
    theirs = read_file(path)
    section = settled(config.engine, theirs)
    assert section.zero != "auto"
    found = section.precision if section.precision != "auto" else auto
    return section, json_of(config, section, theirs, world=world, micro_batch=micro, precision=found, block=BLOCK)


def test_our_settings_in_deepspeeds_words(tmp_path: Path) -> None:
    engine = {"zero": 3, "offload_optimizer": "nvme", "offload_weights": "cpu", "nvme_folder": str(tmp_path)}
    _, json_ = told(tmp_path, None, {"batch": 48, "clip": 0.5}, world=4, micro=3, auto="bf16", **engine)
    assert json_["train_batch_size"] == 48
    assert json_["train_micro_batch_size_per_gpu"] * json_["gradient_accumulation_steps"] * 4 == 48
    assert json_["gradient_clipping"] == 0.5
    offloads = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}, "offload_param": {"device": "cpu"}}
    assert json_["zero_optimization"] == {**SIZES, "stage": 3, **offloads}
    assert json_["bf16"]["enabled"]
    assert json_["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "fp16" not in json_


def test_extra_is_laid_over_last(tmp_path: Path) -> None:
    extra = {"zero_optimization": {"reduce_bucket_size": 7}, "wall_clock_breakdown": True}
    tree = {
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5, "allgather_bucket_size": 6},
        "wall_clock_breakdown": False,
    }
    section, json_ = told(tmp_path, tree, {}, deepspeed_overrides=extra)
    assert section.zero == 1, "what our section leaves open is the file's"
    assert json_["zero_optimization"] == {**SIZES, "stage": 1, "reduce_bucket_size": 7, "allgather_bucket_size": 6}
    assert json_["wall_clock_breakdown"] is True


def test_dsgpt2s_own_file_is_taken_as_it_is(tmp_path: Path) -> None:
    section, json_ = told(tmp_path, DSGPT2, OURS, micro=650)
    assert section.precision == "fp16"
    assert json_["fp16"]["enabled"]
    assert "optimizer" not in json_, "both are ours"
    assert "scheduler" not in json_


def test_a_file_for_hugging_face_is_taken_as_it_is(tmp_path: Path) -> None:
    section, json_ = told(tmp_path, HUGGING, {"batch": 8}, auto="bf16")
    assert (section.zero, section.offload_optimizer, section.offload_weights) == (3, "cpu", "cpu")
    zero = json_["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert zero["sub_group_size"] == 1e9
    assert zero["stage3_max_live_parameters"] == 1e9, "the file's own stay"
    assert "auto" not in json.dumps(json_)


@pytest.mark.parametrize(
    ("theirs", "ours", "engine", "words"),
    [
        ({"gradient_clipping": 1.0}, {}, {}, ["gradient_clipping is 1.0", "train.clip is 0.25"]),
        ({"train_batch_size": 64}, {}, {}, ["train_batch_size is 64", "train.batch is 650"]),
        ({"gradient_accumulation_steps": 2}, {}, {}, ["gradient_accumulation_steps is 2", "is 1"]),
        ({}, {"weight_decay": 0.1}, {}, ["optimizer.params.weight_decay is 1e-05", "train.weight_decay is 0.1"]),
        ({}, {"betas": [0.9, 0.999]}, {}, ["optimizer.params.betas", "train.betas is [0.9, 0.999]"]),
        ({}, {"warmup_shape": "linear"}, {}, ['scheduler.params.warmup_type is "log"', 'train.warmup_shape is "linear"']),
        ({}, {"steps": 10000}, {}, ["scheduler.params.total_num_steps is 300000", "is 10000"]),
        ({}, {"schedule": "cosine"}, {}, ['scheduler.type is "WarmupDecayLR"', 'train.schedule is "cosine"']),
        ({"optimizer": {"type": "Lamb"}}, {}, {}, ['optimizer.type is "Lamb"', "train.optimizer"]),
        ({}, {}, {"precision": "fp32"}, ["fp16.enabled is true", "engine.precision"]),
        ({"gradient_allreduce_op": "sum"}, {}, {}, ['gradient_allreduce_op is "sum"', 'own is "mean"']),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, {}, {}, ["fp16.fp16_master_weights_and_grads is true", "own is false"]),
        ({"torch_autocast": {"enabled": True}}, {}, {}, ["torch_autocast.enabled is true", "own is false"]),
        ({"zero_optimization": {"stage": 2}}, {}, {"zero": 1}, ["zero_optimization.stage is 2", "engine.zero is 1"]),
    ],
)  # fmt: skip
def test_a_file_that_contradicts_is_refused_by_name(
    tmp_path: Path, theirs: dict[str, Any], ours: dict[str, Any], engine: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(TextmillError) as refused:
        told(tmp_path, {**DSGPT2, **theirs}, {**OURS, **ours}, micro=650, **engine)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"zero": 2, "offload_weights": "cpu"}, "engine.offload_weights: needs engine.zero=3"),
        ({"zero": 0, "offload_optimizer": "cpu"}, "engine.offload_optimizer: needs engine.zero of 1"),
        ({"zero": 2, "offload_optimizer": "nvme", "nvme_folder": "x"}, "nvme needs engine.zero=3"),
        ({"zero": 3, "offload_optimizer": "nvme"}, "engine.nvme_folder: not set"),
        ({"zero": 0, "precision": "fp16"}, "fp16 needs engine.zero of 1"),
    ],
)
def test_what_cannot_go_together_is_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(TextmillError, match=word):
        DeepSpeedEngine(**settings)


def test_muon_is_refused() -> None:
    with pytest.raises(TextmillError, match=r"muon needs full matrices.*engine.kind=torch"):
        RunConfig(train=TrainConfig(optimizer="muon"), engine=DeepSpeedEngine())


@pytest.mark.parametrize(("text", "word"), [("{", "not readable as JSON"), ("[1]", "holds a list")])
def test_a_file_that_is_no_settings_is_refused(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(TextmillError, match=word):
        read_file(str(tmp_path / "broken.json"))


def test_damage_of_any_kind_is_one_sentence(tmp_path: Path) -> None:
    """Seeded places of three files that are taken as they are: each is taken still, or refused in a sentence, never with a trace."""
    dice, refused = random.Random(3), set()
    scheduled = {
        **DSGPT2,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "steps_per_print": 10,
    }
    for number in range(600):
        tree, train = [(DSGPT2, OURS), (HUGGING, {"batch": 8}), (scheduled, OURS)][number % 3]
        damaged = mutated(tree, dice)
        try:
            _, json_ = told(tmp_path, damaged, train, micro=train["batch"], auto="bf16")
        except TextmillError as error:
            refused.add(str(error))
        else:
            assert isinstance(json_["zero_optimization"], dict)
    assert len(refused) > 60
    assert not any("\n" in said for said in refused)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"zero_optimization": True}, "zero_optimization is true; an object belongs there"),
        ({"zero_optimization": None}, "zero_optimization is null; an object belongs there"),
        (
            {"zero_optimization": {"offload_optimizer": "cpu"}},
            'zero_optimization.offload_optimizer is "cpu"; an object or null belongs there',
        ),
        ({"fp16": "auto", "bf16": [1]}, "bf16 is [1]; an object belongs there"),
        ({"optimizer": {"type": ["AdamW"]}}, 'optimizer.type is ["AdamW"]; a text belongs there'),
        ({"scheduler": {"params": 3}}, "scheduler.params is 3; an object belongs there"),
        ({"steps_per_print": "often"}, 'steps_per_print is "often"; a number belongs there'),
        ({"communication_data_type": 7}, "communication_data_type is 7; a text or null belongs there"),
        ({"flops_profiler": True}, "flops_profiler is true; an object belongs there"),
        ({"wall_clock_breakdown": None}, "wall_clock_breakdown is null; true or false belongs there"),
    ],
)
def test_what_is_of_another_kind_is_refused_by_name(tree: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(TextmillError, match=re.escape(f"ds_config.json: {said}")):
        told(tmp_path, tree, {})
    if tree.keys() != {"fp16", "bf16"}:
        with pytest.raises(TextmillError, match=re.escape(f"engine.deepspeed_overrides: {said}")):
            told(tmp_path, None, {}, deepspeed_overrides=tree)
