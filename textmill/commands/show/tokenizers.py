"""Prints a tokenizer for people to read: its size, special tokens, how well it compresses, and a text in its tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from textmill.commands.show.bars import print_bars
from textmill.commands.show.tokens import token_texts
from textmill.storage.files import format_path, read_json
from textmill.tokens.vocabulary.tokenizer import open_tokenizer

REPORT = "report.json"
EXAMPLE = "Text becomes tokens. 텍스트는 토큰이 된다. Metin belirteçlere dönüşür. 文本变成标记。 3.14 = π"
ROLES = ("end", "begin", "pad", "unknown", "mask")


def show_tokenizer(folder: Path) -> None:
    """Print the tokenizer of a folder."""
    tokenizer = open_tokenizer(folder)
    kind = type(tokenizer.inner.model).__name__
    print(f"{format_path(folder)}: {kind} tokenizer, {tokenizer.vocab:,} entries")
    roles = {role: getattr(tokenizer, role) for role in ROLES}
    special = {role: token for role, token in roles.items() if token is not None}
    print("  " + ", ".join(f"{role} {token} {tokenizer.inner.id_to_token(token)!r}" for role, token in special.items()))
    if (folder / REPORT).is_file():
        for split, one in read_json(folder / REPORT).items():
            for name, figures in one["by"].items():
                print(
                    f"  {split} text, {name}: {figures['bytes_per_token']:.2f} bytes per token, "
                    f"{figures['tokens_per_word']:.2f} tokens per word, {figures['unknown']:.2%} unknown"
                )
    lengths = Counter(len(tokenizer.decode([token])) for token in range(tokenizer.vocab))
    print_bars("entries by characters", {str(length): lengths[length] for length in sorted(lengths)})
    print("\nan example, token by token")
    print("|".join(token_texts(tokenizer.encode(EXAMPLE), tokenizer)))
