"""Documents: files that LibreOffice, pandoc, FastWARC and the standard library wrote give the words of the text they
were made from; damaged and encrypted ones give one line each.

mill.docx, .rtf and .pdf are LibreOffice 7.4's, mill.odt, .epub, .html and .tex are pandoc 2.17's, all from mill.md.
"""

from __future__ import annotations

import io
import json
import mailbox
import random
import re
import zipfile
from difflib import SequenceMatcher
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest

from tests.support.damage import damage_document
from tests.support.records import read_file, texts_of
from textmill.cli import main
from textmill.config import CorpusConfig, RunConfig
from textmill.corpus import records
from textmill.corpus.document import Document
from textmill.corpus.document_files import describe_unread_documents, format_from_content
from textmill.corpus.find_sources import find_sources, read_records, split_into_chunks
from textmill.corpus.prepare import prepare
from textmill.corpus.records import BadRecord
from textmill.corpus.shards import open_corpus
from textmill.errors import TextmillError

FOLDER = Path(__file__).parent / "documents"
FOOTNOTE = "The book is in the museum of the town, in a case near the stairs"
MIN_WORDS = 0.98


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def known_words() -> list[str]:
    """The words of mill.md without its footnote, which each format has in another place, and without list numbers."""
    text = (FOLDER / "mill.md").read_text(encoding="utf-8")
    text = re.sub(r"\[\^1\]: .*", "", text).replace("[^1]", "")
    return words(re.sub(r"^\d\. ", "", text, flags=re.MULTILINE))


def read(path: Path, data: bytes | None = None, **settings: Any) -> list[Document | BadRecord]:
    return read_file(path, data, documents="file", **settings)


def text_of(path: Path, data: bytes | None = None) -> str:
    return "\n".join(texts_of(read(path, data)))


def reason(path: Path, data: bytes) -> str:
    (found,) = read(path, data)
    assert isinstance(found, BadRecord), found
    return found.reason


def share_in_order(text: str) -> float:
    known = known_words()
    blocks = SequenceMatcher(None, known, words(text), autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) / len(known)


def paragraphs() -> list[str]:
    return [" ".join(words(part)) for part in (FOLDER / "mill.md").read_text(encoding="utf-8").split("\n\n")]


@pytest.mark.parametrize(
    "name", ["mill.docx", "mill.odt", "mill.rtf", "mill.pdf", "mill.epub", "mill.html", "mill.tex"]
)
def test_files_of_other_programs(name: str) -> None:
    text = text_of(FOLDER / name)
    has_footnote = " ".join(words(FOOTNOTE)) in " ".join(words(text))
    assert has_footnote == (name != "mill.rtf")  # striprtf leaves out footnotes
    body = " ".join(words(text)).replace(" ".join(words(FOOTNOTE)), "")
    assert share_in_order(body) >= MIN_WORDS
    foreign = set(words(text)) - set(words((FOLDER / "mill.md").read_text(encoding="utf-8")))
    assert not foreign


def test_markdown_is_read_as_it_is() -> None:
    assert text_of(FOLDER / "mill.md") == (FOLDER / "mill.md").read_text(encoding="utf-8")


def test_headings_lists_and_tables_are_lines() -> None:
    for name in ("mill.docx", "mill.odt", "mill.epub", "mill.html"):
        lines = [line.strip() for line in text_of(FOLDER / name).splitlines()]
        assert "What the miller wrote down" in lines, name
        assert any(
            line.endswith("the weight of the grain, to the half pound,") and line[:1] in "-•" for line in lines
        ), name
        assert any(words(line) == ["1872", "398", "203"] and "\t" in line for line in lines), name


def test_mailbox(tmp_path: Path) -> None:
    box = mailbox.mbox(tmp_path / "mails.mbox")
    for number, part in enumerate(paragraphs()):
        mail = EmailMessage()
        mail["Subject"] = f"Değirmen {number}"
        mail["From"] = "a@example.com"
        mail.set_content(
            f"From here on: {part}\nFrom a new line.\n", cte=("8bit", "base64", "quoted-printable")[number % 3]
        )
        if number % 2:
            mail.add_alternative(f"<p>{part}", subtype="html")
            mail.add_attachment(b"\x00\x01", maintype="application", subtype="x-tar", filename="a.tar")
        box.add(mail)
    box.flush()
    found = read(tmp_path / "mails.mbox", text_key="text", keep_fields=["subject"])
    assert [one.text.strip() for one in found if isinstance(one, Document)] == [
        f"From here on: {part}\nFrom a new line." for part in paragraphs()
    ]
    assert isinstance(found[3], Document)
    assert json.loads(found[3].meta or "") == {"subject": "Değirmen 3"}
    assert [one.id for one in found if isinstance(one, Document)][:2] == ["message 1", "message 2"]


def test_warc(tmp_path: Path) -> None:
    from fastwarc.warc import ArchiveIterator, WarcRecord, WarcRecordType

    page = (FOLDER / "mill.html").read_bytes()
    stream = io.BytesIO()
    bodies = [
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n", page),
        (b"HTTP/1.1 404 Not Found\r\nContent-Type: text/html\r\n\r\n", b"<p>Not found"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n", b"\x89PNG"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"5\r\nA few\r\n6\r\n words\r\n0\r\n\r\n",
        ),
    ]
    for number, (head, body) in enumerate(bodies):
        record = WarcRecord()
        record.init_headers(WarcRecordType.response)
        record.headers["WARC-Target-URI"] = f"https://example.org/{number}"
        record.set_bytes_content(head + body)
        record.write(stream, checksum_data=True)
    assert len(list(ArchiveIterator(io.BytesIO(stream.getvalue()), parse_http=False))) == len(bodies)
    found = read(tmp_path / "a.warc", stream.getvalue())
    assert [one.text for one in found[1:] if isinstance(one, Document)] == ["A few words"]
    assert isinstance(found[0], Document)
    assert share_in_order(found[0].text) >= MIN_WORDS
    assert json.loads(found[0].meta or "")["url"] == "https://example.org/0"
    broken = stream.getvalue().replace(b"The mill stood", b"The mill stooe")
    reasons = [one.reason for one in read(tmp_path / "b.warc", broken) if isinstance(one, BadRecord)]
    assert [text.partition(" is not")[0] for text in reasons] == ["its sha1"]


def test_subtitles(tmp_path: Path) -> None:
    srt = "".join(
        f"{number}\n00:00:{number:02d},000 --> 00:00:{number:02d},900\n<i>{part}</i>\n\n"
        for number, part in enumerate(paragraphs(), 1)
    )
    vtt = "WEBVTT\n\nNOTE not spoken\n\n" + srt.replace(",000", ".000").replace(",900", ".900 align:start")
    for name, text in [("a.srt", srt), ("a.vtt", vtt)]:
        assert text_of(tmp_path / name, text.encode()).splitlines() == paragraphs()
    assert "not subtitles" in reason(tmp_path / "b.srt", b"Only text.")


def test_source_code_keeps_language_and_path(tmp_path: Path) -> None:
    code = Path(__file__).read_bytes()
    (found,) = read(tmp_path / "a.py", code)
    assert isinstance(found, Document)
    assert found.text == code.decode()
    assert json.loads(found.meta or "") == {"language": "Python", "path": str(tmp_path / "a.py")}


def test_sections_of_documents_are_those_of_plain_text(tmp_path: Path) -> None:
    text = "\n\n".join(paragraphs() * 20)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "a.tex").write_text(text.replace("_", ""), encoding="utf-8")
    both = []
    for name in ("a.txt", "a.tex"):
        config = CorpusConfig(section_chars=500)
        chunks = split_into_chunks(find_sources([str(tmp_path / name)]), config.documents)
        both.append(
            [one.text.strip() for chunk in chunks for one in read_records(chunk, config) if isinstance(one, Document)]
        )
    assert len(both[0]) > 5
    assert both[0] == both[1]


def test_menus_are_left_out_of_pages(tmp_path: Path) -> None:
    menu = "<nav><ul>" + "".join(f"<li><a href=/{one}>Entry {one}</a>" for one in range(30)) + "</ul></nav>"
    article = "".join(f"<p>{part}.</p>" for part in paragraphs())
    page = (
        f"<!doctype html><html><body>{menu}<main><article>{article}</article></main><footer>All rights</footer></html>"
    )
    text = text_of(tmp_path / "a.html", page.encode())
    assert "Entry 7" not in text
    assert "All rights" not in text
    assert words(text) == words("\n".join(paragraphs()))


@pytest.mark.parametrize(
    ("declared", "stored", "is_read"),
    [
        ("utf-8", "utf-8", True),
        ("windows-1254", "cp1254", True),
        ("utf-8", "cp1254", False),
        ("iso-8859-1", "utf-8", True),
    ],
)
def test_encodings_of_pages(tmp_path: Path, declared: str, stored: str, is_read: bool) -> None:
    page = f"<html><head><meta charset={declared}></head><body><p>Değirmenci güneş doğmadan kalkar.</p></html>"
    (found,) = read(tmp_path / "a.html", page.encode(stored))
    assert isinstance(found, Document) == is_read
    assert not isinstance(found, Document) or found.text == "Değirmenci güneş doğmadan kalkar."


def test_a_wrong_or_missing_extension(tmp_path: Path) -> None:
    for name in ("mill.docx", "mill.odt", "mill.rtf", "mill.pdf", "mill.epub", "mill.html"):
        expected = text_of(FOLDER / name)
        for other in ("a.pdf", "a.docx", "a.rtf", "a.doc", "letter"):
            assert text_of(tmp_path / other, (FOLDER / name).read_bytes()) == expected, (name, other)


def scanned_pdf() -> bytes:
    import pypdfium2

    document = pypdfium2.PdfDocument.new()
    for _ in range(3):
        document.new_page(200, 300)
    stream = io.BytesIO()
    document.save(stream)
    return stream.getvalue()


def test_files_without_text_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each damaged, encrypted or scanned file, and everything else is kept."""
    texts = tmp_path / "texts"
    texts.mkdir()
    docx = (FOLDER / "mill.docx").read_bytes()
    flipped = bytearray(docx)
    start = docx.index(b"word/document.xml") + 200
    flipped[start] ^= 8
    locked = bytearray((FOLDER / "mill.odt").read_bytes())
    for at in [found.start() for found in re.finditer(b"PK\x01\x02", bytes(locked))]:
        locked[at + 8] |= 1  # the flag of encryption
    files = {
        "flipped.docx": (bytes(flipped), "'word/document.xml' is damaged"),
        "cut.odt": ((FOLDER / "mill.odt").read_bytes()[:5000], "a damaged or truncated zip"),
        "cut.pdf": ((FOLDER / "mill.pdf").read_bytes()[:9000], "truncated"),
        "locked.odt": (bytes(locked), "it is encrypted"),
        "secret.pdf": ((FOLDER / "secret.pdf").read_bytes(), "it is encrypted"),
        "old.docx": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "an encrypted document, or one of an old Word"),
        "scan.pdf": (scanned_pdf(), "no text layer on its 3 pages: a scan"),
    }
    for name, (data, _) in files.items():
        (texts / name).write_bytes(data)
    for name in ("mill.docx", "mill.pdf", "mill.epub"):
        (texts / name).write_bytes((FOLDER / name).read_bytes())
    corpus = {"sources": [str(texts)], "max_unreadable": 1.0, "dedup": "none", "documents": "file"}
    folder = prepare(
        RunConfig.model_validate({"folder": str(tmp_path / "my"), "corpus": corpus, "runner": {"workers": 1}})
    )
    rows = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {Path(row["file"]).name for row in rows} == set(files)
    assert len(rows) == len(files)
    for row in rows:
        assert files[Path(row["file"]).name][1] in row["reason"], row
    assert sorted(Path(one.source).name for one in open_corpus(folder)) == ["mill.docx", "mill.epub", "mill.pdf"]
    assert f"prepare: 1 scan without a text layer: {texts / 'scan.pdf'}; recognise the text" in capsys.readouterr().out


def test_new_and_prepare_count_scans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(7):
        (texts / f"{number}.pdf").write_bytes(scanned_pdf())
    seven = f"7 scans without a text layer: {', '.join(str(texts / f'{one}.pdf') for one in range(5))} and 2 more"
    assert main(["new", str(tmp_path / "mine"), "--text", str(texts), "--minutes", "1"]) == 2
    assert f"found 7 unreadable records, {seven}" in capsys.readouterr().err
    (texts / "notes.txt").write_text("\n".join(f"The mill turns {n} times. " * 20 for n in range(400)))
    assert main(["new", str(tmp_path / "mine"), "--text", str(texts), "--minutes", "1"]) == 0
    assert seven in capsys.readouterr().err
    assert main(["prepare", str(tmp_path / "mine"), "corpus.max_unreadable=0"]) == 2
    assert f"prepare: {seven}" in capsys.readouterr().out


def zip_of(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laughs = b'<!DOCTYPE a [<!ENTITY b "ha"><!ENTITY c "&b;&b;&b;&b;">]><w:document xmlns:w="x">&c;</w:document>'
    assert "declares a document type" in reason(tmp_path / "a.docx", zip_of({"word/document.xml": laughs}))
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1 << 20)
    assert "more than the maximum" in reason(tmp_path / "b.docx", zip_of({"word/document.xml": bytes(1 << 21)}))
    deep = b"<w:document xmlns:w='x'>" + b"<w:p>" * 100_000
    assert "damaged" in reason(tmp_path / "c.docx", zip_of({"word/document.xml": deep}))


def test_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.pdf").write_bytes((FOLDER / "mill.pdf").read_bytes())
    (texts / "b.txt").write_text("Some words of plain text.", encoding="utf-8")
    for module in ("find_sources", "document_files"):
        monkeypatch.setattr(f"textmill.corpus.{module}.missing_package", {"pdf": "pypdfium2"}.get)
    with pytest.raises(
        TextmillError, match=r"a\.pdf: needs the package pypdfium2; run: pip install 'textmill\[documents\]'"
    ):
        find_sources([str(texts / "a.pdf")])
    skipped: list[str] = []
    assert [Path(one.name).name for one in find_sources([str(texts)], skipped=skipped)] == ["b.txt"]
    assert skipped == [str(texts / "a.pdf")]
    assert describe_unread_documents(skipped) == (
        "files not read: 1 pdf; pip install 'textmill[documents]' adds roughly 0.0 MB of text"
    )
    corpus = {"sources": [str(texts)]}
    prepare(RunConfig.model_validate({"folder": str(tmp_path / "my"), "corpus": corpus, "runner": {"workers": 1}}))
    assert "1 file has a format that needs pip install 'textmill[documents]'" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("mill.*")))
def test_random_damage(tmp_path: Path, name: str) -> None:
    """No error and no foreign words; `bench/documents.py` makes 2,000 damages."""
    original = (FOLDER / name).read_bytes()
    known = set(words(text_of(FOLDER / name))) | set(words(original.decode(errors="ignore")))
    generator = random.Random(name)
    for number in range(8):
        damage = damage_document(original, name, generator)
        path = tmp_path / f"{number}-{damage.name}"
        if damage.name.endswith((".gz", ".doc")) or "." not in damage.name:
            path.write_bytes(damage.data)
            if format_from_content(str(path)) is None:
                with pytest.raises(TextmillError, match="; textmill reads"):
                    find_sources([str(path)])
                continue
        found = read(path, damage.data)
        kept = [word for one in found if isinstance(one, Document) for word in words(one.text)]
        foreign = [word for word in kept if word not in known]
        assert not damage.is_revealed or len(foreign) <= 1, (damage.kind, foreign[:9])
