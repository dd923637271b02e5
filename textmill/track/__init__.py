"""Trackers of training metrics: the console, metrics.jsonl, and one file on_KIND.py for each further tracker."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from textmill.config import TrackConfig
from textmill.errors import TextmillError, warn
from textmill.track.console import PlainConsole, Throughput, new_console
from textmill.track.jsonl import METRICS_FILE, NOTES_FILE, JsonLines, NoteLines, truncate_after

__all__ = ["Tracker", "Trackers", "check_trackers", "open_trackers"]


class Tracker(Protocol):
    """Receives the metrics of each logged step."""

    def log(self, step: int, values: dict[str, float]) -> None: ...
    def mark(self, step: int, text: str) -> None: ...
    def close(self) -> None: ...


class Trackers:
    """All trackers of a run; one that fails is switched off with a warning and does not stop training."""

    def __init__(self, console: PlainConsole | None = None) -> None:
        self._console = console
        self._open: dict[str, Tracker] = {"console": console} if console else {}
        self._notes: NoteLines | None = None

    def add(self, name: str, opener: Callable[[], Tracker]) -> None:
        """Open another tracker; a TextmillError is raised, any other error is only a warning."""
        try:
            self._open[name] = opener()
        except TextmillError:
            raise
        except Exception as error:
            _warn(name, error)

    @property
    def names(self) -> list[str]:
        """The trackers that are open."""
        return list(self._open)

    def keep_notes(self, path: Path, *, append: bool) -> None:
        """Write all notes to this file too."""
        try:
            self._notes = NoteLines(path, append=append)
        except OSError as error:
            _warn(NOTES_FILE, error)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Send the metrics of one step to every tracker."""
        for name in self.names:
            self._call(name, lambda tracker: tracker.log(step, values))

    def mark(self, step: int, text: str) -> None:
        """Mark a step in the curves of every tracker: settings have changed from there on."""
        for name in self.names:
            self._call(name, lambda tracker: tracker.mark(step, text))

    def note(self, text: str) -> None:
        """Print a line on the console, and keep it in the file of notes."""
        if (console := self._console) is not None:
            self._call("console", lambda _: console.note(text))
        if self._notes is not None:
            try:
                self._notes.write(text)
            except Exception as error:
                self._notes = None
                _warn(NOTES_FILE, error)

    def advance(self, step: int) -> None:
        """Show that a step is done; it may be logged or not."""
        if (console := self._console) is not None:
            self._call("console", lambda _: console.advance(step))

    def _call(self, name: str, call: Callable[[Tracker], object]) -> None:
        """Call a tracker if it is open; one that fails is switched off."""
        if (tracker := self._open.get(name)) is None:
            return
        try:
            call(tracker)
        except Exception as error:
            del self._open[name]
            with suppress(Exception):
                tracker.close()
            _warn(name, error)

    def set_steps(self, steps: int) -> None:
        """Tell the console the number of steps of the run, if it was not known at the start."""
        if self._console is not None:
            self._console.throughput.steps = steps

    def close(self) -> None:
        """Close every tracker; a second call does nothing."""
        if self._notes is not None:
            self._notes.close()
            self._notes = None
        while self._open:
            name, tracker = self._open.popitem()
            try:
                tracker.close()
            except Exception as error:
                _warn(name, error)


def open_trackers(config: TrackConfig, folder: Path, throughput: Throughput, settings: dict[str, Any]) -> Trackers:
    """Open the trackers of the config; metrics logged after the step at which the run starts are removed, since these
    steps run again."""
    modules = {kind: _import_tracker(kind) for kind in config.kinds}
    start = throughput.start
    trackers = Trackers(new_console(throughput, sys.stdout))
    try:
        trackers.add(METRICS_FILE, lambda: _open_json_lines(folder, start))
        trackers.keep_notes(folder / NOTES_FILE, append=start > 0)
        for kind, module in modules.items():
            if module is not None:
                trackers.add(kind, lambda module=module: module.new_tracker(config, folder, start, settings))  # type: ignore[misc]
            if kind == "wandb" and kind in trackers.names:
                trackers.note(module.describe_mode(config, folder))
    except BaseException:
        trackers.close()
        raise
    return trackers


def check_trackers(config: TrackConfig) -> list[str]:
    """Raise an error for a tracker whose package is not installed; return those whose package is broken."""
    return [kind for kind in config.kinds if _import_tracker(kind) is None]


def _open_json_lines(folder: Path, start: int) -> Tracker:
    truncate_after(folder / METRICS_FILE, start)
    return JsonLines(folder / METRICS_FILE)


def _import_tracker(kind: str) -> Any:
    """Import on_KIND.py; an error if its package is not installed, a warning if the package is broken."""
    try:
        return import_module(f"textmill.track.on_{kind}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != kind:
            raise
        raise TextmillError(f"track.kinds: '{kind}' needs {kind}; run: pip install 'textmill[track]'") from None
    except Exception as error:
        _warn(kind, error)
        return None


def _warn(name: str, error: Exception) -> None:
    text = " ".join(str(error).split()) or "no reason given"
    warn(f"{name} is switched off: {type(error).__name__}: {text}; training continues")
