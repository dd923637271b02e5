"""Fixtures for all tests: shared data, three small texts, and one thread per worker."""

from __future__ import annotations

import gc
import os
import random
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.preloaded import PreloadedPopen
from textmill.cli import main
from textmill.tokens.vocabulary.encoders import NamedText, hard_texts

pytest_plugins = ["tests.support.report"]

# In CI the same code must give the same result; elsewhere every run tries new examples.
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
settings.register_profile("desk", deadline=None, max_examples=50)
settings.load_profile("ci" if os.environ.get("CI") else "desk")

# Two workers run on two cores; a second thread each would only slow them down.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Processes that tests start would compile textmill again each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A signal that is ignored here, as under nohup, would be ignored in processes that tests start and signal.
for number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

# Caches of runs are deleted after the tests.
kept = tempfile.TemporaryDirectory(prefix="textmill-cache-")
os.environ["XDG_CACHE_HOME"] = kept.name

# XLA compiles many small programs, each used a few times: compile quickly, and share them between processes.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    programs = tempfile.TemporaryDirectory(prefix="textmill-xla-")
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": programs.name, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")

ROOT = Path(__file__).resolve().parent.parent

FIRST = (
    "engines/test_layouts.py",
    "engines/test_on_deepspeed.py",
    "engines/test_contract.py",
    "verification/test_verify.py",
    "training/test_loop.py",
    "engines/test_on_jax.py",
    "project/test_launch_recipes.py",
    "training/test_ranks.py",
    "project/test_recipes.py",
    "training/test_engine_changes.py",
    "commands/test_cli.py",
)
"""Slow files run first: a file goes to one worker, and the other would wait for a slow one at the end."""

SENTENCES = {
    "english": [
        "The mill stands by the river.",
        "Every morning the wheel begins to turn.",
        "Who brought the grain last night?",
        "A child counts the sacks and forgets the number.",
        "In winter the water is slow, but it never stops.",
    ],
    "korean": [
        "물레방아는 강가에 서 있다.",
        "아침마다 바퀴가 천천히 돌기 시작한다.",
        "어젯밤에 누가 곡식을 가져왔을까?",
        "아이는 자루를 세다가 숫자를 잊어버린다.",
        "겨울에는 물이 느리지만 멈추지 않는다.",
    ],
    "turkish": [
        "Değirmen ırmağın kıyısında duruyor.",
        "Her sabah çark ağır ağır dönmeye başlar.",
        "Dün gece buğdayı kim getirdi?",
        "Çocuk çuvalları sayar, sonra sayıyı unutur.",
        "Kışın su yavaştır, ama hiç durmaz.",
    ],
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort slow files first; mark tests as long for the parameters named by `long_with`; mark kernels."""
    places = {ROOT / "tests" / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        for mark in item.iter_markers("long_with"):
            if any(type(value) is type(arg) and value == arg for value in values for arg in mark.args):
                item.add_marker("long")
    if running := [item for item in items if item.get_closest_marker("kernels")]:
        from tests.support.kernel_devices import mark_kernels

        mark_kernels(running)


def pytest_collection_finish() -> None:
    """What was imported stays; the collector of garbage need not look at its millions of objects again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_worker() -> Iterator[None]:
    """`runner.workers: auto` is one, in this process: starting others would be most of the work on texts this small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("textmill.runners.on_local.usable_cores", lambda: 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_processes() -> Iterator[None]:
    """Processes of textmill start with torch already imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("subprocess.Popen", PreloadedPopen)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_readers() -> Iterator[None]:
    """`export` asks no other library in a process of its own, which takes seconds; tests/conversion/test_readers.py
    does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("textmill.conversion.readers.check_with_reader", lambda *_: [])
        yield


@pytest.fixture(scope="session", autouse=True)
def short_hard_texts() -> Iterator[None]:
    """Every tokenize and export compares two tokenizers on the beginnings of the hard texts, whose 100,000 characters
    take longer than all else they do here; tests/tokens/test_encoders.py has the whole texts."""
    texts = [NamedText(one.name, one.text[:300]) for one in hard_texts()]
    with pytest.MonkeyPatch.context() as patch:
        for module in ("tokens.vocabulary.encoders", "conversion.compare"):
            patch.setattr(f"textmill.{module}.hard_texts", lambda: iter(texts))
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The large texts in ../shared/data; tests that need them are skipped without them."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no shared data: the folder ../shared/data does not exist")
    return folder


@pytest.fixture
def tiny_texts(tmp_path: Path) -> Path:
    """A folder with a few KB of English, Korean and Turkish text, the same in every run."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for language, sentences in SENTENCES.items():
        dice = random.Random(f"texts {language}")
        blocks = [" ".join(dice.choices(sentences, k=dice.randint(2, 5))) for _ in range(40)]
        (folder / f"{language}.txt").write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tokenized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the quickstart's corpus, tokenizer and tokens; copy it to train on it."""
    folder = tmp_path_factory.mktemp("tokenized")
    for command in ("prepare", "tokenize"):
        assert main([command, "quickstart", f"folder={folder}", "tokenizer.vocab=300"]) == 0
    return folder
