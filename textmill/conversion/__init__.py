"""The command export: writes a model in the format of another tool, checks what was written, then shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.checkpoints.adapters import is_adapter
from textmill.checkpoints.folders import Checkpoint, StepChoice
from textmill.config import ExportConfig, RunConfig
from textmill.conversion.compare import write_and_check
from textmill.conversion.dataset_folder import export_dataset
from textmill.conversion.formats import open_format
from textmill.conversion.formats.hf import text_files
from textmill.conversion.gguf_models import plain_encoder
from textmill.conversion.model import Hints, Model, collect_weights
from textmill.conversion.model_card import read_licences, write_card
from textmill.errors import TextmillError
from textmill.models import find_run_model, read_shape
from textmill.models.pooling import find_pooling
from textmill.storage.files import create_folder, file_lock, format_path, hash_json, remove_folder, write_json
from textmill.storage.hub import HUB_SCHEME, upload_model
from textmill.storage.remote_folders import RemoteFolder, cache_folder, is_url
from textmill.storage.stages import MANIFEST, Force, Stage, list_changes, open_manifest
from textmill.storage.tensor_files import fingerprint_weights
from textmill.tokens.store import open_store, store_paths
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer


def export(config: RunConfig, force: Force = "no", step: StepChoice | None = None) -> Path | str:
    """Write the model of a run, or any model folder, into `export.folder`; return the folder or the URL."""
    if config.export.folder is None:
        raise TextmillError(
            "export.folder: is not set; name the folder to write: textmill export WHERE export.folder=OUT"
        )
    if is_url(config.export.folder):

        def export_locally(settings: ExportConfig, force: Force) -> None:
            export(config.model_copy(update={"export": settings}), force, step)

        return export_to_url(config.export, force, export_locally)
    folder = Path(config.export.folder)
    precision = config.export.precision
    if config.export.kind == "dataset":
        return export_dataset(config.export, config.corpus, config.folder_of("corpus"), force)
    writer = open_format(config.export.kind)
    if precision not in writer.PRECISIONS:
        raise TextmillError(
            f"export.precision: {config.export.kind} has {', '.join(writer.PRECISIONS)}, found {precision}"
        )
    checkpoint = find_run_model(config, step)
    _refuse_overlap(folder, checkpoint)
    shape = read_shape(checkpoint.folder)
    tokenizer = open_tokenizer(checkpoint.tokenizer)
    pooling = find_pooling(checkpoint.folder) if config.export.kind in ("hf", "gguf") else None
    card = write_card(config.export, config.corpus, config.folder_of("tokens"), checkpoint, shape, tokenizer, pooling)
    stage = Stage("export", folder, _made_from(config.export, checkpoint, text_files(shape, tokenizer, "fp32")), None)
    if stage.is_done(force):
        print(f"export: done already: {format_path(folder)}")
        return folder
    weights = collect_weights(shape, checkpoint.weights(), str(checkpoint.folder))
    licences = read_licences(checkpoint.folder)
    model = Model(shape, weights, tokenizer, card=card, licences=licences, pooling=pooling)
    model = plain_encoder(model) if config.export.kind == "gguf" else model
    # What a format does not say about a model is given to its reader.
    hints = Hints(vocab=shape.vocab, heads=shape.heads, activation=getattr(shape, "activation", None))
    valid = _valid_ids(config.folder_of("tokens"), tokenizer)
    files, figures = write_and_check(stage, writer, model, config.export, hints, {"precision": precision}, valid)
    merged = " with its adapter merged" if is_adapter(checkpoint.folder) else ""
    megabytes = sum(entry["bytes"] for entry in files.values()) / 1e6
    parameters = model.shape.parameters
    print(
        f"export: {format_path(folder)}: {parameters:,} parameters of {format_path(checkpoint.folder)}{merged}, "
        f"as {config.export.kind} in {precision}, {megabytes:,.1f} MB\nexport: checked: {figures}"
    )
    return folder


def _valid_ids(folder: Path, tokenizer: TextTokenizer) -> NDArray[np.int64] | None:
    """The first tokens of the valid split in a tokens folder, if there are some that this tokenizer made."""
    if not (folder / MANIFEST).is_file() or open_manifest(folder).get("tokenizer") != tokenizer.fingerprint:
        return None
    if not store_paths(folder / "valid")[0].is_file():
        return None
    return np.asarray(open_store(folder / "valid").ids[:VALID_TOKENS], np.int64)


def _made_from(config: ExportConfig, checkpoint: Checkpoint, texts: dict[str, str]) -> dict[str, Any]:
    """What decides the content."""
    settings = config.model_dump(exclude={"folder", "max_divergence", "reader"})
    made_from = {f"export.{key}": value for key, value in settings.items()}
    return {**made_from, "weights": fingerprint_weights(checkpoint.folder), "texts": hash_json(texts)}


def _refuse_overlap(folder: Path, checkpoint: Checkpoint) -> None:
    """A folder inside the model's folder would be replaced while it is read."""
    if folder.resolve().is_relative_to(checkpoint.folder.resolve()):
        raise TextmillError(
            f"export.folder: {folder} is inside {checkpoint.folder}, which is to be exported; name a folder elsewhere"
        )


VALID_TOKENS = 1024
"""Tokens of the valid split on which a quantised model is compared."""
UNFINISHED = "unfinished-export.json"
"""A file that says that what is in a folder is an export that was not finished; another export may replace it."""


def export_to_url(config: ExportConfig, force: Force, export: Callable[[ExportConfig, Force], None]) -> str:
    """Export into the cache, then copy the folder to `export.folder`; return the URL."""
    url = str(config.folder).rstrip("/")
    local = cache_folder() / "exports" / hash_json(url)[:16] / url.rpartition("/")[2]
    create_folder(local.parent, "XDG_CACHE_HOME")
    with file_lock(local.parent / "lock", f"{url}: another textmill process is exporting to it; wait for it"):
        export(config.model_copy(update={"folder": str(local)}), "changed" if force == "no" else force)
        sizes = [entry["bytes"] for entry in open_manifest(local)["files"].values()]
        try:
            copied = True
            if url.startswith(HUB_SCHEME):
                upload_model(local, url.removeprefix(HUB_SCHEME), replace=force != "no")
            else:
                copied = _copy(local, RemoteFolder(url), force)
        except TextmillError:
            remove_folder(local)
            raise
        remove_folder(local)
    result = f"copied {len(sizes) + 1} files, {sum(sizes) / 1e6:,.1f} MB, to" if copied else "done already:"
    print(f"export: {result} {url}")
    return url


def _copy(local: Path, remote: RemoteFolder, force: Force) -> bool:
    """Copy a folder, unless the same export is there already (then return False).

    The manifest is removed first and written last, so that a folder with a manifest is complete.
    """
    manifest = open_manifest(local)
    names = remote.names()
    earlier = remote.read_json(MANIFEST) if MANIFEST in names else None
    if not isinstance(earlier, dict) or earlier.get("verb") != "export":
        earlier = None
    if names and earlier is None and UNFINISHED not in names:
        raise TextmillError(
            f"{remote.url}: exists and was not made by 'textmill export'; move it away or set another folder"
        )
    if earlier is not None and force == "no":
        if earlier.get("fingerprint") == manifest["fingerprint"]:
            return False
        changes = list_changes(earlier.get("made_from") or {}, manifest["made_from"])
        raise TextmillError(
            f"{remote.url} was made from other settings or inputs: {'; '.join(changes[:4])}; choose another folder, or "
            "replace it with --force"
        )
    write_json(local.parent / UNFINISHED, {"fingerprint": manifest["fingerprint"]})
    remote.put(local.parent / UNFINISHED, UNFINISHED)
    if MANIFEST in names:
        remote.remove(MANIFEST)
    for name in manifest["files"]:
        remote.put(local / name, name)
    # Only files of the earlier export are removed: folders below this one may be exports of their own.
    earlier_files = set(earlier.get("files") or {}) if earlier is not None else set()
    for name in set(names) & earlier_files - manifest["files"].keys():
        remote.remove(name)
    remote.put(local / MANIFEST, MANIFEST)
    remote.remove(UNFINISHED)
    return True
