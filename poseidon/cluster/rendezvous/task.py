"""A task's side of a meeting: comes, runs what rank 0 asks for, and goes when the job is over.

Law: when rank 0 falls silent or the line is lost, everything that was started here is ended, and the task with it. One thread,
the caller's, uses the line.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from poseidon.cluster.rendezvous.program import TaskProgram
from poseidon.cluster.rendezvous.wire import Arrival, Kind, Message, WordError, decode, encode
from poseidon.errors import JobError
from ps_server.errors import ServerError
from ps_server.keys import Keyring
from ps_server.transport.zmq_sockets import ZmqClientTransport

LOOK_S = 0.25
ALIVE_EVERY_S = 2.0
# Beside ZeroMQ's own signs of life, which tell of its thread and not of ours.
SILENCE_S = 20.0
# Pieces of output that wait for the line; programs that write more wait, too.
MOST_WAITING = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendanceSettings:
    """How a task behaves.

    Attributes:
        arrive_timeout_s: until all tasks have come.
        runs_programs: whether it starts anything; else it only waits for the end.
        grace_s: from the end of a program's input to its own, when the task goes.
        environment: of the programs.
    """

    arrive_timeout_s: float = 300.0
    grace_s: float = 15.0
    runs_programs: bool = True
    environment: Mapping[str, str]


def attend(
    address: str,
    keys: Keyring,
    arrival: Arrival,
    settings: AttendanceSettings,
    *,
    asked_to_end: Callable[[], str | None] = lambda: None,
) -> int:
    """Take part in a meeting to its end.

    Args:
        address: `tcp://host:port` of rank 0.
        keys: this side's; see `keys_of_task`.
        arrival: who comes.
        settings: see there.
        asked_to_end: the name of the signal by which the engine has asked this task to end, once; else None.

    Returns:
        the exit status of the job.

    Raises:
        JobError: rank 0 was not there, sent us away, or was lost.
    """
    attendance = _Attendance(address, keys, arrival, settings)
    try:
        return attendance.run(asked_to_end)
    finally:
        attendance.close()


class _Attendance:
    """One task's stay."""

    def __init__(self, address: str, keys: Keyring, arrival: Arrival, settings: AttendanceSettings) -> None:
        self._address = address
        self._settings = settings
        self._line = ZmqClientTransport([address], keys)
        self._mine: list[Message] = [arrival.message()]
        self._waiting: queue.Queue[Message] = queue.Queue(MOST_WAITING)
        self._programs: dict[int, TaskProgram] = {}
        self._thread = threading.get_ident()
        self._closed = False
        self._heard_s = self._said_s = time.monotonic()
        self._welcome = False
        self._status: int | None = None

    def run(self, asked_to_end: Callable[[], str | None]) -> int:
        """Until rank 0 says that the job is over."""
        come_by_s = time.monotonic() + self._settings.arrive_timeout_s
        while self._status is None:
            signal_name = asked_to_end()
            if signal_name is not None:
                if not self._welcome:
                    raise JobError(f"the task was ended by {signal_name} before all others had come")
                self._mine.append(Message(kind=Kind.ASKED, words=(signal_name,)))
            self._send_waiting()
            self._receive()
            self._watch(time.monotonic(), come_by_s)
        return self._status

    def close(self) -> None:
        """End what still runs, and the line."""
        self._closed = True  # nobody hears the programs' last words
        for program in self._programs.values():
            program.feed(b"")
        until_s = time.monotonic() + self._settings.grace_s
        for program in self._programs.values():
            program.stop(max(0.0, until_s - time.monotonic()))
        self._line.close()

    def _receive(self) -> None:
        try:
            for _, frames in self._line.receive(LOOK_S):
                self._heard_s = time.monotonic()
                self._obey(decode(frames))
        except ServerError as error:
            raise JobError(f"rank 0 is lost: {error}") from error
        except WordError as error:
            raise JobError(f"what listens at {self._address} is no rank 0 of ours: {error}") from error

    def _obey(self, message: Message) -> None:
        program = self._programs.get(message.program)
        if message.kind is Kind.WELCOME:
            self._welcome = True
        elif message.kind is Kind.LEAVE:
            if message.words:
                raise JobError(message.words[0])
            self._status = message.status
        elif message.kind is Kind.START and self._settings.runs_programs and program is None:
            self._programs[message.program] = TaskProgram(
                message.program, message.words, self._settings.environment, self._tell
            )
        elif program is not None and message.kind is Kind.INPUT and message.payload:
            program.feed(message.payload)
        elif program is not None and message.kind is Kind.END_INPUT:
            program.feed(b"")
        elif program is not None and message.kind is Kind.KILL:
            program.kill()

    def _tell(self, message: Message) -> None:
        """Called by the programs' threads, who wait while the line is slow; and by our own, who must not."""
        if threading.get_ident() == self._thread:
            self._mine.append(message)
            return
        while not self._closed:
            with contextlib.suppress(queue.Full):
                self._waiting.put(message, timeout=LOOK_S)
                self._line.wake()
                return

    def _send_waiting(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if not self._mine:
                    self._mine.append(self._waiting.get_nowait())
                if not self._line.send(0, encode(self._mine[0])):
                    return
                ended = self._mine.pop(0)
                self._said_s = time.monotonic()
                if ended.kind is Kind.ENDED:
                    self._programs.pop(ended.program, None)

    def _watch(self, now: float, come_by_s: float) -> None:
        if not self._welcome:
            if now > come_by_s:
                raise JobError(
                    f"no welcome from rank 0 at {self._address} within {self._settings.arrive_timeout_s:g} s: does it run "
                    "there, have all tasks come, and have all the same key file?"
                )
            return
        if now - self._heard_s > SILENCE_S:
            raise JobError(f"rank 0 at {self._address} has said nothing for {SILENCE_S:g} s")
        if now - self._said_s > ALIVE_EVERY_S and not self._mine:
            self._mine.append(Message(kind=Kind.ALIVE))
