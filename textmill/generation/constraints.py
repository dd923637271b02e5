"""Constrained output: texts that follow a JSON schema, a regular expression or a grammar, or are one of some texts.

llguidance, which vLLM, SGLang and llama.cpp use too, says which tokens may come next. What cannot be satisfied is found
when a grammar is made; what takes too long to follow ends the text with an error (llguidance has limits).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, StructTag
from numpy.typing import NDArray

from textmill.config import SampleConfig
from textmill.errors import TextmillError
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

WHITESPACE = r"( |\n[ \t]{0,20})?"
"""Between the parts of a JSON text: what JSON is usually written with. A weak model fills its text with more."""
MAX_LENGTH = 200_000
"""Characters of a grammar."""
MAX_REASON = 200


def json_grammar(schema: dict[str, Any] | bool, place: str) -> str:
    """The grammar of JSON texts that a schema allows. `place` names the schema in errors."""
    try:
        return _checked(
            LLMatcher.grammar_from_json_schema(json.dumps(schema), {"whitespace_pattern": WHITESPACE}), place
        )
    except ValueError as error:
        raise _refusal(place, str(error)) from None


def regex_grammar(regex: str, place: str) -> str:
    """The grammar of texts that match a regular expression of Rust's syntax as a whole."""
    return _checked(LLMatcher.grammar_from_regex(regex), place)


def choice_grammar(choices: Sequence[str], place: str) -> str:
    """The grammar of a few texts."""
    if not choices or not all(choices):
        raise _refusal(place, "it has an empty text" if choices else "it is empty")
    return lark_grammar("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices), place)


def lark_grammar(grammar: str, place: str) -> str:
    """The grammar written in Lark's syntax, as llguidance reads it."""
    return _checked(LLMatcher.grammar_from_lark(grammar), place)


class CallFormat(NamedTuple):
    """How a model writes the call of a function."""

    begin: str
    key: str
    """Of the arguments."""
    end: str

    def write(self, function: Mapping[str, Any]) -> str:
        """A call with its name and arguments."""
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        return f"{self.head(function['name'])}{arguments}}}{self.end}"

    def head(self, name: str) -> str:
        """What comes before the arguments."""
        return f'{self.begin}{{"name": "{name}", "{self.key}": '


def call_grammar(
    functions: Sequence[tuple[str, dict[str, Any]]], format_: CallFormat, required: bool, place: str
) -> str:
    """The grammar of texts with calls of functions, given by name and schema; `required`: of a single call."""
    tags = []
    for number, (name, schema) in enumerate(functions):
        json_grammar(schema, f"{place}.{number}.function.parameters")  # for its error
        limited = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
        trigger = format_.begin + '{"name": "'
        tags.append(StructTag(trigger=trigger, begin=format_.head(name), grammar=limited, end="}" + format_.end))
    if not required:
        return lark_grammar(StructTag.to_grammar(tags, assume_special=False), place)
    rules = [
        f"call_{number}: {json.dumps(tag.begin)} %json {json.dumps(tag.grammar)} {json.dumps(tag.end)}"
        for number, tag in enumerate(tags)
    ]
    start = "start: " + " | ".join(f"call_{number}" for number in range(len(tags)))
    return lark_grammar("\n".join([start, *rules]), place)


def _checked(grammar: str, place: str) -> str:
    if len(grammar) > MAX_LENGTH:
        raise _refusal(place, f"it has more than {MAX_LENGTH:,} characters")
    if problem := LLMatcher.validate_grammar(grammar):
        raise _refusal(place, problem)
    return grammar


def _refusal(place: str, problem: str) -> TextmillError:
    reason = " ".join(problem.split())
    reason = reason if len(reason) <= MAX_REASON else reason[:MAX_REASON] + "..."
    return TextmillError(f"{place}: no text can follow it ({reason}); change it")


@lru_cache(maxsize=8)
def read_schema(path: str) -> str:
    """The grammar of the JSON schema in a file."""
    place = f"sample.json_schema: {path}"
    try:
        schema = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TextmillError(f"{place}: cannot be read ({error.strerror}); name a file with a JSON schema") from None
    except ValueError as error:
        raise TextmillError(f"{place}: is not JSON ({error}); correct it") from None
    if not isinstance(schema, dict | bool):
        raise TextmillError(f"{place}: is not a JSON schema, which is an object; correct it")
    return json_grammar(schema, place)


def sample_grammar(sample: SampleConfig) -> str:
    """The grammar that the settings name; empty if they name none."""
    if sample.json_schema is None:
        return ""
    if sample.beams > 1:
        raise TextmillError(f"sample.json_schema: not with sample.beams={sample.beams}; set sample.beams=1")
    return read_schema(sample.json_schema)


class TokenTable:
    """A tokenizer as llguidance needs it; opened when the first constrained text comes."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._opened: tuple[LLTokenizer, LLExecutor] | None = None

    def new_constraint(self, grammar: str, ends: Sequence[int]) -> Constraint:
        """What follows one text; `ends` are the tokens that end it."""
        tokenizer = self._tokenizer
        if self._opened is None:
            try:
                opened = LLTokenizer(tokenizer.inner.to_str(), n_vocab=tokenizer.vocab, eos_token=tokenizer.eos_id)
            except (ValueError, RuntimeError) as error:
                raise TextmillError(f"the model's tokenizer cannot be constrained ({error})") from None
            self._opened = opened, LLExecutor()  # its threads too are for constrained texts only
        opened, executor = self._opened
        other_ends = [id_ for id_ in ends if id_ != tokenizer.eos_id]
        return Constraint(LLMatcher(opened, grammar), tokenizer.vocab, tokenizer.eos_id, other_ends, executor)


@dataclass(frozen=True)
class Constraint:
    """Which tokens may come next in one text."""

    matcher: LLMatcher
    vocab: int
    eos_id: int
    other_ends: list[int]
    """Tokens that end the text, besides `eos_id`."""
    executor: LLExecutor

    def add(self, id_: int) -> None:
        """Append a token to the text."""
        self.matcher.consume_token(id_)

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return bool(self.matcher.is_stopped())

    @property
    def problem(self) -> str:
        """Why the text cannot go on; empty if it can, or is complete."""
        if not self.matcher.is_error():
            return ""
        return f"the text cannot be constrained any further: {self.matcher.get_error()[:MAX_REASON]}"


def allowed_tokens(constraints: Sequence[Constraint]) -> NDArray[np.uint8]:
    """Which tokens may come next in each text, as bits: token 10 is the third lowest bit of byte 1.

    All tokens that end a text may, or none. After a text that cannot go on, all tokens may.
    """
    first = constraints[0]
    words_NW = np.full((len(constraints), -(-first.vocab // 32)), -1, np.int32)
    matchers = [(one.matcher, row) for row, one in enumerate(constraints) if not one.is_complete]
    if matchers:
        first.executor.unsafe_compute_mask_ptr(matchers, words_NW.ctypes.data, words_NW.strides[0], len(words_NW))
    bytes_NB = words_NW.view(np.uint8)
    for row, one in enumerate(constraints):
        for id_ in one.other_ends:
            may_end = bytes_NB[row, one.eos_id // 8] >> one.eos_id % 8 & 1
            bit = np.uint8(1 << id_ % 8)
            bytes_NB[row, id_ // 8] = bytes_NB[row, id_ // 8] & ~bit | bit * may_end
    return bytes_NB
