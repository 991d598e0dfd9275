"""Rank 0's side of a meeting: the tasks that an engine has started come here, and their hosts become a job's machines.

    with Meeting("10.0.0.5", 29500, keys, size=8) as meeting:
        hosts = meeting.gather(timeout_s=300)
        ...                                  # programs on hosts[k], see `met_host.py`
        meeting.dismiss(0)

Law: nobody without the key is heard, and once all have come nobody else can connect. One thread of the meeting's own uses
the socket. However the block is left, every task that came is sent away.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from poseidon import __version__
from poseidon.cluster.machinefile import socket_host
from poseidon.cluster.rendezvous.hosts import HostPlan, hosts_of, objection_to
from poseidon.cluster.rendezvous.remote_host import MetHost
from poseidon.cluster.rendezvous.wire import Arrival, Kind, Message, WordError, arrival_in, decode, encode
from poseidon.errors import JobError
from ps_server.errors import ServerError
from ps_server.keys import Keyring
from ps_server.transport.zmq_sockets import ZmqServerTransport

LOOK_S = 0.25
ALIVE_EVERY_S = 2.0
SILENCE_S = 15.0
LEAVE_S = 5.0


@dataclass(slots=True, kw_only=True)
class _Peer:
    """A task that has come."""

    arrival: Arrival
    heard_s: float
    host: MetHost | None = None
    lost: bool = False


class Meeting:
    """See the module's head.

    Args:
        host: the address to listen on, a number.
        port: there; 0 takes a free one.
        keys: rank 0's; see `keys_of_host`.
        size: how many tasks are to come, this process's own included.
        on_asked: called, from the meeting's thread, when a task was asked to end by its engine.

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
        on_asked: Callable[[str], object] = lambda _: None,
    ) -> None:
        try:
            self._door = ZmqServerTransport(f"tcp://{socket_host(host)}:{port}", keys)
        except ServerError as error:
            raise JobError(f"{error}; --rendezvous_port names another port") from error
        self.address = self._door.address
        """Where the tasks connect to."""
        self._size = size
        self._on_asked = on_asked
        self._peers: dict[bytes, _Peer] = {}
        self._outgoing: deque[tuple[bytes, Message]] = deque()
        self._changed = threading.Condition()
        self._failure = ""
        self._last_alive_s = 0.0
        self._over = False
        self._thread = threading.Thread(target=self._serve, name="poseidon meeting", daemon=True)
        self._thread.start()

    def __enter__(self) -> Meeting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.dismiss(1, "" if error is None else "the job failed before it had started")
        self._over = True
        self._door.wake()
        self._thread.join(LEAVE_S)

    def gather(self, timeout_s: float) -> tuple[tuple[HostPlan, MetHost], ...]:
        """Wait for all tasks.

        Args:
            timeout_s: for how long.

        Returns:
            the hosts, by the rank of the task that leads each.

        Raises:
            JobError: some did not come, or those that came cannot be one job.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure or len(self._peers) == self._size, timeout_s)
            if self._failure:
                raise JobError(self._failure)
            if len(self._peers) < self._size:
                raise JobError(self._who_is_missing(timeout_s))
            plans = hosts_of([peer.arrival for peer in self._peers.values()])
            found = tuple((plan, self._host_for(plan)) for plan in plans)
        self._door.admit_no_more()
        self._tell_all(Message(kind=Kind.WELCOME))
        return found

    def dismiss(self, status: int, why: str = "") -> None:
        """Send all tasks away; only the first call counts.

        Args:
            status: what they exit with.
            why: said by those to whom it is told before they were welcome.
        """
        with self._changed:
            if self._failure == "dismissed":
                return
            self._failure = "dismissed"
        self._tell_all(Message(kind=Kind.LEAVE, status=status, words=(why,) if why else ()))

    def _host_for(self, plan: HostPlan) -> MetHost:
        name, peer = next(item for item in self._peers.items() if item[1].arrival.rank == plan.rank)
        peer.host = MetHost(
            f"rank {plan.rank} ({plan.host})", plan.address, lambda message: self._tell(name, message)
        )
        return peer.host

    def _who_is_missing(self, timeout_s: float) -> str:
        come = {peer.arrival.rank for peer in self._peers.values()}
        missing = [str(rank) for rank in range(self._size) if rank not in come]
        named = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        others = (
            f"; {self._door.refused} attempts with another key, or none, were refused"
            if self._door.refused
            else ""
        )
        return f"of {self._size} tasks these did not come to {self.address} within {timeout_s:g} s: rank {named}{others}"

    def _tell(self, name: bytes, message: Message) -> None:
        self._outgoing.append((name, message))
        self._door.wake()

    def _tell_all(self, message: Message) -> None:
        for name in list(self._peers):
            self._outgoing.append((name, message))
        self._door.wake()

    def _serve(self) -> None:
        """The meeting's thread."""
        while not (self._over and not self._outgoing):
            for name, frames in self._door.receive(LOOK_S):
                self._hear(name, frames)
            self._send_waiting()
            self._watch(time.monotonic())
        self._door.close()

    def _send_waiting(self) -> None:
        """In order for each; who cannot take more waits, and nobody else does."""
        blocked: set[bytes] = set()
        kept: list[tuple[bytes, Message]] = []
        for _ in range(len(self._outgoing)):
            name, message = self._outgoing.popleft()
            peer = self._peers.get(name)
            lost = peer is not None and peer.lost
            if lost and message.kind is not Kind.LEAVE:  # who is only slow still hears the end
                continue
            if name in blocked or not self._door.send(name, encode(message)):
                blocked.add(name)
                if not lost:
                    kept.append((name, message))
        self._outgoing.extendleft(reversed(kept))

    def _hear(self, name: bytes, frames: Sequence[bytes | bytearray | memoryview]) -> None:
        try:
            message = decode(frames)
            peer = self._peers.get(name)
            if peer is None:
                self._welcome(name, arrival_in(message))
                return
        except WordError:
            return  # it has our key and speaks another language; its version is told with its arrival
        peer.heard_s = time.monotonic()
        if message.kind is Kind.ASKED:
            self._on_asked(message.words[0] if message.words else "a signal")
        elif message.kind in (Kind.OUTPUT, Kind.ERRORS, Kind.ENDED) and peer.host is not None:
            peer.host.take(message)

    def _welcome(self, name: bytes, arrival: Arrival) -> None:
        others = [peer.arrival for peer in self._peers.values()]
        why_not = objection_to(arrival, others, size=self._size, version=__version__)
        with self._changed:
            if why_not is None:
                self._peers[name] = _Peer(arrival=arrival, heard_s=time.monotonic())
            else:
                self._tell(name, Message(kind=Kind.LEAVE, status=1, words=(why_not,)))
                self._failure = self._failure or why_not
            self._changed.notify_all()

    def _watch(self, now: float) -> None:
        for peer in self._peers.values():
            if not peer.lost and peer.host is not None and now - peer.heard_s > SILENCE_S:
                peer.lost = True
                peer.host.lose()
        if now - self._last_alive_s > ALIVE_EVERY_S:
            self._last_alive_s = now
            for name, peer in list(self._peers.items()):
                if not peer.lost:
                    self._outgoing.append((name, Message(kind=Kind.ALIVE)))
