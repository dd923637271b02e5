"""The contract of every runner: order, errors, dead workers, and a prompt end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import LONGEST, wait_for
from textmill.config import LocalRunner
from textmill.errors import TextmillError
from textmill.runners import Runner, on_local, open_runner, share_runner
from textmill.runners.on_local import SHARDS_PER_WORKER, usable_cores

JOBS = Path(__file__).parent / "jobs"


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(JOBS))
    import shard_jobs

    return shard_jobs


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def runner(request: pytest.FixtureRequest) -> Runner:
    return open_runner(LocalRunner(workers=request.param))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_results_in_shard_order(runner: Runner, jobs: Any) -> None:
    assert list(runner.map(jobs.double_slowest_first, range(20))) == [2 * shard for shard in range(20)]


def test_no_shards(runner: Runner, jobs: Any) -> None:
    assert list(runner.map(jobs.double, [])) == []


def test_error_reaches_the_caller_unchanged(runner: Runner, jobs: Any) -> None:
    results = runner.map(jobs.refuse_three, range(8))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(TextmillError) as caught:
        next(results)
    assert str(caught.value) == "shard 3: found nothing; look again"
    assert type(caught.value) is TextmillError


def test_shards_are_taken_as_needed(runner: Runner, jobs: Any) -> None:
    taken = []

    def endless() -> Iterator[int]:
        shard = 0
        while True:
            taken.append(shard)
            yield shard
            shard += 1

    results = runner.map(jobs.double, endless())
    assert [next(results) for _ in range(5)] == [0, 2, 4, 6, 8]
    results.close()  # type: ignore[attr-defined]
    assert len(taken) <= 5 + 2 * SHARDS_PER_WORKER


def test_one_worker_is_this_process(jobs: Any) -> None:
    assert set(open_runner(LocalRunner(workers=1)).map(jobs.process_of, range(3))) == {os.getpid()}


def test_never_more_workers_than_shards(jobs: Any) -> None:
    assert set(open_runner(LocalRunner(workers=8)).map(jobs.process_of, [1])) == {os.getpid()}
    used = set(open_runner(LocalRunner(workers=8)).map(jobs.process_of, range(2)))
    assert len(used) <= 2
    assert os.getpid() not in used


def test_auto_uses_the_cores_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_local, "usable_cores", usable_cores)
    assert open_runner(LocalRunner()).workers == usable_cores() >= 1  # type: ignore[attr-defined]


def test_killed_worker_is_replaced(jobs: Any, tmp_path: Path) -> None:
    shards = [(number, str(tmp_path)) for number in range(12)]
    assert list(open_runner(LocalRunner(workers=2)).map(jobs.die_once, shards)) == list(range(12))
    assert (tmp_path / "died-2").exists()


def test_shard_that_always_kills_is_named(jobs: Any) -> None:
    seen: list[int] = []
    results = open_runner(LocalRunner(workers=2)).map(jobs.die_always, range(20))
    with pytest.raises(TextmillError, match=r"died on 5, "):
        seen.extend(results)
    assert seen == [0, 1, 2, 3, 4]


def test_closing_does_not_wait_for_workers(jobs: Any, tmp_path: Path) -> None:
    results = open_runner(LocalRunner(workers=2)).map(jobs.sleep_long, [(number, str(tmp_path)) for number in range(6)])
    assert next(results) == 0
    assert wait_for(lambda: len(list(tmp_path.glob("pid-*"))) >= 2)
    pids = {int(path.name.rpartition("-")[2]) for path in tmp_path.glob("pid-*")}
    results.close()  # type: ignore[attr-defined]
    assert not any(map(alive, pids))
    assert not list(tmp_path.glob("slept-*")), "none of them has slept to its end"


SCRIPT = """
import signal
import sys
sys.path.insert(0, {jobs!r})
import shard_jobs
from textmill.config import LocalRunner
from textmill.runners import open_runner
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who started the tests may have had it ignored
    with open_runner(LocalRunner(workers=2)) as runner:
        list(runner.map(shard_jobs.double, range(4)))
        list(runner.map(shard_jobs.sleep_long, [(number, {folder!r}) for number in (1, 2, 3)]))
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to see processes")
def test_workers_exit_with_their_parent(sign: signal.Signals, tmp_path: Path, root: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(jobs=str(JOBS), folder=str(tmp_path)))
    environment = {**os.environ, "PYTHONPATH": str(root)}
    parent = subprocess.Popen(
        [sys.executable, str(script)], env=environment, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        assert wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
        pids = {int(path.name.rpartition("-")[2]) for path in tmp_path.glob("pid-*")}
        assert all(map(alive, pids))
        if sign == signal.SIGINT:
            os.killpg(parent.pid, sign)  # as Ctrl-C does: the workers get it too
        else:
            parent.kill()
        parent.wait(LONGEST)
        assert wait_for(lambda: not any(map(alive, pids)))
    finally:
        parent.kill()
        _, error = parent.communicate()
    if sign == signal.SIGINT:
        assert error.count(b"Traceback") == 1, error.decode()


STRIKE = """
import signal
import threading
import time
from pathlib import Path

def strike():
    while len(list(Path({folder!r}).glob("pid-*"))) < 2:
        time.sleep(0.01)
    time.sleep(0.2)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    time.sleep(3600)

if __name__ == "__main__":
    threading.Thread(target=strike, daemon=True).start()
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to see processes")
def test_ctrl_c_delivered_to_another_thread_is_noticed(tmp_path: Path, root: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text((STRIKE + SCRIPT).format(jobs=str(JOBS), folder=str(tmp_path)))
    environment = {**os.environ, "PYTHONPATH": str(root)}
    parent = subprocess.Popen(
        [sys.executable, str(script)], env=environment, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        assert parent.wait(LONGEST) == -signal.SIGINT
        pids = {int(path.name.rpartition("-")[2]) for path in tmp_path.glob("pid-*")}
        assert wait_for(lambda: not any(map(alive, pids)))
    finally:
        parent.kill()
        parent.communicate()


def test_script_without_main_guard_is_reported(tmp_path: Path, root: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT.format(jobs=str(JOBS), folder=str(tmp_path)).replace('if __name__ == "__main__":', "if True:")
    )
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "if __name__ == '__main__':" in done.stderr


def test_workers_are_reused_between_maps(jobs: Any, tmp_path: Path) -> None:
    with open_runner(LocalRunner(workers=2)) as runner:
        first, second = (
            set(runner.map(jobs.process_of_each, [(0, folder), (1, folder)]))
            for folder in (f"{tmp_path}/a", f"{tmp_path}/b")
        )
        assert first == second
        assert len(first) == 2
        assert set(runner.map(jobs.process_of, [1])) <= first
        assert all(map(alive, first))
    assert not any(map(alive, first))


def test_stages_share_the_workers_of_one_runner(jobs: Any, tmp_path: Path) -> None:
    """Each stage opens the runner, and may use a `with` block of its own."""

    def used(folder: str) -> set[int]:
        with open_runner(LocalRunner(workers=2)) as runner:
            return set(runner.map(jobs.process_of_each, [(0, f"{tmp_path}/{folder}"), (1, f"{tmp_path}/{folder}")]))

    with share_runner(LocalRunner(workers=2)):
        first, second = used("a"), used("b")
        assert first == second
        assert all(map(alive, first))
        assert set(open_runner(LocalRunner(workers=1)).map(jobs.process_of, range(2))) == {os.getpid()}
    assert not any(map(alive, first))
    assert not used("c") & first


def test_killed_idle_worker_is_replaced(jobs: Any) -> None:
    with open_runner(LocalRunner(workers=2)) as runner:
        (*_, victim) = runner.map(jobs.process_of, range(8))
        os.kill(victim, signal.SIGKILL)
        after = set(runner.map(jobs.process_of, range(8)))
        assert victim not in after
        assert list(runner.map(jobs.double, range(5))) == [0, 2, 4, 6, 8]


def test_workers_of_a_failed_map_are_not_reused(jobs: Any) -> None:
    with open_runner(LocalRunner(workers=2)) as runner:
        before = set(runner.map(jobs.process_of, range(8)))
        with pytest.raises(TextmillError, match="shard 3"):
            list(runner.map(jobs.refuse_three, range(8)))
        assert not any(map(alive, before))
        assert list(runner.map(jobs.double, range(5))) == [0, 2, 4, 6, 8]


def test_without_a_with_block_workers_exit_after_their_map(jobs: Any) -> None:
    assert not any(map(alive, set(open_runner(LocalRunner(workers=2)).map(jobs.process_of, range(8)))))
