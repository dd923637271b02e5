"""Constrained texts of an untrained model parse and validate, by other programs than the one that constrains them."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits

from textmill.config import SampleConfig
from textmill.errors import TextmillError
from textmill.generation import constraints
from textmill.generation.constraints import (
    TokenTable,
    allowed_tokens,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
)
from textmill.generation.generator import Generator
from textmill.generation.requests import Done, Request

SAMPLE = SampleConfig(temperature=1.3, max_tokens=600, seed=3)
WORDS = ["name", "größe", "물레방아", 'a "b"', "items", "x_1"]


def random_schema(dice: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema whose texts are short: an untrained model seldom ends what may go on."""
    kinds = ["integer", "number", "boolean", "null", "string", "enum", "const", "pattern"]
    kind = dice.choice([*kinds, *["object", "array", "anyOf"] * 2 * (depth > 0)])
    if kind == "object":
        names = dice.sample(WORDS, dice.randint(0, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(dice, depth - 1) for name in names},
            "required": dice.sample(names, dice.randint(0, len(names))),
            "additionalProperties": False,
        }
    if kind == "array":
        low = dice.randint(0, 2)
        items = random_schema(dice, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + dice.randint(0, 2)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(dice, depth - 1) for _ in range(dice.randint(1, 3))]}
    if kind == "enum":
        return {"enum": dice.sample([*WORDS, 1, 2.5, None, True, [1, 2]], dice.randint(1, 4))}
    if kind == "const":
        return {"const": dice.choice([*WORDS, 7])}
    if kind == "string":
        return {"type": "string", "maxLength": dice.randint(0, 8)}
    if kind == "pattern":
        return {"type": "string", "pattern": dice.choice(["^[a-c]{2,4}$", "^(ja|nein)$", r"^\d{3}-\d{2}$"])}
    if kind in ("integer", "number"):
        low = dice.randint(-50, 50)
        return {"type": kind, "minimum": low, "maximum": low + dice.randint(0, 1000)}
    return {"type": kind}


def complete(generator: Generator, grammars: list[str], **settings: Any) -> list[tuple[str, Done]]:
    """The text of each grammar, all in one batch next to a text without one, and the same ones alone."""
    prompt = tuple(generator.tokenizer.encode("The mill"))
    sample = SAMPLE.model_copy(update=settings)
    requests = [Request(prompt, sample, grammar=grammar) for grammar in grammars]
    texts, ends = [""] * (len(requests) + 1), [Done("error", 0, "")] * (len(requests) + 1)
    for index, event in generator.run([*requests, Request(prompt, SampleConfig(max_tokens=5))], 8):
        texts[index] += event.text
        if isinstance(event, Done):
            ends[index] = event
    return list(zip(texts, ends, strict=True))[:-1]


@pytest.mark.long_with(1000)
@pytest.mark.parametrize("count", [25, 1000])
def test_texts_of_random_schemas_validate(generator: Generator, count: int) -> None:
    validators = pytest.importorskip("jsonschema_rs", reason="needs the extra long")
    dice = random.Random(5)
    schemas = [random_schema(dice) for _ in range(count)]
    found = complete(generator, [json_grammar(schema, "schema") for schema in schemas])
    for schema, (text, done) in zip(schemas, found, strict=True):
        assert done.reason == "stop", (schema, text, done)
        validators.validator_for(schema).validate(json.loads(text))
    assert len({text for text, _ in found}) > count / 5


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_texts_follow_their_grammar(generator: Generator, temperature: float) -> None:
    """With penalties and a stop string too, and with min_tokens, which a grammar overrides."""
    grammars = [
        regex_grammar(r"[0-9]{4}-(0[1-9]|1[0-2]) (물|불)", "regex"),
        choice_grammar(["yes", "yes, certainly", 'no "thanks"', "아니요"], "choices"),
        lark_grammar('start: "(" item ("," item)* ")"\nitem: /[a-z]{1,2}/ | start', "grammar"),
    ]
    date, choice, tree = complete(
        generator, grammars, temperature=temperature, top_k=20, repetition_penalty=1.3, min_tokens=500, stop=["zzz"]
    )
    assert re.fullmatch(r"\d{4}-(0[1-9]|1[0-2]) (물|불)", date[0])
    assert choice[0] in ("yes", "yes, certainly", 'no "thanks"', "아니요")
    assert re.fullmatch(r"[a-z,()]+", tree[0])
    assert date[1].reason == choice[1].reason == "stop"
    assert tree[1].reason == "length" or tree[0].count("(") == tree[0].count(")")


TREE = {"a": {"b": [1, 2]}}


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        (json.dumps(TREE), True),
        (json.dumps(TREE, separators=(",", ":")), True),
        (json.dumps(TREE, indent=4), True),
        (json.dumps(TREE, indent="\t"), True),
        ('{\n\n"a": {}}', False),
        ('{"a" \n : {}}', False),
    ],
)
def test_json_has_the_whitespace_that_is_usual(generator: Generator, text: str, allowed: bool) -> None:
    tokenizer = generator.tokenizer
    constraint = TokenTable(tokenizer).new_constraint(json_grammar({"type": "object"}, "schema"), (tokenizer.eos_id,))
    followed = []
    for id_ in tokenizer.encode(text):
        followed.append(bool(allowed_tokens([constraint])[0, id_ // 8] >> id_ % 8 & 1))
        constraint.add(id_)
    assert all(followed) == allowed


def test_a_mask_that_takes_too_long_ends_the_text_with_an_error(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = lark_grammar('start: "(" item ("," item)* ")"\nitem: /[a-z]{1,20}/ | start | /[0-9]+x[a-z]*q/', "grammar")
    limits = LLParserLimits(step_lexer_fuel=10)
    monkeypatch.setattr(constraints, "LLMatcher", lambda *given: LLMatcher(*given, limits=limits))
    request = Request(
        tuple(generator.tokenizer.encode("The")), SampleConfig(max_tokens=30, temperature=0), grammar=grammar
    )
    with pytest.raises(TextmillError, match="the text cannot be constrained any further"):
        list(generator.run([request], 1))


def test_a_text_is_the_same_alone_and_in_a_batch(generator: Generator) -> None:
    grammars = [json_grammar(random_schema(random.Random(seed)), "schema") for seed in range(6)]
    together = [text for text, _ in complete(generator, grammars)]
    assert together == [complete(generator, [grammar])[0][0] for grammar in grammars]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "integer", "minimum": 5, "maximum": 3}, "greater than"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible"),
        ({"type": "strin"}, "strin"),
        ({"$ref": "http://example.org/schema.json"}, "not fetch"),
        ({"enum": ["x" * 300_000]}, "characters"),
    ],
)
def test_impossible_schemas_are_refused(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(TextmillError, match=reason) as error:
        json_grammar(schema, "schema")
    assert len(str(error.value)) < 400
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("make", [lambda: regex_grammar("(", "regex"), lambda: choice_grammar([], "choices")])
def test_bad_grammars_are_refused(make: Any) -> None:
    with pytest.raises(TextmillError, match="no text can follow it"):
        make()


def test_a_schema_of_a_file(generator: Generator, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    only = {"additionalProperties": False}
    file.write_text(json.dumps({"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], **only}))
    schema = {"json_schema": str(file), "temperature": 0.0}
    assert json.loads(generator.sample("", SAMPLE.model_copy(update=schema)).text)["a"] in (1, 22)
    with pytest.raises(TextmillError, match=r"sample\.beams"):
        generator.sample("", SAMPLE.model_copy(update={**schema, "beams": 2}))
    for text, problem in (("{", "not JSON"), ("3", "not a JSON schema"), ('{"type": "x"}', "no text can follow")):
        (tmp_path / f"{len(text)}.json").write_text(text)
        with pytest.raises(TextmillError, match=problem):
            generator.sample("", SAMPLE.model_copy(update={"json_schema": str(tmp_path / f"{len(text)}.json")}))
