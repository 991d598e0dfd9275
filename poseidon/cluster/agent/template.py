"""Processes of a host as forks of one that has imported what all of them need.

Importing torch takes a second of a processor, most of the start of a job; the processes of an agent
share it: a job of two workers on one machine takes 2.2 to 2.6 seconds of processors to its end, and
without templates 4.9 to 5.8. Where no fork can be had, a process is started as without a template,
and says itself what is wrong. `multiprocessing.forkserver` does not fit: there is one in a process,
which may be the user's, and its children have its streams, folder, environment and Python.

Law: a fork is as a process that is started, a child of this one, save that all forks of a
template share the seed of Python's hashes and the layout of memory. A template knows no secret, and
ends with this process.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO

from poseidon.base.settings import EVENTS_FD_VARIABLE, STDIN_FD_VARIABLE
from poseidon.cluster.agent.template_process import READY, ROOM
from poseidon.cluster.python_command import program_arguments

_PROGRAM = (
    "from poseidon.cluster.agent.template_process import serve; "
    'exec(serve(), {"__name__": "__main__", "__builtins__": __builtins__})'
)
_OF_ONE_PROCESS = (EVENTS_FD_VARIABLE, STDIN_FD_VARIABLE)
_SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 36, 37
WAIT_S = 50.0
"""How long imports may take; a launcher waits longer for a process."""


class Fork:
    """A forked process, as `subprocess.Popen` has it."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid = pid
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr

    def wait(self) -> int:
        """Return its exit status, once."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Template:
    """A process that has imported modules.

    Args:
        python: the interpreter.
        imports: the modules.
        environment: of the template and its forks.
        folder: where it imports them; None: this process's own.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        python: str,
        imports: Sequence[str],
        environment: Mapping[str, str],
        folder: str | None = None,
    ) -> None:
        self._environment = environment
        self._lock = threading.Lock()
        self._is_ready = False
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.settimeout(WAIT_S)
        with theirs:
            self._process = subprocess.Popen(
                [python, *program_arguments(_PROGRAM, str(theirs.fileno()), *imports, ROOM)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env=dict(environment),
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )

    def wait(self) -> None:
        """Return once it has imported its modules.

        Raises:
            OSError: it has not.
        """
        with self._lock:
            self._wait()

    def _wait(self) -> None:
        if not self._is_ready and self._receive(len(READY)) != READY:
            raise OSError("the template has ended")
        self._is_ready = True

    def _receive(self, size: int) -> bytes:
        try:
            return self._requests.recv(size)
        except TimeoutError:
            self._requests.close()  # else a late answer would be the next request's
            raise

    def fork(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: str | None,
        passed: Sequence[int],
        ignores_signals: bool,
    ) -> Fork:
        """Return a new process.

        Args:
            argv: of a Python process that runs a program given by `-c`.
            environment: of the process: the template's, and variables of its own.
            folder: its working directory; None: this process's own.
            passed: the descriptors that it inherits besides its standard streams.
            ignores_signals: whether it starts ignoring the signals by which a machine ends all
                processes.

        Raises:
            OSError: there is none.
        """
        variables = {
            name: value
            for name, value in environment.items()
            if self._environment.get(name) != value
        }
        with ExitStack() as theirs, ExitStack() as ours:
            ends: list[IO[bytes]] = []
            streams = []
            for number in range(3):
                reading, writing = os.pipe()
                own, other = (writing, reading) if number == 0 else (reading, writing)
                theirs.callback(os.close, other)
                streams.append(other)
                ends.append(ours.enter_context(os.fdopen(own, "wb" if number == 0 else "rb")))
            request = {
                "argv": list(argv),
                "variables": variables,
                "folder": folder or os.getcwd(),
                "ignores": ignores_signals,
                "owner": os.getpid(),
                "numbers": [0, 1, 2, *passed],
            }
            with self._lock:
                self._wait()
                with _subreaper():
                    message = json.dumps(request).encode()
                    socket.send_fds(self._requests, [message], [*streams, *passed])
                    pid = int(self._receive(20) or 0)
            if pid <= 0:
                if pid:
                    os.waitpid(-pid, 0)
                raise OSError("the template has not forked")
            ours.pop_all()
        return Fork(pid, *ends)

    def close(self) -> None:
        """End it; its forks stay. May be called twice."""
        self._process.kill()
        self._process.wait()
        with self._lock:  # who waited for it has its end
            self._requests.close()


class Templates:
    """The templates of one agent. Any thread may use them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[object, ...], Template] = {}

    def of(
        self,
        python: str,
        imports: Sequence[str],
        environment: Mapping[str, str],
        folder: str | None,
    ) -> Template:
        """Return the template of these modules in this environment; the first call starts it.

        Raises:
            OSError: it cannot be started.
        """
        if sys.platform != "linux":
            raise OSError("forks cannot become children")
        common = {name: value for name, value in environment.items() if name not in _OF_ONE_PROCESS}
        key = python, *imports, frozenset(common.items()), folder
        with self._lock:
            if key not in self._known:
                self._known[key] = Template(python, imports, common, folder)
            return self._known[key]

    def close(self) -> None:
        """End all templates; their forks stay. May be called twice."""
        with self._lock:
            for template in self._known.values():
                template.close()
            self._known.clear()


_ASKING = threading.Lock()


@contextmanager
def _subreaper() -> Iterator[None]:
    """Let a process whose parent has ended become a child of this one.

    Raises:
        OSError: the system cannot.
    """
    libc = ctypes.CDLL(None)
    before = ctypes.c_int()
    with _ASKING:
        if libc.prctl(_GET_CHILD_SUBREAPER, ctypes.byref(before)) or libc.prctl(
            _SET_CHILD_SUBREAPER, 1
        ):
            raise OSError("forks cannot become children")
        try:
            yield
        finally:
            libc.prctl(_SET_CHILD_SUBREAPER, before.value)
