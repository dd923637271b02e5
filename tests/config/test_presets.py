"""Presets: what they set, that explicit settings stand above them, and that a written config can change its preset."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import yaml

from textmill.config import CorpusConfig, RunConfig
from textmill.config.presets import NONE, PRESETS, PresetName, RuleName
from textmill.corpus.clean import RULES
from textmill.errors import TextmillError


def test_names() -> None:
    assert set(PRESETS) == set(get_args(PresetName))
    assert set(get_args(RuleName)) == set(RULES)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_what_its_settings_are(preset: Any) -> None:
    config = CorpusConfig(preset=preset)
    assert {key: getattr(config, key) for key in NONE} == PRESETS[preset]
    assert CorpusConfig(**PRESETS[preset]).model_copy(update={"preset": preset}) == config


def test_none_is_the_default() -> None:
    assert CorpusConfig() == CorpusConfig(preset="none")
    assert CorpusConfig().rules == ["unicode", "newlines", "controls", "spaces"]
    assert {name: field.get_default() for name, field in CorpusConfig.model_fields.items() if name in NONE} == NONE


def test_web_is_megatrons_recipe() -> None:
    web = CorpusConfig(preset="web")
    assert "repair" in web.rules
    assert (web.languages, web.min_words) == (["en"], 128)


def test_what_is_said_stands_above() -> None:
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
        ({"markers": [""]}, "corpus.markers: found"),
        ({"block_extensions": [" "]}, "corpus.block_extensions: found"),
    ],
)
def test_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TextmillError, match=message.replace(".", r"\.").replace("?", r"\?")):
        CorpusConfig(**settings)
