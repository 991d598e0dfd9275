"""Workers and shards of the jobs of tests, as forks of a process that has imported torch.

The import takes more than a second of a processor for each process of a job, more than what most
tests compute. A fork runs in the environment in which its template has imported torch: each
environment has a template of its own.

Law: a fork imports Poseidon by itself, and is a child of the test's own process, as one that is
started. All forks of a template share the seed of hashes and the layout of memory; jobs whose
launcher is not the test's process, or whose workers have an agent, start their processes anew.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO
from unittest import mock

from poseidon.cluster.agent import child
from poseidon.settings import EVENTS_FD_VARIABLE, STDIN_FD_VARIABLE

FILE = Path(__file__).with_name("python_template.py")
PROGRAM = f"exec(compile(open({str(FILE)!r}).read(), {str(FILE)!r}, 'exec'))"
FORKED = ("poseidon.engine.process", "ps_server")
"""Modules whose processes are forked."""
OF_ONE_PROCESS = (EVENTS_FD_VARIABLE, STDIN_FD_VARIABLE, "POSEIDON_HOME", "PYTEST_CURRENT_TEST")
"""Variables that neither Python, torch nor their libraries read."""
ROOM = " " * 4096
"""An argument whose place the arguments of forks take."""
PR_SET_CHILD_SUBREAPER = 36
WAIT_S = 60.0


class Forked:
    """A forked process, as `poseidon.cluster.agent.child` takes it of `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid = pid
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr

    def wait(self) -> int:
        """Return its exit status, once."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Template:
    """A process that forks, of one environment."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.settimeout(WAIT_S)
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno()), ROOM],
                stdin=subprocess.DEVNULL,
                cwd="/",
                env=dict(environment),
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self._close)

    def _close(self) -> None:
        self._requests.close()
        self._process.wait(WAIT_S)

    def fork(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: str,
        passed: Sequence[int],
    ) -> Forked:
        """Return a new process.

        Args:
            argv: of a Python process that runs a program given by `-c`.
            environment: of the process.
            folder: its working directory.
            passed: the descriptors that it inherits besides its standard streams.
        """
        with ExitStack() as theirs:
            pipes = [os.pipe() for _ in range(3)]
            streams = [pipes[0][0], pipes[1][1], pipes[2][1]]
            for end in streams:
                theirs.callback(os.close, end)
            request = {
                "argv": list(argv[1:]),
                "environment": dict(environment),
                "folder": folder,
                "parent": os.getpid(),
                "numbers": [0, 1, 2, *passed],
            }
            with self._lock, _subreaper():
                message = json.dumps(request).encode()
                socket.send_fds(self._requests, [message], [*streams, *passed])
                pid = int(self._requests.recv(20))
        ours = (os.fdopen(pipes[0][1], "wb"), *(os.fdopen(pipes[n][0], "rb") for n in (1, 2)))
        return Forked(pid, *ours)


@contextmanager
def _subreaper() -> Iterator[None]:
    """Let a process whose parent has ended become a child of this one."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


@cache
def _template(environment: frozenset[tuple[str, str]]) -> Template:
    return Template(dict(environment))


def _start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None,
    pass_fds: Sequence[int],
    **others: object,
) -> Forked | subprocess.Popen[bytes]:
    """Stand for `subprocess.Popen` as `poseidon.cluster.agent.child` calls it."""
    if not (argv[:2] == [sys.executable, "-c"] and argv[3] in FORKED):
        return subprocess.Popen(argv, env=env, cwd=cwd, pass_fds=pass_fds, **others)
    template = _template(frozenset((k, v) for k, v in env.items() if k not in OF_ONE_PROCESS))
    return template.fork(argv, environment=env, folder=cwd or os.getcwd(), passed=pass_fds)


@contextmanager
def forked_children() -> Iterator[None]:
    """In this block, fork the workers and shards whose launcher is this process."""
    known = SimpleNamespace(Popen=_start, PIPE=subprocess.PIPE)
    with mock.patch.object(child, "subprocess", known):
        yield
