"""Detect the text encoding of a file from its first bytes.

Detectors such as charset-normalizer always name an encoding, and the same bytes are valid in many. Here only Unicode is
assumed; an older encoding is suggested if the text would consist of the letters of a language that is written in it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping

SAMPLE_BYTES = 1 << 18
"""First bytes of a file that are examined."""
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16, whose mark it starts with
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
    (codecs.BOM_UTF8, "utf-8"),
)
"""Byte order marks, and the encoding that each stands for."""
_MARKS = tuple(mark for mark, _ in MARKS)
BINARY_FORMATS = (
    (b"PK\x03\x04", "a Word, Excel or zip file"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Word or Excel file"),
    (b"%PDF-1.", "a PDF"),
    (b"%PDF-2.", "a PDF"),
    (b"{\\rtf", "an RTF document"),
    (b"\x89PNG", "an image"),
    (b"\xff\xd8\xff", "an image"),
    (b"\x1f\x8b", "compressed, but has no .gz in its name"),
    (b"\xfd7zXZ\0", "compressed, but has no .xz in its name"),
    (b"\x28\xb5\x2f\xfd", "compressed, but has no .zst in its name"),
    (b"BZh91AY&SY", "compressed, but has no .bz2 in its name"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"PAR1\x15", "a Parquet file"),  # without the byte after it, the name of a receptor
)
"""First bytes of files that are not text, and what they are. In an older encoding nearly all bytes are characters, so
that nothing else keeps such a file out of a corpus. No text begins with them: it would be kept out too."""
_BINARY_STARTS = tuple(start for start, _ in BINARY_FORMATS)
OLDER_ENCODINGS = ("cp949", "shift_jis", "gb18030", "cp1251", "cp1254", "cp1252")
"""Encodings from before Unicode that are suggested, never assumed: the same bytes are valid in several of them."""
MAX_GARBLED = 0.05
"""Largest fraction of replacement characters and NUL in a text that is well decoded."""
MIN_PLAUSIBLE = 0.9
"""Smallest fraction of non-ASCII characters that must belong to the scripts of an older encoding."""
MIN_OTHER = 3
"""Fewer characters that are not ASCII are too few to tell."""
MIN_KANA = 0.2
"""Smallest fraction of kana in Japanese text."""
MIN_TURKISH = 0.1
"""Smallest fraction of letters of Turkish alone (ğ, ı, ş) among its letters that are not ASCII."""
MIN_FREQUENT_CYRILLIC = 0.42
"""Smallest fraction of the eight most frequent letters in Cyrillic text; Russian and Bulgarian have 0.5 to 0.6."""
MIN_PAIRS = 0.8
"""Smallest fraction of runs of bytes above 0x7f that have an even length, in Korean and Chinese text."""
_HIGH_BYTES = re.compile(rb"[\x80-\xff]+")
_TURKISH_ALONE = frozenset("ğĞıİşŞ")
_FREQUENT_CYRILLIC = frozenset("оеаинтср")
_PUNCTUATION = ((0x2010, 0x2026), (0x00AB, 0x00AB), (0x00BB, 0x00BB))
SCRIPTS = {
    "cp949": ((0xAC00, 0xD7A3), (0x3130, 0x318F)),
    "shift_jis": ((0x3040, 0x30FF), (0x4E00, 0x9FFF), (0x3000, 0x303F)),
    "gb18030": ((0x4E00, 0x9FFF), (0x3000, 0x303F), (0xFF00, 0xFFEF)),
    "cp1251": ((0x0400, 0x045F),),
    "cp1254": (*((ord(letter), ord(letter)) for letter in "çÇğĞıİöÖşŞüÜâÂîÎûÛ"), *_PUNCTUATION),
    "cp1252": ((0x00C0, 0x00FF), *_PUNCTUATION),
}
"""The ranges of characters that text in an older encoding consists of, in addition to ASCII."""


def detect_encoding(head: bytes) -> str:
    """The encoding of a file: UTF-8, or UTF-16 or UTF-32 by a byte order mark or by the places of its NUL bytes."""
    if head.startswith(_MARKS):
        return next(encoding for mark, encoding in MARKS if head.startswith(mark))
    return _unmarked_utf16(head) or "utf-8"


def find_binary_format(head: bytes) -> str | None:
    """What a file is by its first bytes, if it is not text; None if it may be text."""
    if not head.startswith(_BINARY_STARTS):  # one call, since there may be millions of small files
        return None
    return next(name for start, name in BINARY_FORMATS if head.startswith(start))


def resolve_encoding(setting: str, head: bytes) -> str:
    """The encoding to read a file with: `corpus.encoding`, or what its first bytes show if that is auto.

    An older encoding is for the files that need it: one with UTF-8 in it stays UTF-8, or it would become other text
    without an error.
    """
    if setting in ("utf-8", "utf-8-sig", "ascii"):
        return "utf-8"
    if setting.startswith(("auto", "utf-16", "utf-32")):
        detected = detect_encoding(head)
        # In these encodings spaces and line ends have NUL bytes, so a file of UTF-8 without any is not in them.
        if setting == "auto" or detected != "utf-8" or (is_utf8(head) and 0 not in head):
            return detected
        return f"{setting}-le" if setting in ("utf-16", "utf-32") else setting
    if setting.startswith("utf-"):
        return setting
    if mark_length(head):
        return detect_encoding(head)
    return _unmarked_utf16(head) or ("utf-8" if _has_utf8(head) else setting)  # an older encoding has no NUL bytes


def is_garbled(text: str) -> bool:
    """Whether a text was decoded with a wrong encoding: much of it is replacement characters or NUL."""
    return text.count("\ufffd") + text.count("\0") > MAX_GARBLED * len(text)


def mark_length(head: bytes) -> int:
    """Bytes of the byte order mark at the start; 0 if there is none."""
    return next((len(mark) for mark, _ in MARKS if head.startswith(mark)), 0)


def suggest_encoding(head: bytes) -> str | None:
    """The older encoding that bytes which are not UTF-8 are most likely in; None if it is UTF-8 or unclear."""
    decoded = head.decode(errors="replace")
    invalid = decoded.count("\ufffd")
    if is_utf8(head) or invalid < sum(char > "\x7f" for char in decoded) / 2:
        return None  # UTF-8 with a few damaged bytes
    return next((encoding for encoding in OLDER_ENCODINGS if _is_plausible(head, encoding)), None)


def advise_encodings(files: Mapping[str, str]) -> str:
    """What to do with files that are in older encodings; `files` has the name of one for each encoding."""
    if len(files) < 2:
        return "".join(f"the files look like {encoding}: set corpus.encoding={encoding}" for encoding in files)
    *_, last = files
    listed = ", ".join(f"{file} looks like {encoding}" for encoding, file in files.items())
    return (
        f"the files are in several encodings: {listed}; corpus.encoding names only one, so make a project of each, or "
        f"convert them to UTF-8, such as with: iconv -f {last} -t UTF-8 FILE > NEW"
    )


def _is_plausible(head: bytes, encoding: str) -> bool:
    """True if the bytes decode to characters of the scripts that are written in an encoding."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return False
    other = [char for char in text if char > "\x7f"]
    in_script = sum(any(first <= ord(char) <= last for first, last in SCRIPTS[encoding]) for char in other)
    if len(other) < MIN_OTHER or in_script < MIN_PLAUSIBLE * len(other):
        return False
    if encoding == "shift_jis":
        return sum("\u3040" <= char <= "\u30ff" for char in other) >= MIN_KANA * len(other)
    ascii_letters = sum(char.isascii() and char.isalpha() for char in text)
    if encoding == "cp1251":  # Greek, Hebrew and KOI8-R have its bytes too, but for other letters
        frequent = sum(char in _FREQUENT_CYRILLIC for char in text.lower())
        return len(other) > ascii_letters and frequent >= MIN_FREQUENT_CYRILLIC * len(other)
    if encoding == "cp1254":
        return sum(char in _TURKISH_ALONE for char in other) >= MIN_TURKISH * len(other)
    if encoding == "cp1252":  # Greek, Hebrew and Arabic have its bytes too, but hardly any ASCII letters
        return len(other) < ascii_letters
    # Accented letters of Western text stand alone; Korean and Chinese characters are pairs of such bytes.
    runs = [len(run) for run in _HIGH_BYTES.findall(head)]
    pairs = sum(length % 2 == 0 for length in runs) / len(runs)
    return pairs > MIN_PAIRS


def is_utf8(head: bytes) -> bool:
    """True if the bytes are UTF-8; a character cut off at the end is allowed."""
    return _decode_utf8(head) is not None


def _has_utf8(head: bytes) -> bool:
    """True if the bytes are UTF-8 and have a character beyond ASCII that is complete: "café" in cp1252 has none."""
    text = _decode_utf8(head)
    return text is not None and not text.isascii()


def _decode_utf8(head: bytes) -> str | None:
    """The text, without a character cut off at the end; None if the bytes are not UTF-8."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return None


def _unmarked_utf16(head: bytes) -> str | None:
    """UTF-16 without a byte order mark: spaces and line ends have their NUL bytes at even or at odd places only."""
    nuls = head.count(0)
    # In UTF-16, Latin text is nearly half NUL bytes, and other scripts are not valid UTF-8.
    if nuls < 2 or nuls < (0.2 if is_utf8(head) else 0.002) * len(head):
        return None
    for encoding, places in (("utf-16-le", head[1::2]), ("utf-16-be", head[0::2])):
        if places.count(0) >= 0.95 * nuls:
            try:
                codecs.getincrementaldecoder(encoding)().decode(head)
            except UnicodeDecodeError:
                return None
            return encoding
    return None
