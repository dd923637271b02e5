"""YAML, the command line and Python give the same config; paths, mistakes and help."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from textmill.cli import command_help
from textmill.commands.table import COMMANDS
from textmill.config import (
    BeamRunner,
    JaxEngine,
    JaxMesh,
    LocalRunner,
    RunConfig,
    SampleConfig,
    TorchEngine,
    TrainConfig,
)
from textmill.config.engines import DeepSpeedEngine, MeshConfig
from textmill.config.keys import all_fields, section_help, section_types
from textmill.config.load import build_config, merge_trees, parse_settings, read_yaml
from textmill.config.yaml_text import format_yaml, format_yaml_value
from textmill.engines.deepspeed_config import fill_unset
from textmill.errors import TextmillError
from textmill.where import open_where


def test_yaml_command_line_and_python_give_the_same_config(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("train: {learning_rate: 6e-4, batch: 8}\nengine: {micro_batch: 4}\n")
    tree, _ = read_yaml(file)
    arguments = ["train.learning_rate=6e-4", "train.batch=8", "engine.micro_batch=4"]
    python = RunConfig(train=TrainConfig(learning_rate=6e-4, batch=8), engine=TorchEngine(micro_batch=4))
    assert build_config(tree) == build_config(parse_settings(arguments)) == python


def test_the_command_line_overrides_the_file() -> None:
    tree = merge_trees({"train": {"batch": 8, "steps": 5}}, parse_settings(["train.batch=16"]))
    assert tree == {"train": {"batch": 16, "steps": 5}}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("sample.prompt=KING: to be = or not", "KING: to be = or not"),
        ("sample.prompt=007", "007"),
        ("corpus.sources=a.txt,b.txt", ["a.txt", "b.txt"]),
        ('train.sample_prompts=["a, b", c]', ["a, b", "c"]),
        ("train.sample_prompts=Hello, world", ["Hello, world"]),
        ("corpus.split=949,50,1", [949.0, 50.0, 1.0]),
        ("corpus.source_splits=held.jsonl:test, dev-*:valid", {"held.jsonl": "test", "dev-*": "valid"}),
        ("train.length=", None),
        ("train.warmup=0.1", 0.1),
        ("train.warmup=100", 100),
        ("engine.micro_batch=auto", "auto"),
    ],
)
def test_values_of_the_command_line(argument: str, value: object) -> None:
    config = build_config(parse_settings([argument]))
    section, key = argument.partition("=")[0].split(".")
    assert getattr(getattr(config, section), key) == value


def test_another_length_replaces_minutes_and_their_limit(tmp_path: Path) -> None:
    """As `textmill new` writes it: a number of steps on the command line needs no limit of epochs."""
    (tmp_path / "a.yaml").write_text("train: {minutes: 5, max_epochs: 25}")
    shorter = open_where(str(tmp_path / "a.yaml"), ["train.steps=2"]).config.train
    assert (shorter.steps, shorter.minutes, shorter.max_epochs) == (2, None, None)
    longer = open_where(str(tmp_path / "a.yaml"), ["train.minutes=9"]).config.train
    assert (longer.minutes, longer.max_epochs) == (9, 25)
    (tmp_path / "a.yaml").write_text("train: {steps: 5, max_epochs: 3}")
    limited = open_where(str(tmp_path / "a.yaml"), ["train.steps=9"]).config.train
    assert (limited.steps, limited.max_epochs) == (9, 3), "a limit that was not written for minutes stays"


def test_a_mapping_is_written_in_braces() -> None:
    arguments = ["engine.kind=deepspeed", "engine.deepspeed_overrides={zero_optimization: {overlap_comm: false}}"]
    assert build_config(parse_settings(arguments)).engine.deepspeed_overrides == {
        "zero_optimization": {"overlap_comm": False}
    }  # type: ignore[union-attr]


def test_config_is_frozen_and_reads_back_from_its_own_yaml() -> None:
    config = build_config(
        parse_settings(["train.learning_rate=1e-05", 'sample.stop=한국어: "x"\n', "model.shape.heads=6"])
    )
    with pytest.raises(Exception, match="frozen"):
        config.train.batch = 3  # type: ignore[misc]
    assert build_config(yaml.safe_load(config.to_yaml())) == config


def test_texts_that_look_like_other_values_read_back_as_texts(tmp_path: Path) -> None:
    """A folder or a field may be called 1e5, which is a number in a YAML file here."""
    texts = {name: {"text_key": name} for name in ("1e5", "null", "[]", "a: b", "- c", "12", "*", "yes", "#1", "")}
    (tmp_path / "a.yaml").write_text(format_yaml(texts), encoding="utf-8")
    assert read_yaml(tmp_path / "a.yaml")[0] == texts
    for name in texts:
        found = parse_settings([f"train.distil.teachers={format_yaml_value([name])}"])
        assert found["train"]["distil"]["teachers"] == [name]


def test_settings_of_one_call_are_not_recorded() -> None:
    once = ["sample.prompt=Once", "sample.min_tokens=150", "sample.count=3", "sample.max_tokens=160"]
    config = build_config(parse_settings(once))
    assert build_config(yaml.safe_load(config.to_yaml())).sample == SampleConfig(max_tokens=160)


def test_given_weights_replace_the_shape_of_a_file(tmp_path: Path) -> None:
    file, weights = tmp_path / "textmill.yaml", tmp_path / "weights"
    weights.mkdir()
    file.write_text("model: {size: nano, shape: {layers: 3, heads: 2, width: 64, dropout: 0.1}}\n", encoding="utf-8")
    assert open_where(str(tmp_path), []).config.model.shape.layers == 3
    model = open_where(str(tmp_path), [f"model.init_from={weights}"]).config.model
    assert (model.shape.layers, model.shape.dropout) == (None, 0.1)
    with pytest.raises(TextmillError, match="have their own shape"):
        open_where(str(tmp_path), [f"model.init_from={weights}", "model.shape.layers=2"])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ('sample.stop=[""]', "sample.stop: has an empty text"),
        ("sample.stop=", "sample.stop: has an empty text"),
        ('sample.stop=["a", ""]', "sample.stop: has an empty text"),
        ("sample.stop=\udc80", "sample.stop: has a lone surrogate"),
    ],
)
def test_an_empty_stop_string_is_refused(argument: str, message: str) -> None:
    with pytest.raises(TextmillError, match=message):
        build_config(parse_settings([argument]))


def test_more_texts_than_beams_are_refused() -> None:
    with pytest.raises(TextmillError, match=r"sample\.count: 3 is above sample\.beams=2"):
        build_config(parse_settings(["sample.beams=2", "sample.count=3"]))


def test_mistakes_name_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("# comment\ntrain:\n  batch: 8\n  stepz: 3\n")
    with pytest.raises(TextmillError, match=r"a\.yaml:4: train\.stepz: no such key; did you mean 'train\.steps'"):
        open_where(str(file), [])
    file.write_text("train:\n  batch: 8\n  batch: 9\n")
    with pytest.raises(TextmillError, match=r"a\.yaml:3: 'train\.batch' is set twice"):
        open_where(str(file), [])
    file.write_text("train: [\n")
    with pytest.raises(TextmillError, match=r"a\.yaml:2: not YAML"):
        open_where(str(file), [])


def test_paths_are_relative_to_the_file_or_to_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    (project / "textmill.yaml").write_text(
        "corpus: {sources: ['texts/*.txt', tinyshakespeare]}\ntokens: {folder: kept}\n"
    )
    monkeypatch.chdir(elsewhere)
    config = open_where(str(project), ["train.folder=mine"]).config
    assert config.corpus.sources == [str(project / "texts/*.txt"), "tinyshakespeare"]
    assert config.folder_of("corpus") == project / "corpus"
    assert config.folder_of("tokens") == project / "kept"
    assert config.folder_of("train") == elsewhere / "mine"
    (project / "plain.yaml").write_text("train: {steps: 3}\n")
    assert Path(open_where(str(project / "plain.yaml"), []).config.folder) == elsewhere / "runs" / "plain"


def test_a_folder_with_the_name_of_a_family_is_no_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of an earlier run with folder=bert."""
    monkeypatch.chdir(tmp_path)
    Path("bert").mkdir()
    Path("mynet.py").touch()
    assert open_where("quickstart", ["model.family=bert", "model.size=tiny"]).config.model.family == "bert"
    Path("own.yaml").write_text("model: {family: bert, size: tiny}\n")
    assert open_where("own.yaml", []).config.model.family == "bert"
    assert open_where("own.yaml", ["model.family=mynet.py"]).config.model.family == str(tmp_path / "mynet.py")


def test_paths_inside_groups_of_settings_are_relative_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for folder in (project / "teacher", elsewhere / "other"):
        folder.mkdir(parents=True)
    (project / "counts.json").touch()
    (project / "textmill.yaml").write_text("train: {distil: {teachers: [teacher, name/of-the-hub]}}\n")
    (project / "masked.yaml").write_text("train: {layout: masked, masked: {counts: counts.json}}\n")
    monkeypatch.chdir(elsewhere)
    train = open_where(str(project), []).config.train
    assert train.distil.teachers == [str(project / "teacher"), "name/of-the-hub"]
    masked = open_where(str(project / "masked.yaml"), ["model.family=bert"]).config.train.masked
    assert masked.counts == str(project / "counts.json")
    train = open_where(str(project), ["train.distil.teachers=[other]"]).config.train
    assert train.distil.teachers == [str(elsewhere / "other")]


def test_a_path_with_a_variable_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEXTMILL_TEST_FOLDER", str(tmp_path / "there"))
    monkeypatch.delenv("TEXTMILL_TEST_UNSET", raising=False)
    (tmp_path / "my.yaml").write_text(
        "folder: $TEXTMILL_TEST_FOLDER/x\ncorpus: {sources: ['${TEXTMILL_TEST_FOLDER}/*.txt']}\n"
    )
    config = open_where(str(tmp_path / "my.yaml"), []).config
    assert config.folder == str(tmp_path / "there" / "x")
    assert config.corpus.sources == [str(tmp_path / "there" / "*.txt")]
    with pytest.raises(TextmillError, match=r"the environment variable \$TEXTMILL_TEST_UNSET is not set"):
        open_where(str(tmp_path / "my.yaml"), ["train.folder=$TEXTMILL_TEST_UNSET/run"])
    (tmp_path / "$TEXTMILL_TEST_UNSET").mkdir()
    config = open_where(str(tmp_path / "my.yaml"), [f"train.folder={tmp_path}/$TEXTMILL_TEST_UNSET"]).config
    assert config.train.folder == str(tmp_path / "$TEXTMILL_TEST_UNSET"), "a folder of this name exists"


def test_a_mistake_on_the_command_line_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("train:\n  batch: 8\n  warmup: 20\n")
    with pytest.raises(TextmillError, match=r"^train\.batch: found 0; "):
        open_where(str(tmp_path / "my.yaml"), ["train.batch=0"])
    (tmp_path / "empty.yaml").write_text("train:\n  batch: 2\n  steps:\n")
    with pytest.raises(TextmillError, match=r"empty\.yaml:3: train\.steps: found .*; give a whole number"):
        open_where(str(tmp_path / "empty.yaml"), [])
    with pytest.raises(TextmillError, match=r"my\.yaml:3: train\.warmup: 20 is above train\.steps=10; "):
        open_where(str(tmp_path / "my.yaml"), ["train.steps=10"])
    with pytest.raises(TextmillError, match=r"^train\.min_learning_rate: 1\.0 is above "):
        open_where(str(tmp_path / "my.yaml"), ["train.min_learning_rate=1.0"])


@pytest.mark.parametrize("command", [name for name, row in COMMANDS.items() if row.sections])
def test_help_fits_a_screen_and_names_every_key_with_all(command: str) -> None:
    row = COMMANDS[command]
    text = command_help(command)
    keys = [line.strip().partition("=")[0] for line in text.splitlines() if re.match(r"  [a-z]+(\.[a-z_]+)*=", line)]
    assert keys == row.settings.split()
    assert 5 <= len(keys) <= 13
    assert len(text.splitlines()) <= 40
    assert all(key in row.keys.split() or key.partition(".")[0] in ("folder", *row.sections) for key in keys)
    every = command_help(command, every=True)
    for name, field in all_fields():
        if name.partition(".")[0] in ("folder", *row.sections) and not section_types(field.annotation):
            assert f"  {name}=" in every, name


def test_help_names_every_key() -> None:
    text = "\n".join(map(section_help, RunConfig.model_fields))
    for name, field in all_fields():
        assert f"{name}=" in text or f"{name}:" in text, name
        assert field.description or "." not in name, name


@pytest.mark.parametrize(
    ("runner", "message"),
    [
        ({"kind": "spark"}, r"runner\.kind: found 'spark'; choose one of local, beam"),
        (
            {"kind": "beam", "workers": 2},
            r"runner\.workers: runner\.kind=beam has no such key; remove it, or set runner\.kind=local",
        ),
        (
            {"options": ["--runner=x"]},
            r"runner\.options: runner\.kind=local has no such key; remove it, or set runner\.kind=beam",
        ),
        ({"kind": "beam", "options": 3}, r"runner\.options: found 3; give a list, each item text"),
        ({"workerz": 2}, r"runner\.workerz: no such key; did you mean 'runner\.workers'"),
        ({"local": {}}, r"runner\.local: no such key; "),
        (3, r"runner: found 3; give keys such as kind"),
    ],
)
def test_mistakes_of_a_section_with_kinds(runner: object, message: str) -> None:
    with pytest.raises(TextmillError, match=message):
        build_config({"runner": runner})


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"kind": "tensorflow"}, r"engine\.kind: found 'tensorflow'; choose one of torch, jax"),
        ({"kind": "jax", "device": "mps"}, r"engine\.device: found 'mps'; give one of auto, cpu, cuda, tpu"),
        ({"device": "tpu"}, r"engine\.device: found 'tpu'; choose one of auto, cpu, cuda, cuda:N, mps"),
        (
            {"kind": "jax", "compile": True},
            r"engine\.compile: engine\.kind=jax has no such key; remove it, or set engine\.kind=torch",
        ),
        ({"kind": "jax", "mesh": {"tensor": 0}}, r"engine\.mesh\.tensor: found 0; give a value at least 1"),
        (
            {"kind": "jax", "mesh": {"keep_gathered": True}},
            r"engine\.mesh\.keep_gathered: engine\.kind=jax has no such key; .* set engine\.kind=torch",
        ),
        (
            {"kind": "jax", "mesh": {"tensr": 2}},
            r"engine\.mesh\.tensr: no such key; did you mean 'engine\.mesh\.tensor'",
        ),
        (
            {"kind": "deepspeed", "device": "mps"},
            r"engine\.device: found 'mps'; choose one of auto, cpu, cuda, cuda:N$",
        ),
        ({"kind": "deepspeed", "zero": 4}, r"engine\.zero: found 4; give one of auto, 0, 1, 2, 3$"),
        (
            {"kind": "deepspeed", "deepspeed_overrides": 5},
            r"engine\.deepspeed_overrides: found 5; give keys with values below it$",
        ),
        ({"xyzabc": 1}, r"the keys of 'engine' are kind, (?!.*\bkind\b).*\bmesh\.shard\b"),
        (
            "cuda",
            r"engine: found 'cuda'; give keys such as kind, micro_batch, activation_checkpointing, timeout below it$",
        ),
    ],
)
def test_mistakes_name_the_keys_of_the_kind(engine: object, message: str) -> None:
    with pytest.raises(TextmillError, match=message):
        build_config({"engine": engine})


def test_another_kind_keeps_the_settings_it_knows() -> None:
    """A run.yaml has every key of the kind it was trained with."""
    before = yaml.safe_load(
        RunConfig(engine=JaxEngine(micro_batch=4, activation_checkpointing=1, mesh=JaxMesh(shard=2))).to_yaml()
    )
    assert build_config(merge_trees(before, parse_settings(["engine.kind=torch"]))).engine == TorchEngine(
        micro_batch=4, activation_checkpointing=1, mesh=MeshConfig(shard=2)
    )
    assert build_config(merge_trees(before, parse_settings(["engine.kind=jax"]))).engine == JaxEngine(
        micro_batch=4, activation_checkpointing=1, mesh=JaxMesh(shard=2)
    )
    with pytest.raises(TextmillError, match=r"engine\.kind: found 'caffe'; choose one of"):
        build_config(merge_trees(before, parse_settings(["engine.kind=caffe"])))


def test_a_deepspeed_file_with_an_impossible_value_is_named() -> None:
    with pytest.raises(TextmillError, match=r"ds\.json: its value for engine\.zero is 5, which is not allowed"):
        fill_unset(DeepSpeedEngine(deepspeed_config="ds.json"), {"zero_optimization": {"stage": 5}})


def test_a_kind_is_chosen_by_yaml_command_line_or_python() -> None:
    config = build_config(parse_settings(["runner.kind=beam", "runner.options=--runner=FlinkRunner,--parallelism=4"]))
    assert config.runner == BeamRunner(options=["--runner=FlinkRunner", "--parallelism=4"])
    assert build_config({"runner": {"workers": 2}}).runner == LocalRunner(workers=2)
    assert build_config(yaml.safe_load(config.to_yaml())) == config
