"""Stage folders: decide whether a stage is done, changed or unfinished, and put its finished folder in place.

A command such as prepare fills FOLDER.part and renames it to FOLDER when everything is written:

    stage = Stage("prepare", folder, made_from, config.to_yaml())
    if stage.is_done(force):                    # FOLDER exists and was made from the same settings and inputs
        return
    with stage.unfinished_folder() as folder:   # FOLDER.part; after a kill, finished files in it are used again
        files = ...                             # write them; their manifest entries
        stage.write_manifest(folder, files, fields)

manifest.json records the settings and the fingerprints of the inputs (`made_from`), and length and checksum of every
file.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from textmill.config import RunConfig
from textmill.errors import TextmillError
from textmill.storage.files import (
    create_folder,
    file_lock,
    find_damage,
    hash_json,
    is_as_written,
    read_json,
    replace_folder,
    try_remove,
    write_json,
    write_text,
)

Force = Literal["no", "changed", "yes"]
MANIFEST = "manifest.json"
INPUTS = "inputs."
"""Sources are recorded under this prefix and their names."""
MADE_FROM = "made_from.json"
RUN_YAML = "run.yaml"
PROJECT_YAML = "textmill.yaml"
"""The settings of a project, as `textmill new` writes them, next to the folders of its stages."""
YAML_CHECKSUM = "# SHA-256 of the lines above: "
"""Starts the last line of a run.yaml. It holds paths, so its checksum is not in the manifest, which holds none."""
RESULT_SECTIONS = ("corpus", "tokenizer", "tokens", "train")
"""Config sections whose settings decide the content of a folder."""


@dataclass(frozen=True)
class Stage:
    """The folder of one command and everything that decides its content."""

    command: str
    folder: Path
    made_from: dict[str, Any]
    """Settings and fingerprints of the inputs, flat: 'corpus.split' -> value."""
    run_yaml: str | None
    """The resolved config, saved next to the result; None for an exported model."""

    def is_done(self, force: Force) -> bool:
        """Whether the folder already holds this result; raises if it was made from other settings or inputs."""
        self._check_ownership()
        if force == "yes":
            return False
        if (self._unfinished / MANIFEST).is_file():
            # An earlier run was killed after its last file, before the folder got its name.
            made_from = open_manifest(self._unfinished)["made_from"]
            if made_from == self.made_from:
                self._commit()
        if not (self.folder / MANIFEST).is_file():
            return False
        manifest = open_manifest(self.folder)
        changes = list_changes(manifest["made_from"], self.made_from)
        if not changes:
            damage = find_damage(self.folder, manifest["files"], deep=False)
            if damage and force == "no":
                again = f"textmill {self.command} WHERE --force"
                raise TextmillError(f"{self.folder}: {damage[0]}; run it again with: {again}")
            return not damage
        if force == "changed":
            return False
        raise TextmillError(
            f"{self.folder} was made from other settings or inputs: {'; '.join(changes[:4])}; "
            f"set them back, choose another folder, or run this stage again from scratch with --force"
        )

    def _check_ownership(self) -> None:
        """Refuse to replace a folder that this command did not write, even with --force."""
        if not self.folder.exists() or (self.folder.is_dir() and not any(self.folder.iterdir())):
            return
        if not (self.folder / MANIFEST).is_file() or open_manifest(self.folder).get("verb") != self.command:
            raise TextmillError(
                f"{self.folder}: exists and was not made by 'textmill {self.command}'; "
                "move it away or set another folder"
            )

    @contextmanager
    def unfinished_folder(self) -> Iterator[Path]:
        """A folder to fill. It is kept when interrupted, and renamed to its final name when the block ends."""
        unfinished = self._unfinished
        inputs_hash = hash_json(self.made_from)
        create_folder(unfinished.parent, "folder")
        with file_lock(self._lock, f"{self.folder}: another textmill process is writing it; wait for it"):
            if unfinished.exists():
                record = unfinished / MADE_FROM
                has_same_inputs = record.is_file() and read_json(record) == inputs_hash
                if not has_same_inputs:
                    shutil.rmtree(unfinished)
            unfinished.mkdir(exist_ok=True)
            write_json(unfinished / MADE_FROM, inputs_hash)
            yield unfinished
            self._commit()
            self._lock.unlink()

    def discard(self) -> None:
        """Remove the unfinished folder, because its content must not be used; the caller holds its lock."""
        try_remove(self._unfinished)
        try_remove(self._lock)

    def _commit(self) -> None:
        """Rename the unfinished folder to its final name."""
        (self._unfinished / MADE_FROM).unlink(missing_ok=True)
        for pattern in ("*.tmp-*", "*.old-*"):  # left by a killed run
            for path in list(self._unfinished.rglob(pattern)):
                try_remove(path)
        replace_folder(self._unfinished, self.folder)

    @property
    def _unfinished(self) -> Path:
        return self.folder.with_name(self.folder.name + ".part")

    @property
    def _lock(self) -> Path:
        return self.folder.with_name(self.folder.name + ".part.lock")

    def write_manifest(self, folder: Path, files: dict[str, dict[str, Any]], fields: dict[str, Any]) -> None:
        """Write the manifest, last of all files: `fields`, length and checksum of every file, settings and inputs."""
        fingerprint = hash_json({name: entry["sha256"] for name, entry in files.items()})
        # run.yaml holds paths too; the manifest does not, so it is the same on every machine.
        if self.run_yaml is not None:
            write_text(folder / RUN_YAML, add_yaml_checksum(self.run_yaml))
            fields = {**fields, "run_yaml_has_checksum": True}
        manifest = {
            "verb": self.command,
            "fingerprint": fingerprint,
            **fields,
            "files": files,
            "made_from": self.made_from,
        }
        write_json(folder / MANIFEST, {**manifest, "seal": hash_json(manifest)})


def open_manifest(folder: Path, command: str = "prepare, fit-tokenizer or tokenize") -> dict[str, Any]:
    """Read the manifest of a stage folder; `command` is the one that makes it."""
    if not (folder / MANIFEST).is_file():
        raise TextmillError(
            f"{folder}: no {MANIFEST} found; run textmill {command} first, or textmill run, which runs all stages"
        )
    manifest: dict[str, Any] = read_json(folder / MANIFEST)
    return manifest


def find_stage_damage(folder: Path) -> list[str]:
    """Problems of a stage folder, including its manifest."""
    manifest = open_manifest(folder)
    seal = manifest.pop("seal", None)
    if seal != hash_json(manifest):
        return [f"{MANIFEST} does not match its own checksum"]
    damage = [] if is_as_written(folder / MANIFEST) else [f"{MANIFEST} has other bytes than those that were written"]
    if "run_yaml_has_checksum" in manifest:
        damage += find_yaml_damage(folder)
    return damage + find_damage(folder, manifest["files"])


def add_yaml_checksum(text: str) -> str:
    """A run.yaml with its own checksum as the last line, which replaces the one that it has."""
    body = text.partition(YAML_CHECKSUM)[0]
    return f"{body}{YAML_CHECKSUM}{hashlib.sha256(body.encode()).hexdigest()}\n"


def find_yaml_damage(folder: Path) -> list[str]:
    """Whether the run.yaml of a folder is missing or does not match its own checksum."""
    try:
        text = (folder / RUN_YAML).read_bytes().decode()
    except FileNotFoundError:
        return [f"{RUN_YAML} is missing"]
    except (OSError, UnicodeDecodeError) as error:
        return [f"{RUN_YAML} cannot be read ({error})"]
    return [] if text == add_yaml_checksum(text) else [f"{RUN_YAML} does not match its own checksum"]


def list_changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What changed between two flat settings, a line each; a setting that did not exist before had its default."""
    if after.keys() - before.keys():
        defaults = RunConfig().results(*RESULT_SECTIONS)
        before = {key: defaults[key] for key in after if key in defaults} | before
    lines = []
    for key in sorted(before.keys() | after.keys()):
        old = before.get(key)
        new = after.get(key)
        if old == new:
            continue
        if key.startswith(INPUTS) and (change := _describe_source(old, new)):
            lines.append(f"the source {key.removeprefix(INPUTS)} {change}")
        elif isinstance(old, dict) and isinstance(new, dict):
            lines += [f"{key}.{line}" for line in list_changes(old, new)]
        else:
            lines.append(f"{key} was {_shorten(old)}, is {_shorten(new)}")
    return lines


def _describe_source(old: Any, new: Any) -> str | None:
    """What happened to a source; None if it is the same source, read in another way."""
    if isinstance(old, dict) and isinstance(new, dict):
        if old.get("files") != new.get("files"):
            return f"has changed ({new.get('files'):,} files, {old.get('files'):,} before)"
        return "has changed" if old.get("sha256") != new.get("sha256") else None
    if isinstance(old, dict) or isinstance(new, dict):
        return "is new" if old is None else "is no longer there" if new is None else None
    return None


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:28] + "..." + text[-28:]
