"""The processes of a job as children of an agent.

Law: each child leads a session of its own, so that Ctrl-C on the terminal reaches the launcher
only, and so that one signal to its group ends the child and all that it started. A child is reaped
only after that signal: until then its id, which is also the group's, cannot belong to anyone else.

Each child has a thread that writes its standard input, one for each of its outputs, and one that
waits for its end. They end with the child; `close` collects them.
"""

from __future__ import annotations

import array
import codecs
import contextlib
import fcntl
import os
import queue
import select
import signal
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO

from poseidon.base.settings import EVENTS_FD_VARIABLE, STDIN_FD_VARIABLE, inherited_environment
from poseidon.cluster.agent.template import IGNORED, Fork, Templates
from poseidon.cluster.events import decode_line
from poseidon.cluster.process import Listener, OutputStream, ProcessSpec, creation
from poseidon.cluster.python_command import module_folders
from poseidon.errors import JobError, limit_reached
from ps_server.monitor import owned_thread

# A longer event is cut: a process that writes without line ends must not fill our memory.
MAX_LINE_BYTES = 1 << 20
# Queues on the way to the launcher hold 30,000 pieces before a process that writes more waits: at
# most 120 MB.
PIECE_BYTES = 1 << 12
# Commands are few and short; a process that has not read a hundred of them does not read at all.
MAX_QUEUED_LINES = 100
# How often a reader looks whether its process has ended: a process that has left the session may
# hold the output open.
LOOK_S = 0.2
# How long the thread that writes the input may take to end after the process.
WRITER_S = 2.0
_IGNORED_NAMES = " ".join(number.name.removeprefix("SIG") for number in IGNORED)
_IGNORE_SIGNALS = ("sh", "-c", f'trap "" {_IGNORED_NAMES}; exec "$@"', "sh")


def base_environment(inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which children find the modules that this process finds. They end
    when they are done: they have no terminal on which Python could ask what to do next.

    Args:
        inherited: what it adds to; None: what this process's own children inherit.
    """
    inherited = inherited_environment() if inherited is None else inherited
    return {
        **{name: value for name, value in inherited.items() if name != "PYTHONINSPECT"},
        "PYTHONPATH": module_folders(inherited.get("PYTHONPATH", "")),
        "PYTHONUNBUFFERED": "1",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSettings:
    """Settings of the children of one agent.

    Attributes:
        environment: that they inherit.
        folder: their working directory; None: this process's own.
        stdin: the descriptor that a child reads that may read its launcher's standard input; None:
            no child may.
        ignore_signals: whether all children have `ProcessSpec.ignore_signals`.
    """

    environment: Mapping[str, str] = field(default_factory=base_environment)
    folder: str | None = None
    stdin: int | None = None
    ignore_signals: bool = False


def start_child(
    spec: ProcessSpec,
    listener: Listener,
    settings: ChildSettings | None = None,
    templates: Templates | None = None,
) -> ChildProcess:
    """Start a child.

    Args:
        spec: of the process.
        listener: see `ChildProcess`.
        settings: of this agent's children.
        templates: of this agent; None: the child imports its modules itself.

    Raises:
        JobError: it cannot be started; the message has the process and the reason.
    """
    settings = settings or ChildSettings()
    ignores = spec.ignore_signals or settings.ignore_signals
    try:
        child, events = _spawn(replace(spec, ignore_signals=ignores), settings, templates)
        try:
            return ChildProcess(spec, child, listener, events=events, ignores_signals=ignores)
        except RuntimeError:  # no thread can be started
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            for pipe in (child.stdin, child.stdout, child.stderr, events):
                if pipe is not None:
                    pipe.close()
            raise
    except (OSError, ValueError, RuntimeError) as error:
        why = limit_reached(error) or error
        raise JobError(
            f"cannot start {spec.name.describe()} with '{spec.argv[0]}': {why}"
        ) from error


def _spawn(
    spec: ProcessSpec, settings: ChildSettings, templates: Templates | None
) -> tuple[subprocess.Popen[bytes] | Fork, IO[bytes] | None]:
    """Start a child; return it, and the pipe of its events if that is not its standard output."""
    environment = {**settings.environment, **spec.environment}
    with ExitStack() as opened:
        passed = []
        events: IO[bytes] | None = None
        if spec.own_stdin and settings.stdin is not None:
            passed.append(os.dup(settings.stdin))
            opened.callback(os.close, passed[-1])
            environment[STDIN_FD_VARIABLE] = str(passed[-1])
        if spec.own_stdout:
            read_fd, write_fd = os.pipe()
            events = os.fdopen(read_fd, "rb")
            opened.callback(os.close, write_fd)
            passed.append(write_fd)
            environment[EVENTS_FD_VARIABLE] = str(write_fd)
        try:
            child = _fork(spec, environment, settings, passed, templates) or subprocess.Popen(
                [*(_IGNORE_SIGNALS if spec.ignore_signals else ()), *spec.argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=settings.folder,
                env=environment,
                start_new_session=True,
                pass_fds=passed,
            )
        except BaseException:
            if events is not None:
                events.close()
            raise
        return child, events


def _fork(
    spec: ProcessSpec,
    environment: Mapping[str, str],
    settings: ChildSettings,
    passed: Sequence[int],
    templates: Templates | None,
) -> Fork | None:
    """Return a child from a template; None where there is none."""
    if templates is None or not spec.imports:
        return None
    try:
        template = templates.of(spec.argv[0], spec.imports, environment, settings.folder)
        return template.fork(
            spec.argv,
            environment=environment,
            folder=settings.folder,
            passed=passed,
            ignores_signals=spec.ignore_signals,
        )
    except OSError:
        return None


class ChildProcess:
    """A child process and its threads.

    Args:
        spec: what was started.
        child: the process.
        listener: notified of what it writes, and of its end.
        events: the pipe of its events; None: its standard output.
        ignores_signals: whether it was started ignoring SIGTERM.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        child: subprocess.Popen[bytes] | Fork,
        listener: Listener,
        *,
        events: IO[bytes] | None = None,
        ignores_signals: bool = False,
    ) -> None:
        self.name = spec.name
        self._child = child
        self._listener = listener
        self._lock = threading.Lock()
        self._status: int | None = None
        self._ended = threading.Event()
        self.created = creation(child.pid)
        self._started_ignoring = (
            ignores_signals or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        )
        self._lines: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED_LINES)
        out, err = _Output(child.stdout, self.poll), _Output(child.stderr, self.poll)
        readers = {
            "stdout": partial(self._read_events, out),
            "stderr": partial(self._read_output, err, OutputStream.STDERR),
        }
        if events is not None:
            readers["stdout"] = partial(self._read_output, out, OutputStream.STDOUT)
            readers["events"] = partial(self._read_events, _Output(events, self.poll))
        self._readers = [self._thread(role, work) for role, work in readers.items()]
        self._writer = self._thread("stdin", self._write_lines)
        self._waiter = self._thread("exit", self._wait)
        self.send_line(spec.first_line)
        for thread in (*self._readers, self._writer, self._waiter):
            thread.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def send_line(self, line: bytes) -> None:
        """Queue one line for its standard input; dropped when the process no longer reads."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(line)

    def poll(self) -> int | None:
        """Return its exit status as `Listener.exited` gets it, or None while it runs."""
        with self._lock:
            return self._status

    def terminate(self) -> None:
        """Send SIGTERM to its group, and SIGCONT, without which a stopped process would not
        handle it.

        A child that was started ignoring SIGTERM (`ProcessSpec.ignore_signals`) and still does is
        killed at once, for nothing else ends it. A child that ignores SIGTERM by itself, for
        instance while it writes a file, keeps its time.
        """
        if self._started_ignoring and _ignores(self._child.pid, signal.SIGTERM):
            self.kill()
            return
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL to it and all that it started. Nothing happens when it has ended."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill it if it still runs, and join its threads."""
        self.kill()
        self._waiter.join(2 * WRITER_S)

    def _thread(self, role: str, work: Callable[[], None]) -> threading.Thread:
        return owned_thread(f"poseidon {self.name.short} {role}", work, partial(self._fail, role))

    def _signal(self, number: int) -> None:
        with self._lock:
            if self._status is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._child.pid, number)

    def _fail(self, role: str, error: Exception) -> None:
        """End the process, and report why: its output, input or exit can no longer be followed."""
        self.kill()
        if not self._ended.is_set():
            process = self.name.describe(self._child.pid)
            message = f"{process}: its {role} cannot be followed: {type(error).__name__}: {error}"
            self._listener.event(self.name, {"event": "error", "message": message, "exit_code": 1})

    def _wait(self) -> None:
        try:
            # WNOWAIT leaves a zombie that keeps the id, so the group that is killed here is the
            # child's.
            os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        except OSError as error:
            self._fail("exit", error)
        with self._lock:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._status = status = self._child.wait()
        # With its reader dead, a blocked write has failed; an idle writer waits for the queue. A
        # full queue belongs to a writer that has already ended.
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._writer.join(WRITER_S)
        for reader in self._readers:
            reader.join()
        self._ended.set()
        self._listener.exited(self.name, status)

    def _write_lines(self) -> None:
        stream = _pipe(self._child.stdin)
        with contextlib.suppress(OSError), stream:
            while (line := self._lines.get()) is not None:
                stream.write(line + b"\n")
                stream.flush()

    def _read_events(self, output: _Output) -> None:
        for line in output.lines():
            event = decode_line(line)
            if event is None:
                text = line.decode("utf-8", errors="surrogateescape")
                self._listener.output(self.name, OutputStream.STDERR, text)
            else:
                self._listener.event(self.name, event)

    def _read_output(self, output: _Output, stream: OutputStream) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        for piece in output.pieces():
            if text := decoder.decode(piece):
                self._listener.output(self.name, stream, text)
        if text := decoder.decode(b"", final=True):
            self._listener.output(self.name, stream, text)


class _Output:
    """An output of a child, which one thread reads.

    Args:
        pipe: its read end. A process that has left the child's session may hold the other end.
        status: returns None until the child has ended: what it has written is in the pipe then.
    """

    def __init__(self, pipe: IO[bytes] | None, status: Callable[[], int | None]) -> None:
        self._pipe, self._status = _pipe(pipe), status

    def pieces(self) -> Iterator[bytes]:
        """Yield what the child writes, as it comes; close the pipe at the end."""
        with self._pipe:
            fd = self._pipe.fileno()
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            while True:
                is_ready = poll.poll(1000 * LOOK_S)
                if self._status() is not None:
                    break
                if is_ready:
                    if not (piece := os.read(fd, PIECE_BYTES)):
                        return
                    yield piece
            unread = array.array("i", [0])
            fcntl.ioctl(fd, termios.FIONREAD, unread)
            if unread[0]:
                yield os.read(fd, unread[0])

    def lines(self) -> Iterator[bytes]:
        """Yield `pieces` as lines."""
        part = b""
        for piece in self.pieces():
            *lines, part = (part + piece).split(b"\n")
            yield from (line + b"\n" for line in lines)
            if len(part) >= MAX_LINE_BYTES:
                yield part
                part = b""
        if part:
            yield part


def _ignores(pid: int, number: int) -> bool:
    """Return whether a process ignores a signal; False where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:")]
    return any(mask >> (number - 1) & 1 for mask in masks)


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
