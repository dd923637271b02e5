"""Stop signals: the first is a request, the second exits at once; a process keeps its exit code and all its output."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.waiting import LONGEST, wait_for
from textmill.processes.signals import SIGNALS, StopSignals

BUSY = """
import hashlib, sys, threading, time
from textmill.processes.signals import StopSignals
with StopSignals() as stopping:
    def tell():
        while stopping.received is None:
            time.sleep(0.01)
        print(stopping.received, flush=True)
    threading.Thread(target=tell, daemon=True).start()
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 10**9)  # minutes in C code, where no Python signal handler runs
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_the_second_signal_exits_at_once(number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"{number.name}\n", "the first signal is received at once and ends nothing"
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=LONGEST) == 75
    finally:
        process.kill()


def test_the_end_of_a_terminal_is_one_request_however_often_it_is_signalled() -> None:
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "SIGHUP\n"
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=LONGEST) == 75
    finally:
        process.kill()


def test_sighup_stays_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stopping:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGUSR1)
            assert wait_for(lambda: stopping.received) == "SIGUSR1"
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signal_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    threads = threading.active_count()
    for _ in range(2):
        with StopSignals() as stopping:
            signal.raise_signal(signal.SIGUSR1)
            assert wait_for(lambda: stopping.received) == "SIGUSR1"
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    wait_for(lambda: threading.active_count() <= threads, lambda: "the thread is gone with it")


PROGRAM = """
import atexit, sys, threading
from textmill.processes.signals import run_and_exit

def work():
    threading.Thread(target=threading.Event().wait).start()
    atexit.register(print, "then what was promised for the end")
    print("work")
    {last}

run_and_exit(work)
"""


def ended(last: str, root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(last=last)], cwd=root, capture_output=True, text=True, timeout=300
    )


def test_an_endless_thread_does_not_keep_the_process_alive(root: Path) -> None:
    done = ended("return 75", root)
    assert (done.returncode, done.stdout, done.stderr) == (75, "work\nthen what was promised for the end\n", "")


def test_sigterm_during_exit_does_not_change_the_exit_code(root: Path) -> None:
    done = ended("import os, signal; atexit.register(os.kill, os.getpid(), signal.SIGTERM); return 3", root)
    assert (done.returncode, done.stdout, done.stderr) == (3, "work\nthen what was promised for the end\n", "")


def test_a_bug_keeps_its_traceback(root: Path) -> None:
    done = ended("raise KeyError('a bug')", root)
    assert (done.returncode, done.stdout) == (1, "work\nthen what was promised for the end\n")
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("KeyError: 'a bug'\n")
