"""A host as rank 0 sees it through a meeting: it runs programs there, as over SSH.

Law: what `SshHost` promises, without SSH: `run`, `open`, `alive`, `words`. What a host writes to us is bounded.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

from poseidon.cluster.rendezvous.wire import Kind, Message
from poseidon.cluster.ssh.channel import MOST_OUTPUT_BYTES, Finished
from poseidon.errors import JobError

LONGEST_LINE_BYTES = 4 << 20
# Output that nobody reads: a program that has written so much has lost its reader.
MOST_UNREAD_BYTES = 64 << 20


class _Pieces:
    """One output of a program: pieces come in, lines go out."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._held = b""
        self._unread_bytes = 0
        self._over = False
        self._changed = threading.Condition()

    def put(self, piece: bytes) -> bool:
        """Take a piece; False when too much is unread."""
        with self._changed:
            self._pieces.append(piece)
            self._unread_bytes += len(piece)
            self._changed.notify_all()
            return self._unread_bytes <= MOST_UNREAD_BYTES

    def end(self) -> None:
        """Nothing follows."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def line(self) -> bytes | None:
        """The next line without its end, cut where it is too long; None at the end."""
        with self._changed:
            while True:
                head, found, rest = self._held.partition(b"\n")
                if found or len(self._held) >= LONGEST_LINE_BYTES:
                    cut = head[:LONGEST_LINE_BYTES]
                    self._held = rest if found and len(head) <= LONGEST_LINE_BYTES else self._held[len(cut) :]
                    return cut.rstrip(b"\r")
                if self._pieces:
                    self._held += b"".join(self._pieces)
                    self._pieces.clear()
                    self._unread_bytes = 0
                elif self._over:
                    self._held = b""
                    return head or None
                else:
                    self._changed.wait()

    def rest(self, until_s: float) -> bytes | None:
        """Everything up to the end; None when that has not come in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._over, max(0.0, until_s - time.monotonic())):
                return None
            return b"".join(self._pieces)


class MetLines:
    """A program on a met host, talked to in lines: a `LineChannel`."""

    def __init__(self, host: MetHost, number: int) -> None:
        self._host = host
        self._number = number
        self.output = _Pieces()
        self.errors = _Pieces()
        self._status: int | None = None
        self._ended = threading.Event()

    def send(self, line: bytes) -> None:
        """Write one line, given without its end.

        Raises:
            OSError: the program or the host is gone.
        """
        self.write(line + b"\n")

    def write(self, piece: bytes) -> None:
        """The same for bytes of any kind."""
        if self._ended.is_set() or not self._host.alive:
            raise OSError(f"{self._host.words} is gone")
        self._host.tell(Message(kind=Kind.INPUT, program=self._number, payload=piece))

    def end_input(self) -> None:
        """The program reads an end of file."""
        self._host.tell(Message(kind=Kind.END_INPUT, program=self._number))

    def receive(self) -> bytes | None:
        """The next line of its standard output without its end; None at the end. One thread at a time."""
        return self.output.line()

    def receive_error(self) -> bytes | None:
        """The same of its standard error."""
        return self.errors.line()

    def status(self, timeout_s: float) -> int | None:
        """Its exit status, -1 when the host was lost; None when it has not ended in time."""
        return self._status if self._ended.wait(timeout_s) else None

    def close(self) -> None:
        """End the line; the program reads an end of file. May be called twice."""
        if not self._ended.is_set():
            self.end_input()

    def kill(self) -> None:
        """End the program at once."""
        self._host.tell(Message(kind=Kind.KILL, program=self._number))

    def take(self, message: Message) -> None:
        """What the host says of it."""
        if message.kind is Kind.ENDED:
            self.end(message.status)
        elif message.payload:
            pieces = self.output if message.kind is Kind.OUTPUT else self.errors
            if not pieces.put(message.payload):
                self.kill()

    def end(self, status: int) -> None:
        """It has ended, or nothing more can be heard of it."""
        self._status = status
        self._ended.set()
        self.output.end()
        self.errors.end()


class MetHost:
    """One host of a meeting; see the module's head.

    Args:
        words: what it is called in messages.
        address: its own, that the others reach it at.
        tell: queues a message to its task; any thread may call it.
    """

    def __init__(self, words: str, address: str, tell: Callable[[Message], None]) -> None:
        self._words = words
        self.address = address
        self.tell = tell
        self._lock = threading.Lock()
        self._programs: dict[int, MetLines] = {}
        self._last = 0
        self._lost = False

    @property
    def words(self) -> str:
        """`rank 3 (node2)`, for messages."""
        return self._words

    @property
    def alive(self) -> bool:
        """Whether its task is there, as far as is known."""
        return not self._lost

    def open(self, argv: Sequence[str], *, timeout_s: float = 15.0) -> MetLines:
        """Start a program and talk to it in lines.

        Args:
            argv: the program and its arguments; no shell sees them.
            timeout_s: not needed here.

        Raises:
            JobError: the host is lost.
        """
        with self._lock:
            if self._lost:
                raise JobError(f"{self._words}: its task is gone, so '{argv[0]}' cannot be started there")
            self._last = number = self._last + 1
            lines = self._programs[number] = MetLines(self, number)
        self.tell(Message(kind=Kind.START, program=number, words=tuple(argv)))
        return lines

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Finished:
        """Run a program to its end.

        Args:
            argv: the program and its arguments; no shell sees them.
            stdin: all that it reads.
            timeout_s: limit of the whole.

        Raises:
            JobError: the host was lost, the time is up, or it writes without end.
        """
        until_s = time.monotonic() + timeout_s
        lines = self.open(argv)
        try:
            if stdin:
                lines.write(stdin)
            lines.end_input()
        except OSError as error:
            raise JobError(f"{self._words}: the task was lost while '{argv[0]}' ran") from error
        stdout, stderr = lines.output.rest(until_s), lines.errors.rest(until_s)
        status = lines.status(max(0.0, until_s - time.monotonic()))
        if stdout is None or stderr is None or status is None:
            lines.kill()
            raise JobError(f"{self._words}: '{argv[0]}' did not end within {timeout_s:g} s")
        if max(len(stdout), len(stderr)) > MOST_OUTPUT_BYTES:
            raise JobError(f"{self._words}: '{argv[0]}' wrote more than {MOST_OUTPUT_BYTES >> 20} MiB")
        if self._lost:
            raise JobError(f"{self._words}: the task was lost while '{argv[0]}' ran")
        return Finished(status=status, stdout=stdout, stderr=stderr)

    def sftp(self) -> NoReturn:
        """There is none."""
        raise JobError(f"{self._words}: files are not copied to hosts that a scheduler has chosen")

    def local_address(self) -> str:
        """Nothing is known of our own address on the way there."""
        return ""

    def close(self) -> None:
        """Nothing to let go of: the meeting ends all lines."""

    def take(self, message: Message) -> None:
        """What its task says of a program."""
        with self._lock:
            lines = self._programs.get(message.program)
            if message.kind is Kind.ENDED:
                self._programs.pop(message.program, None)
        if lines is not None:
            lines.take(message)

    def lose(self) -> None:
        """Its task is gone, and so are its programs."""
        with self._lock:
            self._lost = True
            programs = list(self._programs.values())
            self._programs.clear()
        for lines in programs:
            lines.end(-1)
