"""Beam keeps the contract of the local runner, in one process and in several, down to the bytes of a corpus."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("apache_beam", reason="needs apache-beam: pip install 'textmill[beam]'")

from tests.support.own_packages import own_packages
from textmill.config import BeamRunner, RunConfig
from textmill.corpus.prepare import prepare
from textmill.errors import TextmillError
from textmill.runners import on_beam, open_runner

JOBS = Path(__file__).parent / "jobs"
pytestmark = pytest.mark.long  # apache-beam is in the extra long; the local runner keeps the same contract
PROCESSES = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, root: Path) -> Any:
    monkeypatch.syspath_prepend(str(JOBS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(JOBS)]))  # for Beam's own processes
    import shard_jobs

    return shard_jobs


@pytest.fixture(params=[[], PROCESSES], ids=["in memory", "two processes"])
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return open_runner(BeamRunner(options=request.param, shared_folder=str(tmp_path / "shared")))


def test_results_in_shard_order_and_no_file_left(runner: Any, jobs: Any, tmp_path: Path) -> None:
    assert list(runner.map(jobs.double_slowest_first, range(20))) == [2 * shard for shard in range(20)]
    assert list((tmp_path / "shared").iterdir()) == []


def test_no_shards(jobs: Any) -> None:
    assert list(open_runner(BeamRunner()).map(jobs.double, [])) == []


def test_error_reaches_the_caller_unchanged(runner: Any, jobs: Any, tmp_path: Path) -> None:
    results = runner.map(jobs.refuse_three, range(8))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(TextmillError) as caught:
        next(results)
    assert str(caught.value) == "shard 3: found nothing; look again"
    assert type(caught.value) is TextmillError
    assert list((tmp_path / "shared").iterdir()) == []


def test_failing_function_ends_the_pipeline_with_its_own_error(jobs: Any, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"^shard 2: the disk went away$"):
        list(open_runner(BeamRunner()).map(jobs.break_once, [(number, str(tmp_path)) for number in range(4)]))


def test_retried_bundle_skips_finished_shards(jobs: Any, tmp_path: Path) -> None:
    calls, folder = tmp_path / "calls", tmp_path / "results"
    calls.mkdir()
    folder.mkdir()
    step = on_beam._ShardStep(jobs.break_once, str(folder))
    shards = [(number, on_beam.CODER.encode((number, str(calls)))) for number in (1, 2)]
    step.process(shards[0])
    with pytest.raises(OSError, match="went away"):
        step.process(shards[1])
    for shard in shards * 2:  # as a runner does that retries
        step.process(shard)
    assert [on_beam._read_outcome(folder, number, None, "") for number in (1, 2)] == [1, 2]
    assert [(calls / f"calls-{number}").read_text() for number in (1, 2)] == ["x", "xx"]


def test_killed_worker_is_replaced(runner: Any, jobs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_beam, "GRACE_SECONDS", 2.0)
    assert list(runner.map(jobs.die_once, [(number, str(tmp_path)) for number in range(6)])) == list(range(6))
    assert (tmp_path / "died-2").exists()
    assert list((tmp_path / "shared").iterdir()) == []


def test_worker_killed_before_it_starts_is_replaced(jobs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_beam, "GRACE_SECONDS", 2.0)
    runner = open_runner(BeamRunner(options=PROCESSES, shared_folder=str(tmp_path / "shared")))
    assert list(runner.map(jobs.DieOnArrival(str(tmp_path)), range(6))) == [0, 2, 4, 6, 8, 10]
    assert (tmp_path / "died-on-arrival").exists()
    assert list((tmp_path / "shared").iterdir()) == []


def test_shard_that_always_kills_is_named(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_beam, "MAX_PIPELINES", 1)
    with pytest.raises(TextmillError, match=r"runner: a worker died .*; \d is not finished"):
        list(open_runner(BeamRunner()).map(jobs.die_always, [3, 5]))


def test_shards_are_taken_a_pipeline_at_a_time(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_beam, "SHARDS_PER_PIPELINE", 4)
    taken = []

    def shards() -> Any:
        for shard in range(1000):
            taken.append(shard)
            yield shard

    results: Any = open_runner(BeamRunner()).map(jobs.double, shards())
    assert [next(results) for _ in range(6)] == [0, 2, 4, 6, 8, 10]
    results.close()
    assert len(taken) == 8


def test_error_names_an_impossible_folder(jobs: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TextmillError, match=r"runner\.shared_folder: .*file/x"):
        list(open_runner(BeamRunner(shared_folder=str(tmp_path / "file" / "x"))).map(jobs.double, [1]))


def test_worker_without_the_folder_is_reported(jobs: Any, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="every worker can access"):
        on_beam._ShardStep(jobs.double, str(tmp_path / "elsewhere")).process((0, on_beam.CODER.encode(1)))


DATAFLOW = ["--runner=DataflowRunner", "--project=my-project", "--region=us-central1", "--temp_location=gs://bucket/t"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--direct_num_worker=2"], r"no option --direct_num_worker; did you mean --direct_num_workers\?"),
        (["--direct_num_workers=two"], "argument --direct_num_workers: invalid int value: 'two'; correct it"),
        (["multi_processing"], "found 'multi_processing', which is no option; write --NAME=VALUE"),
        (["--direct_num_workers=2", "4"], "found '4', which is no option"),
        (["--direct_running_mode=many"], "invalid choice: 'many'"),
        (["--runner=no.such.Runner"], "No module named 'no'; install what it needs"),
        (DATAFLOW[:1] + DATAFLOW[2:], r"Missing required option: project\. Set what is missing"),
        (DATAFLOW[:3], r"Missing GCS path option: temp_location\."),
        ([*DATAFLOW[:3], "--temp_location=/tmp"], r"Invalid GCS path \(/tmp\)"),
        ([*DATAFLOW, "--num_workers=5", "--max_num_workers=3"], r"num_workers \(5\) cannot exceed max_num_workers"),
    ],
)
def test_options_are_checked_by_beam_itself(options: list[str], reason: str) -> None:
    with pytest.raises(TextmillError, match=f"^runner.options: .*{reason}"):
        open_runner(BeamRunner(options=options))


def test_documented_options_are_known(root: Path) -> None:
    page = (root / "docs" / "runners.md").read_text(encoding="utf-8")
    rows = [re.findall(r"`(--[^`]+)`", line) for line in page.splitlines() if line.startswith("| ")]
    tried = [row for row in rows if row and "dask" not in row[0]]
    assert len(tried) >= 4
    for row in tried:
        options = [word.replace("=gs://...", "=gs://bucket/t").replace("=...", "=my-project") for word in row]
        open_runner(BeamRunner(options=options))


def test_wrong_options_end_in_one_line(jobs: Any) -> None:
    with pytest.raises(TextmillError, match=r"runner: the Beam pipeline failed: .*NoSuchRunner"):
        list(open_runner(BeamRunner(options=["--runner=NoSuchRunner"])).map(jobs.double, [1]))


def test_prepare_gives_the_same_bytes(
    tiny_texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.chdir(tmp_path)

    def content(name: str, runner: dict[str, Any]) -> dict[str, bytes]:
        corpus = {"sources": ["texts"], "section_chars": 100, "split": [8.0, 1.0, 1.0]}
        folder = prepare(RunConfig.model_validate({"folder": name, "corpus": corpus, "runner": runner}))
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "run.yaml"}

    local = content("local", {"workers": 1})
    assert local == content("memory", {"kind": "beam"})
    assert local == content("processes", {"kind": "beam", "options": PROCESSES})
    assert "train-00000.parquet" in local


def test_dask_gives_the_same_bytes(tiny_texts: Path, tmp_path: Path, root: Path) -> None:
    packages = own_packages("dask==2026.8.0", "distributed==2026.8.0")
    paths = os.pathsep.join([str(root), str(packages)])
    script = [sys.executable, str(JOBS / "dask_prepare.py"), str(tiny_texts), str(tmp_path / "dask")]
    done = subprocess.run(script, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    corpus = {"sources": [str(tiny_texts)], "section_chars": 100, "split": [8.0, 1.0, 1.0]}
    local = prepare(RunConfig.model_validate({"folder": str(tmp_path / "local"), "corpus": corpus}))
    names = sorted(path.name for path in local.iterdir() if path.name != "run.yaml")
    assert "train-00000.parquet" in names
    for name in names:
        assert (tmp_path / "dask" / "corpus" / name).read_bytes() == (local / name).read_bytes(), name


def test_missing_package_is_reported_at_start(root: Path) -> None:
    script = "import sys; sys.modules['apache_beam'] = None; import textmill.runners.on_beam"
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert "runner.kind=beam needs apache-beam; run: pip install 'textmill[beam]'" in done.stderr


def test_beam_prints_no_warnings_of_packages_that_are_not_needed(root: Path) -> None:
    """Only while Beam is imported: what other code logs afterwards is not filtered."""
    script = "import textmill.runners.on_beam, logging; print(logging.getLogger().filters)"
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "[]\n")
