"""The planning rules: sizes of published optima, a plan for every text, and more minutes never make a smaller net."""

from __future__ import annotations

import itertools
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.support.machines import H200, TWO_CORES
from textmill.commands.run import second_generation
from textmill.config import RunConfig, TrainConfig
from textmill.config.load import parse_settings, read_yaml
from textmill.corpus.inspection import RecordFacts
from textmill.engines import on_torch
from textmill.models import open_family
from textmill.planning.plan import (
    COMPILE_SECONDS,
    FIT_RATE,
    FITTED_BYTES,
    STAGE_RATES,
    MachineProfile,
    TextProfile,
    default_minutes,
    fitted_fraction,
    plan_for,
)
from textmill.planning.project_file import Project, count_model_parameters, project_yaml
from textmill.training.auto_preset import MAX_EPOCHS

ENGLISH = {512: 2.1, 1024: 2.8, 2048: 3.3, 4096: 3.7, 8192: 4.0, 16384: 4.3, 32000: 4.5}
FLAT = MachineProfile("cuda", "a card", 16, 140 << 30, ((1_000_000, 4e14), (100_000_000, 4e14)), 0.0)
"""A card that reaches the same with any net, as the published table assumes."""


def text_of(size: float, **more: float) -> TextProfile:
    return replace(TextProfile(round(size), max(1, round(size / 5000)), 0.0, ENGLISH, {"Latin": 1.0}), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("million_tokens", "seconds", "million_parameters"),
    [(20, 60, 19), (20, 170, 63), (52, 60, 19), (52, 170, 32), (250, 170, 32), (250, 540, 58)],
)
def test_sizes_are_near_those_of_the_scaling_laws(million_tokens: int, seconds: int, million_parameters: int) -> None:
    """Compute-optimal sizes at 4e14 FLOP/s, where repeated text allows them; the rules choose from a few widths."""
    text = text_of(million_tokens * 1e6 * 4.3 / 0.9)
    other = COMPILE_SECONDS + sum(text.bytes / rate / 4 for rate in STAGE_RATES.values())
    other += min(text.bytes, FITTED_BYTES) / FIT_RATE
    plan = plan_for(text, FLAT, (seconds + other) / 60)
    assert million_parameters / 2.1 < plan.parameters / 1e6 < million_parameters * 2.1


@given(st.floats(2e3, 1e11), st.floats(0.2, 600), st.sampled_from([TWO_CORES, H200]))
def test_every_text_gets_a_plan_that_the_config_accepts(size: float, minutes: float, machine: MachineProfile) -> None:
    plan = plan_for(text_of(size), machine, minutes)
    shape = {"layers": plan.layers, "heads": plan.heads, "width": plan.width, "dropout": plan.dropout}
    RunConfig.model_validate(
        {
            "model": {"shape": shape},
            "tokenizer": {"vocab": plan.vocab},
            "train": {
                "length": plan.length,
                "batch": plan.batch,
                "steps": plan.steps,
                "optimizer": "muon",
                "learning_rate": plan.learning_rate,
                "weight_decay": plan.weight_decay,
                "muon": {"adamw_rate_factor": plan.adamw_rate_factor},
            },
        }
    )
    assert plan.width % plan.heads == 0
    assert plan.epochs <= MAX_EPOCHS
    assert math.isfinite(plan.weight_decay)
    assert plan.seconds <= max(5.0, 60 * minutes) * 1.01


@given(st.floats(1e5, 1e10), st.floats(0.5, 100), st.floats(1, 10), st.sampled_from([TWO_CORES, H200]))
def test_more_minutes_never_make_a_smaller_net(
    size: float, minutes: float, times: float, machine: MachineProfile
) -> None:
    text = text_of(size)
    assert plan_for(text, machine, minutes * times).width >= plan_for(text, machine, minutes).width


def test_duplicates_count_once() -> None:
    assert plan_for(text_of(2e7, duplicates=0.5), H200, 5).train_tokens < plan_for(text_of(2e7), H200, 5).train_tokens


def test_without_minutes_a_small_text_ends_when_more_does_not_help() -> None:
    assert default_minutes(text_of(1e6), H200) < 3
    assert default_minutes(text_of(1e9), H200) == 30
    assert default_minutes(text_of(1e8), TWO_CORES) == 5


def test_a_vocabulary_is_fitted_on_20_mb_at_most_of_long_documents_too() -> None:
    """Pieces of them are sampled; of some hundred short documents all are used."""
    assert fitted_fraction(text_of(1e9, documents=10), 10) == 0.02
    assert fitted_fraction(text_of(1e9, documents=1e6), 10) == 0.02
    assert fitted_fraction(text_of(5e7, documents=1000), 10) == 1
    assert fitted_fraction(text_of(1e7, documents=2), 10) == 1
    assert fitted_fraction(text_of(1e7, documents=1e4), 1) == 0.5


def test_the_korean_trial() -> None:
    """bench/LOG.md: of the nets tried on 12 MB of Korean, a Llama of 6 x 384 with a weight decay of 4 in batches of
    16,900 tokens was the best on text from elsewhere."""
    korean = {512: 2.39, 1024: 3.49, 2048: 4.41, 4096: 5.23, 8192: 5.95, 16384: 6.55, 32000: 7.03}
    plan = plan_for(TextProfile(12_000_000, 8300, 0.0, korean, {"Hangul": 1.0}), H200, 1, family="llama")
    assert (plan.layers, plan.width) == (6, 384)
    assert 7 < plan.epochs <= 10
    tokens = plan.batch * plan.length
    assert plan.weight_decay / tokens == pytest.approx(4 / 16_900, rel=0.3), "the same timescale"
    assert 8_000 < tokens < 20_000


def test_the_plan_for_shakespeare_is_near_the_best_trials() -> None:
    """bench/LOG.md: on nanoGPT's split, a Llama of 6 x 384 in 10 epochs, with weight decay 4 in batches of 5,120 tokens
    or with a vocabulary of 512."""
    shakespeare = {512: 1.88, 1024: 2.26, 2048: 2.65, 4096: 3.0, 8192: 3.3}
    text = TextProfile(1_003_854, 286, 0.0, shakespeare, {"Latin": 1.0})
    plan = plan_for(text, H200, 1, family="llama")
    assert (plan.layers, plan.width, plan.vocab, plan.epochs) == (6, 384, 512, 10)
    assert plan.weight_decay / (plan.batch * plan.length) == pytest.approx(4 / 5120, rel=0.3)
    assert text.held_out_percent == 2


def test_compiling_must_save_more_time_than_it_takes() -> None:
    assert not plan_for(text_of(60e6), H200, 0.8).compiled
    assert plan_for(text_of(60e6), H200, 3).compiled
    assert not plan_for(text_of(1e6), TWO_CORES, 5).compiled


@pytest.mark.parametrize("cores", [4, 16])
def test_what_is_planned_as_compiled_is_compiled_by_the_engine(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file says nothing of `engine.compile` then, so that auto decides."""
    monkeypatch.setattr(on_torch, "usable_cores", lambda: cores)
    monkeypatch.setattr(on_torch, "peak_flops_of", lambda device: 989e12)
    planned = 0
    for size, minutes in itertools.product((1e6, 1e7, 3e7, 1e8, 1e9), (1, 1.5, 2, 3, 5, 30)):
        plan = plan_for(text_of(size), replace(H200, cores=cores), minutes)
        if plan.compiled:
            steps = math.ceil(MAX_EPOCHS * plan.train_tokens / (plan.batch * plan.length))
            train = TrainConfig(minutes=minutes, batch=plan.batch, length=plan.length)
            longest: Any = train.model_copy(update={"steps": steps})
            assert on_torch._is_long(longest, plan, torch.device("cuda"), 1), (size, minutes)  # type: ignore[arg-type]
            planned += 1
    assert planned >= 5


def test_a_run_that_its_epochs_end_soon_is_not_compiled_whatever_its_minutes() -> None:
    plan = plan_for(text_of(1e6), H200, 30)
    assert plan.ends_early
    assert plan.seconds < 90, "compiling pays from a minute and a half on"
    assert not plan.compiled
    assert plan_for(text_of(1e9), H200, 30).compiled


def test_a_second_generation_is_planned_if_the_text_needs_less_than_the_time() -> None:
    text = text_of(1e5)
    short, long = (plan_for(text, TWO_CORES, minutes) for minutes in (0.2, 600))
    once = plan_for(text, TWO_CORES, 3.5 * long.seconds / 60 + 0.2)  # a second one would have no time to spare
    assert [plan.ends_early for plan in (short, once, long)] == [False, True, True]
    assert [plan.generations for plan in (short, once, long)] == [1, 1, 2]
    assert long.all_seconds == 3 * long.seconds, "a step with a teacher takes up to twice as long"
    for plan in (short, once, long):
        written = project_yaml(Project("x", ["a.txt"], RecordFacts(), text, TWO_CORES, plan))
        config = RunConfig.model_validate(yaml.safe_load(written))
        assert config.train.generations == plan.generations
        assert ("0.02 to 0.04 bits per byte better" in written) == (plan.generations == 2)
    assert plan_for(text, TWO_CORES, 600, "bert").generations == 1
    minutes = default_minutes(text, TWO_CORES)
    assert plan_for(text, TWO_CORES, minutes).generations == 2, "they are in the minutes if the user names none"


@pytest.mark.parametrize("key", ["content", "[]", "1e5", "a.b[]"])
def test_the_field_with_the_text_reads_back(key: str, tmp_path: Path) -> None:
    text = text_of(1e5)
    plan = plan_for(text, TWO_CORES, 1)
    project = Project("x", ["*.json", "1e5"], RecordFacts(text_key=key), text, TWO_CORES, plan)
    (tmp_path / "a.yaml").write_text(project_yaml(project))
    corpus = read_yaml(tmp_path / "a.yaml")[0]["corpus"]
    assert (corpus["text_key"], corpus["sources"]) == (key, ["*.json", "1e5"])


@pytest.mark.parametrize("minutes", [0.2, 600])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_the_parameters_of_a_plan_are_those_of_its_file(family: str, minutes: float, tmp_path: Path) -> None:
    text = text_of(1e5)
    plan = plan_for(text, TWO_CORES, minutes, family)
    project = Project("x", ["a.txt"], RecordFacts(), text, TWO_CORES, plan, family)
    (tmp_path / "a.yaml").write_text(project_yaml(project))
    model = RunConfig.model_validate(read_yaml(tmp_path / "a.yaml")[0]).model
    shape = open_family(family).shape_of(model, vocab=plan.vocab, eos_id=0, length=plan.length)
    assert count_model_parameters(project) == shape.parameters


@pytest.mark.parametrize("folder", ["x", "my text", "a, b", "it's #1", "a*b/*", "- {c}: d", "!tag"])
def test_proposed_commands_can_be_pasted_for_any_folder(folder: str) -> None:
    text = text_of(1e5)
    project = Project(folder, ["a.txt"], RecordFacts(), text, TWO_CORES, plan_for(text, TWO_CORES, 600))
    commands = [line.lstrip("# ") for line in project_yaml(project).splitlines() if line.startswith("#   textmill run")]
    assert shlex.split(commands[0], comments=True) == ["textmill", "run", folder]
    where = shlex.quote(folder)
    words = shlex.split(second_generation(where, f"{folder}/run"))
    assert words[:3] == ["textmill", "run", folder]
    found = parse_settings(words[3:])["train"]
    assert (found["folder"], found["distil"]["teachers"]) == (f"{folder}/run-2", [f"{folder}/run"])
