"""Compares a written file with the model it came from: logits on seeded inputs, token ids of multilingual texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from textmill.config import ExportConfig
from textmill.conversion import readers
from textmill.conversion.formats import Format
from textmill.conversion.model import Array, Files, Hints, Model
from textmill.errors import TextmillError
from textmill.storage.stages import Stage
from textmill.tokens.vocabulary.encoders import hard_texts
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

LOGIT_BOUNDS = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2}
"""The largest difference of a logit, as a fraction of the largest logit (or of 1 if that is less)."""
DIVERGENCE_BOUNDS = {"q8_0": 0.02, "q4_0": 0.5}
"""The mean Kullback-Leibler divergence of the next token on real text, unless export.max_divergence says otherwise."""
SAMPLES = 2
LONGEST = 64
TEXT_ROWS = 16
"""Rows of LONGEST tokens of real text for the divergence of a quantised model."""
SEED = 5
TEXTS = (
    "The mill stands by the river; its wheel doesn't turn in 1,234 winters.",
    "물레방아는 강가에 서 있다. 아침마다 바퀴가 돌기 시작한다!",
    "Değirmen köprünün üstünde duruyor; çark yavaş yavaş döner.",
    "Мельница стоит у реки, и её колесо вращается.",
    "水車は川のほとりに立っている。磨坊在河边，水轮慢慢地转。",
    "الطاحونة بجانب النهر. טחנה ליד הנהר. चक्की नदी के किनारे है। โรงสีอยู่ริมแม่น้ำ",
)
SHAPE_FIELDS = (
    "layers",
    "heads",
    "kv_heads",
    "width",
    "inner",
    "positions",
    "vocab",
    "activation",
    "untied",
    "rotary_scaling",
)


def text_ids(model: Model, given: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Ids of real text in rows: those given, or else of the texts here."""
    length = min(LONGEST, model.shape.positions)
    if given is None or len(given) < length:
        assert model.tokenizer is not None
        given = np.array([id_ for text in TEXTS for id_ in model.tokenizer.encode(text)], np.int64)
    length = min(length, len(given))
    rows = min(TEXT_ROWS, len(given) // length)
    return given[: rows * length].reshape(rows, length)


def sample_ids(model: Model) -> NDArray[np.int64]:
    """Seeded token ids, which cover the whole vocabulary with equal chance."""
    length = min(LONGEST, model.shape.positions)
    return np.random.default_rng(SEED).integers(0, model.shape.vocab, (SAMPLES, length))


def logits_of(model: Model, ids: NDArray[np.int64]) -> Array:
    """Logits in fp32 on the CPU."""
    return readers.outputs_of(readers.net_of(model), torch.from_numpy(ids), has_logits=True)


def mean_divergence(source: Array, written: Array) -> float:
    """The mean Kullback-Leibler divergence of the next token, in nats."""
    p, q = (torch.log_softmax(torch.from_numpy(logits.astype(np.float64)), -1) for logits in (source, written))
    return float((p.exp() * (p - q)).sum(-1).mean().clamp(min=0))  # which leaves NaN


def write_and_check(
    stage: Stage,
    writer: Format,
    model: Model,
    config: ExportConfig,
    hints: Hints,
    facts: dict[str, Any],
    valid: NDArray[np.int64] | None = None,
) -> tuple[Files, str]:
    """Write the folder of a stage, read it back with these hints and compare; it appears only if they agree.

    Returns the files, and the result of the comparison in words; `facts` are added to the manifest. `valid`: ids of
    text that the model was not trained on, on which a quantised model is measured.
    """
    with stage.unfinished_folder() as unfinished:
        try:
            files = writer.write(model, unfinished, config)
            figures = check_written(model, writer.read(unfinished, hints), config, str(stage.folder), valid)
            if config.reader:
                where = str(stage.folder)
                opened = readers.check_with_reader(model, unfinished, config.kind, config.precision, TEXTS, where)
                figures = "; ".join([figures, *opened])
        except TextmillError:
            stage.discard()
            raise
        stage.write_manifest(unfinished, files, {**facts, "parameters": model.shape.parameters, "check": figures})
    return files, figures


def check_written(
    source: Model, written: Model, config: ExportConfig, where: str, valid: NDArray[np.int64] | None = None
) -> str:
    """Raise unless what was written computes what the source computes; return the figures in words."""
    precision = config.precision
    for name in SHAPE_FIELDS:
        expected = getattr(source.shape, name, None)
        actual = getattr(written.shape, name, None)
        if expected != actual:
            raise _failed(where, f"its {name} is read back as {actual}, the model has {expected}")
    ids = sample_ids(source) if precision in LOGIT_BOUNDS else text_ids(source, valid)
    expected_logits, actual_logits = logits_of(source, ids), logits_of(written, ids)
    difference = float(np.abs(expected_logits - actual_logits).max())
    figures = f"logits differ by at most {difference:.2g}"
    if precision in LOGIT_BOUNDS:
        bound = LOGIT_BOUNDS[precision] * max(1.0, float(np.abs(expected_logits).max()))
        figures += f" (bound {bound:.2g})"
        if not difference <= bound:  # also true for NaN
            raise _failed(where, f"its {figures}", "; use export.precision=fp32" if precision != "fp32" else "")
    else:
        bound = config.max_divergence or DIVERGENCE_BOUNDS[precision]
        divergence = mean_divergence(expected_logits, actual_logits)
        figures += f", mean KL divergence {divergence:.2g} (bound {bound:g}) on {ids.size:,} tokens of text"
        if not divergence <= bound:
            raise _failed(where, f"its {figures}", "; use export.precision=fp16, or raise export.max_divergence")
    joins = config.kind == "gguf"  # llama.cpp does so between words too
    return f"{figures}; {check_tokenizer(source.tokenizer, written.tokenizer, where, joins_unknown=joins)}"


def check_tokenizer(
    source: TextTokenizer | None, written: TextTokenizer | None, where: str, *, joins_unknown: bool
) -> str:
    """Raise unless both give the same ids for texts in many scripts; return the figures in words.

    `joins_unknown`: several tokens for unknown text in a row count as one.
    """
    if source is None or written is None:
        return "no tokenizer to compare"
    texts = [*TEXTS, *(hard_text.text for hard_text in hard_texts())]
    for text in texts:
        expected = source.encode(text)
        actual = written.encode(text)
        if joins_unknown:
            expected = readers.join_unknown(expected, source.unk_id)
            actual = readers.join_unknown(actual, source.unk_id)
        if expected != actual:
            raise _failed(where, f"its tokenizer gives other ids for {text[:40]!r}")
    if source.eos_id != written.eos_id:
        raise _failed(where, f"its end-of-text token is {written.eos_id}, the model has {source.eos_id}")
    return f"ids of {len(texts)} texts are equal"


def _failed(where: str, what: str, advice: str = "") -> TextmillError:
    return TextmillError(f"{where}: not written: {what} when read back{advice}")
