"""The JSON bodies of requests: OpenAI's fields and a few more."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

EXPECTED = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "input": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "a text or a list of texts",
    "logprobs": "an integer from 0 to 20 (completions), or true or false (chat)",
    "messages": "a list of objects, each with a role (system, user, assistant) and text content",
    "logit_bias": "an object that maps token ids to numbers from -100 to 100",
}
"""What a field with several types must be, for error messages."""
EXPECTED_BY_PATH = {"/fill": {"prompt": "a text or a list of texts, with the mask token where a token is missing"}}
"""The same for fields that have other types in requests to this path."""

Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


# Stop at the first wrong item: reporting every item of a long list would take seconds.
Texts = Annotated[list[str], Field(fail_fast=True)]
Ids = Annotated[list[int], Field(fail_fast=True)]


class Body(BaseModel):
    """A JSON object with strict types and no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class StreamOptions(Body):
    """Additional events of a stream."""

    include_usage: bool = False
    """End with a chunk that has the token counts."""
    include_obfuscation: bool = False
    """Accepted and ignored."""


class SamplingBody(Body):
    """Fields of completions and chat. What is not set comes from the server's `sample` settings."""

    model: str | None = Field(None, max_length=500)
    """The model's name, as in /v1/models."""
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    """0: always the most likely token; higher: more random."""
    top_p: Probability | None = None
    """Nucleus sampling: sample from the fewest most likely tokens whose probabilities add up to this."""
    top_k: int | None = Field(None, ge=0, lt=2**31)
    """Sample from the k most likely tokens only; 0: no limit."""
    min_p: Probability | None = None
    """Exclude tokens less likely than this fraction of the most likely token's probability."""
    typical_p: Probability | None = None
    """Typical sampling: sample from the most typical tokens whose probabilities add up to this."""
    repetition_penalty: float | None = Field(None, gt=0, le=100, allow_inf_nan=False)
    """Above 1: tokens that are already in the text become less likely."""
    presence_penalty: Penalty | None = None
    """Subtracted from the logit of every token that is already in the new text."""
    frequency_penalty: Penalty | None = None
    """Subtracted from the logit of a token for each time it is in the new text."""
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] | None = None
    """Added to the logits of these token ids."""
    min_tokens: int | None = Field(None, ge=0)
    """The text cannot end before this many new tokens."""
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    """The same seed gives the same text; random if not set."""
    n: int | None = Field(None, ge=1)
    """Texts per prompt; their seeds count up from `seed`."""
    stop: str | Texts | None = None
    """The text ends before the first of these; an empty list: none."""
    stop_token_ids: Ids | None = None
    """Additional tokens that end the text."""
    stream: bool | None = None
    """Stream the text as server-sent events."""
    stream_options: StreamOptions | None = None
    user: Any = None
    """Accepted and ignored, as are the next five fields."""
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


class CompletionBody(SamplingBody):
    """A text to continue."""

    prompt: str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    max_tokens: int | None = Field(None, ge=0)
    """Maximum number of new tokens; 0 with `echo` only scores the prompt."""
    echo: bool | None = None
    """Include the prompt in the text, and its tokens in `logprobs`."""
    logprobs: int | None = Field(None, ge=0, le=20)
    """Number of most likely tokens to return with their log-probabilities at each position."""
    best_of: int | None = Field(None, ge=1)
    """Must equal `n`."""
    suffix: None = None
    """Not supported."""


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation; a reply's message can be sent back unchanged."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    type: Literal["text"] | None = None
    """Sent by lm-evaluation-harness."""
    refusal: None = None
    annotations: list[None] | None = Field(None, max_length=0)
    audio: None = None
    function_call: None = None
    tool_calls: None = None
    name: None = None


class TextFormat(Body):
    """The only reply format."""

    type: Literal["text"] = "text"


class ChatBody(SamplingBody):
    """A conversation to answer."""

    messages: list[Message] = Field(min_length=1, max_length=4096, fail_fast=True)
    """The conversation so far, oldest message first."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum number of new tokens."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """The newer name of `max_tokens`."""
    logprobs: bool | None = None
    """Return each new token's log-probability."""
    top_logprobs: int | None = Field(None, ge=0, le=20)
    """Number of most likely tokens to return at each position; needs `logprobs`."""
    response_format: TextFormat | None = None
    """Only text is supported."""
    modalities: list[Literal["text"]] | None = None
    """Only text is supported."""
    tool_choice: Literal["none", "auto"] | None = None
    """Accepted and ignored, as is `parallel_tool_calls`: there are no tools."""
    parallel_tool_calls: bool | None = None
    tools: None = None
    """Not supported, like the next seven fields."""
    functions: None = None
    function_call: None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None


class EmbeddingBody(Body):
    """Texts whose embeddings are wanted."""

    input: str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]
    """A text, a list of texts, a list of token ids, or a list of such lists; special tokens are added."""
    model: str | None = Field(None, max_length=500)
    """The model's name, as in /v1/models."""
    encoding_format: Literal["float", "base64"] | None = None
    """float (default): lists of numbers; base64: the same as little-endian float32 bytes in base64."""
    dimensions: int | None = Field(None, ge=1)
    """Must be the model's number of dimensions."""
    truncate: bool | None = None
    """Truncate texts that are too long; by default they are refused."""
    user: Any = None
    """Accepted and ignored."""


class FillBody(Body):
    """Texts whose masks are to be filled in."""

    prompt: str | Texts
    """A text or a list of texts, with the mask token (`mask` in /v1/models) where a token is missing."""
    top_k: int | None = Field(None, ge=1, le=1000)
    """Most likely tokens to return for each mask; default: 5."""
    model: str | None = Field(None, max_length=500)
    """The model's name, as in /v1/models."""


class TokenizeBody(Body):
    """A text to tokenize; no special tokens are added."""

    text: str | None = None
    prompt: str | None = None
    """Like `text`, but special tokens in it are recognised; used by lm-evaluation-harness."""
    add_special_tokens: bool | None = None
    """Accepted and ignored."""


class DetokenizeBody(Body):
    """Token ids to decode."""

    tokens: Ids


BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/embeddings": EmbeddingBody,
    "/fill": FillBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}


def expected_value(path: str, field: str) -> str | None:
    """What a field of a path's body must be; None if its type says so."""
    return EXPECTED_BY_PATH.get(path, {}).get(field) or EXPECTED.get(field)


def known_fields(path: str) -> list[str]:
    """Return the field names of a path's body."""
    return list(BODIES[path].model_fields) if path in BODIES else []
