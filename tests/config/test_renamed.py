"""Old names of settings: users' files and old folders are read under today's names, and nothing is lost on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from textmill.config import RunConfig
from textmill.config.keys import all_fields, suggest_key
from textmill.config.load import build_config, parse_settings, read_recorded_config, read_user_config
from textmill.config.other_names import OTHER_NAMES
from textmill.config.renamed import (
    ADDED,
    RENAMED,
    RENAMED_VALUES,
    original_settings,
    rename_settings,
    rename_tree,
    rename_value,
)
from textmill.errors import TextmillError
from textmill.storage.stages import Stage, list_changes
from textmill.where import open_where

OLD = Path(__file__).parent / "old"
"""run.yaml, manifests and progress.json as the version before the renaming wrote them, for three projects."""
MAPPINGS = {"corpus.sides", "corpus.source_splits", "tokenizer.turns", "tokenizer.chat_turns"}
PROJECTS = ("packed", "padded", "chat")


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The tree flat: 'train.batch' -> 32; a setting whose value is a mapping stays one value."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = prefix + name
        flat |= leaves(value, f"{key}.") if isinstance(value, dict) and key not in MAPPINGS else {key: value}
    return flat


def test_the_table_maps_old_keys_to_existing_keys() -> None:
    known = {name for name, _ in all_fields()}
    assert set(RENAMED.values()) | set(RENAMED_VALUES) <= known
    assert not set(RENAMED) & known
    assert len(set(RENAMED.values())) == len(RENAMED)
    assert not set(RENAMED) & set(OTHER_NAMES.values())


def test_a_users_file_with_old_names_is_read_and_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text("train: {layout: padded, long: cut, close: true, keep: 7}\nserve: {adapter: apart}\n")
    new.write_text(
        "train: {layout: padded, padded: {long_documents: truncate, end_truncated: true}, checkpoints: {keep: 7}}\n"
        "serve: {adapter: separate}\n"
    )
    found = open_where(str(old), ["folder=here"]).config
    lines = capsys.readouterr().err.splitlines()
    assert found == open_where(str(new), ["folder=here"]).config
    assert capsys.readouterr().err == ""
    assert len(lines) == 1
    assert "old.yaml: train.long is now train.padded.long_documents; train.close is now" in lines[0]


def test_the_command_line_takes_old_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_settings(["train.apart=true", "track.offline=false"]) == {
        "train": {"packed": {"isolate_documents": True}},
        "track": {"wandb": {"offline": False}},
    }
    assert "train.apart is now train.packed.isolate_documents" in capsys.readouterr().err
    assert parse_settings(["serve.adapter=apart"]) == {"serve": {"adapter": "separate"}}


@pytest.mark.parametrize("rank", ["0", "3"])
def test_one_of_several_processes_names_the_new_key(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    parse_settings(["train.apart=true"])
    assert bool(capsys.readouterr().err) == (rank == "0")


def test_a_mistake_under_an_old_name_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("train:\n  batch: 8\n  keep: 0\n")
    with pytest.raises(TextmillError, match=r"a\.yaml:3: train\.checkpoints\.keep: found 0; give a value at least 1"):
        open_where(str(file), [])
    file.write_text("train:\n  keep: 3\n  checkpoints: {keep: 4}\n")
    with pytest.raises(
        TextmillError, match=r"a\.yaml:2: train\.keep: is now train\.checkpoints\.keep, and both are set"
    ):
        read_user_config(file)


def test_advice_names_the_new_key() -> None:
    assert suggest_key("train.apart") == "train.apart is now 'train.packed.isolate_documents'"
    assert suggest_key("rest_rate") == "train.rest_rate is now 'train.muon.adamw_rate_factor'"


@pytest.mark.parametrize("project", PROJECTS)
def test_an_old_run_yaml_keeps_every_setting(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = OLD / project / "run.yaml"
    before = leaves(yaml.safe_load(path.read_text(encoding="utf-8")))
    config = build_config(read_recorded_config(path))
    after = leaves(config.model_dump(mode="json"))
    assert set(RENAMED) & set(before), "the fixture has old names"
    for key, value in before.items():
        new = RENAMED.get(key, key)
        assert after[new] == rename_value(new, value), key
    assert capsys.readouterr().err == "", "a folder of ours is read without a notice"
    assert build_config(yaml.safe_load(config.to_yaml())) == config


@pytest.mark.parametrize("project", PROJECTS)
def test_old_stages_and_runs_count_as_done(project: str) -> None:
    config = build_config(read_recorded_config(OLD / project / "run.yaml"))
    recorded = json.loads((OLD / project / "made_from.json").read_text(encoding="utf-8"))
    for stage, before in recorded.items():
        now = {key: value for key, value in config.results(stage).items() if key in rename_settings(before)}
        settings = {key: value for key, value in before.items() if rename_settings({key: value}).keys() & now.keys()}
        assert len(now) > 5, stage
        if stage == "corpus":
            now["corpus.rules"] = sorted(now["corpus.rules"])  # as prepare records them
        assert list_changes(settings, now) == [], stage


def test_a_folder_with_an_old_manifest_is_done(tmp_path: Path) -> None:
    recorded = json.loads((OLD / "padded" / "made_from.json").read_text(encoding="utf-8"))["tokens"]
    old = Stage("tokenize", tmp_path / "tokens", recorded, "folder: .\n")
    with old.unfinished_folder() as part:
        old.write_manifest(part, {}, {})
    now = rename_settings(recorded)
    assert now["tokens.features.max_length"] == 16
    assert Stage("tokenize", tmp_path / "tokens", now, "folder: .\n").is_done("no")
    changed = Stage("tokenize", tmp_path / "tokens", now | {"tokens.features.stride": 3}, "folder: .\n")
    with pytest.raises(TextmillError, match=r"tokens\.features\.stride was 8, is 3"):
        changed.is_done("no")


def test_a_changed_setting_of_an_old_run_is_found() -> None:
    before = json.loads((OLD / "packed" / "made_from.json").read_text(encoding="utf-8"))["train"]
    after = rename_settings(before) | {"train.packed.last_window": "keep"}
    assert list_changes(before, after) == ["train.packed.last_window was drop, is keep"]


def test_hashes_over_settings_use_the_first_names() -> None:
    results = RunConfig().results("corpus", "tokenizer", "train")
    first = original_settings(results)
    assert "corpus.section" in first
    assert "corpus.section_chars" not in first
    assert rename_settings(first) | ADDED == results
    assert original_settings({"corpus.encoding": "cp949"}) == {"corpus.encoding": "cp949"}
    assert original_settings({"train.padded.long_documents": "truncate"}) == {"train.long": "cut"}


def test_renaming_ignores_values_that_are_no_sections() -> None:
    tree = {"train": 3, "tokens": {"features": [1]}, "engine": None}
    assert rename_tree(tree) == (tree, {})
