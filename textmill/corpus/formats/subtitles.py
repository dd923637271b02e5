"""Read subtitles, SRT and WebVTT: the lines that are spoken, without their times."""

from __future__ import annotations

import re

from textmill.corpus.document_files import decode_text
from textmill.corpus.records import UnreadableRecord

_TIME = re.compile(r"\s*(?:\d+:)?\d\d:\d\d[,.]\d+\s+-->\s+(?:\d+:)?\d\d:\d\d[,.]\d+")
_MARKUP = re.compile(r"</?[A-Za-z][^<>\n]{0,100}>|<[\d:.]+>|\{\\[^{}\n]{0,100}\}")


def extract(raw: bytes, encoding: str) -> str:
    """The lines of all cues; a line that repeats the one before it, as in captions that roll, is left out."""
    lines: list[str] = []
    cues = 0
    in_cue = False
    for line in decode_text(raw, encoding).splitlines():
        if _TIME.match(line):
            cues += 1
            in_cue = True
        elif not line.strip():
            in_cue = False  # what follows is a number, a name or a note until the next time
        elif in_cue:
            spoken = _MARKUP.sub("", line).strip()
            if spoken and (not lines or spoken != lines[-1]):
                lines.append(spoken)
    if not cues:
        raise UnreadableRecord("no times such as 00:00:01,000 --> 00:00:04,000: not subtitles")
    return "\n".join(lines)
