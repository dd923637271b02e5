"""The command import: turns a model file of another tool into a model folder for textmill and transformers."""

from __future__ import annotations

from pathlib import Path

from textmill.config import ExportConfig
from textmill.conversion.compare import write_and_check
from textmill.conversion.formats import KINDS, find_kind, open_format
from textmill.conversion.model import Hints
from textmill.errors import TextmillError, warn
from textmill.storage.files import format_path, hash_file, hash_json
from textmill.storage.remote_folders import fetch, is_url
from textmill.storage.stages import Force, Stage


def import_model(
    what: str,
    out: str,
    *,
    kind: str | None = None,
    config: str | None = None,
    tokenizer: str | None = None,
    vocab: int | None = None,
    heads: int | None = None,
    activation: str | None = None,
    force: Force = "no",
) -> Path:
    """Read a model file or folder of another tool, write it as a Hugging Face folder in fp32; return the folder.

    `kind` is the format; without it, the format is found from the file. The other arguments are facts that some formats
    do not have: see Hints.
    """
    path = fetch(what) if is_url(what) else Path(what)
    folder = Path(out)
    if folder.resolve().is_relative_to(path.resolve()) and path.is_dir():
        raise TextmillError(f"{out}: is inside {what}, which is to be read; name a folder elsewhere")
    kind = find_kind(path, kind)
    hints = Hints(Path(config) if config else None, Path(tokenizer) if tokenizer else None, vocab, heads, activation)
    made_from = {"source": _fingerprint(path), "kind": kind}
    made_from |= {name: str(value) for name, value in vars(hints).items() if value is not None}
    stage = Stage("import", folder, made_from, None)
    if stage.is_done(force):
        print(f"import: done already: {format_path(folder)}")
        return folder
    model = open_format(kind).read(path, hints)
    settings = ExportConfig(folder=str(folder), precision="fp32", reader=False)
    _, figures = write_and_check(stage, open_format("hf"), model, settings, Hints(), {})
    print(f"import: {format_path(folder)}: {model.shape.parameters:,} parameters of {what}, read as {kind}")
    print(f"import: checked: {figures}")
    if model.tokenizer is None:
        warn(f"{what} has no tokenizer that textmill reads; import it again with --tokenizer FOLDER")
    return folder


def _fingerprint(path: Path) -> str:
    """A hash of the checksums of a file, or of all files below a folder by their names."""
    if not path.is_dir():
        return hash_json({path.name: hash_file(path)})
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return hash_json({str(file.relative_to(path)): hash_file(file) for file in files})


def is_importable(path: Path) -> bool:
    """Whether a file or folder looks like a format that import reads."""
    return any(open_format(kind).matches(path) for kind in KINDS)
