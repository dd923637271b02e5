"""Presets: what they set, that explicit settings override them, and that a written config can change its preset."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import yaml

from textmill.config import CorpusConfig, RunConfig, TrainConfig
from textmill.config.corpus import PRESETS, PresetName, RuleName
from textmill.config.training import TRAIN_PRESETS, TrainPresetName
from textmill.corpus.clean.rules import RULES
from textmill.errors import TextmillError


def test_preset_names() -> None:
    assert set(PRESETS) == set(get_args(PresetName))
    assert set(get_args(RuleName)) == set(RULES)
    assert set(TRAIN_PRESETS) == set(get_args(TrainPresetName))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_what_its_settings_are(preset: Any) -> None:
    config = CorpusConfig(preset=preset)
    assert {key: getattr(config, key) for key in PRESETS[preset]} == PRESETS[preset]
    assert CorpusConfig(**PRESETS[preset]).model_copy(update={"preset": preset}) == config


def test_none_is_the_default() -> None:
    assert CorpusConfig() == CorpusConfig(preset="none")
    assert CorpusConfig().rules == ["unicode", "newlines", "controls", "spaces"]


def test_web_is_megatrons_recipe() -> None:
    web = CorpusConfig(preset="web")
    assert "repair" in web.rules
    assert (web.languages, web.min_words) == (["en"], 128)


def test_explicit_settings_override_the_preset() -> None:
    web = CorpusConfig(preset="web", languages=["ko", "en"], min_words=20)
    assert (web.languages, web.min_words, web.max_digits) == (["ko", "en"], 20, PRESETS["web"]["max_digits"])


def test_a_written_config_reads_back_and_can_change_its_preset() -> None:
    config = RunConfig(corpus=CorpusConfig(preset="web", min_words=20))
    tree = yaml.safe_load(config.to_yaml())
    assert tree["corpus"]["min_words"] == 20
    assert "rules" not in tree["corpus"]
    assert RunConfig.model_validate(tree) == config
    tree["corpus"]["preset"] = "chat"
    assert RunConfig.model_validate(tree).corpus == CorpusConfig(preset="chat", min_words=20)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"languages": ["kr"]}, "corpus.languages: no language 'kr'; did you mean 'ko'?"),
        ({"languages": ["english"]}, "corpus.languages: no language 'english'"),
        ({"block_urls": [" "]}, "corpus.block_urls: found"),
    ],
)
def test_invalid_presets_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TextmillError, match=message.replace(".", r"\.").replace("?", r"\?")):
        CorpusConfig(**settings)


def test_training_presets() -> None:
    muon = TrainConfig(preset="pretrain-muon")
    assert (muon.optimizer, muon.learning_rate, muon.muon.momentum, muon.batch, muon.warmup) == (
        "muon",
        4.5e-3,
        0.9,
        32,
        0.05,
    )
    nano = TrainConfig(preset="pretrain-nano")
    assert (nano.optimizer, nano.learning_rate, nano.min_learning_rate, nano.muon.momentum, nano.batch) == (
        "muon",
        1e-2,
        6e-4,
        0.9,
        16,
    )
    assert TrainConfig(preset="pretrain-adamw").optimizer == "adamw"
    assert TrainConfig(preset="none") == TrainConfig()
    assert TrainConfig(preset="pretrain-muon", learning_rate=1e-3).learning_rate == 1e-3, (
        "an explicit setting overrides the preset"
    )
    for name, settings in TRAIN_PRESETS.items():
        assert TrainConfig(**settings).model_copy(update={"preset": name}) == TrainConfig(preset=name)


def test_a_written_run_keeps_its_training_preset_and_explicit_settings() -> None:
    config = RunConfig(train=TrainConfig(preset="pretrain-muon", batch=8, epochs=2.0))
    tree = yaml.safe_load(config.to_yaml())
    assert tree["train"]["preset"] == "pretrain-muon"
    assert (tree["train"]["batch"], tree["train"]["epochs"]) == (8, 2.0)
    assert "learning_rate" not in tree["train"]
    assert RunConfig.model_validate(tree) == config
    tree["train"]["preset"] = "pretrain-adamw"
    changed = RunConfig.model_validate(tree).train
    assert (changed.optimizer, changed.learning_rate, changed.batch) == ("adamw", 6e-4, 8)
    assert config.results("train")["train.learning_rate"] == 4.5e-3, "what decides the result is compared by itself"
    assert "train.preset" not in config.results("train")
