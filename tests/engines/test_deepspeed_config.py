"""DeepSpeed's JSON config from our settings and from users' own JSON files."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.damage import mutated
from textmill.config import RunConfig, TrainConfig
from textmill.config.deepspeed_json import read_user_config
from textmill.config.engines import DeepSpeedEngine
from textmill.config.load import parse_settings
from textmill.engines.deepspeed_config import build_json, fill_unset
from textmill.errors import TextmillError

# The JSON in dsGPT2's README: fp16, a logarithmic warm-up and a decay to a tenth.
DSGPT2 = {
    "train_batch_size": 650,
    "gradient_accumulation_steps": 1,
    "fp16": {"enabled": True},
    "gradient_clipping": 0.25,
    "optimizer": {"type": "AdamW", "params": {"lr": 3.5e-4, "betas": [0.95, 0.999], "eps": 1e-8, "weight_decay": 1e-5}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": 300000,
            "warmup_min_lr": 3.5e-5,
            "warmup_max_lr": 3.5e-4,
            "warmup_num_steps": 1000,
        },
    },
}
OURS = {
    "batch": 650,
    "clip": 0.25,
    "learning_rate": 3.5e-4,
    "min_learning_rate": 3.5e-5,
    "betas": [0.95, 0.999],
    "weight_decay": 1e-5,
    "schedule": "linear",
    "steps": 300000,
    "warmup": 1000,
    "warmup_shape": "log",
}
# A typical JSON for Hugging Face's trainer: ZeRO-3, both offloads, most values "auto".
HUGGING = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
        "sub_group_size": 1e9,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


BLOCK = 1000
SIZES = {
    "reduce_bucket_size": 1000,
    "stage3_prefetch_bucket_size": 1000,
    "stage3_max_live_parameters": 2000,
    "stage3_max_reuse_distance": 2000,
}


def built(
    tmp_path: Path, tree: Any, train: dict[str, Any], world: int = 1, micro: int = 1, auto: str = "fp32", **engine: Any
) -> Any:
    path = None
    if tree is not None:
        path = str(tmp_path / "ds_config.json")
        Path(path).write_text(json.dumps(tree))
    config = RunConfig(train=TrainConfig(**train), engine=DeepSpeedEngine(deepspeed_config=path, **engine))
    assert isinstance(config.engine, DeepSpeedEngine)
    user = read_user_config(path)
    section = fill_unset(config.engine, user)
    assert section.zero != "auto"
    found = section.precision if section.precision != "auto" else auto
    return section, build_json(
        section, config.train, user, world=world, micro_batch=micro, precision=found, block=BLOCK
    )


def test_our_settings_become_deepspeed_keys(tmp_path: Path) -> None:
    engine = {"zero": 3, "offload_optimizer": "nvme", "offload_weights": "cpu", "nvme_folder": str(tmp_path)}
    _, json_ = built(tmp_path, None, {"batch": 48, "clip": 0.5}, world=4, micro=3, auto="bf16", **engine)
    assert json_["train_batch_size"] == 48
    assert json_["train_micro_batch_size_per_gpu"] * json_["gradient_accumulation_steps"] * 4 == 48
    assert json_["gradient_clipping"] == 0.5
    offloads = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}, "offload_param": {"device": "cpu"}}
    assert json_["zero_optimization"] == {**SIZES, "stage": 3, **offloads}
    assert json_["bf16"]["enabled"]
    assert json_["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "fp16" not in json_


def test_overrides_are_merged_last(tmp_path: Path) -> None:
    overrides = {"zero_optimization": {"reduce_bucket_size": 7}, "wall_clock_breakdown": True}
    tree = {
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5, "allgather_bucket_size": 6},
        "wall_clock_breakdown": False,
    }
    section, json_ = built(tmp_path, tree, {}, deepspeed_overrides=overrides)
    assert section.zero == 1, "unset settings come from the JSON"
    assert json_["zero_optimization"] == {**SIZES, "stage": 1, "reduce_bucket_size": 7, "allgather_bucket_size": 6}
    assert json_["wall_clock_breakdown"] is True


def test_dsgpt2s_json_is_accepted_unchanged(tmp_path: Path) -> None:
    section, json_ = built(tmp_path, DSGPT2, OURS, micro=650)
    assert section.precision == "fp16"
    assert json_["fp16"]["enabled"]
    assert "optimizer" not in json_, "we build both"
    assert "scheduler" not in json_


def test_a_hugging_face_json_is_accepted_unchanged(tmp_path: Path) -> None:
    section, json_ = built(tmp_path, HUGGING, {"batch": 8}, auto="bf16")
    assert (section.zero, section.offload_optimizer, section.offload_weights) == (3, "cpu", "cpu")
    zero = json_["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert zero["sub_group_size"] == 1e9
    assert zero["stage3_max_live_parameters"] == 1e9, "values of the JSON override our bucket sizes"
    assert "auto" not in json.dumps(json_)


@pytest.mark.parametrize(
    ("user", "ours", "engine", "parts"),
    [
        ({"gradient_clipping": 1.0}, {}, {}, ["gradient_clipping is 1.0", "train.clip is 0.25"]),
        ({"train_batch_size": 64}, {}, {}, ["train_batch_size is 64", "train.batch is 650"]),
        ({"gradient_accumulation_steps": 2}, {}, {}, ["gradient_accumulation_steps is 2", "is 1"]),
        ({}, {"weight_decay": 0.1}, {}, ["optimizer.params.weight_decay is 1e-05", "train.weight_decay is 0.1"]),
        ({}, {"betas": [0.9, 0.999]}, {}, ["optimizer.params.betas", "train.betas is [0.9, 0.999]"]),
        (
            {},
            {"warmup_shape": "linear"},
            {},
            ['scheduler.params.warmup_type is "log"', 'train.warmup_shape is "linear"'],
        ),
        ({}, {"steps": 10000}, {}, ["scheduler.params.total_num_steps is 300000", "is 10000"]),
        ({}, {"schedule": "cosine"}, {}, ['scheduler.type is "WarmupDecayLR"', 'train.schedule is "cosine"']),
        ({"optimizer": {"type": "Lamb"}}, {}, {}, ['optimizer.type is "Lamb"', "train.optimizer"]),
        ({}, {}, {"precision": "fp32"}, ["fp16.enabled is true", "engine.precision"]),
        (
            {"gradient_allreduce_op": "sum"},
            {},
            {},
            ['gradient_allreduce_op is "sum"', 'the only supported value is "mean"'],
        ),
        (
            {"fp16": {"fp16_master_weights_and_grads": True}},
            {},
            {},
            ["fp16_master_weights_and_grads is true", "is false"],
        ),
        ({"torch_autocast": {"enabled": True}}, {}, {}, ["torch_autocast.enabled is true", "value is false"]),
        ({"zero_optimization": {"stage": 2}}, {}, {"zero": 1}, ["zero_optimization.stage is 2", "engine.zero is 1"]),
    ],
)
def test_a_json_that_contradicts_our_settings_is_refused(
    tmp_path: Path, user: dict[str, Any], ours: dict[str, Any], engine: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(TextmillError) as refused:
        built(tmp_path, {**DSGPT2, **user}, {**OURS, **ours}, micro=650, **engine)
    assert all(part in str(refused.value) for part in parts), refused.value


def test_all_differences_are_in_one_error_with_the_settings_that_end_them(tmp_path: Path) -> None:
    with pytest.raises(TextmillError) as refused:
        built(tmp_path, {**DSGPT2, "torch_autocast": {"enabled": True}}, {"batch": 13, "warmup": 0}, micro=13)
    differing = "batch clip learning_rate min_learning_rate betas weight_decay schedule warmup_shape warmup decay_steps"
    settings = re.findall(r"(train\.\w+)=(\S+(?: [\d.]+\])?)", str(refused.value).partition("set ")[2])
    assert sorted(key for key, _ in settings) == sorted({f"train.{name}" for name in differing.split()})
    assert "torch_autocast.enabled is true" in str(refused.value)
    agreeing = parse_settings([f"{key}={value.rstrip(';')}" for key, value in settings])["train"]
    built(tmp_path, DSGPT2, {**agreeing, "steps": 300000}, micro=650)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zero": 2, "offload_weights": "cpu"}, "engine.offload_weights: needs engine.zero=3"),
        ({"zero": 0, "offload_optimizer": "cpu"}, "engine.offload_optimizer: needs engine.zero of 1"),
        ({"zero": 2, "offload_optimizer": "nvme", "nvme_folder": "x"}, "nvme needs engine.zero=3"),
        ({"zero": 3, "offload_optimizer": "nvme"}, "engine.nvme_folder: not set"),
        ({"zero": 0, "precision": "fp16"}, "fp16 needs engine.zero of 1"),
    ],
)
def test_incompatible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TextmillError, match=message):
        DeepSpeedEngine(**settings)


def test_muon_is_refused() -> None:
    with pytest.raises(TextmillError, match=r"muon needs full matrices.*engine.kind=torch"):
        RunConfig(train=TrainConfig(optimizer="muon"), engine=DeepSpeedEngine())


@pytest.mark.parametrize(("text", "message"), [("{", "not readable as JSON"), ("[1]", "contains a list")])
def test_a_file_without_a_json_object_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(TextmillError, match=message):
        read_user_config(str(tmp_path / "broken.json"))


def test_a_damaged_json_is_accepted_or_refused_in_one_line(tmp_path: Path) -> None:
    """Random changes to three valid JSON files: never a traceback."""
    random_, refused = random.Random(3), set()
    scheduled = {
        **DSGPT2,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "steps_per_print": 10,
    }
    for number in range(600):
        tree, train = [(DSGPT2, OURS), (HUGGING, {"batch": 8}), (scheduled, OURS)][number % 3]
        damaged = mutated(tree, random_)
        try:
            _, json_ = built(tmp_path, damaged, train, micro=train["batch"], auto="bf16")
        except TextmillError as error:
            refused.add(str(error))
        else:
            assert isinstance(json_["zero_optimization"], dict)
    assert len(refused) > 60
    assert not any("\n" in message for message in refused)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"zero_optimization": True}, "zero_optimization is true; it must be an object"),
        ({"zero_optimization": None}, "zero_optimization is null; it must be an object"),
        (
            {"zero_optimization": {"offload_optimizer": "cpu"}},
            'zero_optimization.offload_optimizer is "cpu"; it must be an object or null',
        ),
        ({"fp16": "auto", "bf16": [1]}, "bf16 is [1]; it must be an object"),
        ({"optimizer": {"type": ["AdamW"]}}, 'optimizer.type is ["AdamW"]; it must be a string'),
        ({"scheduler": {"params": 3}}, "scheduler.params is 3; it must be an object"),
        ({"steps_per_print": "often"}, 'steps_per_print is "often"; it must be a number'),
        ({"communication_data_type": 7}, "communication_data_type is 7; it must be a string or null"),
        ({"flops_profiler": True}, "flops_profiler is true; it must be an object"),
        ({"wall_clock_breakdown": None}, "wall_clock_breakdown is null; it must be true or false"),
    ],
)
def test_values_of_a_wrong_type_are_refused(tree: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TextmillError, match=re.escape(f"ds_config.json: {message}")):
        built(tmp_path, tree, {})
    if tree.keys() != {"fp16", "bf16"}:
        with pytest.raises(TextmillError, match=re.escape(f"engine.deepspeed_overrides: {message}")):
            built(tmp_path, None, {}, deepspeed_overrides=tree)
