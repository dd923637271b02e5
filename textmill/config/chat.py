"""Chat templates as data: for each role what stands before and after its words, in special tokens alone."""

from __future__ import annotations

import re
from collections.abc import Mapping

from textmill.errors import TextmillError

WORDS, END = "{content}", "{end}"
"""In a turn: what is said, and the tokenizer's end-of-text token."""
ROLES = ("system", "user", "assistant")
TEMPLATES = {
    "default": {
        "system": "<|system|>{content}{end}",
        "user": "<|user|>{content}{end}",
        "assistant": "<|assistant|>{content}{end}",
    },
    "dsgpt2": {"user": "<usr><s>{content}</s>", "assistant": "<sys><s>{content}</s>"},
}
"""dsGPT2 calls its own side <sys>, and knows no system turn."""
DSGPT2_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<sys>", "<usr>"]
"""Its special tokens in the order of their ids."""
_TOKEN = re.compile(r"\{end\}|<[^<>\s]+>|\[[^\[\]\s]+\]")


def turns_of(chat: str | None, own: Mapping[str, str]) -> dict[str, str]:
    """The turns of a named template with a user's own laid over it; nothing where neither is said."""
    return {**TEMPLATES.get(chat or "", {}), **own}


def tokens_in(text: str) -> list[str]:
    """The special tokens that a turn names, {end} included."""
    return _TOKEN.findall(text.replace(WORDS, " "))


def check_turns(turns: Mapping[str, str]) -> None:
    """Refuse a template from which a model cannot learn to answer and to stop."""
    for role, text in turns.items():
        if role not in ROLES:
            raise TextmillError(f"tokenizer.chat_turns: no role '{role}'; known are {', '.join(ROLES)}")
        before, words, after = text.partition(WORDS)
        if not words or WORDS in after:
            raise TextmillError(f"tokenizer.chat_turns: {role} is {text!r}; put {WORDS} into it once, for what is said")
        if rest := _TOKEN.sub("", before + after):
            raise TextmillError(
                f"tokenizer.chat_turns: {role} has {rest!r}, which melts into the words beside it; give special tokens alone, such as <|user|>"
            )
        if not before:
            prompt = (
                "there is no generation prompt, so nothing tells the model to answer"
                if role == "assistant"
                else "nothing tells who speaks"
            )
            raise TextmillError(
                f"tokenizer.chat_turns: {role} begins with {WORDS}: {prompt}; put a token before it, such as <|{role}|>"
            )
    if missing := [role for role in ("user", "assistant") if role not in turns]:
        raise TextmillError(
            f"tokenizer.chat_turns: no turn of the {missing[0]}; add one, such as {missing[0]}: <|{missing[0]}|>{WORDS}{END}"
        )
    if turns["assistant"].endswith(WORDS):
        raise TextmillError(
            f"tokenizer.chat_turns: assistant ends with {WORDS}, so the model would never learn to stop; put {END} after it"
        )
    if turns["assistant"].partition(WORDS)[0] == turns["user"].partition(WORDS)[0]:
        raise TextmillError(
            "tokenizer.chat_turns: user and assistant begin alike, so nothing tells who speaks; give each a token of its own"
        )
