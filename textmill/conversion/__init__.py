"""The command export: writes a model as a plain Hugging Face folder, adapter merged, atomically."""

from __future__ import annotations

from pathlib import Path

from textmill.checkpoints.adapters import is_adapter
from textmill.checkpoints.folders import Checkpoint, StepChoice
from textmill.config import RunConfig
from textmill.conversion.hugging_face import read_all_weights, text_files
from textmill.errors import TextmillError
from textmill.models import find_run_model, read_shape
from textmill.storage.files import format_path, hash_json, write_bytes
from textmill.storage.stages import Force, Stage
from textmill.storage.tensor_files import encode_safetensors, fingerprint_weights
from textmill.tokens.vocabulary.tokenizer import open_tokenizer


def export(config: RunConfig, force: Force = "no", step: StepChoice | None = None) -> Path:
    """Write the model of a run, or any model folder, into `export.folder`; return the folder."""
    if config.export.folder is None:
        raise TextmillError(
            "export.folder: is not set; name the folder to write: textmill export WHERE export.folder=OUT"
        )
    folder, precision = Path(config.export.folder), config.export.precision
    checkpoint = find_run_model(config, step)
    _refuse_overlap(folder, checkpoint)
    shape, tokenizer = read_shape(checkpoint.folder), open_tokenizer(checkpoint.tokenizer)
    files = text_files(shape, tokenizer, precision)
    made_from = {
        "export.precision": precision,
        "weights": fingerprint_weights(checkpoint.folder),
        "texts": hash_json(files),
    }
    stage = Stage("export", folder, made_from, None)
    if stage.is_done(force):
        print(f"export: done already: {format_path(folder)}")
        return folder
    with stage.unfinished_folder() as part:
        accounts = {name: write_bytes(part / name, [text.encode()]) for name, text in files.items()}
        blocks = encode_safetensors(list(read_all_weights(checkpoint, shape)), precision)
        accounts["model.safetensors"] = write_bytes(part / "model.safetensors", blocks)
        stage.write_manifest(part, accounts, {"precision": precision, "parameters": shape.parameters})
    merged = " with its adapter merged" if is_adapter(checkpoint.folder) else ""
    size = accounts["model.safetensors"]["bytes"] / 1e6
    print(
        f"export: {format_path(folder)}: {shape.parameters:,} parameters of "
        f"{format_path(checkpoint.folder)}{merged}, in {precision}, {size:,.1f} MB"
    )
    return folder


def _refuse_overlap(folder: Path, checkpoint: Checkpoint) -> None:
    """A folder inside the model's folder would be replaced while it is read."""
    if folder.resolve().is_relative_to(checkpoint.folder.resolve()):
        raise TextmillError(
            f"export.folder: {folder} is inside {checkpoint.folder}, which is to be exported; name a folder elsewhere"
        )
