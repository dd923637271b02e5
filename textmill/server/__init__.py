"""The command serve: a model answers over HTTP, as OpenAI's API does, with a page to try it."""

from __future__ import annotations

from textmill.checkpoints.folders import StepChoice
from textmill.config import RunConfig
from textmill.errors import EXIT_BUG, AlreadyReported


def serve(config: RunConfig, step: StepChoice = "latest") -> None:
    """Answer over HTTP until stopped."""
    from textmill.server.connections import (
        raise_file_limit,
    )  # the web framework and the model's are loaded only when asked
    from textmill.server.lifecycle import bind, run
    from textmill.server.model_setup import open_service

    raise_file_limit(config.serve)
    listening = bind(config.serve.host, config.serve.port)  # before the model, which may take minutes to load
    if run(open_service(config, step), listening):
        raise AlreadyReported(EXIT_BUG)
