"""The id of a run in a tracker: saved in the run folder, so that a resumed run has the same one."""

from __future__ import annotations

import secrets
from pathlib import Path

from textmill.storage.files import write_text

ID_FILE = "id.txt"


def read_or_create_id(folder: Path, name: str, start: int) -> str:
    """The id in a tracker's folder; a new run, at step 0, gets a new one with the name of its folder."""
    id_file = folder / ID_FILE
    if start > 0 and id_file.is_file() and (known := id_file.read_text(encoding="utf-8").strip()):
        return known
    plain = "".join(char if char.isascii() and char.isalnum() else "-" for char in name).strip("-")
    new_id = f"{plain[:40] or 'run'}-{secrets.token_hex(4)}"
    id_file.parent.mkdir(parents=True, exist_ok=True)
    write_text(id_file, new_id + "\n")
    return new_id
