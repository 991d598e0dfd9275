"""The rendezvous server, on rank 0: the tasks that a scheduler has started join
here, and their hosts become those of a job.

    with RendezvousServer("10.0.0.5", 29500, keys, size=8) as rendezvous:
        hosts = rendezvous.gather(timeout_s=300)
        ...                                  # run programs on hosts[k], see `task_connection.py`
        rendezvous.dismiss(0)

Law: only holders of the key can connect, and nobody once all tasks have joined. One thread, the
server's own, uses the socket. However the block is left, every task that joined is dismissed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from poseidon import __version__
from poseidon.cluster.machinefile import socket_host
from poseidon.cluster.rendezvous.hosts import RendezvousHost, group_by_host, rejection_reason
from poseidon.cluster.rendezvous.task_connection import TaskConnection
from poseidon.cluster.rendezvous.wire import (
    Kind,
    Message,
    MessageError,
    TaskInfo,
    decode,
    decode_task_info,
    encode,
)
from poseidon.errors import JobError
from ps_server.errors import ServerError
from ps_server.keys import Keyring
from ps_server.transport.zmq_sockets import ZmqServerTransport

POLL_S = 0.25
HEARTBEAT_S = 2.0
SILENCE_S = 15.0
CLOSE_S = 5.0


@dataclass(slots=True, kw_only=True)
class _Member:
    """A task that has joined."""

    task: TaskInfo
    received_s: float
    connection: TaskConnection | None = None
    lost: bool = False


class RendezvousServer:
    """See the module's docstring.

    Args:
        host: the address to listen on, a number.
        port: there; 0 takes a free one.
        keys: rank 0's; see `server_keys`.
        size: the number of tasks, this process's own included.
        on_signal: called, from the server's thread, with the name of a signal by
            which its scheduler asks a task to end.

    Raises:
        JobError: the address cannot be listened on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        keys: Keyring,
        *,
        size: int,
        on_signal: Callable[[str], object] = lambda _: None,
    ) -> None:
        try:
            self._transport = ZmqServerTransport(f"tcp://{socket_host(host)}:{port}", keys)
        except ServerError as error:
            raise JobError(f"{error}; --rendezvous_port names another port") from error
        self.address = self._transport.address
        """The address that the tasks connect to."""
        self._size = size
        self._on_signal = on_signal
        self._members: dict[bytes, _Member] = {}
        self._outgoing: deque[tuple[bytes, Message]] = deque()
        self._changed = threading.Condition()
        self._failure = ""
        self._dismissal: Message | None = None
        self._last_alive_s = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="poseidon rendezvous", daemon=True)
        self._thread.start()

    def __enter__(self) -> RendezvousServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.dismiss(1, "" if error is None else "the job failed before it had started")
        self._closing = True
        self._transport.wake()
        self._thread.join(CLOSE_S)

    def gather(self, timeout_s: float) -> tuple[tuple[RendezvousHost, TaskConnection], ...]:
        """Wait until all tasks have joined.

        Args:
            timeout_s: for how long.

        Returns:
            The hosts, by the ranks of their leaders.

        Raises:
            JobError: some did not join, or those that joined cannot be one job.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or len(self._members) == self._size, timeout_s
            )
            if self._failure:
                raise JobError(self._failure)
            if len(self._members) < self._size:
                raise JobError(self._describe_missing(timeout_s))
            plans = group_by_host([member.task for member in self._members.values()])
            found = tuple((plan, self._connect(plan)) for plan in plans)
        self._transport.admit_no_more()
        self._send_all(Message(kind=Kind.WELCOME))
        return found

    def abort(self, why: str) -> None:
        """End a `gather` that waits with an error; only the first call counts.

        May be called from any thread.
        """
        with self._changed:
            self._failure = self._failure or why
            self._changed.notify_all()

    def dismiss(self, status: int, why: str = "") -> None:
        """Dismiss all tasks, those that join later too; only the first call counts.

        Args:
            status: their exit status.
            why: the reason, which tasks print that were not welcomed yet.
        """
        with self._changed:
            if self._dismissal is not None:
                return
            self._dismissal = Message(
                kind=Kind.DISMISS, status=status, arguments=(why,) if why else ()
            )
        self._send_all(self._dismissal)

    def _connect(self, plan: RendezvousHost) -> TaskConnection:
        name, member = next(
            item for item in self._members.items() if item[1].task.rank == plan.rank
        )
        member.received_s = (
            time.monotonic()
        )  # while it waited for the others it had nothing to send
        member.connection = TaskConnection(
            f"rank {plan.rank} ({plan.host})",
            plan.address,
            lambda message: self._send(name, message),
        )
        return member.connection

    def _describe_missing(self, timeout_s: float) -> str:
        joined = {member.task.rank for member in self._members.values()}
        missing = [str(rank) for rank in range(self._size) if rank not in joined]
        named = ", ".join(missing[:8]) + (
            f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        )
        others = (
            f"; {self._transport.refused} attempts with another key, or none, were refused"
            if self._transport.refused
            else ""
        )
        return f"of {self._size} tasks these did not join at {self.address} within {timeout_s:g} s: rank {named}{others}"

    def _send(self, name: bytes, message: Message) -> None:
        self._outgoing.append((name, message))
        self._transport.wake()

    def _send_all(self, message: Message) -> None:
        for name in list(self._members):
            self._outgoing.append((name, message))
        self._transport.wake()

    def _run(self) -> None:
        """Run the server's thread; on any exception, end every wait of its owner."""
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - `gather` raises it, and every connection counts as lost
            self._fail(f"the rendezvous has failed: {type(error).__name__}: {error}")
        finally:
            self._transport.close()

    def _fail(self, why: str) -> None:
        print(f"poseidon: {why}", file=sys.stderr)
        self.abort(why)
        for member in list(self._members.values()):
            member.lost = True
            if member.connection is not None:
                member.connection.lose()

    def _serve(self) -> None:
        while not (self._closing and not self._outgoing):
            for name, frames in self._transport.receive(POLL_S):
                self._take(name, frames)
            self._send_waiting()
            self._watch(time.monotonic())

    def _send_waiting(self) -> None:
        """Send in order for each task; one that cannot take more holds up no other."""
        blocked: set[bytes] = set()
        kept: list[tuple[bytes, Message]] = []
        for _ in range(len(self._outgoing)):
            name, message = self._outgoing.popleft()
            member = self._members.get(name)
            lost = member is not None and member.lost
            if (
                lost and message.kind is not Kind.DISMISS
            ):  # a task that is only slow is still dismissed
                continue
            if name in blocked or not self._transport.send(name, encode(message)):
                blocked.add(name)
                if not lost:
                    kept.append((name, message))
        self._outgoing.extendleft(reversed(kept))

    def _take(self, name: bytes, frames: Sequence[bytes | bytearray | memoryview]) -> None:
        try:
            message = decode(frames)
            member = self._members.get(name)
            if member is None:
                self._join(name, decode_task_info(message))
                return
        except MessageError:
            return  # it has our key and another protocol; rank 0 reports it as missing
        member.received_s = time.monotonic()
        if message.kind is Kind.SIGNALED:
            self._on_signal(message.arguments[0] if message.arguments else "a signal")
        elif (
            message.kind in (Kind.OUTPUT, Kind.ERRORS, Kind.ENDED) and member.connection is not None
        ):
            member.connection.take(message)

    def _join(self, name: bytes, task: TaskInfo) -> None:
        others = [member.task for member in self._members.values()]
        why_not = rejection_reason(task, others, size=self._size, version=__version__)
        with self._changed:
            if self._dismissal is not None:
                self._send(name, self._dismissal)
            elif why_not is None:
                self._members[name] = _Member(task=task, received_s=time.monotonic())
            else:
                self._send(name, Message(kind=Kind.DISMISS, status=1, arguments=(why_not,)))
                self._failure = self._failure or why_not
            self._changed.notify_all()

    def _watch(self, now: float) -> None:
        for member in self._members.values():
            if (
                not member.lost
                and member.connection is not None
                and now - member.received_s > SILENCE_S
            ):
                member.lost = True
                member.connection.lose()
        if now - self._last_alive_s > HEARTBEAT_S:
            self._last_alive_s = now
            for name, member in list(self._members.items()):
                if not member.lost:
                    self._outgoing.append((name, Message(kind=Kind.HEARTBEAT)))
