"""RunConfig: all settings of a run as one frozen tree, filled in the same way by YAML, the command line and Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from textmill.config.corpus import CorpusConfig, NamedSource
from textmill.config.engines import BeamRunner, EngineConfig, JaxEngine, JaxMesh, LocalRunner, RunnerConfig, TorchEngine
from textmill.config.model import RESHAPABLE, LoraConfig, ModelConfig, ShapeConfig
from textmill.config.own_files import is_own_file
from textmill.config.section import Section, field_markers, path, results_of
from textmill.config.sizes import SIZES
from textmill.config.tokenizer import MASKED_TOKENS, TokenizerConfig, TokensConfig
from textmill.config.training import DistilConfig, MaskedConfig, MuonConfig, TrainConfig
from textmill.config.usage import (
    EmbedConfig,
    EvaluateConfig,
    ExportConfig,
    PlanConfig,
    SampleConfig,
    ServeConfig,
    TrackConfig,
)
from textmill.config.yaml_text import format_yaml
from textmill.errors import TextmillError

__all__ = [
    "SIZES",
    "BeamRunner",
    "CorpusConfig",
    "DistilConfig",
    "EmbedConfig",
    "EngineConfig",
    "EvaluateConfig",
    "ExportConfig",
    "JaxEngine",
    "JaxMesh",
    "LocalRunner",
    "LoraConfig",
    "MaskedConfig",
    "ModelConfig",
    "MuonConfig",
    "NamedSource",
    "PlanConfig",
    "RunConfig",
    "SampleConfig",
    "Section",
    "ServeConfig",
    "ShapeConfig",
    "TokenizerConfig",
    "TokensConfig",
    "TorchEngine",
    "TrackConfig",
    "TrainConfig",
]

StageName = Literal["corpus", "tokenizer", "tokens", "train"]
DEFAULT_KINDS = {"runner": "local", "engine": "torch"}
"""The kind of a section that does not set one."""
STAGE_FOLDERS: dict[StageName, str] = {"corpus": "corpus", "tokenizer": "tokenizer", "tokens": "tokens", "train": "run"}


class RunConfig(Section):
    """All settings of one model: corpus, tokenizer, tokens, model, training, evaluation, serving."""

    folder: str = path(".")
    """The root folder; every stage has its folder below it."""

    def __init__(self, **sections: Any) -> None:
        try:
            super().__init__(**sections)
        except ValidationError as error:
            from textmill.config.load import first_mistake  # it reads the fields of this class

            raise TextmillError(first_mistake(error, sections)[0]) from None

    corpus: CorpusConfig = Field(default_factory=CorpusConfig)
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    tokens: TokensConfig = Field(default_factory=TokensConfig)
    runner: RunnerConfig = Field(default_factory=LocalRunner, discriminator="kind")
    model: ModelConfig = Field(default_factory=ModelConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    engine: EngineConfig = Field(default_factory=TorchEngine, discriminator="kind")
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
    sample: SampleConfig = Field(default_factory=SampleConfig)
    embed: EmbedConfig = Field(default_factory=EmbedConfig)
    serve: ServeConfig = Field(default_factory=ServeConfig)
    export: ExportConfig = Field(default_factory=ExportConfig)
    track: TrackConfig = Field(default_factory=TrackConfig)
    plan: PlanConfig = Field(default_factory=PlanConfig)

    @field_validator("runner", "engine", mode="before")
    @classmethod
    def _default_kind(cls, value: Any, info: ValidationInfo) -> Any:
        return {"kind": DEFAULT_KINDS[str(info.field_name)], **value} if isinstance(value, dict) else value

    @model_validator(mode="before")
    @classmethod
    def _add_masked_tokens(cls, data: Any) -> Any:
        """A fitted tokenizer gets the tokens that a masked model needs and that only wordpiece has of its own."""
        train = data.get("train") if isinstance(data, dict) else None
        tokenizer = data.get("tokenizer", {}) if isinstance(data, dict) else None
        if not isinstance(train, dict) or train.get("layout") != "masked" or not isinstance(tokenizer, dict):
            return data
        missing = MASKED_TOKENS.get(tokenizer.get("kind", "bpe"), ())
        given = tokenizer.get("special_tokens", [])
        if tokenizer.get("use") or not isinstance(given, list) or {"<mask>", "[MASK]"} & set(map(str, given)):
            return data
        tokens = [*given, *(token for token in missing if token not in given)]
        return {**data, "tokenizer": {**tokenizer, "special_tokens": tokens}} if missing else data

    @model_validator(mode="after")
    def _check_across_sections(self) -> RunConfig:
        _check_shape(self.model, self.train)
        _check_micro_batch(self.engine.micro_batch, self.train)
        train = self.train
        if train.unit == "steps" and train.warmup >= 1 and train.warmup > train.steps:
            raise TextmillError(
                f"train.warmup: {train.warmup} is above train.steps={train.steps}; lower it, or give a "
                "fraction such as 0.05"
            )
        settings = self.results("train")
        for refused, reason in self.engine.refused.items():
            key, _, value = refused.partition("=")
            if settings[key] == value if value else settings[key]:
                raise TextmillError(f"{key}: {reason}; set engine.kind=torch, or {'change' if value else 'remove'} it")
        if (low := train.min_learning_rate) > (high := train.learning_rate):
            raise TextmillError(f"train.min_learning_rate: {low} is above train.learning_rate={high}; lower it")
        sample = self.sample
        if sample.min_tokens > sample.max_tokens:
            raise TextmillError(
                f"sample.min_tokens: {sample.min_tokens} is above sample.max_tokens={sample.max_tokens}; lower it"
            )
        if 1 < sample.beams < sample.count:
            raise TextmillError(
                f"sample.count: {sample.count} is above sample.beams={sample.beams}, the texts that are found; lower it"
            )
        return self

    @model_validator(mode="after")
    def _check_labels(self) -> RunConfig:
        """Examples with labels need their own layout, a length, and a model that keeps its own head."""
        labels = self.corpus.labels
        train = self.train
        if labels and train.layout != "labelled":
            raise TextmillError(
                f"train.layout: found {train.layout}, but corpus.labels={labels} needs labelled; change it"
            )
        if not labels and train.layout == "labelled":
            raise TextmillError(
                "corpus.labels: is not set, which train.layout=labelled needs; set sequence-classification, "
                "token-classification or question-answering"
            )
        if not labels:
            return self
        unused = {
            "tokens.use": self.tokens.use,
            "train.distil": train.distil.teachers,
            "train.label_smoothing": train.label_smoothing,
        }
        if found := [name for name, value in unused.items() if value]:
            raise TextmillError(f"{found[0]}: cannot be used with corpus.labels={labels}; remove it")
        if train.length is None:
            raise TextmillError(
                f"train.length: is not set, and corpus.labels={labels} cuts examples to it; set it, such as 128"
            )
        return self

    @model_validator(mode="after")
    def _check_generations(self) -> RunConfig:
        """All generations but the first have a teacher."""
        train = self.train
        wrong = {
            f"train.layout={train.layout}": train.layout in ("masked", "labelled"),
            "train.distil.teachers": bool(train.distil.teachers),
            "engine.mesh.pipeline": isinstance(self.engine, TorchEngine) and self.engine.mesh.pipeline > 1,
        }
        if train.generations > 1 and (reason := self.engine.refused.get("train.distil.teachers")):
            raise TextmillError(f"train.generations: {reason}; set engine.kind=torch, or remove it")
        if train.generations > 1 and (found := [setting for setting, is_set in wrong.items() if is_set]):
            raise TextmillError(f"train.generations: does not work with {found[0]}; remove one of the two")
        return self

    def folder_of(self, stage: StageName) -> Path:
        """A stage's folder."""
        named = getattr(self, stage).folder
        return Path(named) if named else Path(self.folder) / STAGE_FOLDERS[stage]

    def results(self, *sections: str) -> dict[str, Any]:
        """The settings of these sections that decide the result, flat: 'train.chat.pack' -> True."""
        flat: dict[str, Any] = {}
        for name in sections:
            flat |= results_of(getattr(self, name), name)
        return flat

    def to_yaml(self) -> str:
        """The tree as YAML that `textmill COMMAND run.yaml` reads back, without the settings of one call."""
        tree = _drop_per_call(self.model_dump(mode="json"))
        return format_yaml(tree)


def _drop_per_call(tree: dict[str, Any]) -> dict[str, Any]:
    """A config tree without the settings of one call, such as a prompt: no folder records them."""
    kept = dict(tree)
    for name, field in RunConfig.model_fields.items():
        section = field.annotation
        values = tree.get(name)
        if isinstance(section, type) and issubclass(section, Section) and isinstance(values, dict):
            once = {key for key, one in section.model_fields.items() if field_markers(one).get("per_call")}
            kept[name] = {key: value for key, value in values.items() if key not in once}
            if once and not kept[name]:
                del kept[name]
    return kept


def _check_micro_batch(micro: int | str, train: TrainConfig) -> None:
    if isinstance(micro, int) and any(size % micro for size in train.sizes):
        near = max(size for size in range(1, micro + 1) if not any(one % size for one in train.sizes))
        rampup = f" with train.batch_rampup={','.join(map(str, train.batch_rampup))}" if train.batch_rampup else ""
        raise TextmillError(
            f"engine.micro_batch: {micro} does not divide train.batch={train.batch}{rampup}; {near} does"
        )


def shape_numbers(model: ModelConfig) -> dict[str, Any]:
    """The numbers of the named size, overridden by those of `model.shape`."""
    sizes = SIZES.get(model.family)
    if sizes is None:
        known = ", ".join(SIZES)
        raise TextmillError(
            f"model.family: no family '{model.family}'; choose {known}, or name your own file: ./mynet.py"
        )
    if model.size not in sizes:
        raise TextmillError(f"model.size: no size '{model.size}'; choose one of {', '.join(sizes)}")
    own = model.shape.model_dump(exclude_none=True) if isinstance(model.shape, ShapeConfig) else {}
    if "extra" in own:
        raise TextmillError(f"model.shape.extra: {model.family} has no numbers of its own; remove it")
    known_names = (*sizes[model.size], "inner", "attention_dropout")
    if unknown := [name for name in own if name not in known_names]:
        raise TextmillError(f"model.shape.{unknown[0]}: the family {model.family} does not have it; remove it")
    numbers = {**sizes[model.size], **own}
    return {"attention_dropout": numbers["dropout"], **numbers}


def _check_shape(model: ModelConfig, train: TrainConfig) -> None:
    own_family = is_own_file(model.family)
    if not own_family:
        shape_numbers(model)
    if model.lora and not model.init_from:
        raise TextmillError("model.lora: needs weights to adapt; set model.init_from")
    if model.init_layers and (model.lora or not model.init_from):
        why = "cannot be used with model.lora, whose base has all its blocks" if model.lora else "needs model.init_from"
        raise TextmillError(f"model.init_layers: {why}; remove it")
    own = model.shape.model_dump(exclude_none=True) if isinstance(model.shape, ShapeConfig) else {"": model.shape}
    if model.init_from and (fixed := [name for name in own if name not in RESHAPABLE]):
        key = f"model.shape.{fixed[0]}".rstrip(".")
        raise TextmillError(
            f"{key}: the weights of model.init_from have their own shape; remove {key} or model.init_from"
        )
    if isinstance(model.shape, str) or model.init_from or own_family:
        return  # the family checks numbers that are in a file, and a family in a file its own
    numbers = shape_numbers(model)
    if numbers["width"] % numbers["heads"]:
        near = [heads for heads in range(1, numbers["width"] + 1) if numbers["width"] % heads == 0]
        near.sort(key=lambda heads: abs(heads - numbers["heads"]))
        raise TextmillError(
            f"model.shape.heads: {numbers['heads']} heads do not divide the width {numbers['width']}; "
            f"model.shape.heads={near[0]} does"
        )
    if train.length and train.length > numbers["positions"]:
        raise TextmillError(
            f"train.length: {train.length} is longer than the model's {numbers['positions']} positions; "
            f"set train.length={numbers['positions']} or model.shape.positions={train.length}"
        )
