"""A process that is forked from the template sees what a process that is started as usual sees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.preloaded import PreloadedPopen, UsualPopen, can_be_forked

SHOW = """
import os, sys
print(os.getcwd(), sys.argv, sys.path, os.environ["NEW"], len(os.environ), os.getppid(), sys.stdin.read(), __name__)
print(sys.stdout.encoding, sys.stderr.errors, sys.stdout.line_buffering, "textmill" in sys.modules)
from textmill.cli import main; sys.exit(main())"""


def test_a_forked_process_is_like_any_other(tmp_path: Path, root: Path) -> None:
    command = [sys.executable, "-c", SHOW, "train", "no-such-file.yaml"]
    options: dict[str, Any] = {
        "env": {**os.environ, "PYTHONPATH": str(root), "NEW": "1"},
        "cwd": tmp_path,
        "text": True,
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    found = []
    for popen in (PreloadedPopen, UsualPopen):
        process = popen(command, **options)
        found.append((*process.communicate("a line\n", timeout=300), process.returncode))
    assert found[0] == found[1]
    assert found[0][2] == 2
    assert "no-such-file.yaml" in found[0][1]


def test_passed_files_keep_their_numbers(root: Path) -> None:
    code = "import os, sys; [os.write(int(one), b'x') for one in sys.argv[1:]]; "
    code += "from textmill.cli import main; sys.exit(main())"
    read_end, write_end = os.pipe()
    numbers = [os.dup(write_end) for _ in range(12)]
    try:
        PreloadedPopen(
            [sys.executable, "-c", code, *map(str, numbers)], pass_fds=numbers, stderr=subprocess.DEVNULL
        ).wait(300)
        assert os.read(read_end, 100) == b"x" * len(numbers)
    finally:
        for number in (read_end, write_end, *numbers):
            os.close(number)


def test_a_signal_is_its_exit_code(root: Path) -> None:
    kill = (
        f"import os, sys; os.kill(os.getpid(), {int(signal.SIGKILL)}); from textmill.cli import main; sys.exit(main())"
    )
    for popen in (PreloadedPopen, UsualPopen):
        assert popen([sys.executable, "-c", kill]).wait(300) == -signal.SIGKILL


def test_other_programs_start_as_usual() -> None:
    textmill, plain = [sys.executable, "-m", "textmill"], {"shell": False, "preexec_fn": None, "executable": None}
    assert can_be_forked(textmill, dict(os.environ), plain) == (sys.platform == "linux")
    assert not can_be_forked(textmill, {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}, plain)
    assert not can_be_forked(["sh", "-c", "textmill"], dict(os.environ), plain)
    assert not can_be_forked([sys.executable, "-c", "import textmill"], dict(os.environ), plain)
