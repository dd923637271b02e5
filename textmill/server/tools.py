"""Tools: functions that a model may call, in the format of its chat template.

A call is text, such as

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

A grammar (generation/constraints.py) makes every call valid, and `CallParser` finds the calls in the text. A template
that does not know tools gets them as a system message, calls as the assistant's text and results as the user's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from textmill.errors import TextmillError
from textmill.generation.constraints import CallFormat, call_grammar
from textmill.server.bodies import ChatBody, NamedTool, Tool
from textmill.server.errors import HttpError, quote_value
from textmill.tokens.chat import AnyTemplate, JinjaTemplate

TAGS = ("<tool_call>\n", "\n</tool_call>")
"""Around a call, as Qwen and many others write it."""
INTRODUCTION = """You may call functions to answer. They are, in JSON:
{tools}
To call one, write:
<tool_call>
{{"name": NAME, "arguments": ARGUMENTS}}
</tool_call>"""
RESPONSE = "<tool_response>\n{}\n</tool_response>"


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and how the model calls them."""

    tools: Sequence[Tool]
    """Those that may be called."""
    required: bool
    """Whether the answer must be a call."""
    format: CallFormat
    known: bool
    """Whether the model's template knows tools."""

    def descriptions(self) -> list[dict[str, Any]]:
        """The tools as the template shows them."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def grammar(self) -> str:
        """What the answer must follow; empty if there are no tools."""
        if not self.tools:
            return ""
        functions = [(tool.function.name, tool.function.parameters or {"type": "object"}) for tool in self.tools]
        return call_grammar(functions, self.format, self.required, "tools")

    def to_messages(self, turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages as the template reads them."""
        if self.known:
            return list(turns)
        messages: list[dict[str, Any]] = []
        for turn in turns:
            content = turn["content"]
            calls = [self.format.write(one["function"]) for one in turn.get("tool_calls", ())]
            if turn["role"] == "tool":
                content = RESPONSE.format(content)
                if messages and messages[-1]["role"] == "tool":
                    content = f"{messages.pop()['content']}\n{content}"
            messages.append({"role": turn["role"], "content": "\n".join([*filter(None, [content]), *calls])})
        if self.tools:
            lines = "\n".join(json.dumps(one["function"], ensure_ascii=False) for one in self.descriptions())
            system = messages.pop(0)["content"] if messages[0]["role"] == "system" else ""
            text = INTRODUCTION.format(tools=lines)
            messages.insert(0, {"role": "system", "content": f"{system}\n\n{text}" if system else text})
        return [{**one, "role": "user"} if one["role"] == "tool" else one for one in messages]


def find_tool_use(body: ChatBody, template: AnyTemplate) -> ToolUse:
    """Return the tools that a request may use; raise if it asks for one that it does not have."""
    names = [tool.function.name for tool in body.tools or ()]
    choice = body.tool_choice
    if len(set(names)) < len(names):
        raise HttpError(400, "tools: two have the same name; rename one", field="tools")
    if not names and choice not in (None, "none", "auto"):
        raise HttpError(400, "tool_choice: there are no tools; send them too", field="tool_choice")
    tools = list(body.tools or ()) if choice != "none" else []
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            message = f"tool_choice: {quote_value(choice.function.name)} is not one of the tools"
            raise HttpError(400, message, field="tool_choice")
    required = bool(tools) and choice not in (None, "auto")
    return ToolUse(tools, required, *_find_format(template))


def _find_format(template: AnyTemplate) -> tuple[CallFormat, bool]:
    """How a template's model writes a call, and whether the template knows tools.

    A mark that is a special token cannot be part of a text.
    """
    jinja = template.jinja if isinstance(template, JinjaTemplate) else ""
    known = bool(re.search(r"\btools\b", jinja))
    special = [token.content for token in template.tokenizer.inner.get_added_tokens_decoder().values() if token.special]
    if (known and TAGS[0].strip() not in jinja) or TAGS[0].strip() in special:
        return CallFormat("", "parameters" if '"parameters":' in jinja else "arguments", ""), known
    return CallFormat(TAGS[0], "arguments", TAGS[1]), known


def read_arguments(text: str, field: str) -> Any:
    """Parse the arguments of an earlier call, which templates write themselves."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise HttpError(400, f"{field}: is not JSON; send it as the model wrote it", field="messages") from None


class Call(NamedTuple):
    """A call that the model has written."""

    name: str
    arguments: str
    """A JSON object."""


class CallParser:
    """Finds the calls in a text that comes in parts; everything else is content."""

    def __init__(self, format_: CallFormat) -> None:
        self._start = format_.begin + '{"name": "'
        self._end = "}" + format_.end
        self._head = re.compile(rf'([\w-]+)", "{format_.key}": ')
        self._held = ""
        """A call that is not complete, or what may become the start of one."""

    def add(self, text: str, ended: bool) -> tuple[str, list[Call]]:
        """Return the content and the calls that are complete with a next part."""
        self._held += text
        content = ""
        calls = []
        while (start := self._held.find(self._start)) >= 0 and (found := self._read_call(start)):
            call, stop = found
            content += self._held[:start]
            self._held = self._held[stop:]
            calls.append(call)
        if start < 0:
            start = len(self._held) - self._count_possible()
        if ended:
            start = len(self._held)
        content += self._held[:start]
        self._held = self._held[start:]
        return content, calls

    def _read_call(self, start: int) -> tuple[Call, int] | None:
        """Return the call that starts at a place, and where it ends; None if it is not complete."""
        head = self._head.match(self._held, start + len(self._start))
        if head is None:
            return None
        try:
            _, stop = json.JSONDecoder().raw_decode(self._held, head.end())
        except (ValueError, RecursionError):
            return None
        if not self._held.startswith(self._end, stop):
            return None
        return Call(head[1], self._held[head.end() : stop]), stop + len(self._end)

    def _count_possible(self) -> int:
        """How many of the last characters may be the start of a call."""
        lengths = range(min(len(self._held), len(self._start)), 0, -1)
        return next((length for length in lengths if self._held.endswith(self._start[:length])), 0)


def check_tool_use(body: ChatBody, tool_use: ToolUse) -> str:
    """Return the grammar of a request with tools; raise if it has another one too, or a schema is impossible."""
    others = (body.response_format and body.response_format.type != "text", body.regex, body.grammar, body.choices)
    if tool_use.tools and any(others):
        message = "tools: not together with response_format, choices, regex or grammar; send one of them"
        raise HttpError(400, message, field="tools")
    try:
        return tool_use.grammar()
    except TextmillError as error:
        raise HttpError(400, str(error), field="tools") from None
