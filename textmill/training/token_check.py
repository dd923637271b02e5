"""TokenCheck: compares the token files with their checksums in a thread, during the first steps, once per run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from textmill.errors import TextmillError
from textmill.processes.ranks import Ranks
from textmill.processes.signals import StopSignals
from textmill.storage.files import find_damage, read_json, write_json

CHECKED_FILE = "tokens_checked.json"
"""The files that were found intact, with length and modification time: a resumed run does not read them again."""
POLL_SECONDS = 0.2


class TokenCheck:
    """Checks in a daemon thread; `files` are paths with their manifest entries, which may name the
    command that writes them; none on ranks other than the first."""

    def __init__(self, run: Path, files: dict[Path, dict[str, Any]]) -> None:
        self.run = run
        self.files = files
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._check, name="check tokens", daemon=True)
        self._thread.start()

    def _check(self) -> None:
        try:
            checked = self._read_checked()
            for path, entry in self.files.items():
                state = [entry["sha256"], (before := path.stat()).st_size, before.st_mtime_ns]
                if checked.get(str(path)) == state:
                    continue
                if damage := find_damage(path.parent, {path.name: entry}):
                    raise TextmillError(
                        f"{path.parent}: {damage[0]}, so the training data is wrong; no further checkpoint is saved; "
                        f"put the file back, or make it again with: textmill {entry.get('command', 'tokenize')} WHERE "
                        "--force"
                    )
                checked[str(path)] = state
                write_json(self.run / CHECKED_FILE, checked)
        except BaseException as error:
            self._error = error

    def _read_checked(self) -> dict[str, Any]:
        """What earlier processes of this run found intact; a damaged list counts as empty."""
        try:
            found = read_json(self.run / CHECKED_FILE)
            return found if isinstance(found, dict) else {}
        except TextmillError:
            return {}

    @property
    def failed(self) -> bool:
        """Whether a file is damaged and `wait` will raise the error; does not wait."""
        return self._error is not None

    def wait(self, ranks: Ranks, signals: StopSignals) -> None:
        """Wait for the check, unless a stop signal arrives; raise the error that it found."""
        while self._thread.is_alive() and signals.received is None:
            ranks.report_progress()
            self._thread.join(POLL_SECONDS)
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the error that the check found so far, if there is one."""
        if self._error is not None:
            raise self._error
