"""What a run reached, as sections of its page: figures next to those of counting, a verdict, texts that it wrote."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from textmill.corpus.accounts import format_count
from textmill.evaluation.metrics import list_columns
from textmill.reports.run_files import RunFiles
from textmill.reports.texts import describe_origin

MODELS = {"model": "this model", "bigram": "counting pairs of tokens (bigram)", "unigram": "counting tokens (unigram)"}
COUNTING = ("bigram", "unigram")
UNITS = {"documents": "document", "tokens": "token", "bytes": "byte"}
"""What the counts of an evaluation are counts of, as the page names it."""
CHAT_UNITS = {**UNITS, "documents": "conversation", "tokens": "assistant token"}
SHOWN_SOURCES = 20
"""Files of the corpus that a page names."""


def result_sections(run: RunFiles) -> Iterator[dict[str, Any]]:
    """The sections that come first: verdict, tables of figures, texts."""
    step = str(run.summary.get("inputs", {}).get("step", "")).removeprefix("step-").lstrip("0")
    yield {"title": f"Verdict at step {step}", "open": True, "texts": run.summary.get("verdict", [])}
    for result in run.evaluations:
        if rows := {name: result[name] for name in MODELS if isinstance(result.get(name), dict)}:
            columns, *cells = list_columns({MODELS[name]: row for name, row in rows.items()})
            yield {"title": _evaluation_title(result), "open": True, "rows": cells, "head": columns}
    texts = run.summary.get("texts", [])
    yield {"title": f"Texts of the model at step {step}, not selected", "open": True, "texts": texts}


def baselines_of(run: RunFiles) -> dict[str, float]:
    """Bits per byte of models that count, on the valid split, by name."""
    measured = [result for result in run.evaluations if result.get("split") == "valid"]
    found = {MODELS[name]: measured[-1].get(name, {}).get("bits_per_byte") for name in COUNTING} if measured else {}
    return {name: bits for name, bits in found.items() if bits}


def shorten_account(account: dict[str, Any]) -> dict[str, Any]:
    """The account of a corpus with the files that most records came from; of thousands nobody reads all."""
    sources = account.get("by_source")
    if not isinstance(sources, dict) or len(sources) <= SHOWN_SOURCES:
        return account
    largest = sorted(sources, key=lambda name: -sources[name].get("records", 0))[:SHOWN_SOURCES]
    others = f"{len(sources) - SHOWN_SOURCES:,}, in corpus/account.json"
    return {**account, "by_source": {name: sources[name] for name in largest}, "other_sources": others}


def _evaluation_title(result: dict[str, Any]) -> str:
    """On what an evaluation was done: "Measured at step 500 on the valid split: 12 documents, 3,456 tokens"."""
    units = CHAT_UNITS if "truncate" in result else UNITS  # only the evaluation of answers records how it cuts chats
    counts = [format_count(result[key], unit) for key, unit in units.items() if isinstance(result.get(key), int)]
    return f"Measured at step {result.get('step') or 0:,} on the {describe_origin(result)}: {', '.join(counts)}"
