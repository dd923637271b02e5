"""The serve command: an HTTP server with OpenAI's API and a page to try the model."""

from __future__ import annotations

from textmill.checkpoints.folders import StepChoice
from textmill.config import RunConfig
from textmill.errors import EXIT_BUG, AlreadyReported


def serve(config: RunConfig, step: StepChoice | None = None) -> None:
    """Serve a model over HTTP until stopped."""
    # The web framework is slow to import.
    from textmill.server.connections import raise_file_limit
    from textmill.server.lifecycle import bind, open_service, run

    raise_file_limit(config.serve)
    listening = bind(config.serve.host, config.serve.port)  # first, because loading the model may take minutes
    if run(open_service(config, step), listening):
        raise AlreadyReported(EXIT_BUG)
