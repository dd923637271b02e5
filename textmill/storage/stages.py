"""How a verb owns its folder: done already, changed, half made, or new; and how it appears whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from textmill.config import RunConfig
from textmill.config.renamed import rename_settings
from textmill.errors import TextmillError
from textmill.storage.files import (
    faults_of,
    hash_json,
    locked,
    new_folder,
    read_json,
    replace_folder,
    write_json,
    write_text,
)

Force = Literal["no", "changed", "yes"]
MANIFEST = "manifest.json"
MADE_FROM = "made_from.json"
RESULTS = ("corpus", "tokenizer", "tokens", "train")
"""The sections whose settings decide what a folder holds."""


@dataclass(frozen=True)
class Stage:
    """One verb's folder and everything that decides its content."""

    verb: str
    folder: Path
    made_from: dict[str, Any]
    """Settings and fingerprints of inputs, flat: 'corpus.split' -> value."""
    run_yaml: str | None
    """The resolved config, kept beside the result; none beside what is for others."""

    def done(self, force: Force) -> bool:
        """Whether the folder holds this very result already; refuses a folder made from something else."""
        self._refuse_foreign()
        if force == "yes":
            return False
        if (self._part / MANIFEST).is_file() and rename_settings(
            open_manifest(self._part)["made_from"]
        ) == self.made_from:
            self._put_in_place()  # an earlier run was killed in its very last moment
        if not self.folder.exists():
            return False
        if not (self.folder / MANIFEST).is_file():
            return False
        manifest = open_manifest(self.folder)
        changes = differences(manifest["made_from"], self.made_from)
        if not changes:
            faults = faults_of(self.folder, manifest["files"], deep=False)
            if faults and force == "no":
                raise TextmillError(f"{self.folder}: {faults[0]}; make it anew with: textmill {self.verb} --force")
            return not faults
        if force == "changed":
            return False
        raise TextmillError(
            f"{self.folder} was made from something else: {'; '.join(changes[:4])}; "
            f"set it back, choose another folder, or start this stage anew with --force"
        )

    def _refuse_foreign(self) -> None:
        """A folder that this verb did not make is never replaced, not even by force."""
        if not self.folder.exists() or (self.folder.is_dir() and not any(self.folder.iterdir())):
            return
        made = (self.folder / MANIFEST).is_file() and open_manifest(self.folder).get("verb") == self.verb
        if not made:
            raise TextmillError(
                f"{self.folder}: stands there and was not made by 'textmill {self.verb}'; move it away or set another folder"
            )

    @contextmanager
    def building(self) -> Iterator[Path]:
        """A half-made folder to fill; kept when interrupted, put in place with its manifest when filled."""
        part, mark = self._part, hash_json(self.made_from)
        new_folder(part.parent, "folder")
        with locked(part.with_name(part.name + ".lock"), f"{self.folder}: another textmill is making it; wait for it"):
            if part.exists() and not ((part / MADE_FROM).is_file() and read_json(part / MADE_FROM) == mark):
                shutil.rmtree(part)
            part.mkdir(exist_ok=True)
            write_json(part / MADE_FROM, mark)
            yield part
            self._put_in_place()
            part.with_name(part.name + ".lock").unlink()

    def _put_in_place(self) -> None:
        (self._part / MADE_FROM).unlink(missing_ok=True)
        for pattern in ("*.tmp-*", "*.old-*"):  # what a killed run left half written or half removed
            for path in self._part.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        replace_folder(self._part, self.folder)

    @property
    def _part(self) -> Path:
        return self.folder.with_name(self.folder.name + ".part")

    def finish(self, part: Path, files: dict[str, dict[str, Any]], facts: dict[str, Any]) -> None:
        """Write the manifest, as the very last thing: facts, every file's length and checksum, and what it was made from."""
        fingerprint = hash_json({name: account["sha256"] for name, account in files.items()})
        # The config says where and how, too; a manifest says what, and is the same wherever it was made.
        if self.run_yaml is not None:
            write_text(part / "run.yaml", self.run_yaml)
        manifest = {"verb": self.verb, "fingerprint": fingerprint, **facts, "files": files, "made_from": self.made_from}
        write_json(part / MANIFEST, {**manifest, "seal": hash_json(manifest)})


def open_manifest(folder: Path) -> dict[str, Any]:
    """A stage folder's manifest; the error says which verb makes the folder."""
    if not (folder / MANIFEST).is_file():
        raise TextmillError(f"{folder}: no {MANIFEST} there; the stage before has not been run")
    manifest: dict[str, Any] = read_json(folder / MANIFEST)
    return manifest


def faults_in_stage(folder: Path) -> list[str]:
    """What is wrong with a stage's folder, its manifest among it."""
    manifest = open_manifest(folder)
    seal = manifest.pop("seal", None)
    if seal != hash_json(manifest):
        return [f"{MANIFEST} does not match its own checksum"]
    return faults_of(folder, manifest["files"])


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What changed between two flat settings, a line each; a setting that did not exist before had its default."""
    before = rename_settings(before)
    lines, defaults = [], RunConfig().results(*RESULTS) if after.keys() - before.keys() else {}
    before = {key: defaults[key] for key in after if key in defaults} | before
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += [f"{key}.{line}" for line in differences(old, new)]
        elif old != new:
            lines.append(f"{key} was {_short(old)}, is {_short(new)}")
    return lines


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:28] + "..." + text[-28:]
