"""Standard output and error may be lost at any moment: work goes on, and no command pretends to have a result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "textmill"]


def closed_pipe() -> int:
    """The writing end of a pipe that nobody reads."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    return write_end


@pytest.mark.parametrize("words", [["recipes"], ["--help"], ["train", "--help"]])
def test_a_command_whose_result_is_its_output_ends_with_141(words: list[str]) -> None:
    pipe = closed_pipe()
    done = subprocess.run([*COMMAND, *words], stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(pipe)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_on_a_full_disk_is_a_mistake_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "recipes"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr == (
        "textmill: standard output cannot be written (No space left on device); write it elsewhere\n"
    )


def test_a_mistake_without_stderr_keeps_its_exit_code() -> None:
    pipe = closed_pipe()
    done = subprocess.run([*COMMAND, "train", "no-such-file.yaml"], stderr=pipe, timeout=300)
    os.close(pipe)
    assert done.returncode == 2


PROGRAM = """
import os, sys
from textmill.processes.output import protect_output
output = protect_output(result_is_output=False)
other = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
print("lost"); print("lost too", file=sys.stderr); sys.stdout.flush(); sys.stderr.flush()
os.system("echo from a child; echo from a child >&2")
os.write(other, f"{output.error.strerror} {sys.stdin.read()!r}".encode())
"""


def test_closed_descriptors_are_not_given_to_other_files(tmp_path: Path) -> None:
    """A shell's `>&- 2>&- <&-` closes them; the next file that is opened would get their numbers, and the output."""
    script = [sys.executable, "-c", PROGRAM, str(tmp_path / "file")]
    done = subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *script], timeout=300)
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == "Bad file descriptor ''"
