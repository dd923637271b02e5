"""Conversations: the four shapes in which people keep them, read into turns of a role and what it says."""

from __future__ import annotations

import json
from typing import Any, get_args

from textmill.config.data import ChatShape
from textmill.corpus.document import Turn
from textmill.corpus.records import Unreadable

SHAPES = tuple(shape for shape in get_args(ChatShape) if shape != "auto")
ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "usr": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
}  # fmt: skip
PAIRS = (("q", "a"), ("question", "answer"), ("prompt", "completion"), ("prompt", "response"), ("query", "response"))
"""What the two columns of questions and answers are usually called, in any case."""
UNSAID = "text"
"""`corpus.text_key` where nobody said another."""

Record = dict[str, Any]


def conversation_of(value: object, shape: str, key: str = UNSAID) -> tuple[Turn, ...]:
    """The turns of one record; `key` names the list of turns, or the two fields of a pair, where they have other names."""
    if not isinstance(value, dict):
        raise Unreadable("found no object; a conversation is an object with fields, or a row with columns")
    shape = _shape_of(value) if shape == "auto" else shape
    if shape == "alpaca":
        turns = _alpaca(value)
    elif shape == "pairs":
        turns = list(zip(("user", "assistant"), (_text(value, name) for name in _pair_of(value, key)), strict=True))
    else:
        turns = _listed(value, shape, key)
    if not turns:
        raise Unreadable("a conversation without turns")
    if late := [place for place, (role, _) in enumerate(turns) if role == "system" and place]:
        raise Unreadable(f"turn {late[0] + 1} is the system's; only the first can be")
    return tuple(turns)


def canonical(turns: tuple[Turn, ...]) -> str:
    """The conversation as the JSON that shards hold: the form in which transformers takes it."""
    return json.dumps(
        [{"role": role, "content": text} for role, text in turns], ensure_ascii=False, separators=(",", ":")
    )


def turns_of(text: str) -> list[Turn]:
    """The way back of `canonical`."""
    return [(turn["role"], turn["content"]) for turn in json.loads(text)]


def _shape_of(value: Record) -> str:
    """The one shape that a record can be read in."""
    fits = {
        "messages": isinstance(value.get("messages"), list), "sharegpt": isinstance(value.get("conversations"), list),
        "alpaca": {"instruction", "output"} <= value.keys(), "pairs": bool(_pairs_in(value)),
    }  # fmt: skip
    found = [shape for shape, fit in fits.items() if fit]
    if len(found) == 1:
        return found[0]
    what = (
        f"could be {' or '.join(found)}" if found else f"no conversation in the fields {sorted(map(str, value))[:12]}"
    )
    raise Unreadable(f"{what}; set corpus.chat to one of {', '.join(SHAPES)}")


def _pairs_in(value: Record) -> list[tuple[str, str]]:
    """The known pairs of names that a record has, as it spells them."""
    spelt = {str(name).strip().lower(): str(name) for name in value}
    return [(spelt[first], spelt[second]) for first, second in PAIRS if first in spelt and second in spelt]


def _pair_of(value: Record, key: str) -> tuple[str, str]:
    if key != UNSAID:
        names = tuple(name.strip() for name in key.split("+"))
        if len(names) != 2 or not set(names) <= value.keys():
            raise Unreadable(
                f"corpus.text_key={key} names no question and answer of {sorted(map(str, value))[:12]}; say QUESTION+ANSWER"
            )
        return names[0], names[1]
    found = _pairs_in(value)
    if len(found) != 1:
        several = " and ".join("+".join(pair) for pair in found)
        what = f"found both {several}" if found else f"no question and answer in {sorted(map(str, value))[:12]}"
        raise Unreadable(f"{what}; name the two fields with corpus.text_key=QUESTION+ANSWER")
    return found[0]


def _alpaca(value: Record) -> list[Turn]:
    asked, more = _text(value, "instruction"), _text(value, "input") if value.get("input") else ""
    turns = [("user", f"{asked}\n\n{more}" if more.strip() else asked), ("assistant", _text(value, "output"))]
    return [("system", _text(value, "system")), *turns] if value.get("system") else turns


def _listed(value: Record, shape: str, key: str) -> list[Turn]:
    """A list of turns under one name: role and content, or from and value."""
    usual, role_name, text_name = (
        ("messages", "role", "content") if shape == "messages" else ("conversations", "from", "value")
    )
    name = usual if key == UNSAID else key
    listed = value.get(name)
    if not isinstance(listed, list):
        raise Unreadable(f"no list '{name}'; found {sorted(map(str, value))[:12]}; name it with corpus.text_key")
    turns = [("system", _text(value, "system"))] if value.get("system") else []
    for number, turn in enumerate(listed, 1):
        role = turn.get(role_name) if isinstance(turn, dict) else None
        if not isinstance(role, str) or role.lower() not in ROLES:
            raise Unreadable(f"turn {number}: {role_name} is {role!r}; known are {', '.join(ROLES)}")
        turns.append((ROLES[role.lower()], _text(turn, text_name, f"turn {number}: ")))
    return turns


def _text(value: Record, name: str, where: str = "") -> str:
    found = value.get(name)
    if not isinstance(found, str):
        raise Unreadable(f"{where}'{name}' is {'missing' if name not in value else type(found).__name__}, not text")
    return found
