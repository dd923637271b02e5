"""Tools: the official client calls functions of an untrained model, and every call validates."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.generation.test_constraints import random_schema
from tests.support.live_server import Live
from tests.support.small_models import TEXT, write_model
from tests.tokens.test_jinja_template import CHATML, HEADERS, QWEN
from textmill.checkpoints.folders import open_checkpoint
from textmill.config import SampleConfig, TokenizerConfig, TorchEngine
from textmill.generation.constraints import CallFormat, call_grammar
from textmill.generation.generator import open_generator
from textmill.generation.requests import Request
from textmill.models.gpt2 import family as gpt2
from textmill.server.bodies import ChatBody
from textmill.server.tools import Call, CallParser, find_tool_use
from textmill.tokens.chat import open_template
from textmill.tokens.vocabulary.tokenizer import fit

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "unit": {"$ref": "#/$defs/Unit"}},
    "required": ["a", "unit"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["m", "km"]}},
}
LOOK = {"type": "object", "properties": {"at": {"enum": ["mill", "river"]}}, "required": ["at"]}
# As LangChain's bind_tools sends them.
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}},
    {"type": "function", "function": {"name": "look", "parameters": {**LOOK, "additionalProperties": False}}},
]
NAMED = {"type": "function", "function": {"name": "look"}}
TAGGED = CallFormat("<tool_call>\n", "arguments", "\n</tool_call>")
QUESTION = {"role": "user", "content": "How far is the mill?"}


def write_hf(folder: Path, jinja: str) -> Path:
    """A model folder with a chat template and random weights."""
    marks = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|stop|>", "<|end|>"]
    tokenizer = fit(iter([TEXT * 3]), TokenizerConfig(vocab=300, special_tokens=marks))
    shape = gpt2.Shape(
        layers=1, heads=2, width=32, inner=64, positions=1500, vocab=tokenizer.vocab, eos_id=tokenizer.eos_id
    )
    written = write_model(folder / "run", tokenizer, shape).folder
    (folder / "hf").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(written / name, folder / "hf")
    settings = json.loads((written / "tokenizer_config.json").read_text())
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": jinja}))
    return folder / "hf"


@pytest.fixture(scope="module", params=[QWEN, CHATML], ids=["template-with-tools", "without"])
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, new_live: Callable[..., Live]
) -> Iterator[openai.OpenAI]:
    live = new_live({"where": str(write_hf(tmp_path_factory.mktemp("tools"), request.param))})
    yield openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0)
    live.stop()


def check_call(call: Any) -> None:
    found = json.loads(call.function.arguments)
    if call.function.name == "look":
        assert found["at"] in ("mill", "river")
    else:
        assert (0 <= found["a"] <= 99, found["unit"] in ("m", "km")) == (True, True)


def test_client_calls_functions(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "hf", "messages": [QUESTION], "tools": TOOLS, "max_tokens": 300, "seed": 3}
    reply = client.chat.completions.create(**body, tool_choice="required", n=6)
    names = set()
    for choice in reply.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        [call] = choice.message.tool_calls or ()
        check_call(call)
        names.add(call.function.name)
    assert names == {"add", "look"}
    with client.chat.completions.stream(**body, tool_choice="required") as events:
        message = events.get_final_completion().choices[0].message
    first = reply.choices[0].message
    assert [one.function.arguments for one in message.tool_calls or ()] == [
        one.function.arguments for one in first.tool_calls or ()
    ]
    # As with_structured_output(method="function_calling") asks.
    named = client.chat.completions.create(**body, tool_choice=NAMED, extra_body={"parallel_tool_calls": False})
    [call] = named.choices[0].message.tool_calls or ()
    assert call.function.name == "look"
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(**{**body, "max_tokens": 5}, tool_choice=choice).choices[0]
        assert (answer.message.content is not None, answer.message.tool_calls) == (True, None)
    # The next turn, with the result.
    result = {"role": "tool", "tool_call_id": call.id, "name": "look", "content": "물레방아"}
    talk = [QUESTION, named.choices[0].message.model_dump(), result]
    after = client.chat.completions.create(model="hf", messages=talk, tools=TOOLS, max_tokens=2)
    assert after.usage.prompt_tokens > named.usage.prompt_tokens
    for more, message in [
        ({"tools": [], "tool_choice": "required"}, "there are no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x' is not one of the tools"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "two have the same name"),
        ({"response_format": {"type": "json_object"}}, "not together with response_format"),
        ({"tool_choice": "any"}, "tool_choice: must be none, auto, required"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content: is missing"),
    ]:
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(**{**body, **more})


def test_calls_are_found_however_the_text_is_cut() -> None:
    text = (
        'Let me see: <tool_call> {"name": "f"}\n<tool_call>\n{"name": "f_1", "arguments": {"a": "}\\n</tool_call>"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call> 끝 <tool_call>\n{"name": "h'
    )
    wanted = [Call("f_1", '{"a": "}\\n</tool_call>"}'), Call("g", "{}")]
    content = 'Let me see: <tool_call> {"name": "f"}\n\n 끝 <tool_call>\n{"name": "h'
    dice = random.Random(1)
    for size in [1, 2, 3, 7, len(text), *(dice.randrange(1, 60) for _ in range(20))]:
        parser = CallParser(TAGGED)
        found = [
            parser.add(text[start : start + size], start + size >= len(text)) for start in range(0, len(text), size)
        ]
        assert "".join(part for part, _ in found) == content
        assert [call for _, calls in found for call in calls] == wanted


@pytest.mark.parametrize("format_", [TAGGED, CallFormat("", "parameters", "")], ids=["tagged", "bare"])
def test_calls_with_random_schemas_validate(tmp_path: Path, format_: CallFormat) -> None:
    validators = pytest.importorskip("jsonschema_rs", reason="needs the extra long")
    write_hf(tmp_path, QWEN)
    generator = open_generator(open_checkpoint(tmp_path / "hf"), TorchEngine(device="cpu", precision="fp32"))
    dice = random.Random(4)
    schemas = [{"anyOf": [random_schema(dice)]} for _ in range(12)]
    grammars = [call_grammar([("f", schema), ("g-2", {"type": "null"})], format_, True, "tools") for schema in schemas]
    sample = SampleConfig(temperature=1.3, max_tokens=900)
    requests = [
        Request((5, 6), sample.model_copy(update={"seed": 5 + n}), grammar=one) for n, one in enumerate(grammars)
    ]
    texts = [""] * len(requests)
    for index, event in generator.run(requests, 6):
        texts[index] += event.text
    names = set()
    for schema, text in zip(schemas, texts, strict=True):
        content, [call] = CallParser(format_).add(text, ended=True)
        assert content == ""
        names.add(call.name)
        validators.validator_for(schema if call.name == "f" else {"type": "null"}).validate(json.loads(call.arguments))
    assert names == {"f", "g-2"}


@pytest.mark.parametrize(
    ("jinja", "format_", "known"),
    [
        (QWEN, TAGGED, True),
        (CHATML, TAGGED, False),
        (HEADERS, CallFormat("", "arguments", ""), True),
        ('{{ tools }} {"name": NAME, "parameters": {}}', CallFormat("", "parameters", ""), True),
    ],
)
def test_calls_have_the_format_of_the_template(tmp_path: Path, jinja: str, format_: CallFormat, known: bool) -> None:
    template = open_template(write_hf(tmp_path, jinja))
    assert template is not None
    use = find_tool_use(ChatBody.model_validate({"messages": [QUESTION], "tools": TOOLS}), template)
    assert (use.format, use.known) == (format_, known)


def test_template_without_tools_gets_them_as_messages(tmp_path: Path) -> None:
    template = open_template(write_hf(tmp_path, CHATML))
    assert template is not None
    use = find_tool_use(ChatBody.model_validate({"messages": [QUESTION], "tools": TOOLS}), template)
    call = {"name": "add", "arguments": {"a": 1}}
    turns = [
        {"role": "system", "content": "Be brief."},
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    system, user, assistant, result = use.to_messages(turns)
    assert system["content"].startswith("Be brief.\n\nYou may call functions")
    assert '"name": "look"' in system["content"]
    assert user == QUESTION
    assert assistant["content"] == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    responses = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert result == {"role": "user", "content": responses}
    assert use.to_messages(turns[1:])[0]["role"] == "system"
