"""The section for serving a model over HTTP."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from textmill.config.section import Section, changeable, path
from textmill.errors import TextmillError


class ServeConfig(Section):
    """How a model is served over HTTP; `sample` holds the defaults of a request."""

    host: str = changeable("127.0.0.1", min_length=1)
    """The address to listen on; 0.0.0.0: every address of this machine."""
    port: int = changeable(8000, ge=0, le=65535)
    """The port to listen on; 0: any free port, which is printed."""
    key_file: str | None = path(None)
    """A file whose first line is the API key; default: the environment variable TEXTMILL_API_KEY, else no key is
    required."""
    model_name: str | None = changeable(None, min_length=1, max_length=200)
    """The model's name in requests and replies; default: the name of its folder."""
    adapter: Literal["merged", "separate"] = changeable("merged")
    """A LoRA adapter: merged into its base when the model is opened, or computed as a separate branch."""
    slots: int = changeable(16, ge=1, le=1024)
    """Texts generated at the same time (continuous batching)."""
    queue: int = changeable(64, ge=0, le=100_000)
    """Texts that may wait for a slot; more are refused with status 429."""
    max_connections: int = changeable(1000, ge=1, le=100_000)
    """Most open connections; beyond them the one that has waited longest for its request is closed, or the new one gets
    status 503."""
    read_timeout: float = changeable(10.0, gt=0, le=3600)
    """Seconds that a client has to send a request, plus one for every 16 KiB of it; then it gets status 408."""
    max_body: int = changeable(1_000_000, ge=1000)
    """Most bytes in the body of a request."""
    max_prompt: int | None = changeable(None, ge=1)
    """Most tokens in a prompt; default: the model's longest context."""
    max_tokens: int = changeable(4096, ge=1)
    """Most new tokens that a request may ask for."""
    max_choices: int = changeable(16, ge=1, le=1024)
    """Most texts that one request may ask for: its prompts times `n`."""
    max_inputs: int = changeable(4096, ge=1, le=100_000)
    """Most texts in one request for embeddings or to fill in."""
    max_stops: int = changeable(16, ge=0, le=64)
    """Most stop strings in a request."""
    request_timeout: float = changeable(300.0, gt=0, le=86400)
    """Seconds for a request, waiting included; then it ends with the text generated so far."""
    shutdown_grace: float = changeable(30.0, ge=0, le=3600)
    """Seconds that running requests have to finish when the server is stopped."""
    step_timeout: float = changeable(60.0, gt=0, le=86400)
    """Seconds that one step of the model may take; after that it counts as hung: /health returns 503, and waiting
    requests get an error."""
    allowed_origins: list[str] = changeable([])
    """Web origins whose pages may call the server (CORS), such as https://example.org; default: none."""
    allowed_hosts: list[str] = changeable([])
    """More host names of the server; by default a server that listens on this machine only accepts localhost and
    addresses."""
    log_prompts: bool = changeable(False)
    """Write prompts to the request log; false: only sizes and times."""

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, value: list[str]) -> list[str]:
        for origin in value:
            if origin != "*" and (not origin.startswith(("http://", "https://")) or origin.count("/") != 2):
                raise TextmillError(
                    f"serve.allowed_origins: '{origin}' is no web origin; write https://NAME or "
                    "http://NAME:PORT, without a path"
                )
        return value
