"""The bodies of requests, as OpenAI's clients send them, with a few fields more."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

EXPECTED = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "a text or a list of texts",
    "logprobs": "a whole number from 0 to 20 (completions) or true or false (chat)",
    "messages": "a list of objects, each with a role (system, user, assistant) and a content that is text",
    "logit_bias": "an object from token ids to numbers from -100 to 100",
}
"""What a field that admits several types wants, in words."""

Chance = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


# A long list of the wrong kind is wrong at its first item: to say so for each would take seconds.
Texts = Annotated[list[str], Field(fail_fast=True)]
Ids = Annotated[list[int], Field(fail_fast=True)]


class Body(BaseModel):
    """A JSON object: strict about types, unknown fields refused."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class StreamOptions(Body):
    """What a stream tells besides the text."""

    include_usage: bool = False
    """End with a chunk that counts the tokens."""
    include_obfuscation: bool = False
    """Accepted, and not done."""


class Sampling(Body):
    """What completions and chat have in common; what is not said comes from the server's `sample` settings."""

    model: str | None = Field(None, max_length=500)
    """The model's name, as /v1/models has it."""
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    """0: always the likeliest token; higher: bolder."""
    top_p: Chance | None = None
    """Choose among the likeliest tokens that together reach this probability."""
    top_k: int | None = Field(None, ge=0, lt=2**31)
    """Choose among the k likeliest tokens only; 0: no limit."""
    min_p: Chance | None = None
    """Leave out tokens below this share of the likeliest one's probability."""
    typical_p: Chance | None = None
    """Choose among the most typical tokens that together reach this probability."""
    repetition_penalty: float | None = Field(None, gt=0, le=100, allow_inf_nan=False)
    """Above 1: tokens already there become less likely."""
    presence_penalty: Penalty | None = None
    """Taken from the score of every token already there."""
    frequency_penalty: Penalty | None = None
    """Taken from the score of a token for every time it is there."""
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] | None = None
    """Added to the scores of these token ids."""
    min_tokens: int | None = Field(None, ge=0)
    """No end of text before this many new tokens."""
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    """The same seed gives the same text; a new one each time if not said."""
    n: int | None = Field(None, ge=1)
    """Texts for each prompt, with seeds counted on from `seed`."""
    stop: str | Texts | None = None
    """The text ends before the first of these."""
    stop_token_ids: Ids | None = None
    """More tokens that end the text."""
    stream: bool | None = None
    """Send the text as it comes, as server-sent events."""
    stream_options: StreamOptions | None = None
    user: Any = None
    """Accepted and not used, as are the next five: no text depends on them."""
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


class CompletionBody(Sampling):
    """A text to continue."""

    prompt: str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    max_tokens: int | None = Field(None, ge=0)
    """New tokens at most; 0 with `echo` only judges the prompt."""
    echo: bool | None = None
    """Begin with the prompt itself, with its log-probabilities where they are asked."""
    logprobs: int | None = Field(None, ge=0, le=20)
    """So many likeliest tokens and their log-probabilities at each place, and the chosen one's."""
    best_of: int | None = Field(None, ge=1)
    """Only the value of `n`."""
    suffix: None = None
    """Not supported: a text that stands behind what is filled in."""


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation; an answer can be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    type: Literal["text"] | None = None
    """As lm-evaluation-harness has written it."""
    refusal: None = None
    annotations: list[None] | None = Field(None, max_length=0)
    audio: None = None
    function_call: None = None
    tool_calls: None = None
    name: None = None


class TextFormat(Body):
    """The one format of replies."""

    type: Literal["text"] = "text"


class ChatBody(Sampling):
    """A conversation to answer."""

    messages: list[Message] = Field(min_length=1, max_length=4096, fail_fast=True)
    """The conversation so far, the oldest turn first."""
    max_tokens: int | None = Field(None, ge=1)
    """New tokens at most."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """The same, by its newer name."""
    logprobs: bool | None = None
    """Tell each new token's log-probability."""
    top_logprobs: int | None = Field(None, ge=0, le=20)
    """So many likeliest tokens at each place, with `logprobs`."""
    response_format: TextFormat | None = None
    """Text is the one format."""
    modalities: list[Literal["text"]] | None = None
    """Text is the one way to answer."""
    tool_choice: Literal["none", "auto"] | None = None
    """Accepted and not used, as is `parallel_tool_calls`: there are no tools to choose from."""
    parallel_tool_calls: bool | None = None
    tools: None = None
    """Not supported, nor are the next seven."""
    functions: None = None
    function_call: None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None


class TokenizeBody(Body):
    """A text to cut into tokens; nothing is added to it."""

    text: str | None = None
    prompt: str | None = None
    """The same as lm-evaluation-harness asks it: special tokens that stand in the text are read as such."""
    add_special_tokens: bool | None = None
    """Accepted, and not done."""


class DetokenizeBody(Body):
    """Tokens to join to a text."""

    tokens: Ids


BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody, "/tokenize": TokenizeBody, "/detokenize": DetokenizeBody,
}  # fmt: skip


def known_fields(path: str) -> list[str]:
    """The fields that a place's body may have."""
    return list(BODIES[path].model_fields) if path in BODIES else []
