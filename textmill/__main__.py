"""Runs the command line as `python -m textmill`."""

from __future__ import annotations

from textmill.cli import command

if __name__ == "__main__":
    command()
