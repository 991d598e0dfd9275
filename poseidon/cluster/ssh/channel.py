"""Programs on a host over SSH: run to the end, or connected to line by line.

Law: `shell_command` alone makes the command line, and the output that is kept
is bounded: a host cannot fill our memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import paramiko

from poseidon.cluster.ssh.quoting import shell_command
from poseidon.errors import JobError

MAX_OUTPUT_BYTES = 16 << 20
MAX_LINE_BYTES = 4 << 20
_CHUNK_BYTES = 1 << 16
_BROKEN = (paramiko.SSHException, OSError, EOFError)
"""Paramiko's exceptions for a connection that is broken or refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A program that has ended.

    Attributes:
        status: its exit status; -1 when a signal ended it.
        stdout: all of its output.
        stderr: all of its standard error.
    """

    status: int
    stdout: bytes
    stderr: bytes


def run_over(
    transport: paramiko.Transport,
    label: str,
    argv: Sequence[str],
    *,
    stdin: bytes,
    timeout_s: float,
) -> Finished:
    """Run a program to its end; see `SshConnection.run`."""
    deadline_s = time.monotonic() + timeout_s
    channel = _start(transport, label, argv, timeout_s)
    try:
        channel.settimeout(timeout_s)
        outputs = (_Collector(channel.recv, "stdout"), _Collector(channel.recv_stderr, "stderr"))
        in_time = _send_all(channel, stdin, timeout_s)
        for output in outputs:
            output.join(max(0.0, deadline_s - time.monotonic()))
        in_time = channel.status_event.wait(max(0.0, deadline_s - time.monotonic())) and in_time
        if any(output.overflowed for output in outputs):
            raise JobError(f"{label}: '{argv[0]}' wrote more than {MAX_OUTPUT_BYTES >> 20} MiB")
        if not in_time or any(output.is_alive() for output in outputs):
            raise JobError(f"{label}: '{argv[0]}' did not end within {timeout_s:g} s")
        for output in outputs:
            if output.error is not None:
                raise JobError(
                    f"{label}: cannot read the output of '{argv[0]}': {output.error}"
                ) from output.error
        status = channel.recv_exit_status()
        if status < 0 and not transport.is_active():
            raise JobError(f"{label}: the connection broke while '{argv[0]}' ran")
        return Finished(status=status, stdout=outputs[0].content, stderr=outputs[1].content)
    finally:
        _close(channel)


@contextmanager
def reply_within(channel: paramiko.Channel, timeout_s: float) -> Iterator[None]:
    """Close a channel unless the block ends in time: paramiko's requests have no timeout.

    Raises:
        TimeoutError: it was closed.
    """
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        _close(channel)

    timer = threading.Timer(timeout_s, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    except _BROKEN as error:
        if expired.is_set():
            raise TimeoutError(f"no answer within {timeout_s:g} s") from error
        raise
    finally:
        timer.cancel()


class SshLineChannel:
    """The standard streams of a program on a host: a `LineChannel`."""

    def __init__(
        self, transport: paramiko.Transport, label: str, argv: Sequence[str], *, timeout_s: float
    ) -> None:
        self._channel = _start(transport, label, argv, timeout_s)
        self._channel.settimeout(None)
        self._output = self._channel.makefile("rb", 1 << 16)
        self._errors = self._channel.makefile_stderr("rb", 1 << 16)

    def send(self, line: bytes) -> None:
        """Write one line, given without its end. May wait for the program to read, until `close`.

        Raises:
            OSError: the channel is broken or closed.
        """
        try:
            self._channel.sendall(line + b"\n")
        except (paramiko.SSHException, EOFError) as error:
            raise OSError(str(error) or "the connection broke") from error

    def receive(self) -> bytes | None:
        """Return the next line of standard output, None at the end.

        Waits until `close`. For one thread at a time.
        """
        return _next_line(self._output)

    def receive_error(self) -> bytes | None:
        """Return the next line of its standard error; see `receive`."""
        return _next_line(self._errors)

    def status(self, timeout_s: float) -> int | None:
        """Return its exit status, -1 for a signal or a broken connection; None when it has not
        ended in time.
        """
        if not self._channel.status_event.wait(timeout_s):
            return None
        return self._channel.recv_exit_status()

    def close(self) -> None:
        """Close the channel; the program reads an end of file.

        May be called twice; never raises.
        """
        _close(self._channel)


class _Collector(threading.Thread):
    """Reads one output to its end; `error` is any exception but the end of the connection."""

    def __init__(self, receive: Callable[[int], bytes], role: str) -> None:
        super().__init__(name=f"poseidon ssh {role}", daemon=True)
        self._receive = receive
        self._pieces: list[bytes] = []
        self._size_bytes = 0
        self.error: Exception | None = None
        self.start()

    @property
    def overflowed(self) -> bool:
        return self._size_bytes > MAX_OUTPUT_BYTES

    @property
    def content(self) -> bytes:
        return b"".join(self._pieces)

    def run(self) -> None:
        try:
            while not self.overflowed and (piece := self._receive(_CHUNK_BYTES)):
                self._pieces.append(piece)
                self._size_bytes += len(piece)
        except OSError:
            pass  # the exit status says whether the program or the connection has ended
        except Exception as error:  # noqa: BLE001 - `run_over` raises it
            self.error = error


def _send_all(channel: paramiko.Channel, stdin: bytes, timeout_s: float) -> bool:
    """Write all input and close it; return False when the time is up."""
    try:
        with reply_within(channel, timeout_s):
            channel.sendall(stdin)
            channel.shutdown_write()
    except TimeoutError:
        return False
    except _BROKEN:
        pass  # the program may end without reading; its status says why
    return True


def _close(channel: paramiko.Channel) -> None:
    with suppress(*_BROKEN):  # the connection may be gone by now
        channel.close()


def _start(
    transport: paramiko.Transport, label: str, argv: Sequence[str], timeout_s: float
) -> paramiko.Channel:
    command = shell_command(argv)
    try:
        channel = transport.open_session(timeout=timeout_s)
        channel.settimeout(timeout_s)
        with reply_within(channel, timeout_s):
            channel.exec_command(command)
    except _BROKEN as error:
        raise JobError(
            f"{label}: cannot start '{argv[0]}' there: {str(error) or 'the connection broke'}"
        ) from error
    return channel


def _next_line(stream: paramiko.ChannelFile) -> bytes | None:
    try:
        line = stream.readline(MAX_LINE_BYTES)
    except OSError:
        return None
    raw = line.encode() if isinstance(line, str) else bytes(line)
    return raw.rstrip(b"\r\n") if raw else None
