"""Read conversations from four common layouts into turns of a role and a text.

All of these records become (("user", "Hi"), ("assistant", "Hello")):

    messages    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    sharegpt    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    alpaca      {"instruction": "Hi", "input": "", "output": "Hello"}
    pairs       {"question": "Hi", "answer": "Hello"}
"""

from __future__ import annotations

import json
from typing import Any, get_args

from textmill.config.corpus import ChatShape
from textmill.corpus.document import Turn
from textmill.corpus.records import UnreadableRecord

SHAPES = tuple(shape for shape in get_args(ChatShape) if shape != "auto")
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "usr": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
PAIR_NAMES = (
    ("q", "a"),
    ("question", "answer"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("query", "response"),
    ("instruction", "response"),
    ("질문", "답변"),
    ("soru", "cevap"),
    ("soru", "yanıt"),
    ("问题", "回答"),
    ("質問", "回答"),
)
"""Common names of the question and the answer column, compared without case."""
TURN_LISTS = {"messages": "messages", "sharegpt": "conversations"}
"""The usual name of the list of turns."""
TURN_FIELDS = (("messages", "role", "content"), ("sharegpt", "from", "value"))
"""The fields of a turn: the role and the text."""
DEFAULT_KEY = "text"
"""The default of `corpus.text_key`."""

Record = dict[str, Any]


def read_conversation(value: object, shape: str, key: str = DEFAULT_KEY) -> tuple[Turn, ...]:
    """The turns of one record.

    `key` names the list of turns, or the question and answer fields, if they do not have the usual names.
    """
    if not isinstance(value, dict):
        raise UnreadableRecord("not an object; a conversation must be an object with fields or a row with columns")
    try:
        return _read_turns(value, shape, key)
    except UnreadableRecord:
        layout = find_layout(value)
        if shape == "auto" or layout is None or layout[0] == shape:
            raise
        found, turns = layout
        more = f" corpus.text_key={turns}" if turns != DEFAULT_KEY else ""
        raise UnreadableRecord(
            f"a conversation in the layout {found}, found with corpus.chat={shape}; set corpus.chat={found}{more}"
        ) from None


def _read_turns(value: Record, shape: str, key: str) -> tuple[Turn, ...]:
    shape = _detect_shape(value) if shape == "auto" else shape
    if shape == "alpaca":
        turns = _read_alpaca(value)
    elif shape == "pairs":
        question, answer = _pair_names(value, key)
        turns = [("user", _read_text(value, question)), ("assistant", _read_text(value, answer))]
    else:
        turns = _read_turn_list(value, shape, key)
    if not turns:
        raise UnreadableRecord("a conversation without turns")
    for number, (role, _) in enumerate(turns, 1):
        if role == "system" and number > 1:
            raise UnreadableRecord(f"turn {number} is a system turn; only the first turn can be")
    return tuple(turns)


def find_layout(value: Record) -> tuple[str, str] | None:
    """The layout of a record and the key of its turns; None if it is not a conversation.

    Unlike `corpus.chat=auto`, a list of turns is found under any name.
    """
    for name, field in value.items():
        first_turn = field[0] if isinstance(field, list) and field else None
        for shape, role_name, text_name in TURN_FIELDS:
            if isinstance(first_turn, dict) and {role_name, text_name} <= first_turn.keys():
                return shape, DEFAULT_KEY if name == TURN_LISTS[shape] else str(name)
    try:
        shape = _detect_shape(value)
        _read_turns(value, shape, DEFAULT_KEY)
    except UnreadableRecord:
        return None
    return shape, DEFAULT_KEY


def turns_to_json(turns: tuple[Turn, ...]) -> str:
    """A conversation as JSON, in the format that shards store and transformers reads."""
    return json.dumps(
        [{"role": role, "content": text} for role, text in turns], ensure_ascii=False, separators=(",", ":")
    )


def turns_from_json(text: str) -> list[Turn]:
    """The inverse of `turns_to_json`."""
    return [(turn["role"], turn["content"]) for turn in json.loads(text)]


def _detect_shape(value: Record) -> str:
    """The layout of a record; an error if none or several fit."""
    is_possible = {
        "messages": isinstance(value.get("messages"), list),
        "sharegpt": isinstance(value.get("conversations"), list),
        "alpaca": {"instruction", "output"} <= value.keys(),
        "pairs": bool(_find_pairs(value)),
    }
    shapes = [shape for shape, possible in is_possible.items() if possible]
    if len(shapes) == 1:
        return shapes[0]
    if shapes:
        problem = f"could be {' or '.join(shapes)}"
    else:
        problem = f"no conversation in the fields {sorted(map(str, value))[:12]}"
    raise UnreadableRecord(f"{problem}; set corpus.chat to one of {', '.join(SHAPES)}")


def _find_pairs(value: Record) -> list[tuple[str, str]]:
    """The known pairs of field names that a record has, as it spells them."""
    spellings = {str(name).strip().lower(): str(name) for name in value}
    return [
        (spellings[first], spellings[second])
        for first, second in PAIR_NAMES
        if first in spellings and second in spellings
    ]


def _pair_names(value: Record, key: str) -> tuple[str, str]:
    if key != DEFAULT_KEY:
        names = tuple(name.strip() for name in key.split("+"))
        if len(names) != 2 or not set(names) <= value.keys():
            raise UnreadableRecord(
                f"corpus.text_key={key} does not name two of the fields {sorted(map(str, value))[:12]}; "
                f"write QUESTION+ANSWER"
            )
        return names[0], names[1]
    pairs = _find_pairs(value)
    if len(pairs) == 1:
        return pairs[0]
    if pairs:
        problem = f"found both {' and '.join('+'.join(pair) for pair in pairs)}"
    else:
        problem = f"no question and answer in {sorted(map(str, value))[:12]}"
    raise UnreadableRecord(f"{problem}; name the two fields with corpus.text_key=QUESTION+ANSWER")


def _read_alpaca(value: Record) -> list[Turn]:
    instruction = _read_text(value, "instruction")
    extra_input = _read_text(value, "input") if value.get("input") else ""
    turns = [
        ("user", f"{instruction}\n\n{extra_input}" if extra_input.strip() else instruction),
        ("assistant", _read_text(value, "output")),
    ]
    return [("system", _read_text(value, "system")), *turns] if value.get("system") else turns


def _read_turn_list(value: Record, shape: str, key: str) -> list[Turn]:
    """Turns from a list of objects with role and content, or from and value."""
    role_name, text_name = next((role, text) for layout, role, text in TURN_FIELDS if layout == shape)
    name = TURN_LISTS[shape] if key == DEFAULT_KEY else key
    turn_list = value.get(name)
    if not isinstance(turn_list, list):
        raise UnreadableRecord(f"no list '{name}'; found {sorted(map(str, value))[:12]}; name it with corpus.text_key")
    turns = [("system", _read_text(value, "system"))] if value.get("system") else []
    for number, turn in enumerate(turn_list, 1):
        role = turn.get(role_name) if isinstance(turn, dict) else None
        if not isinstance(role, str) or role.lower() not in ROLES:
            raise UnreadableRecord(f"turn {number}: {role_name} is {role!r}; expected one of {', '.join(ROLES)}")
        turns.append((ROLES[role.lower()], _read_text(turn, text_name, f"turn {number}: ")))
    return turns


def _read_text(value: Record, name: str, where: str = "") -> str:
    text = value.get(name)
    if not isinstance(text, str):
        kind = type(text).__name__ if name in value else "missing"
        raise UnreadableRecord(f"{where}'{name}' is {kind}, not text")
    return text
