"""The command new: inspects the text and the machine, and writes a YAML file with a plan and the reason of each
number."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from textmill.config import SIZES, CorpusConfig
from textmill.corpus.accounts import format_count
from textmill.corpus.document_files import TEXT_SHARES, describe_unread_documents
from textmill.corpus.encodings import advise_encodings
from textmill.corpus.find_sources import bundled_corpora, describe_skipped, find_sources, source_state
from textmill.corpus.inspection import RecordFacts, inspect_records
from textmill.corpus.prepare import may_have_conversations
from textmill.corpus.source import ONE_TEXT_FORMATS, Source
from textmill.errors import TextmillError, warn
from textmill.models import open_family
from textmill.planning.inspect_text import GROUP_FIELDS, inspect_text
from textmill.planning.plan import (
    MAX_MINUTES,
    MIN_SECTION,
    VOCABS,
    MachineProfile,
    TextProfile,
    auto_family,
    default_minutes,
    limit_vocabs,
    plan_for,
)
from textmill.planning.probe_machine import BUSY, probe_machine, running_processes
from textmill.planning.project_file import Project, count_model_parameters, path_in_project, project_yaml, two_digits
from textmill.storage.files import write_text
from textmill.storage.stages import PROJECT_YAML

AUTO = "auto"
"""The family that is chosen for the machine."""
MANY_FILES = 40
"""From this many files on, if some of their texts are cut, each is in one split; the middle of fewer files is valid and
test, since a whole file would be too much of the text."""
CUT_FILES = 1.1
"""Documents for each file from which on some texts are certainly cut: their number is an estimate."""
FEW_DOCUMENTS = 20
"""Fewer different documents than this often leave the valid split empty."""


def new(folder: str, text: str | Sequence[str], minutes: float | None = None, family: str = "auto") -> Path:
    """Write FOLDER/textmill.yaml for the user's own text: files, folders, globs or shipped corpora; return its path.

    The settings are chosen so that `textmill run FOLDER` takes about `minutes`; default: until more does not help.
    """
    path = Path(folder) / PROJECT_YAML
    entries = [text] if isinstance(text, str) else list(text)
    _check_arguments(folder, path, minutes, family)
    masked = family != AUTO and open_family(family).OBJECTIVE == "masked"
    sources = _find_texts(entries, folder)
    records = inspect_records(sources, CorpusConfig())
    if records.chat and (plain := [source for source in sources if not may_have_conversations(source)]):
        records = inspect_records(sources, CorpusConfig(), with_conversations=False)
        print(
            f"new: conversations next to plain text ({plain[0].name}) are read as plain text; for a chat model, name "
            "the files of conversations alone"
        )
    if len(records.older_encodings) > 1:
        raise TextmillError(f"--text: {advise_encodings(records.older_encodings)}")
    encoding = "auto" if records.encoding.startswith("utf-") else records.encoding
    sources = [source._replace(encoding=encoding) for source in sources]
    if masked and records.chat:
        raise TextmillError(f"--family: the records are conversations, which a {family} does not learn; remove it")
    profile = _inspect(sources, records, encoding, masked)
    machine = probe_machine()
    _warn_of_busy_machine(machine)
    if family == AUTO:
        family = auto_family(profile, machine, minutes or MAX_MINUTES[machine.device])
    minutes = minutes or default_minutes(profile, machine, family)
    plan = plan_for(profile, machine, minutes, family)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TextmillError(f"{folder}: cannot be created ({error.strerror}); name another folder") from None
    named = [_named(entry, folder) for entry in entries]
    project = Project(folder, named, records, profile, machine, plan, family)
    write_text(path, project_yaml(project))
    print(f"new: {format_count(len(sources), 'file')}, {_describe_project(project)}")
    _warn_of_text(profile, encoding, path)
    print(f"wrote {path}; next: textmill run {shlex.quote(folder)}")
    return path


def _check_arguments(folder: str, path: Path, minutes: float | None, family: str) -> None:
    if family not in (AUTO, *SIZES):
        raise TextmillError(f"--family: no family '{family}'; choose one of {', '.join((AUTO, *SIZES))}")
    if not folder:
        raise TextmillError("new: the name of the folder is empty; write: textmill new DIR --text 'texts/*.txt'")
    if path.exists():
        raise TextmillError(f"{path}: exists already; edit it, or name another folder")
    if minutes is not None and not 0 < minutes < float("inf"):
        raise TextmillError(f"--minutes: found {minutes:g}; give a number above 0")


def _find_texts(entries: list[str], folder: str) -> list[Source]:
    own_folders = [Path(folder) / name for name in ("corpus", "tokenizer", "tokens", "run")]
    skipped: list[str] = []
    found = find_sources(entries, skip=own_folders, skipped=skipped, setting="--text")
    for line in [*filter(None, [describe_unread_documents(skipped)]), *describe_skipped(skipped)]:
        print(f"new: {line}")
    if not any(source_state(source).bytes for source in found):
        empty = "the file is empty" if len(found) == 1 else f"all of {len(found):,} files are empty"
        raise TextmillError(f"{', '.join(entries)}: {empty}; name files with text")
    return found


def _inspect(sources: Sequence[Source], records: RecordFacts, encoding: str, masked: bool) -> TextProfile:
    """The profile of the text; files of one text and a few long records are to be cut into sections, others are not."""
    shortest = MIN_SECTION if masked else 200
    corpus: dict[str, object] = {"text_key": records.text_key or "text", "chat": records.chat, "encoding": encoding}
    if not records.chat and "[" not in (records.text_key or ""):
        corpus["keep_fields"] = [name for name in GROUP_FIELDS if name in records.fields and name != records.text_key]
    section = 0
    of_one_text = [source for source in sources if source.format in ONE_TEXT_FORMATS]
    if len(of_one_text) == len(sources):
        size = sum(source_state(source).bytes * TEXT_SHARES.get(source.format, 1) for source in sources)
        section = _section_chars(size, shortest)
        corpus["section_chars"] = section
    profile = replace(inspect_text(sources, CorpusConfig.model_validate(corpus), VOCABS), section=section)
    if not section and not records.chat and _has_few_records(profile, shortest):
        section = _section_chars(profile.bytes, shortest)
        few = profile.bytes // (2 * section)  # how many documents there will be is a rough guess
        profile = replace(profile, cut_records=True, section=section, documents=few, split_by="position")
    elif of_one_text and profile.split_by == "document":
        if section and len(sources) >= MANY_FILES and profile.documents > CUT_FILES * len(sources):
            profile = replace(profile, split_by="file")
        elif profile.documents >= 2 * len(sources):
            profile = replace(profile, split_by="position")
    return limit_vocabs(profile) if masked else profile


def _describe_project(project: Project) -> str:
    plan = project.plan
    text = project.text
    parameters = count_model_parameters(project) / 1e6
    shape = f"{plan.layers} layers x {plan.width}, {parameters:.1f}M parameters, vocabulary {plan.vocab:,}"
    return f"{text.bytes / 1e6:.1f} MB of text; {shape}, {two_digits(plan.epochs)} epochs"


def _section_chars(size: float, shortest: int) -> int:
    """Characters of a section, such that a text of `size` bytes has some hundreds of them."""
    return max(shortest, min(4000, round(size / 30000) * 100))


def _has_few_records(profile: TextProfile, shortest: int) -> bool:
    """Whether nearly all of the text is in a few records, each long enough for several sections."""
    size = profile.typical_document_bytes
    return size * FEW_DOCUMENTS > profile.bytes and size > 8 * _section_chars(profile.bytes, shortest)


def _warn_of_busy_machine(machine: MachineProfile) -> None:
    """Warn if other programs use the CPU whose speed was measured."""
    load = running_processes()
    cores = max(machine.cores, os.cpu_count() or 1)
    if machine.device == "cpu" and load > BUSY * cores:
        warn(
            f"the machine is busy ({load:.0f} running processes, {cores} cores); the plan is for an idle one: while it "
            "is busy, the run gets through less of the text"
        )


def _warn_of_text(profile: TextProfile, encoding: str, path: Path) -> None:
    """Warn of a guessed encoding, of scans, and of too few documents."""
    if profile.scans:
        warn(f"{profile.scans}; they give no text")
    if encoding != "auto":
        warn(f"files that are not UTF-8 look like {encoding}; if that is wrong, change corpus.encoding in {path}")
    if profile.different_documents < FEW_DOCUMENTS:
        warn(
            f"the text has about {format_count(profile.different_documents, 'different document')} of "
            f"{profile.documents:,}: probably too few for valid and test splits, so that nobody can tell how good the "
            "model is; add text"
        )


def _named(entry: str, folder: str) -> str:
    """A source as the project's file names it: a path, unless it is a shipped corpus or remote."""
    if (entry in bundled_corpora() and not os.path.exists(entry)) or ":" in entry:
        return entry
    return path_in_project(os.path.expanduser(entry), folder)
