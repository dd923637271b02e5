"""From a sum of losses to the figures that people compare, and the table that shows them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from textmill.errors import TextmillError
from textmill.storage.files import shown

COLUMNS = {
    "token_perplexity": "token ppl", "word_perplexity": "word ppl", "byte_perplexity": "byte ppl", "bits_per_byte": "bits/byte",
}  # fmt: skip
LARGEST = math.log(1e15)
"""Perplexities above e to this are not said: text without spaces has 'words' of a page."""


def figures_of(loss: float, counts: dict[str, int], who: str) -> dict[str, float | None]:
    """Perplexities of a split from its summed loss in nats and its counts of tokens, and of words and bytes where they are known."""
    if not math.isfinite(loss):
        raise TextmillError(
            f"{who}: its loss is {loss}, no measure; the weights are damaged or training diverged; use an earlier --step"
        )
    figures: dict[str, float | None] = {
        "loss": loss / counts["tokens"],
        "token_perplexity": _exp(loss, counts["tokens"]),
    }
    if "words" in counts:
        figures["word_perplexity"] = _exp(loss, counts["words"])
    if "bytes" in counts:
        figures["byte_perplexity"] = _exp(loss, counts["bytes"])
        figures["bits_per_byte"] = loss / counts["bytes"] / math.log(2) if counts["bytes"] else None
    return figures


def _exp(loss: float, count: int) -> float | None:
    return math.exp(loss / count) if count and loss / count < LARGEST else None


def table_of(rows: dict[str, dict[str, Any]]) -> str:
    """Rows of figures as aligned text; a figure that none has gets no column."""
    columns = {key: title for key, title in COLUMNS.items() if any(key in figures for figures in rows.values())}
    cells = [["", *columns.values()]] + [
        [name, *(_spoken(figures[key]) for key in columns)] for name, figures in rows.items()
    ]
    named, *widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join([name.ljust(named), *map(str.rjust, row, widths)]) for name, *row in cells)


def _spoken(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if value >= 100 else f"{value:.4f}"


def protocol_of(result: dict[str, Any]) -> str:
    """How the figures came about, in plain words."""
    window, stride = result["window"], result["stride"]
    sizes = ", ".join(
        f"{result[name]:,} {name}" for name in ("documents", "tokens", "words", "bytes") if name in result
    )
    lines = [
        f"{shown(Path(result['checkpoint']))}, step {result['step']:,}, in {result['precision']} on {result['device']}.",
        f"Split {result['split']}: {sizes}.",
        f"Every token is predicted once, in windows of {window:,} tokens that are {stride:,} apart and run across documents;"
        + (f" all but the first {window:,} see at least {window - stride:,} tokens before them;" if stride < window else "")
        + f" the very first token{' of each store' if result.get('stores', 1) > 1 else ''} is predicted from an end-of-text token.",
    ]  # fmt: skip
    if "append_end" in result:
        lines.append(
            "End-of-text tokens are predicted and count in the loss and in tokens, but not in words or bytes." if result["append_end"]
            else "The tokens were made without end-of-text tokens between documents."
        )  # fmt: skip
    if "words" in result:
        lines.append("Words are what stands between white space; bytes are those of UTF-8.")
    else:
        lines.append("How many words and bytes these tokens were made of is not known, so there is no figure for them.")
    if "counted" in result:
        part = f"the first {result['counted']:,} of" if result["counted"] < result["train_tokens"] else "all"
        counted = f"both counted on {part} {result['train_tokens']:,} train tokens"
        lines.append(f"unigram: add-one; bigram: interpolated Witten-Bell over that unigram; {counted}.")
    return "\n".join(lines)
