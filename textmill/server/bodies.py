"""The JSON bodies of requests: OpenAI's fields and a few more, how they are read, and what is wrong with a bad one."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request

from textmill.server.errors import HttpError, quote_value

UNREADABLE = "the request cannot be read; send JSON in UTF-8, as described at /docs"
NOT_AN_OBJECT = "the body must be a JSON object, sent with Content-Type: application/json"
PYDANTIC_PHRASES = {
    "Input should be greater than or equal to": "must be at least",
    "Input should be less than or equal to": "must be at most",
    "Input should be greater than": "must be more than",
    "Input should be less than": "must be less than",
    "Input should be": "must be",
}
"""From pydantic's phrases to ours."""

Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


# Stop at the first wrong item: reporting every item of a long list would take seconds.
Texts = Annotated[list[str], Field(fail_fast=True)]
Ids = Annotated[list[int], Field(fail_fast=True)]


IGNORED = frozenset(
    {
        "cache_prompt",
        "id",
        "id_slot",
        "name",
        "prompt_cache_retention",
        "reasoning",
        "reasoning_content",
        "return_progress",
        "timestamp",
        "timings_per_token",
    }
)
"""Unknown fields that front ends send, and that have no effect on the text."""


class Body(BaseModel):
    """A JSON object with strict types and without unknown fields, except those that ask for nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)
    EXPECTED: ClassVar[dict[str, str]] = {
        "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
        "input": "a text, a list of texts, a list of token ids, or a list of such lists",
        "stop": "a text or a list of texts",
        "logprobs": "an integer from 0 to 20 (completions), or true or false (chat)",
        "messages": "a list of objects, each with a role (system, user, assistant) and text content",
        "tool_choice": "none, auto, required, or an object with a type and a function's name",
        "logit_bias": "an object that maps token ids to numbers from -100 to 100",
    }
    """What a field with several types must be, for error messages."""


class StreamOptions(Body):
    """Additional events of a stream."""

    include_usage: bool = False
    """End with a chunk that has the token counts."""
    include_obfuscation: bool = False
    """Accepted and ignored."""


class JsonSchema(Body):
    """A JSON schema and its name."""

    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    """Accepted and ignored, as are `description` and `strict`: every text follows the schema."""
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """What the text is."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    """json_object: a JSON object; json_schema: JSON that follows `json_schema`."""
    json_schema: JsonSchema | None = None


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
    response_format: ResponseFormat | None = None
    """The text is JSON. It may end early, at `max_tokens`; `finish_reason` is then length."""
    choices: Texts | None = None
    """The text is one of these."""
    regex: str | None = None
    """The text matches this regular expression of Rust's syntax as a whole."""
    grammar: str | None = None
    """The text follows this grammar in Lark's syntax, as llguidance reads it."""
    stream: bool | None = None
    """Stream the text as server-sent events."""
    stream_options: StreamOptions | None = None
    user: Any = None
    """Accepted and ignored, as are the next five fields, and fields with an empty value: null, false, [], {} or ""."""
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


class Function(Body):
    """What a function does, and the JSON schema of its arguments."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Accepted and ignored: all arguments follow the schema."""


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """A tool by its name."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(FunctionName):
    """A function and its arguments, which are JSON."""

    arguments: str


class ToolCall(Body):
    """A call in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Accepted and ignored: chunks of a stream have it."""


class TextPart(Body):
    """A message's content as a list has parts; only text is accepted."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation; a reply's message can be sent back unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    """Only an answer that calls tools may have none."""
    type: Literal["text"] | None = None
    """Sent by lm-evaluation-harness."""
    refusal: None = None
    annotations: list[None] | None = Field(None, max_length=0)
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCall] | None = Field(None, fail_fast=True)
    tool_call_id: str | None = None
    """The call whose result a message of the role tool has."""


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
    modalities: list[Literal["text"]] | None = None
    """Only text is supported."""
    tools: list[Tool] | None = Field(None, max_length=128, fail_fast=True)
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """required, or a tool by its name: the answer is one call; auto (default): it may have calls."""
    parallel_tool_calls: bool | None = None
    """Accepted and ignored: only with auto there may be several calls."""
    functions: None = None
    """Not supported, like the next six fields."""
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

    EXPECTED = {"prompt": "a text or a list of texts, with the mask token where a token is missing"}
    prompt: str | Texts
    """A text or a list of texts, with the mask token (`mask` in /v1/models) where a token is missing."""
    top_k: int | None = Field(None, ge=1, le=1000)
    """Most likely tokens to return for each mask; default: 5."""
    model: str | None = Field(None, max_length=500)
    """The model's name, as in /v1/models."""


class PreferenceBody(Body):
    """Two answers, one of which is better."""

    messages: list[Message] | None = Field(None, max_length=4096, fail_fast=True)
    """The conversation before the answers."""
    prompt: str | None = None
    """The text that both continue, instead of `messages`."""
    chosen: str
    rejected: str
    chosen_by: dict[str, Any] | None = None
    """The model and the settings of the chosen text."""
    rejected_by: dict[str, Any] | None = None
    """The same of the other."""


class TokenizeBody(Body):
    """A text to tokenize; no special tokens are added."""

    text: str | None = None
    prompt: str | None = None
    """Like `text`, but special tokens in it are recognised; used by lm-evaluation-harness."""
    model: str | None = Field(None, max_length=500)
    """The model whose tokenizer to use."""
    add_special_tokens: bool | None = None
    """Accepted and ignored."""


class DetokenizeBody(Body):
    """Token ids to decode."""

    tokens: Ids
    model: str | None = Field(None, max_length=500)
    """The model whose tokenizer to use."""


BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/embeddings": EmbeddingBody,
    "/fill": FillBody,
    "/preferences": PreferenceBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}


BodyType = TypeVar("BodyType", bound=Body)


async def read_body(http: Request, body_type: type[BodyType], limit: int) -> BodyType:
    """Read and parse the body of a request; raise HttpError if it has more than `limit` bytes or is wrong."""
    if int(http.headers.get("content-length", "0")) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    received = 0
    try:
        async for part in http.stream():
            parts.append(part)
            received += len(part)
            if received > limit:
                raise _too_large(limit)
    except ClientDisconnect:
        raise HttpError(400, UNREADABLE) from None
    raw = b"".join(parts)
    if not raw or not _is_json(http.headers.get("content-type", "")):
        raise HttpError(400, NOT_AN_OBJECT)
    return _parse(raw, body_type)


def _too_large(limit: int) -> HttpError:
    message = f"the body is larger than the limit of {limit:,} bytes; send a smaller one"
    return HttpError(413, message, code="body_too_large")


@lru_cache(maxsize=64)
def _is_json(content_type: str) -> bool:
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def _parse(raw: bytes, body_type: type[BodyType]) -> BodyType:
    """Parse and validate a body.

    Invalid bodies are parsed a second time by Python's json, which accepts every encoding and reports the position.
    Fields that ask for nothing are then removed.
    """
    try:
        return body_type.model_validate_json(raw)
    except ValidationError:
        pass
    try:
        tree = json.loads(raw)
        if isinstance(tree, dict):
            tree = _remove_harmless(tree, body_type)
            if body_type is ChatBody and isinstance(messages := tree.get("messages"), list):
                tree["messages"] = [
                    _remove_harmless(one, Message) if isinstance(one, dict) else one for one in messages
                ]
        return body_type.model_validate(tree)
    except json.JSONDecodeError as error:
        raise HttpError(
            400, f"the body is not JSON: {error.msg.removesuffix(' at')} at character {error.pos}"
        ) from None
    except ValidationError as error:
        message, field = _describe_errors(error.errors(include_url=False), body_type)
        raise HttpError(400, message, field=field) from None
    except (ValueError, RecursionError):  # not UTF-8, a number with thousands of digits, deeply nested lists
        raise HttpError(400, UNREADABLE) from None


def _remove_harmless(tree: dict[str, Any], body_type: type[Body]) -> dict[str, Any]:
    """Return a JSON object without ignored fields, and without unknown or unsupported ones whose value is empty."""
    fields = body_type.model_fields
    supported = {name for name, field in fields.items() if field.annotation is not type(None)}
    return {
        name: value
        for name, value in tree.items()
        if name in supported or (name not in IGNORED and value not in (None, False, "", [], {}))
    }


def _describe_errors(errors: Sequence[Mapping[str, Any]], body_type: type[Body]) -> tuple[str, str | None]:
    """Describe the first of pydantic's errors in one sentence; return it and the field's name."""
    error = errors[0]
    location = list(error["loc"])
    if not location:
        return NOT_AN_OBJECT, None
    top = str(location[0])
    same_field = [other for other in errors if list(other["loc"][:1]) == location[:1]]
    if error["type"] == "extra_forbidden" and len(location) == 1:
        similar = difflib.get_close_matches(top, body_type.model_fields, n=1, cutoff=0.6)
        name = quote_value(top, quoted=False)
        advice = f"did you mean '{similar[0]}'?" if similar else "remove it"
        return f"{name}: unknown field; {advice}", name
    name = ".".join(quote_value(str(part), quoted=False) for part in location if not _is_type_tag(str(part)))
    if error["type"] == "extra_forbidden":
        return f"{name}: unknown field; remove it", top
    if error["type"] == "none_required" and len(same_field) == 1:
        return f"{name}: is not supported; remove it", top
    if error["type"] == "missing":
        return f"{'.'.join(map(str, location))}: is missing", top
    if len(same_field) > 1 and (value := body_type.EXPECTED.get(top)):  # one error for each type of a union
        return f"{top}: must be {value}", top
    message = str(error["msg"])
    for phrase, plain_phrase in PYDANTIC_PHRASES.items():
        message = message.replace(phrase, plain_phrase)
    return f"{name}: {message}; found {quote_value(error.get('input'))}", top


def _is_type_tag(part: str) -> bool:
    """Whether a part of pydantic's location names one type of a union instead of a field."""
    return "[" in part or part in ("str", "int", "float", "bool")
