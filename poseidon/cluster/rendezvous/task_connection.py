"""Rank 0's connection to a host of the rendezvous: runs programs there, through the task that
leads the host.

Law: the interface of `SshConnection` without SSH: `run`, `open`, `alive`, `label`. Output that is
kept is bounded.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

from poseidon.cluster.rendezvous.wire import Kind, Message
from poseidon.cluster.ssh.channel import MAX_OUTPUT_BYTES, Finished
from poseidon.errors import JobError

MAX_LINE_BYTES = 4 << 20
# Output that is not read: a program that has written so much has lost its reader, and is killed.
MAX_UNREAD_BYTES = 64 << 20


class _OutputBuffer:
    """One output of a program: chunks in, lines out."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._held = b""
        self._unread_bytes = 0
        self._closed = False
        self._changed = threading.Condition()

    def put(self, chunk: bytes) -> bool:
        """Add a chunk; return False when too much is unread."""
        with self._changed:
            self._chunks.append(chunk)
            self._unread_bytes += len(chunk)
            self._changed.notify_all()
            return self._unread_bytes <= MAX_UNREAD_BYTES

    def close(self) -> None:
        """Mark the end of the output."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def line(self) -> bytes | None:
        """Return the next line without its end, cut where it is too long; None at the end.

        Waits until `close`.
        """
        with self._changed:
            while True:
                head, found, rest = self._held.partition(b"\n")
                if found or len(self._held) >= MAX_LINE_BYTES:
                    cut = head[:MAX_LINE_BYTES]
                    self._held = (
                        rest if found and len(head) <= MAX_LINE_BYTES else self._held[len(cut) :]
                    )
                    return cut.rstrip(b"\r")
                if self._chunks:
                    self._held += b"".join(self._chunks)
                    self._chunks.clear()
                    self._unread_bytes = 0
                elif self._closed:
                    self._held = b""
                    return head or None
                else:
                    self._changed.wait()

    def rest(self, until_s: float) -> bytes | None:
        """Return everything up to the end; None when it has not ended in time."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._closed, max(0.0, until_s - time.monotonic())
            ):
                return None
            return b"".join(self._chunks)


class TaskChannel:
    """The standard streams of a program on such a host: a `LineChannel`."""

    def __init__(self, connection: TaskConnection, number: int) -> None:
        self._connection = connection
        self._number = number
        self.output = _OutputBuffer()
        self.errors = _OutputBuffer()
        self._status: int | None = None
        self._ended = threading.Event()

    def send(self, line: bytes) -> None:
        """Write one line, given without its end.

        Raises:
            OSError: the program has ended or the task is lost.
        """
        self.write(line + b"\n")

    def write(self, chunk: bytes) -> None:
        """Write bytes; see `send`."""
        if self._ended.is_set() or not self._connection.alive:
            raise OSError(f"{self._connection.label} is lost")
        self._connection.send(Message(kind=Kind.INPUT, program=self._number, payload=chunk))

    def end_input(self) -> None:
        """Close its standard input: the program reads an end of file."""
        self._connection.send(Message(kind=Kind.END_INPUT, program=self._number))

    def receive(self) -> bytes | None:
        """Return the next line of standard output, None at the end.

        Waits until `end`. For one thread at a time.
        """
        return self.output.line()

    def receive_error(self) -> bytes | None:
        """Return the next line of its standard error; see `receive`."""
        return self.errors.line()

    def status(self, timeout_s: float) -> int | None:
        """Return its exit status, -1 when the task was lost; None when it has not ended in time."""
        return self._status if self._ended.wait(timeout_s) else None

    def close(self) -> None:
        """Close its standard input, upon which the program ends. May be called twice."""
        if not self._ended.is_set():
            self.end_input()

    def kill(self) -> None:
        """Kill the program."""
        self._connection.send(Message(kind=Kind.KILL, program=self._number))

    def take(self, message: Message) -> None:
        """Take a message of the task about it."""
        if message.kind is Kind.ENDED:
            self.end(message.status)
        elif message.payload:
            buffer = self.output if message.kind is Kind.OUTPUT else self.errors
            if not buffer.put(message.payload):
                self.kill()

    def end(self, status: int) -> None:
        """Mark it as ended, or as lost with its task."""
        self._status = status
        self._ended.set()
        self.output.close()
        self.errors.close()


class TaskConnection:
    """A connection to one host of a rendezvous; see the module's docstring.

    Args:
        label: the host in messages, `rank 3 (node2)`.
        address: at which the other hosts reach it.
        send: queues a message to its task; any thread may call it.
    """

    def __init__(self, label: str, address: str, send: Callable[[Message], None]) -> None:
        self._label = label
        self.address = address
        self.send = send
        self._lock = threading.Lock()
        self._programs: dict[int, TaskChannel] = {}
        self._last = 0
        self._lost = False

    @property
    def label(self) -> str:
        """The host in messages: `rank 3 (node2)`."""
        return self._label

    @property
    def alive(self) -> bool:
        """Whether its task is alive: no loss was noticed yet."""
        return not self._lost

    def open(self, argv: Sequence[str], *, timeout_s: float = 15.0) -> TaskChannel:
        """Start a program and connect to its standard streams.

        Args:
            argv: the program and its arguments; no shell sees them.
            timeout_s: not used.

        Raises:
            JobError: the task is lost.
        """
        with self._lock:
            if self._lost:
                raise JobError(
                    f"{self._label}: its task is lost, so '{argv[0]}' cannot be started there"
                )
            self._last = number = self._last + 1
            lines = self._programs[number] = TaskChannel(self, number)
        self.send(Message(kind=Kind.START, program=number, arguments=tuple(argv)))
        return lines

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Finished:
        """Run a program to its end.

        Args:
            argv: the program and its arguments; no shell sees them.
            stdin: its whole standard input.
            timeout_s: limit of the whole.

        Raises:
            JobError: the task was lost, the time is up, or the output is too long.
        """
        until_s = time.monotonic() + timeout_s
        lines = self.open(argv)
        try:
            if stdin:
                lines.write(stdin)
            lines.end_input()
        except OSError as error:
            raise JobError(f"{self._label}: the task was lost while '{argv[0]}' ran") from error
        stdout, stderr = lines.output.rest(until_s), lines.errors.rest(until_s)
        status = lines.status(max(0.0, until_s - time.monotonic()))
        if stdout is None or stderr is None or status is None:
            lines.kill()
            raise JobError(f"{self._label}: '{argv[0]}' did not end within {timeout_s:g} s")
        if max(len(stdout), len(stderr)) > MAX_OUTPUT_BYTES:
            raise JobError(
                f"{self._label}: '{argv[0]}' wrote more than {MAX_OUTPUT_BYTES >> 20} MiB"
            )
        if self._lost:
            raise JobError(f"{self._label}: the task was lost while '{argv[0]}' ran")
        return Finished(status=status, stdout=stdout, stderr=stderr)

    def sftp(self) -> NoReturn:
        """Raise an error: there is no SFTP."""
        raise JobError(f"{self._label}: files are not copied to hosts that a scheduler has chosen")

    def local_address(self) -> str:
        """Return an empty text: our own address on the route there is not known."""
        return ""

    def close(self) -> None:
        """Do nothing: the rendezvous closes all channels."""

    def take(self, message: Message) -> None:
        """Take a message of the task about a program."""
        with self._lock:
            lines = self._programs.get(message.program)
            if message.kind is Kind.ENDED:
                self._programs.pop(message.program, None)
        if lines is not None:
            lines.take(message)

    def lose(self) -> None:
        """Mark the task as lost, and its programs with it."""
        with self._lock:
            self._lost = True
            programs = list(self._programs.values())
            self._programs.clear()
        for lines in programs:
            lines.end(-1)
