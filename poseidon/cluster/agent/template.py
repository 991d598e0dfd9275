"""Processes of a host as forks of one that has imported what all of them need.

Importing torch takes a second of a processor, most of the start of a job; the processes of an agent
share it: a job of two workers on one machine takes 2.2 to 2.6 seconds of processors to its end, and
without templates 4.9 to 5.8. Where no fork can be had, a process is started as without a template,
and says itself what is wrong. `multiprocessing.forkserver` does not fit: there is one in a process,
which may be the user's, and its children have its streams, folder, environment and Python.

Law: a fork is as a process that is started, a child of this one, save that all forks of a
template share the seed of Python's hashes and the layout of memory. A template knows no secret, and
ends with this process.

The program of a template: a process that has imported modules, and forks processes on request.

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
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from poseidon.base.settings import EVENTS_FD_VARIABLE, STDIN_FD_VARIABLE
from poseidon.cluster.python_command import program_arguments

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
    # Python seeds its own generator again in a fork; numpy and torch do not
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
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


_PROGRAM = (
    "from poseidon.cluster.agent.template import serve; "
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
