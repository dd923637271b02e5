"""Evaluation tasks, one file each, found by file name."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from textmill.evaluation.task import Task


def open_task(name: str) -> Task:
    """The task in NAME.py; which names exist is checked when the config is read."""
    return cast(Task, import_module(f"textmill.evaluation.tasks.{name}"))
