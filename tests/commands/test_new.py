"""`textmill new` with other files than plain UTF-8 text: its project runs as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.machines import H200, TWO_CORES
from textmill.cli import main
from textmill.commands.new import MANY_FILES, _warn_of_busy_machine
from textmill.corpus.document import SPLITS
from textmill.corpus.shards import open_corpus
from textmill.planning.plan import MachineProfile
from textmill.where import open_where

SHAKESPEARE = Path(__file__).parents[2] / "textmill" / "corpora" / "tinyshakespeare.txt"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_conversations_get_a_template() -> None:
    rows = "".join(f"What is {n} and one?,It is {n + 1}.\n" for n in range(90))
    Path("pairs.csv").write_text("Q,A\n" + rows, encoding="utf-8")
    assert main(["new", "mine", "--text", "pairs.csv", "--minutes", "1"]) == 0
    for command in ("prepare", "fit-tokenizer", "tokenize"):
        assert main([command, "mine"]) == 0, command
    config = open_where("mine", []).config
    assert (config.tokenizer.chat, config.train.layout) == ("default", "chat")


def test_conversations_next_to_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    Path("texts").mkdir()
    turns = [{"role": "user", "content": "Who goes there?"}, {"role": "assistant", "content": "Nobody at all."}]
    Path("texts/chat.jsonl").write_text("".join(json.dumps({"messages": turns, "n": n}) + "\n" for n in range(40)))
    Path("texts/plain.txt").write_text("\n\n".join(f"The mill turns {n} times. " * 9 for n in range(80)))
    Path("texts/picture.png").write_bytes(b"\x89PNG")
    assert main(["new", "mine", "--text", "texts", "--minutes", "1"]) == 0
    printed = capsys.readouterr().out
    assert "conversations next to plain text (texts/plain.txt) are read as plain text" in printed
    assert "1 file has no format that textmill reads and will be skipped: texts/picture.png" in printed
    assert main(["prepare", "mine"]) == 0


def test_files_in_an_older_encoding_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    Path("texts").mkdir()
    texts = {f"{n}.txt": f"물레방아가 강가에서 {n}번 돌아간다. 방앗간 주인은 곡식을 빻는다." for n in range(30)}
    for name, text in texts.items():
        Path("texts", name).write_bytes(text.encode("utf-8" if name < "2" else "cp949"))
    assert main(["new", "mine", "--text", "texts", "--minutes", "1"]) == 0
    assert "files that are not UTF-8 look like cp949; if that is wrong, change" in capsys.readouterr().err
    assert main(["prepare", "mine", "corpus.dedup=exact"]) == 0
    assert {document.text for document in open_corpus(Path("mine/corpus"))} == set(texts.values())


SENTENCES = {
    "cp949": "물레방아가 강가에서 돌아간다. 방앗간 주인은 곡식을 빻는다. ",
    "cp1252": "Le café était fermé à l'été, où le garçon a mangé une crêpe près de la forêt. ",
    "cp1254": "Değirmenin çarkı ırmağın kıyısında ağır ağır dönüyor, şu işçi öğütülmüş buğdayı taşıyor. ",
}


def write_texts(*encodings: str) -> None:
    Path("texts").mkdir()
    for encoding in encodings:
        for n in range(20):
            Path("texts", f"{encoding}-{n}.txt").write_bytes((f"{n}. " + SENTENCES[encoding] * 5).encode(encoding))


def test_two_older_encodings_are_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Read as cp1252, the Korean files would become Latin letters without an error."""
    write_texts("cp949", "cp1252")
    assert main(["new", "mine", "--text", "texts", "--minutes", "1"]) == 2
    error = capsys.readouterr().err
    assert "the files are in several encodings: texts/cp1252-0.txt looks like cp1252, " in error
    assert "cp949-0.txt looks like cp949; corpus.encoding names only one, so make a project of each, or" in error
    assert "iconv -f cp949 -t UTF-8 FILE > NEW" in error
    assert not Path("mine").exists()
    assert main(["prepare", "quickstart", "corpus.sources=texts"]) == 2
    error = capsys.readouterr().err
    assert "cp949-0.txt looks like cp949; corpus.encoding names only one" in error
    assert "set corpus.encoding=" not in error, "it would be wrong for some of the files"
    assert main(["prepare", "quickstart", "corpus.sources=texts", "corpus.encoding=cp1252"]) == 0
    assert "may become garbled: the files are in several encodings" in capsys.readouterr().out


def test_an_encoding_with_the_letters_of_another_is_no_second_one(capsys: pytest.CaptureFixture[str]) -> None:
    write_texts("cp1252", "cp1254")
    assert main(["prepare", "quickstart", "corpus.sources=texts"]) == 2
    assert "the files look like cp1254: set corpus.encoding=cp1254" in capsys.readouterr().err
    assert main(["new", "mine", "--text", "texts", "--minutes", "1"]) == 0
    assert main(["prepare", "mine"]) == 0
    assert "garbled" not in capsys.readouterr().out
    texts = " ".join(document.text for document in open_corpus(Path("mine/corpus")))
    assert SENTENCES["cp1252"].strip() in texts
    assert SENTENCES["cp1254"].strip() in texts


def test_other_projects_in_the_folder_of_texts_are_not_text() -> None:
    Path("texts").mkdir()
    for n in range(30):
        Path("texts", f"{n}.txt").write_text(f"The wheel of mill {n} turns by the river. " * 9, encoding="utf-8")
    assert main(["new", "texts/first", "--text", "texts", "--minutes", "1"]) == 0
    for command in ("prepare", "fit-tokenizer", "tokenize"):
        assert main([command, "texts/first"]) == 0, command
    run = Path("texts/first/run")
    run.mkdir()
    for name in ("run.yaml", "metrics.jsonl", "summary.json"):
        (run / name).write_text("{}\n", encoding="utf-8")
    (run / "step-0000001").mkdir()
    (run / "step-0000001" / "config.json").write_text("{}", encoding="utf-8")
    assert main(["new", "texts/second", "--text", "texts", "--minutes", "1"]) == 0
    assert main(["prepare", "texts/second", "corpus.dedup=exact"]) == 0
    sources = {document.source for document in open_corpus(Path("texts/second/corpus"))}
    assert {Path(name).name for name in sources} == {f"{n}.txt" for n in range(30)}


@pytest.mark.parametrize("short", [0, 300])
def test_one_huge_record_is_cut(short: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Many short records beside it change nothing: the huge one would still be in one split."""
    text = SHAKESPEARE.read_text(encoding="utf-8")[:300_000]
    rows = [text, *(f"The wheel of mill {n} turns." for n in range(short))]
    Path("a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    assert main(["new", "mine", "--text", "a.jsonl", "--minutes", "1"]) == 0
    assert "too few for valid and test splits" not in capsys.readouterr().err
    assert "# a record is cut into documents of about" in Path("mine/textmill.yaml").read_text(encoding="utf-8")
    assert main(["prepare", "mine"]) == 0
    for split in ("valid", "test"):
        size = sum(len(document.text) for document in open_corpus(Path("mine/corpus"), split))
        assert 0.02 * len(text) < size < 0.2 * len(text), split


def test_a_few_records_of_usual_size_are_whole() -> None:
    rows = [f"The wheel of mill {n} turns by the river. " * 20 for n in range(15)]
    Path("a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    assert main(["new", "mine", "--text", "a.jsonl", "--minutes", "1"]) == 0
    assert not open_where("mine", []).config.corpus.cut_records


@pytest.mark.parametrize(("files", "expected"), [(3, "position"), (MANY_FILES, "file")])
def test_documents_are_split_as_plain_text_is(files: int, expected: str) -> None:
    Path("papers").mkdir()
    for number in range(files):
        text = "\n\n".join(f"Mill {number}, part {part}. " + "The wheel turns. " * 20 for part in range(9))
        source = f"\\documentclass{{article}}\n\\begin{{document}}\n{text}\n\\end{{document}}\n"
        Path(f"papers/{number}.tex").write_text(source, encoding="utf-8")
    assert main(["new", "mine", "--text", "papers", "--minutes", "1"]) == 0
    assert open_where("mine", []).config.corpus.split_by == expected


@pytest.mark.parametrize(("long", "expected"), [(0, "document"), (MANY_FILES // 2, "file")])
def test_files_of_which_some_are_cut_stay_together(long: int, expected: str) -> None:
    Path("texts").mkdir()
    for number in range(MANY_FILES):
        lines = [f"Mill {number}, line {line}. The wheel turns by the river." for line in range(3)]
        Path(f"texts/{number}.txt").write_text("\n\n".join(lines * (15 if number < long else 1)), encoding="utf-8")
    assert main(["new", "mine", "--text", "texts", "--minutes", "1"]) == 0
    assert open_where("mine", []).config.corpus.split_by == expected


def test_texts_of_an_author_stay_together() -> None:
    text = SHAKESPEARE.read_text(encoding="utf-8")
    rows = [{"text": text[n * 700 : n * 700 + 700], "author": f"author {n % 30}"} for n in range(300)]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert main(["new", "mine", "--text", "a.jsonl", "--minutes", "1"]) == 0
    corpus = open_where("mine", []).config.corpus
    assert (corpus.split_by, corpus.keep_fields) == ("field:author", ["author"])
    assert main(["prepare", "mine"]) == 0
    metas = [{one.meta for one in open_corpus(Path("mine/corpus"), split)} for split in SPLITS]
    assert all(metas), "few authors, but no split is empty"
    assert sum(map(len, metas)) == 30


@pytest.mark.parametrize(("copies", "dedup"), [(0, "exact"), (40, "near"), (900, "exact")])
def test_near_duplicates_of_the_sample(copies: int, dedup: str) -> None:
    """If nearly all texts repeat others, they follow a template, and are kept."""
    text = SHAKESPEARE.read_text(encoding="utf-8")
    rows = [text[n * 700 : n * 700 + 700] for n in range(100)]
    rows += [f"{rows[n % 3]}\nread {n} times" for n in range(copies)]
    Path("a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    assert main(["new", "mine", "--text", "a.jsonl", "--minutes", "1"]) == 0
    assert open_where("mine", []).config.corpus.dedup == dedup


def test_a_folder_of_many_formats_and_fields() -> None:
    """Windows line ends, byte order marks, an empty file, a file of one line, and a picture."""
    Path("texts/deep").mkdir(parents=True)
    turkish = [f"Değirmen {n} kez döner, ırmağın kıyısında şarkı söylenir." for n in range(60)]
    korean = [f"물레방아가 강가에서 {n}번 돌아간다. 방앗간 주인은 곡식을 빻는다." for n in range(60)]
    Path("texts/a.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(turkish[:30]).encode())
    Path("texts/b.txt").write_bytes("\r\n\r\n".join(turkish[30:]).encode("cp1254"))
    Path("texts/c.csv").write_text(
        "no;metin\r\n" + "".join(f'{n};"{one}"\r\n' for n, one in enumerate(korean[:30])), encoding="utf-8"
    )
    rows = "".join(json.dumps({"content": one}, ensure_ascii=False) + "\r\n" for one in korean[30:])
    Path("texts/deep/d.jsonl").write_bytes(b"\xef\xbb\xbf" + rows.encode())
    Path("texts/e.txt").write_bytes(b"")
    Path("texts/f.txt").write_text("Tek satır", encoding="utf-8")
    Path("texts/g.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert main(["new", "mine", "--text", "texts", "--minutes", "1"]) == 0
    assert main(["prepare", "mine", "corpus.documents=block", "corpus.split_by=document", "corpus.dedup=exact"]) == 0
    found = [document.text.strip() for document in open_corpus(Path("mine/corpus"))]
    assert sorted(found) == sorted([*turkish, *korean, "Tek satır"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "a.txt: the file is empty; name files with text"),
        ("a.jsonl", '{"n": 1}\n', "found 1 unreadable record, the first: a.jsonl:1: no field 'text'; found ['n']"),
        ("b.txt", "words", "--text: nothing matches 'a.*'"),
    ],
)
def test_texts_that_cannot_be_used(name: str, content: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(name).write_text(content, encoding="utf-8")
    assert main(["new", "mine", "--text", name if name.startswith("a") else "a.*"]) == 2
    assert message in capsys.readouterr().err
    assert not Path("mine").exists()


@pytest.mark.parametrize(
    ("machine", "all_cores", "busy"),
    [(TWO_CORES, 2, True), (TWO_CORES, 64, False), (H200, 2, False)],
    ids=["CPU", "container with two of 64 cores", "GPU"],
)
def test_a_busy_cpu_is_reported(
    machine: MachineProfile,
    all_cores: int,
    busy: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The load is that of all cores, and does not slow down a GPU."""
    monkeypatch.setattr("os.getloadavg", lambda: (30.0, 1.0, 1.0), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: all_cores)
    _warn_of_busy_machine(machine)
    assert ("the machine is busy (30 running processes, 2 cores)" in capsys.readouterr().err) == busy


@pytest.mark.parametrize("minutes", ["nan", "inf"])
def test_minutes_that_are_no_duration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], minutes: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine", "--text", "tinyshakespeare", "--minutes", minutes]) == 2
    assert f"--minutes: found {minutes}; give a number above 0" in capsys.readouterr().err
    assert not Path("mine").exists()
