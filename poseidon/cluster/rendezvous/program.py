"""A program that a task runs for rank 0: forwards its input, its output and its exit.

Law: it leads a session of its own. Its output is forwarded in order, its exit last. A slow receiver
slows it down; nothing piles up in memory. `stop` first closes its input, upon which an agent ends
all that it has started.

Slurm signals every process of a step, Kubernetes and others only some. So programs, and what they
start, ignore the signals that ask to end; the task alone handles them and reports them to rank 0,
which decides.
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

CHUNK_BYTES = 1 << 16
MAX_QUEUED = 1000
DRAIN_S = 2.0
CANNOT_START = 127
_IGNORE_SIGNALS = ("sh", "-c", 'trap "" TERM INT HUP USR1 USR2; exec "$@"', "sh")


class TaskProgram:
    """A child process and its threads.

    Args:
        number: its number in messages.
        argv: the program and its arguments.
        environment: of the child.
        send: takes messages of the kinds OUTPUT, ERRORS and ENDED, from any thread; may wait.
    """

    def __init__(
        self,
        number: int,
        argv: Sequence[str],
        environment: Mapping[str, str],
        send: Callable[[Message], None],
    ) -> None:
        self._number = number
        self._send = send
        self._input: queue.Queue[bytes] = queue.Queue(MAX_QUEUED)
        self._lock = threading.Lock()
        self._ended = False
        try:
            self._child: subprocess.Popen[bytes] | None = subprocess.Popen(
                [*_IGNORE_SIGNALS, *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(environment),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            self._child = None
            self._ended = True
            self._send_output(
                Kind.ERRORS,
                f"cannot start '{argv[0]}': {error}\n".encode(errors="backslashreplace"),
            )
            self._send(Message(kind=Kind.ENDED, program=number, status=CANNOT_START))
            return
        child = self._child
        self._readers = [
            self._thread(lambda: self._forward(child.stdout, Kind.OUTPUT)),
            self._thread(lambda: self._forward(child.stderr, Kind.ERRORS)),
        ]
        self._writer = self._thread(self._write)
        self._waiter = self._thread(self._wait)

    @property
    def ended(self) -> bool:
        """Whether it has ended; its last output may still be on its way."""
        with self._lock:
            return self._ended

    def feed(self, chunk: bytes) -> None:
        """Queue bytes for its standard input; none: close it.

        A program that does not read is killed.
        """
        try:
            self._input.put_nowait(chunk)
        except queue.Full:
            self.kill()

    def kill(self) -> None:
        """Kill it and all that it started."""
        with self._lock:
            if self._child is not None and not self._ended:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._child.pid, signal.SIGKILL)

    def stop(self, grace_s: float) -> None:
        """Close its input; kill it if it has not ended in time."""
        self.feed(b"")
        if self._child is not None:
            self._waiter.join(grace_s)
            self.kill()
            self._waiter.join(2 * DRAIN_S)

    def _thread(self, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - rank 0 is the owner
                self._fail(error)

        thread = threading.Thread(target=run, name=f"poseidon program {self._number}", daemon=True)
        thread.start()
        return thread

    def _fail(self, error: Exception) -> None:
        """End the program, and send the reason as its standard error."""
        self.kill()
        self._send_output(
            Kind.ERRORS, f"{type(error).__name__}: {error}\n".encode(errors="backslashreplace")
        )

    def _send_output(self, kind: Kind, payload: bytes) -> None:
        self._send(Message(kind=kind, program=self._number, payload=payload))

    def _forward(self, stream: IO[bytes] | None, kind: Kind) -> None:
        assert stream is not None
        with contextlib.suppress(OSError, ValueError), stream:
            while chunk := os.read(stream.fileno(), CHUNK_BYTES):
                self._send_output(kind, chunk)

    def _write(self) -> None:
        assert self._child is not None and self._child.stdin is not None
        with contextlib.suppress(OSError), self._child.stdin as stream:
            while chunk := self._input.get():
                stream.write(chunk)
                stream.flush()

    def _wait(self) -> None:
        assert self._child is not None
        try:
            # WNOWAIT leaves a zombie that keeps the id, so the group that is killed here is the
            # child's.
            os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        except OSError as error:
            self._fail(error)
        with self._lock:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._ended = True
            status = self._child.wait()
        with contextlib.suppress(queue.Full):
            self._input.put_nowait(b"")
        for reader in self._readers:
            reader.join(DRAIN_S)
        self._send(Message(kind=Kind.ENDED, program=self._number, status=status))
