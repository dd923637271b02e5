"""Section for serving a model over HTTP."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from textmill.config.section import Section, changeable, path
from textmill.errors import TextmillError


class ServeConfig(Section):
    """How a model is served over HTTP; what a request leaves unsaid comes from `sample`."""

    host: str = changeable("127.0.0.1", min_length=1)
    """The address to listen on; 0.0.0.0: every address of this machine."""
    port: int = changeable(8000, ge=0, le=65535)
    """The port to listen on; 0: any free one, which is said."""
    key_file: str | None = path(None)
    """A file whose first line is the API key; without one the environment's TEXTMILL_API_KEY, and without that no key is asked."""
    model_name: str | None = changeable(None, min_length=1, max_length=200)
    """The model's name in requests and replies; its folder's if not said."""
    adapter: Literal["merged", "separate"] = changeable("merged")
    """An adapter's model: merged into its base when it is opened, or the base as it is and the adapter computed beside it."""
    slots: int = changeable(16, ge=1, le=1024)
    """Texts that are made at the same time."""
    queue: int = changeable(64, ge=0, le=100_000)
    """Texts that may wait for a slot; more are refused with 429."""
    max_connections: int = changeable(1000, ge=1, le=100_000)
    """Connections that may be open; beyond them the one that has waited longest for its request makes room, or the new one gets a 503."""
    read_timeout: float = changeable(10.0, gt=0, le=3600)
    """Seconds that a client has to send a request, and a second more for every 16 KiB of it; then it gets a 408."""
    max_body: int = changeable(1_000_000, ge=1000)
    """Bytes of a request's body at most."""
    max_prompt: int | None = changeable(None, ge=1)
    """Tokens of a prompt at most; what the model can see if not said."""
    max_tokens: int = changeable(4096, ge=1)
    """New tokens that a request may ask for at most."""
    max_choices: int = changeable(16, ge=1, le=1024)
    """Texts that one request may ask for at most: its prompts times `n`."""
    max_stops: int = changeable(16, ge=0, le=64)
    """Stop strings of a request at most."""
    request_timeout: float = changeable(300.0, gt=0, le=86400)
    """A request's time, waiting included; then it ends with the text made so far."""
    shutdown_grace: float = changeable(30.0, ge=0, le=3600)
    """Seconds that running requests have to finish when the server is stopped."""
    step_timeout: float = changeable(60.0, gt=0, le=86400)
    """Seconds that one step of the model may take; after them it is taken for hung: /health says 503, and those who wait are told."""
    allowed_origins: list[str] = changeable([])
    """Web origins whose pages may call the server, such as https://example.org; none if not said."""
    allowed_hosts: list[str] = changeable([])
    """More names that the server is called by; one that listens on this machine only answers to localhost and to addresses."""
    log_prompts: bool = changeable(False)
    """Write prompts to the request log; without it the log has sizes and times only."""

    @field_validator("allowed_origins")
    @classmethod
    def _whole_origins(cls, value: list[str]) -> list[str]:
        for origin in value:
            if origin != "*" and (not origin.startswith(("http://", "https://")) or origin.count("/") != 2):
                raise TextmillError(
                    f"serve.allowed_origins: '{origin}' is no web origin; say https://NAME or http://NAME:PORT, without a path"
                )
        return value
