"""The command tune: short trials around a project's settings, and a YAML file with the best of them."""

from __future__ import annotations

import json
import shlex
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from textmill.commands.prepare import prepare
from textmill.config import RunConfig
from textmill.errors import TextmillError
from textmill.planning.tuned_file import describe_outcome, table_head, table_row, write_tuned
from textmill.planning.tuning import FOLDER, Tuning, refuse_several_processes
from textmill.storage.files import create_folder, file_lock, format_path, remove_folder
from textmill.storage.stages import Force
from textmill.tokens.splits import Splits, open_splits
from textmill.tokens.tokenize import tokenize
from textmill.tokens.vocabulary.fitting import fit_tokenizer
from textmill.training.auto_preset import fill_auto_preset
from textmill.training.new_run import check_start


def tune(config: RunConfig, minutes: float = 60.0, as_json: bool = False, force: Force = "no") -> dict[str, Any]:
    """Try learning rate, weight decay, width, batch and more, one at a time, and write FOLDER/tuned.yaml.

    A trial is a run with a complete schedule of its own. Finished trials are kept: the same command continues after a
    kill, and more `minutes` add trials.
    """
    started = time.monotonic()
    if minutes <= 0:
        raise TextmillError(f"--minutes: found {minutes:g}; give a number above 0")
    refuse_several_processes()
    check_start(config)
    folder = Path(config.folder) / FOLDER
    create_folder(folder, "folder")
    with (
        file_lock(folder / ".lock", f"{folder}: another process is tuning in this folder; wait for it"),
        redirect_stdout(sys.stderr if as_json else sys.stdout),
    ):
        if force != "no":
            for path in folder.glob("trial*"):
                remove_folder(path) if path.is_dir() else path.unlink()
        data = _run_stages(config)
        tuning = Tuning(fill_auto_preset(config), data, minutes, started)
        print(table_head(tuning.unit), flush=True)
        complete = tuning.run(lambda *row: print(table_row(*row), flush=True))
        print("\n".join(describe_outcome(tuning)))
        if not complete:
            print(f"the {minutes:g} minutes are used up; more --minutes add trials")
        written = format_path(write_tuned(tuning))
        best = written if tuning.outcome.changes else format_path(folder.parent)
        print(f"wrote {written}; next: textmill run {shlex.quote(best)}")
    summary = tuning.summary()
    if as_json:
        print(json.dumps(summary, ensure_ascii=False))
    return summary


def _run_stages(config: RunConfig) -> Splits:
    """The stages before training, as far as they are not done; their tokens."""
    if not config.tokens.use:
        for stage in (prepare, fit_tokenizer, tokenize):
            stage(config, "no")
    data = open_splits(config)
    if not data.stores("valid"):
        raise TextmillError("tune: the valid split is empty; use more text, or give it more of corpus.split")
    return data
