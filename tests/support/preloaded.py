"""Start textmill's processes with torch already imported: forked from a template process that imported it once.

Importing torch, with what FSDP and tensor parallelism need of it, is most of the work of a small job. The template
imports other projects' packages only; each process imports textmill itself, with its own environment variables.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import re
import runpy
import site
import socket
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.attention.flex_attention",
    "numpy",
    "pydantic",
    "yaml",
    "safetensors.numpy",
    "pyarrow.compute",
    "tokenizers",
    "fsspec",
    "httpx",
    "starlette",
    "uvicorn",
)
PROGRAM = re.compile(r"from textmill\.cli import (main; sys\.exit\(main\(\)\)|command; command\(\))$")
READ_AT_START = re.compile(r"PYTHON(?!PATH$)|LD_|LC_|LANG$|OMP_|MKL_|OPENBLAS_|TORCH|CUDA_")
"""Environment variables that the interpreter and the packages read when they start."""
SET_SUBREAPER, GET_SUBREAPER = 36, 37
"""prctl's numbers for: orphaned processes become children of this process."""
LARGEST = 200_000
"""Bytes of a request."""
ABOVE = 500
"""File numbers from here on are used by no process."""
STANDARD = {"p2cread": 0, "c2pwrite": 1, "errwrite": 2}
"""The names in `subprocess` of a process's standard streams, and their file numbers."""


LOCK = threading.Lock()
UsualPopen = subprocess.Popen


class PreloadedPopen(subprocess.Popen[Any]):
    """`subprocess.Popen`, but a textmill process is forked from the template; any other is started as usual."""

    def _execute_child(self, *arguments: Any) -> None:
        usual = super()._execute_child  # type: ignore[misc]
        given = inspect.signature(usual).bind(*arguments).arguments
        env = os.environ if given["env"] is None else given["env"]
        if not can_be_forked(given["args"], env, given):
            usual(*arguments)
            return
        streams = {number: given[name] if given[name] >= 0 else number for name, number in STANDARD.items()}
        files = {**streams, **{number: number for number in given["pass_fds"]}}
        request = {
            "words": list(map(os.fsdecode, given["args"][1:])),
            "env": dict(env),
            "numbers": list(files),
            "folder": os.fspath(given["cwd"] or Path.cwd()),
            "session": given["start_new_session"],
        }
        self.pid = fork_template(request, list(files.values()))
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]


def can_be_forked(words: Any, env: Any, given: dict[str, Any]) -> bool:
    """Whether this is a program of textmill, or of its tests, that starts as the template did."""
    if sys.platform != "linux" or not isinstance(words, list) or not words or words[0] != sys.executable:
        return False
    if given["shell"] or given["preexec_fn"] or given["executable"]:
        return False
    first, second = [*map(str, words[1:3]), "", ""][:2]
    if second == "-m":
        first, second = second, str(words[3])
    ours = (first == "-m" and second.startswith(("textmill", "tests.support.", "torch.distributed.run"))) or (
        (first == "-c" and bool(PROGRAM.search(second))) or first.startswith(str(Path(__file__).parent))
    )
    names = {name for name in {*env, *os.environ} if READ_AT_START.match(name)}
    return ours and all(env.get(name) == os.environ.get(name) for name in names)


def fork_template(request: dict[str, Any], files: list[int]) -> int:
    """Fork the template; return the number of the new process, which is a child of this process."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    with LOCK:
        template = open_template()
        prctl(GET_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        prctl(SET_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(template, [json.dumps(request).encode()], files)
            answer = template.recv(100)
        finally:
            prctl(SET_SUBREAPER, before.value, 0, 0, 0)
    assert answer, "the template process has ended"
    return int(answer)


@cache
def open_template() -> socket.socket:
    """Start the template process, which ends with this one; return the socket that takes requests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        process = UsualPopen(command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve(place: socket.socket) -> dict[str, Any]:
    """Fork a process for each request; return the request in that process."""
    parent = os.getppid()
    while True:
        data, files, _, _ = socket.recv_fds(place, LARGEST, 20)
        if not data:
            os._exit(0)
        read_end, write_end = os.pipe()
        if not (middle := os.fork()):
            # The process in the middle ends at once, so that the test becomes the parent of the other.
            if pid := os.fork():
                os.write(write_end, str(pid).encode())
                os._exit(0)
            while os.getppid() != parent:  # the process in the middle has not ended yet
                time.sleep(0.001)
            request: dict[str, Any] = json.loads(data)
            place.detach()  # or it would close the file that gets its number
            _take_files(request["numbers"], files)
            return request
        os.waitpid(middle, 0)
        place.send(os.read(read_end, 100))
        for number in (*files, read_end, write_end):
            os.close(number)


def _take_files(numbers: list[int], files: list[int]) -> None:
    """Give the received files their numbers, and close all others."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, ABOVE) for file in files]
    os.closerange(0, ABOVE)
    for number, file in zip(numbers, high, strict=True):
        os.dup2(file, number)
        os.close(file)
    errors, encoding = sys.stderr.errors, sys.stdout.encoding
    sys.stdin = sys.__stdin__ = open(0, closefd=False, encoding=encoding)  # type: ignore[misc]
    for name, number in (("stdout", 1), ("stderr", 2)):
        now = bool(os.environ.get("PYTHONUNBUFFERED"))
        stream = open(number, "w", closefd=False, encoding=encoding, errors=errors if number == 2 else None)
        stream.reconfigure(line_buffering=number == 2 or os.isatty(1), write_through=now)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _become(words: list[str], env: dict[str, str], folder: str, session: bool) -> None:
    """Run a module, a file or code as Python does."""
    if session:
        os.setsid()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    safe, words = words[0] == "-P", words[words[0] == "-P" :]
    first = {"-m": folder, "-c": ""}.get(words[0], str(Path(words[0]).parent))
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*([] if safe else [first]), *paths, *(path for path in sys.path[1:] if path not in paths)]
    importlib.invalidate_caches()
    sys.modules.pop("sitecustomize", None)  # the template may have imported the system's own
    site.execsitecustomize()  # type: ignore[attr-defined]
    sys.argv = words[words[0] == "-m" :]
    if words[0] == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(words[1], sys.modules["__main__"].__dict__)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    _become(request["words"], request["env"], request["folder"], request["session"])
