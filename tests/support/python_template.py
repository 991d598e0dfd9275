"""The program of a Python process that has imported torch, and forks processes of jobs on request.

`tests.support.forked_children` starts it. A fork runs a program with the arguments, environment,
folder, descriptors and session of a process that is started. Of Poseidon it has imported nothing.

Law: requests come from the process that made the template, over the socket whose descriptor is the
first argument; the template ends with that process. The socket's other end is a subreaper while it
asks, so that a fork becomes its child.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

MODULES = ("numpy", "torch", "zmq", "google.protobuf.text_format")
"""What each process of a job imports."""
MAX_BYTES, MAX_FILES = 1 << 17, 16
UNUSED_FD = 200
ARGUMENTS_START, ARGUMENTS_END = 45, 46
"""Fields of /proc/PID/stat after the name, from 0."""


def serve(requests: socket.socket) -> str:
    """Fork for each request. Return in each fork, with its program."""
    while True:
        text, files, _, _ = socket.recv_fds(requests, MAX_BYTES, MAX_FILES)
        if not text:
            sys.exit()
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)  # the fork's parent is now the process that asks
            return become(json.loads(text), files, requests)
        for file in files:
            os.close(file)
        os.waitpid(between, 0)


def become(request: dict, files: Sequence[int], requests: socket.socket) -> str:
    """Take the identity of a requested process, and report its id. Return its program.

    Args:
        request: `argv` after the interpreter, `environment`, `folder`, the `parent` to wait for,
            and the `numbers` of its descriptors.
        files: these descriptors.
        requests: where it is reported.
    """
    os.setsid()
    while os.getppid() != request["parent"]:
        time.sleep(0.001)
    requests.send(str(os.getpid()).encode())
    requests.close()
    high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, UNUSED_FD) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(high, request["numbers"], strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.modules["numpy"].random.seed()  # as a process that is started: unlike any other
    _, program, *arguments = request["argv"]
    sys.argv = ["-c", *arguments]
    show(sys.executable, *request["argv"])
    return program


def show(*words: str) -> None:
    """Let the system show other arguments of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[ARGUMENTS_START]), int(fields[ARGUMENTS_END])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    assert len(text) <= end - start, "the arguments of the process are too long"
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    gc.disable()
    for module in MODULES:
        importlib.import_module(module)
    gc.freeze()
    program = serve(socket.socket(fileno=int(sys.argv[1])))
    gc.enable()
    exec(program, {"__name__": "__main__", "__builtins__": __builtins__})
