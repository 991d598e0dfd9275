"""A task of the rendezvous: joins, runs the programs that rank 0 requests, and ends with the job.

Law: when rank 0 falls silent or the connection is lost, everything that was started here is ended,
and the task with it. One thread, the caller's, uses the socket.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from poseidon.cluster.rendezvous.program import TaskProgram
from poseidon.cluster.rendezvous.wire import Kind, Message, MessageError, TaskInfo, decode, encode
from poseidon.cluster.supervision.signals import exit_code_of
from poseidon.errors import JobError
from ps_server.errors import ServerError
from ps_server.keys import Keyring
from ps_server.transport.zmq_sockets import ZmqClientTransport

POLL_S = 0.25
HEARTBEAT_S = 2.0
# Besides ZeroMQ's own heartbeats, which its thread sends, not ours.
SILENCE_S = 20.0
# Chunks of output that wait to be sent; programs that write more wait, too.
MAX_QUEUED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """Settings of a task.

    Attributes:
        join_timeout_s: until all tasks have joined.
        runs_programs: whether it runs programs for rank 0; else it only waits for the end.
        grace_s: from the end of a program's input to its kill, when the task ends.
        environment: of the programs.
    """

    join_timeout_s: float = 300.0
    grace_s: float = 15.0
    runs_programs: bool = True
    environment: Mapping[str, str]


def run_task(
    address: str,
    keys: Keyring,
    task: TaskInfo,
    settings: TaskSettings,
    *,
    pending_signal: Callable[[], str | None] = lambda: None,
) -> int:
    """Join the rendezvous and take part to its end.

    Args:
        address: `tcp://host:port` of rank 0.
        keys: this side's; see `task_keys`.
        task: this one.
        settings: its settings.
        pending_signal: returns the name of a signal by which the scheduler has asked this task to
            end, once; else None.

    Returns:
        The exit status of the job.

    Raises:
        JobError: rank 0 was not reached, refused us, or was lost.
    """
    member = _Task(address, keys, task, settings)
    try:
        return member.run(pending_signal)
    finally:
        member.close()


class _Task:
    """One task's stay."""

    def __init__(self, address: str, keys: Keyring, task: TaskInfo, settings: TaskSettings) -> None:
        self._address = address
        self._settings = settings
        self._transport = ZmqClientTransport([address], keys)
        self._outgoing: list[Message] = [task.message()]
        self._queued: queue.Queue[Message] = queue.Queue(MAX_QUEUED)
        self._programs: dict[int, TaskProgram] = {}
        self._thread = threading.get_ident()
        self._closed = False
        self._received_s = self._sent_s = time.monotonic()
        self._welcomed = False
        self._status: int | None = None

    def run(self, pending_signal: Callable[[], str | None]) -> int:
        """Run until rank 0 dismisses this task; return the job's exit status."""
        join_by_s = time.monotonic() + self._settings.join_timeout_s
        while self._status is None:
            signal_name = pending_signal()
            if signal_name is not None:
                if not self._welcomed:
                    error = JobError(
                        f"the task was ended by {signal_name} before all others had joined"
                    )
                    error.exit_code = exit_code_of(signal.Signals[signal_name])
                    raise error
                self._outgoing.append(Message(kind=Kind.SIGNALED, arguments=(signal_name,)))
            self._send_waiting()
            self._receive()
            self._watch(time.monotonic(), join_by_s)
        return self._status

    def close(self) -> None:
        """End what still runs, and close the connection."""
        self._closed = True  # the programs' last output is dropped
        for program in self._programs.values():
            program.feed(b"")
        until_s = time.monotonic() + self._settings.grace_s
        for program in self._programs.values():
            program.stop(max(0.0, until_s - time.monotonic()))
        self._transport.close()

    def _receive(self) -> None:
        try:
            for _, frames in self._transport.receive(POLL_S):
                self._received_s = time.monotonic()
                self._take(decode(frames))
        except ServerError as error:
            raise JobError(f"rank 0 is lost: {error}") from error
        except MessageError as error:
            raise JobError(
                f"what listens at {self._address} is not rank 0 of this job: {error}"
            ) from error

    def _take(self, message: Message) -> None:
        program = self._programs.get(message.program)
        if message.kind is Kind.WELCOME:
            self._welcomed = True
        elif message.kind is Kind.DISMISS:
            if message.arguments:
                raise JobError(message.arguments[0])
            self._status = message.status
        elif message.kind is Kind.START and self._settings.runs_programs and program is None:
            self._programs[message.program] = TaskProgram(
                message.program, message.arguments, self._settings.environment, self._queue
            )
        elif program is not None and message.kind is Kind.INPUT and message.payload:
            program.feed(message.payload)
        elif program is not None and message.kind is Kind.END_INPUT:
            program.feed(b"")
        elif program is not None and message.kind is Kind.KILL:
            program.kill()

    def _queue(self, message: Message) -> None:
        """Queue a message.

        The programs' threads wait while the connection is slow; our own thread must not.
        """
        if threading.get_ident() == self._thread:
            self._outgoing.append(message)
            return
        while not self._closed:
            with contextlib.suppress(queue.Full):
                self._queued.put(message, timeout=POLL_S)
                self._transport.wake()
                return

    def _send_waiting(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if not self._outgoing:
                    self._outgoing.append(self._queued.get_nowait())
                if not self._transport.send(0, encode(self._outgoing[0])):
                    return
                ended = self._outgoing.pop(0)
                self._sent_s = time.monotonic()
                if ended.kind is Kind.ENDED:
                    self._programs.pop(ended.program, None)

    def _watch(self, now: float, join_by_s: float) -> None:
        if not self._welcomed:
            if now > join_by_s:
                raise JobError(
                    f"rank 0 at {self._address} did not answer within "
                    f"{self._settings.join_timeout_s:g} s: does it run "
                    "there, have all tasks joined, and have all the same key file?"
                )
            return
        if now - self._received_s > SILENCE_S:
            raise JobError(f"rank 0 at {self._address} has sent nothing for {SILENCE_S:g} s")
        if now - self._sent_s > HEARTBEAT_S and not self._outgoing:
            self._outgoing.append(Message(kind=Kind.HEARTBEAT))
