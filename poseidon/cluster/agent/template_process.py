"""The program of a template: a process that has imported modules, and forks processes on request.

`poseidon.cluster.agent.template` starts it. A fork has the arguments, environment, folder,
descriptors, session and signals of a process that is started, and runs its program.

Law: a template runs nothing but imports. It has one thread, and nothing but imports has been
written by it; otherwise it ends, and processes are started. It ends with its owner, over whose
socket requests come. The owner is a subreaper while it asks, so that a fork becomes its child.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

READY = b"ready"
MAX_BYTES, MAX_FILES = 1 << 16, 16
ROOM = " " * 4096
"""An argument of a template, whose place the arguments of forks take."""
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which a machine or a scheduler ends all processes."""
_ARGUMENTS_START, _ARGUMENTS_END = 45, 46
"""Fields of /proc/PID/stat after the name, from 0."""


def serve() -> str:
    """Import the modules of the command line, and fork for each request. Return in each fork, with
    its program.

    The arguments are the descriptor of the socket, and the names of the modules.
    """
    requests = socket.socket(fileno=int(sys.argv[1]))
    _import(sys.argv[2:-1])
    requests.send(READY)
    while True:
        text, files, _, _ = socket.recv_fds(requests, MAX_BYTES, MAX_FILES)
        if not text:
            os._exit(0)
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)  # the fork's parent is now the owner
            return _fork(json.loads(text), files, requests)
        for file in files:
            os.close(file)
        os.waitpid(between, 0)


def _import(modules: Sequence[str]) -> None:
    """Import modules. End the process where that has an effect which forks would not have."""
    _require_one_thread()
    written = os.memfd_create("output")
    for number in (1, 2):
        os.dup2(written, number)
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    sys.stdout.flush()
    sys.stderr.flush()
    _require_one_thread()
    if os.fstat(written).st_size:
        os._exit(1)
    os.close(written)


def _require_one_thread() -> None:
    """End the process if it has several threads, besides those that a library ends at a fork."""
    first = os.fork()
    if first == 0:
        os._exit(0)
    os.waitpid(first, 0)
    if len(os.listdir("/proc/self/task")) > 1:
        os._exit(1)


def _fork(request: dict[str, Any], files: Sequence[int], requests: socket.socket) -> str:
    """Take the identity of a requested process, and report its id; negative: it has failed, and
    ends. Return its program.

    Args:
        request: `argv` of a Python process with `-c`; its `folder`; the `variables` that it has and
            the template has not; whether it `ignores` signals; the `owner`, its parent; and the
            `numbers` of its descriptors.
        files: these descriptors.
        requests: where it is reported.
    """
    between = os.getppid()
    os.setsid()
    while os.getppid() == between != request["owner"]:
        time.sleep(0.001)
    unused = max(request["numbers"]) + 1
    low = [*files, requests.detach()]
    high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, unused) for file in low]
    for file in low:
        os.close(file)
    with socket.socket(fileno=high.pop()) as report:
        try:
            program = _become(request, high)
        except BaseException:  # noqa: BLE001 - the owner raises it, and starts the process
            report.send(str(-os.getpid()).encode())
            os._exit(1)
        report.send(str(os.getpid()).encode())
    return program


def _become(request: dict[str, Any], files: Sequence[int]) -> str:
    for file, number in zip(files, request["numbers"], strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.update(request["variables"])
    os.chdir(request["folder"])
    if request["ignores"]:
        for ignored in IGNORED:
            signal.signal(ignored, signal.SIG_IGN)
    python, option, program, *arguments = map(str, request["argv"])
    sys.argv = [option, *arguments]
    sys.orig_argv = [python, option, program, *arguments]
    _show(*sys.orig_argv)
    if "numpy" in sys.modules:  # Python seeds its own generator again in a fork, numpy does not
        sys.modules["numpy"].random.seed()
    gc.enable()
    return program


def _show(*words: str) -> None:
    """Let the system show other arguments of this process: `poseidon kill` looks for `--job ID` among
    them. `setproctitle` would show one argument with spaces.
    """
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start, end = int(fields[_ARGUMENTS_START]), int(fields[_ARGUMENTS_END])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    if len(text) > end - start:
        raise ValueError("the arguments are too long")
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
