"""doctor finds what is wrong: each test breaks one thing and expects its cause and a fix."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from textmill.cli import main
from textmill.commands import doctor
from textmill.commands import doctor as command
from textmill.commands.doctor import ADVICE, BAD, GOOD, Finding, run_check
from textmill.config import CorpusConfig, RunConfig
from textmill.config.load import build_config
from textmill.errors import TextmillError
from textmill.verification.launcher import free_port


class Usage(NamedTuple):
    free: int


def config_of(tree: dict[str, Any], folder: Path) -> RunConfig:
    return build_config({"folder": str(folder), **tree})


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    found = doctor.check_folder(Path("/proc"))
    assert found.level == BAD
    assert "/proc: cannot be written" in found.found
    assert "folder=PATH" in found.fix
    assert doctor.check_folder(tmp_path).level == GOOD, "the fix works"


def test_a_folder_that_does_not_exist_yet_is_judged_by_its_parent(tmp_path: Path) -> None:
    found = doctor.check_folder(tmp_path / "not" / "yet")
    assert found.level == GOOD
    assert str(tmp_path) in found.found


@pytest.mark.parametrize(("free", "level"), [(1 << 20, BAD), (5 << 30, ADVICE), (50 << 30, GOOD)])
def test_little_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, level: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free))
    assert doctor.check_folder(tmp_path).level == level


def test_small_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 20))
    found = doctor.check_shared_memory(tmp_path)
    assert found.level == BAD
    assert "--shm-size" in found.fix
    assert doctor.check_shared_memory(tmp_path / "none").level == ADVICE


def test_the_limit_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("1000000000\n")
    read = doctor._container_limit
    monkeypatch.setattr(doctor, "_container_limit", lambda: read(limit))
    found = doctor.check_memory()
    assert found.level == BAD
    assert "1.0 GB (limit of the container)" in found.found
    limit.write_text("max\n")
    assert doctor.check_memory().level == GOOD


def test_few_open_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        found = doctor.check_limits()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found.level == ADVICE
    assert found.fix == f"ulimit -n {before[1]}"
    assert int(found.fix.split()[-1]) >= doctor.MIN_FILES, "the fix is enough"


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [one.level for one in doctor.check_versions()] == [GOOD, GOOD]
    monkeypatch.setattr(doctor, "version", lambda _: "2.4.1")
    assert doctor.check_versions()[1].level == ADVICE
    monkeypatch.setattr(doctor.sys, "version_info", (3, 9, 1))
    assert doctor.check_versions()[0].level == BAD


def test_a_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of({"runner": {"kind": "beam"}}, tmp_path)
    monkeypatch.setattr(doctor, "find_spec", lambda package: None if package == "apache_beam" else object())
    missing = doctor.check_extras(config)[-1]
    assert missing.level == BAD
    assert "runner.kind=beam needs apache_beam" in missing.found
    assert missing.fix == "pip install 'textmill[beam]'"


def test_sources(tmp_path: Path) -> None:
    missing = doctor.check_sources(CorpusConfig(sources=[str(tmp_path / "none.txt")]), tmp_path / "out")
    assert missing.level == BAD
    assert "none.txt" in missing.found
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some text")
    (tmp_path / "texts" / "b.png").write_bytes(b"\x89PNG")
    partly = doctor.check_sources(CorpusConfig(sources=[str(tmp_path / "texts")]), tmp_path / "out")
    assert partly.level == ADVICE
    assert "b.png" in partly.found
    assert doctor.check_sources(config_of({}, tmp_path).corpus, tmp_path).level == ADVICE
    for name in ("renamed.txt", "damaged.jsonl.gz"):
        (tmp_path / name).write_bytes(b"PK\x03\x04")
        broken = doctor.check_sources(CorpusConfig(sources=[str(tmp_path / name)]), tmp_path / "out")
        assert broken.level == BAD
        assert name in broken.found


def test_a_mongodb_server_that_does_not_answer(tmp_path: Path) -> None:
    server = {"MONGO_CONFIG": {"ip": "127.0.0.1", "port": free_port(), "DB_name": "corpus"}, "COLLECTIONS": {}}
    path = tmp_path / "db_config.json"
    path.write_text(json.dumps(server))
    found = doctor.check_sources(CorpusConfig(sources=[f"mongo:{path}"]), tmp_path / "out")
    assert found.level == BAD
    assert "start the server" in found.fix


def test_a_missing_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> list[str]:
        raise TextmillError("track.kinds: 'wandb' needs wandb")

    monkeypatch.setattr(doctor, "check_trackers", refuse)
    assert doctor.check_trackers_work(config_of({"track": {"kinds": ["wandb"]}}, tmp_path).track).level == BAD


def test_a_tracker_that_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package is there, but cannot be imported."""
    broken = tmp_path / "packages" / "wandb"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libwandb.so: wrong ELF class')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb" or name.endswith("on_wandb")]:
        monkeypatch.delitem(sys.modules, name)
    found = doctor.check_trackers_work(config_of({"track": {"kinds": ["wandb"]}}, tmp_path).track)
    assert found.level == ADVICE
    assert "wandb" in found.found
    assert "wrong ELF class" in found.found


@pytest.mark.skipif(os.getuid() == 0, reason="root may read every file")
def test_a_source_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("some text")
    (tmp_path / "secret.txt").chmod(0)
    found = doctor.check_sources(CorpusConfig(sources=[str(tmp_path / "secret.txt")]), tmp_path / "out")
    assert found.level == BAD
    assert "secret.txt" in found.found


@pytest.mark.parametrize(
    ("line", "level", "text"),
    [
        ("cuda||4.85|4.85", GOOD, "gives torch's numbers"),
        ("cpu||4.85|4.85", GOOD, "no GPU was found"),
        ("cuda|C compiler (install gcc)|4.85|4.85", ADVICE, "slower fallbacks"),
        ("cuda||4.85|nan", BAD, "4.85 on the CPU"),
        ("cuda||4.85|4.95", BAD, "4.95 on the GPU"),
        ("", BAD, "it printed nothing"),
    ],
)
def test_what_a_kernel_computed(line: str, level: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "run_python", lambda _: doctor.CompletedProcess([], 0, line))
    found = doctor.check_kernel()
    assert (found.level, text in found.found) == (level, True)


@pytest.mark.long
def test_a_kernel_that_cannot_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_kernel().level == GOOD
    monkeypatch.setenv("TEXTMILL_FAULT", "fail@kernel")
    found = doctor.check_kernel()
    assert found.level == BAD
    assert "no kernel image is available" in found.found
    assert "engine.device=cpu" in found.fix


@pytest.mark.long
def test_processes_that_cannot_connect(tmp_path: Path, tokenized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = shutil.copytree(tokenized, tmp_path / "scratch")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    found = doctor.check_processes(scratch)
    assert found.level == BAD
    assert "connect to localhost" in found.fix
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert doctor.check_processes(scratch).level == GOOD, "the fix works"


def test_a_check_that_fails_itself_is_a_finding() -> None:
    def broken() -> Finding:
        raise ZeroDivisionError("x")

    assert run_check(broken)[0].level == BAD


def test_the_exit_code_is_that_of_the_worst(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    good, bad = Finding("a", GOOD, "fine"), Finding("b", BAD, "broken", "mend it")
    monkeypatch.setattr(command, "list_checks", lambda *_: [lambda: good])
    assert main(["doctor"]) == 0
    assert "doctor: 1 checks, 0 with advice, none failed" in capsys.readouterr().out
    monkeypatch.setattr(command, "list_checks", lambda *_: [lambda: good, lambda: [bad]])
    assert main(["doctor", "--json"]) == 1
    out = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["level"], one["fix"]) for one in out] == [("a", GOOD, ""), ("b", BAD, "mend it")]
    assert main(["doctor", "a", "b"]) == 2
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.long
def test_jobs_on_a_healthy_and_on_broken_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "healthy").mkdir()
    assert [one.level for one in doctor.check_training(tmp_path / "healthy", "cpu")] == [GOOD, GOOD]
    shutil.rmtree(tmp_path / "healthy" / "one")
    monkeypatch.setenv("TEXTMILL_FAULT", "nan@step:0,nan@step:1")
    wrong = doctor.run_textmill(doctor.train_arguments(tmp_path / "healthy", "wrong", 2))
    assert wrong.returncode == 2
    assert "diverged" in doctor.last_line(wrong)
    monkeypatch.setenv("TEXTMILL_FAULT", "full@disk:1")
    full = doctor.check_training(tmp_path / "full", "cpu")
    assert [one.level for one in full] == [BAD]
    assert "No space left" in full[0].found
    monkeypatch.delenv("TEXTMILL_FAULT")
    assert doctor.check_processes(tmp_path / "full").level == ADVICE, "there is no data to train on"
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    compiler = doctor.check_compile()
    assert compiler.level == ADVICE
    assert "g++" in compiler.fix
