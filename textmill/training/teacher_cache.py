"""The command cache-teacher: writes the teachers' most likely tokens for every sample of a run, which reads them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from textmill.checkpoints.folders import open_model
from textmill.config import RunConfig, TrainConfig
from textmill.config.section import results_of
from textmill.config.training import TEACHER_CACHE
from textmill.engines.distillation.teachers import check_teachers, check_top_k, fingerprint_teachers, resolve_teachers
from textmill.errors import TextmillError
from textmill.storage.files import find_damage, format_path, manifest_entry, write_bytes
from textmill.storage.progress import format_amount, progress
from textmill.storage.stages import MANIFEST, Force, Stage, list_changes, open_manifest
from textmill.tokens.batches.loader import Batches, open_batches
from textmill.tokens.batches.teacher_cache import TeacherCache, encode_records, file_name, record_of, records_per_file
from textmill.tokens.splits import Splits, open_splits
from textmill.training.auto_preset import fill_auto_preset
from textmill.training.run_length import RunLength, plan_run_length
from textmill.training.start import choose_shape, use_imported_model

COMMAND = "cache-teacher"
PER_FILE = "samples_per_file"


def cache_teacher(config: RunConfig, force: Force = "no") -> Path:
    """Write the teachers' predictions for the samples of a run, next to its tokens; return their folder."""
    config = use_imported_model(config, write=True)
    config = fill_auto_preset(config.model_copy(update={"train": resolve_teachers(config.train)}))
    _check_settings(config.train)
    data = open_splits(config)
    check_teachers(config.train.distil, config.engine, config.model, data.tokenizer)
    init_model = open_model(config.model.init_from) if config.model.init_from else None
    shape = replace(choose_shape(config.model, config.train.length, data, init_model), vocab=data.tokenizer.vocab)
    check_top_k(config.train.distil, shape)
    length = config.train.length or shape.positions
    batches = open_batches(config.train, data, length=length, folder=None)
    run_length = plan_run_length(config.train, batches, length)
    samples = run_length.samples_after(run_length.steps)
    folder = Path(config.train.distil.cache or config.folder_of("tokens").with_name(TEACHER_CACHE))
    torch_part: Any = import_module("textmill.engines.distillation.teachers_torch")
    exact = torch_part.is_exact(config.engine)
    made_from = {**describe_cache(config.train, data, length), "samples": samples, "exact": exact}
    if force != "yes" and (existing := _existing(folder, made_from)):
        made_from = existing
        samples = existing["samples"]
    stage = Stage(COMMAND, folder, made_from, config.to_yaml())
    if stage.is_done(force):
        print(f"{COMMAND}: done already: {format_path(folder)}")
        return folder
    stage = replace(stage, made_from={**made_from, "exact": exact})  # damaged ones are not written as exactly as before
    record = record_of(length, config.train.distil.top_k, shape.vocab, exact=exact)
    bytes_per_token = record.itemsize / length
    print(
        f"{COMMAND}: {samples:,} samples of {length:,} tokens, {bytes_per_token:,.1f} bytes per token, "
        f"{format_amount(samples * record.itemsize, 'bytes')} in {format_path(folder)}",
        flush=True,
    )
    _check_disk(folder, samples * record.itemsize)
    # It refuses teachers that do not fit, before anything is written.
    predictor = torch_part.TopPredictor(config.engine, config.train, shape)
    with stage.unfinished_folder() as part:
        files = _write_files(part, record, samples, batches, predictor)
        stage.write_manifest(part, files, {"bytes_per_token": bytes_per_token, PER_FILE: records_per_file(record)})
    print(f"{COMMAND}: written: {format_path(folder)}; train with train.distil.cache={format_path(folder)}")
    return folder


def _existing(folder: Path, needed: dict[str, Any]) -> dict[str, Any] | None:
    """What existing predictions were made from, if they are those that are needed, or more, or more exact."""
    if not (folder / MANIFEST).is_file():
        return None
    existing: dict[str, Any] = open_manifest(folder).get("made_from", {})
    amounts = ("samples", "exact")  # more of these is fine, everything else must be equal
    has_enough = all(existing.get(name, 0) >= needed[name] for name in amounts)
    with_existing_amounts = {**needed, **{name: existing.get(name) for name in amounts}}
    return existing if has_enough and with_existing_amounts == existing else None


def _check_disk(folder: Path, needed: int) -> None:
    """Refuse to start what does not fit on the disk; files of an earlier start count as free."""
    place = next(path for path in folder.absolute().parents if path.is_dir())
    part = folder.with_name(folder.name + ".part")
    written = sum(path.stat().st_size for path in part.glob("*.bin")) if part.is_dir() else 0
    if (free := shutil.disk_usage(place).free + written) < needed:
        raise TextmillError(
            f"{folder}: needs {needed / 1e9:,.1f} GB, and the disk has {free / 1e9:,.1f} GB free; lower "
            "train.distil.top_k, or set train.distil.cache to a folder on another disk"
        )


def _check_settings(train: TrainConfig) -> None:
    distil = train.distil
    if not distil.teachers:
        raise TextmillError("train.distil.teachers: there are none to cache; name a run or a model folder")
    if not distil.top_k:
        raise TextmillError("train.distil.top_k: is 0; set how many tokens to keep at each position, such as 64")
    distil.check_samples(train.layout, train.minutes)


def describe_cache(train: TrainConfig, data: Splits, length: int) -> dict[str, Any]:
    """All that decides the predictions of a sample: its tokens, by its number in the run, and the teachers."""
    layout = f"train.{train.layout}."
    settings = {key: value for key, value in results_of(train, "train").items() if key.startswith(layout)}
    return {
        **settings,
        "train.layout": train.layout,
        "train.length": length,
        "train.seed": train.seed,
        "train.distil.teachers": fingerprint_teachers(train.distil.teachers),
        "train.distil.temperature": train.distil.temperature,
        "train.distil.top_k": train.distil.top_k,
        "tokens": data.fingerprint,
        "tokenizer": data.tokenizer.fingerprint,
    }


def _write_files(
    part: Path, record: np.dtype[Any], samples: int, batches: Batches, predictor: Any
) -> dict[str, dict[str, Any]]:
    """Write the files that are missing; return all with length and checksum."""
    files = {}
    per_file = records_per_file(record)
    names = {file_name(number): start for number, start in enumerate(range(0, samples, per_file))}
    missing = {name: start for name, start in names.items() if not (part / name).is_file()}
    total = sum(min(samples, start + per_file) - start for start in missing.values())
    with progress(COMMAND, total=total, unit="samples", second_unit="tokens") as bar:

        def records(start: int) -> Iterator[bytes]:
            stop = min(samples, start + per_file)
            step = predictor.samples_of_pass(record["ids"].shape[0])
            for first in range(start, stop, step):
                batch = batches.samples_at(np.arange(first, min(stop, first + step), dtype=np.int64))
                yield encode_records(record, batch, *predictor.predict(batch)).tobytes()
                bar.advance(len(batch.inputs), batch.inputs.size)

        for name, start in names.items():
            if name in missing:
                write_bytes(part / name, records(start))
            files[name] = manifest_entry(part / name)
    return files


def open_teacher_cache(
    train: TrainConfig, data: Splits, length: RunLength
) -> tuple[TeacherCache, dict[Path, dict[str, Any]]]:
    """The cache of a run and its files, after checking that it was made for the samples of this run."""
    folder = Path(str(train.distil.cache))
    _check_settings(train)
    if not (folder / MANIFEST).is_file():
        raise TextmillError(f"train.distil.cache: {folder}: no predictions found; write them with: textmill {COMMAND}")
    manifest = open_manifest(folder, COMMAND)
    if manifest.get("verb") != COMMAND:
        raise TextmillError(f"train.distil.cache: {folder}: was not made by 'textmill {COMMAND}'; name another folder")
    made_from = dict(manifest["made_from"])
    samples = made_from.pop("samples")
    exact = made_from.pop("exact")
    if changes := list_changes(made_from, describe_cache(train, data, length.sample_length)):
        raise TextmillError(
            f"train.distil.cache: {folder} was made for another run: {'; '.join(changes[:4])}; set them back, or write "
            f"the predictions again with: textmill {COMMAND} WHERE --force"
        )
    if (needed := length.samples_after(length.steps)) > samples:
        raise TextmillError(
            f"train.distil.cache: {folder} has the predictions of {samples:,} samples, the run needs {needed:,}; lower "
            f"train.{train.unit}, or write more with: textmill {COMMAND} WHERE --force"
        )
    if damage := find_damage(folder, manifest["files"], deep=False):
        again = f"textmill {COMMAND} WHERE --force"
        raise TextmillError(f"train.distil.cache: {folder}: {damage[0]}; write it again: {again}")
    vocab = data.tokenizer.vocab
    record = record_of(length.sample_length, train.distil.top_k, vocab, exact=exact)
    cache = TeacherCache(folder, record, samples, manifest[PER_FILE], vocab)
    files = {folder / name: {**entry, "command": COMMAND} for name, entry in manifest["files"].items()}
    return cache, files
