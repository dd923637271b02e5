"""Chat templates as data: for each role the special tokens before and after its message."""

from __future__ import annotations

import re
from collections.abc import Mapping

from textmill.errors import TextmillError

CONTENT = "{content}"
END = "{end}"
"""In a turn: the message, and the tokenizer's end-of-text token."""
ROLES = ("system", "user", "assistant")
TEMPLATES = {
    "default": {
        "system": "<|system|>{content}{end}",
        "user": "<|user|>{content}{end}",
        "assistant": "<|assistant|>{content}{end}",
    },
    "dsgpt2": {"user": "<usr><s>{content}</s>", "assistant": "<sys><s>{content}</s>"},
}
"""dsGPT2 calls the assistant <sys>, and has no system turn."""
DSGPT2_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<sys>", "<usr>"]
"""dsGPT2's special tokens in the order of their ids."""
_TOKEN = re.compile(r"\{end\}|<[^<>\s]+>|\[[^\[\]\s]+\]")


def turns_of(chat: str | None, own: Mapping[str, str]) -> dict[str, str]:
    """The turns of a named template, overridden by the user's own; empty if neither is set."""
    return {**TEMPLATES.get(chat or "", {}), **own}


def tokens_in(text: str) -> list[str]:
    """The special tokens that a turn names, {end} included."""
    return _TOKEN.findall(text.replace(CONTENT, " "))


def check_turns(turns: Mapping[str, str]) -> None:
    """Refuse a template with which a model cannot learn to answer and to stop."""
    for role, text in turns.items():
        _check_turn(role, text)
    if missing := [role for role in ("user", "assistant") if role not in turns]:
        raise TextmillError(
            f"tokenizer.chat_turns: no turn for the {missing[0]}; add one, such as {missing[0]}: "
            f"<|{missing[0]}|>{CONTENT}{END}"
        )
    if turns["assistant"].endswith(CONTENT):
        raise TextmillError(
            f"tokenizer.chat_turns: assistant ends with {CONTENT}, so the model would never learn to stop; "
            f"put {END} after it"
        )
    if turns["assistant"].partition(CONTENT)[0] == turns["user"].partition(CONTENT)[0]:
        raise TextmillError(
            "tokenizer.chat_turns: user and assistant begin alike, so nothing shows who speaks; give each its own token"
        )


def _check_turn(role: str, text: str) -> None:
    """Refuse a turn that is not special tokens, the message, and perhaps special tokens again."""
    if role not in ROLES:
        raise TextmillError(f"tokenizer.chat_turns: no role '{role}'; the roles are {', '.join(ROLES)}")
    before, found, after = text.partition(CONTENT)
    if not found or CONTENT in after:
        raise TextmillError(
            f"tokenizer.chat_turns: {role} is {text!r}; it needs {CONTENT} exactly once, for the message"
        )
    if rest := _TOKEN.sub("", before + after):
        raise TextmillError(
            f"tokenizer.chat_turns: {role} has {rest!r}, which would merge with the message next to it; "
            "use only special tokens, such as <|user|>"
        )
    if not before:
        problem = "nothing shows who speaks"
        if role == "assistant":
            problem = "there is no generation prompt, so the model cannot know when to answer"
        raise TextmillError(
            f"tokenizer.chat_turns: {role} begins with {CONTENT}: {problem}; put a token before it, such as <|{role}|>"
        )
