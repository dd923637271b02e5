"""OpenAI's responses API on top of chat completions: another form of the request, of the reply and of the events.

A stream is a list of events with a type, such as `response.output_text.delta`; each repeats what it has ended.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from textmill.server.bodies import (
    CalledFunction,
    CallItem,
    CallOutputItem,
    ChatBody,
    Function,
    FunctionName,
    JsonSchema,
    Message,
    NamedResponseTool,
    NamedTool,
    ResponseBody,
    ResponseFormat,
    SamplingBody,
    Tool,
    ToolCall,
)
from textmill.server.errors import HttpError
from textmill.server.model_requests import Prompt
from textmill.server.replies import ChatReply, JsonObject
from textmill.server.service import IndexedChunk, ReceivedText, Service
from textmill.server.tools import ToolUse


def to_chat(body: ResponseBody) -> ChatBody:
    """Return the chat request that asks for the same."""
    if body.n not in (None, 1):
        raise HttpError(400, f"n: {body.n} texts; a response has one; use /v1/chat/completions", field="n")
    fields = {name: getattr(body, name) for name in SamplingBody.model_fields}
    text = body.text and body.text.format
    if text:
        schema = None if text.schema_ is None else JsonSchema.model_validate({"schema": text.schema_})
        fields["response_format"] = ResponseFormat(type=text.type, json_schema=schema)
    named = body.tool_choice
    choice = (
        NamedTool(type="function", function=FunctionName(name=named.name))
        if isinstance(named, NamedResponseTool)
        else named
    )
    functions = [
        Function(name=tool.name, description=tool.description, parameters=tool.parameters) for tool in body.tools or ()
    ]
    return ChatBody.model_construct(
        **fields,
        messages=read_input(body),
        max_completion_tokens=body.max_output_tokens,
        tools=[Tool(type="function", function=one) for one in functions],
        tool_choice=choice,
    )


def read_input(body: ResponseBody) -> list[Message]:
    """Return the messages of a request; calls that follow each other are one message."""
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, Message(role="user", content=body.input)]
    calls: list[ToolCall] = []
    for item in body.input:
        if isinstance(item, CallItem):
            if calls:
                messages.pop()
            function = CalledFunction(name=item.name, arguments=item.arguments)
            calls = [*calls, ToolCall(id=item.call_id, function=function)]
            messages.append(Message(role="assistant", tool_calls=calls))
            continue
        calls = []
        if isinstance(item, CallOutputItem):
            messages.append(Message(role="tool", content=item.output, tool_call_id=item.call_id))
        else:
            content = item.content
            text = content if isinstance(content, str) else "".join(part.text for part in content)
            messages.append(Message(role=item.role, content=text))
    return messages


class ResponseReply(ChatReply):
    """The reply to a request for a response."""

    def __init__(self, service: Service, body: ResponseBody, chat: ChatBody, prompt: Prompt, use: ToolUse) -> None:
        super().__init__(service, chat, prompt, use)
        self.chunk_head = {}
        self._numbers = count()
        self._finish_reason: str | None = None
        self._output: list[JsonObject] = []
        self._message: JsonObject | None = None
        """The item of the output that has the text."""
        self._response: JsonObject = {
            "id": _new_id("resp"),
            "object": "response",
            "created_at": self.head["created"],
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "metadata": {},
            "model": service.name,
            "output": [],
            "parallel_tool_calls": True,
            "temperature": service.sample.temperature if body.temperature is None else body.temperature,
            "tool_choice": body.model_dump()["tool_choice"] or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": service.sample.top_p if body.top_p is None else body.top_p,
        }

    def build(self, texts: Sequence[ReceivedText]) -> JsonObject:
        """Return the complete reply."""
        [choice] = super().build(texts)["choices"]
        self._finish_reason = choice["finish_reason"]
        message = choice["message"]
        calls = message.get("tool_calls", [])
        if message["content"] or not calls:
            self._open_message()["content"][0]["text"] = message["content"]
        self._output += [_call_item(call) for call in calls]
        return self._end_response()

    def first_chunks(self) -> Iterator[JsonObject]:
        """Yield the events before the text."""
        yield self._event("created", response=self._response)
        yield self._event("in_progress", response=self._response)

    def next_chunks(self, received: Sequence[IndexedChunk]) -> Iterator[JsonObject]:
        """Yield the events of new text and of calls."""
        for chunk in super().next_chunks(received):
            [choice] = chunk["choices"]
            self._finish_reason = choice["finish_reason"]
            if content := choice["delta"].get("content"):
                yield from self._write(content)
            for call in choice["delta"].get("tool_calls", ()):
                item = _call_item(call)
                self._output.append(item)
                place = {"output_index": len(self._output) - 1}
                yield self._event("output_item.added", **place, item={**item, "arguments": "", "status": "in_progress"})
                place["item_id"] = item["id"]
                yield self._event("function_call_arguments.delta", **place, delta=item["arguments"])
                yield self._event("function_call_arguments.done", **place, arguments=item["arguments"])
                yield self._event("output_item.done", output_index=place["output_index"], item=item)

    def last_chunks(self) -> Iterator[JsonObject]:
        """Yield the end of the text, and the complete reply."""
        if self._finish_reason is None:  # it has failed, and the event before says why
            return
        if self._message is not None or not self._output:
            yield from self._write("")
            assert self._message is not None
            place = self._place_of_text()
            [part] = self._message["content"]
            yield self._event("output_text.done", **place, text=part["text"], logprobs=[])
            yield self._event("content_part.done", **place, part=part)
            yield self._event("output_item.done", output_index=place["output_index"], item=self._message)
        response = self._end_response()
        yield self._event(response["status"], response=response)

    def usage(self) -> JsonObject:
        """Return the token counts."""
        chat = super().usage()
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.reused_tokens},
            "output_tokens": self.new_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            **{name: chat[name] for name in ("total_tokens", "dropped_messages") if name in chat},
        }

    def _write(self, text: str) -> Iterator[JsonObject]:
        """Yield the events that add text to the message."""
        if self._message is None:
            item = self._open_message()
            place = self._place_of_text()
            opened = {**item, "content": [], "status": "in_progress"}
            yield self._event("output_item.added", output_index=place["output_index"], item=opened)
            yield self._event("content_part.added", **place, part=dict(item["content"][0]))
        assert self._message is not None
        self._message["content"][0]["text"] += text
        if text:
            yield self._event("output_text.delta", **self._place_of_text(), delta=text, logprobs=[])

    def _open_message(self) -> JsonObject:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = {"type": "message", "id": _new_id("msg"), "role": "assistant", "status": "completed", "content": [part]}
        self._message = item
        self._output.append(item)
        return item

    def _place_of_text(self) -> JsonObject:
        assert self._message is not None
        index = next(index for index, item in enumerate(self._output) if item is self._message)
        return {"item_id": self._message["id"], "output_index": index, "content_index": 0}

    def _end_response(self) -> JsonObject:
        """Return the complete response."""
        is_cut = self._finish_reason == "length"
        if is_cut and self._message is not None:
            self._message["status"] = "incomplete"
        self._response["status"] = "incomplete" if is_cut else "completed"
        self._response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        return {**self._response, "output": self._output, "usage": self.usage()}

    def _event(self, name: str, **fields: Any) -> JsonObject:
        return {"type": f"response.{name}", "sequence_number": next(self._numbers), **fields}


def _call_item(call: JsonObject) -> JsonObject:
    function = call["function"]
    return {"type": "function_call", "id": _new_id("fc"), "call_id": call["id"], **function, "status": "completed"}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{random.getrandbits(96):024x}"
