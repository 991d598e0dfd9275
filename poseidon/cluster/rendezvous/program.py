"""A program that a task runs for rank 0: bytes in, bytes out, its end.

Law: it leads a session of its own. Whatever it writes is handed on in order, and its end last of all. Whoever hands on slowly
slows it down; nothing is kept in memory. `stop` first ends its input, which an agent answers by ending all that it has started.

Slurm signals every process of a step, Kubernetes and others only some. So programs, and what they start, are born with
the signals that ask to end ignored; the task alone takes them, and rank 0 decides what becomes of them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from poseidon.cluster.rendezvous.wire import Kind, Message

PIECE_BYTES = 1 << 16
MOST_INPUTS = 1000
LAST_WORDS_S = 2.0
CANNOT_START = 127
_DEAF = ("sh", "-c", 'trap "" TERM INT HUP USR1 USR2; exec "$@"', "sh")


class TaskProgram:
    """A child and the threads around it.

    Args:
        number: what rank 0 calls it.
        argv: what to run.
        environment: of the child.
        tell: takes messages of the kinds OUTPUT, ERRORS and ENDED, from any thread; may wait.
    """

    def __init__(
        self,
        number: int,
        argv: Sequence[str],
        environment: Mapping[str, str],
        tell: Callable[[Message], None],
    ) -> None:
        self._number = number
        self._tell = tell
        self._input: queue.Queue[bytes] = queue.Queue(MOST_INPUTS)
        self._lock = threading.Lock()
        self._ended = False
        try:
            self._child: subprocess.Popen[bytes] | None = subprocess.Popen(
                [*_DEAF, *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(environment),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            self._child = None
            self._ended = True
            self._say(Kind.ERRORS, f"cannot start '{argv[0]}': {error}\n".encode())
            self._tell(Message(kind=Kind.ENDED, program=number, status=CANNOT_START))
            return
        child = self._child
        self._readers = [
            self._thread(lambda: self._hand_on(child.stdout, Kind.OUTPUT)),
            self._thread(lambda: self._hand_on(child.stderr, Kind.ERRORS)),
        ]
        self._writer = self._thread(self._write)
        self._waiter = self._thread(self._wait)

    @property
    def ended(self) -> bool:
        """Whether it has gone; its last words may still be on their way."""
        with self._lock:
            return self._ended

    def feed(self, piece: bytes) -> None:
        """Bytes for its standard input; none: the end of it. A program that does not read is killed."""
        try:
            self._input.put_nowait(piece)
        except queue.Full:
            self.kill()

    def kill(self) -> None:
        """End it at once."""
        with self._lock:
            if self._child is not None and not self._ended:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._child.pid, signal.SIGKILL)

    def stop(self, grace_s: float) -> None:
        """End its input, and it, if it has not ended in time."""
        self.feed(b"")
        if self._child is not None:
            self._waiter.join(grace_s)
            self.kill()
            self._waiter.join(2 * LAST_WORDS_S)

    def _thread(self, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name=f"poseidon program {self._number}", daemon=True)
        thread.start()
        return thread

    def _say(self, kind: Kind, payload: bytes) -> None:
        self._tell(Message(kind=kind, program=self._number, payload=payload))

    def _hand_on(self, stream: IO[bytes] | None, kind: Kind) -> None:
        assert stream is not None
        with contextlib.suppress(OSError, ValueError), stream:
            while piece := os.read(stream.fileno(), PIECE_BYTES):
                self._say(kind, piece)

    def _write(self) -> None:
        assert self._child is not None and self._child.stdin is not None
        with contextlib.suppress(OSError), self._child.stdin as stream:
            while piece := self._input.get():
                stream.write(piece)
                stream.flush()

    def _wait(self) -> None:
        assert self._child is not None
        # WNOWAIT leaves a zombie that keeps the id, so the group that is killed here is surely the child's.
        os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._ended = True
            status = self._child.wait()
        with contextlib.suppress(queue.Full):
            self._input.put_nowait(b"")
        for reader in self._readers:
            reader.join(LAST_WORDS_S)
        self._tell(Message(kind=Kind.ENDED, program=self._number, status=status))
