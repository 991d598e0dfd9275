"""Messages between any two workers of a job, for the collectives of process groups.

    ["Data", group, number, part, call, place] payload
    ["Shared", ...], ["Lent", ...]         as "Data", with a place in memory (`host_memory.py`)
    ["Ask", ...], ["Answer", ...]          of the store (`store.py`)
    ["Failed"] sentence
    ["Ended"] empty                        its sender begins no more calls

A message is identified by its sender, its group, the number of the collective within the group, and
its part of the collective. It waits at the receiver until it is asked for. `call` describes the
collective and `place` has the line of the script that makes it, both for errors.

Law: once a collective has failed on one worker, workers no longer agree on what comes next. That
worker tells all others, and each call from then on raises the first error at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import NamedTuple, TypeVar

from poseidon.errors import UsageError, printable
from poseidon.exchange.job_control import SAME_CALLS
from poseidon.exchange.worker_links import LOOK_S, read_header, unpacked
from poseidon.torch.process_group.host_memory import HostMemory
from poseidon.torch.process_group.late_links import Gather, LateLinks
from poseidon.torch.process_group.lent_blocks import Lent
from poseidon.torch.process_group.store import JobStore
from ps_server import RemoteProtocolError
from ps_server.network import Network
from ps_server.transport.base import Buffer, Frames

MessageId = tuple[int, str, int, int]
"""The sender's rank, the group, the number of the collective, and the part of it."""


class Message(NamedTuple):
    """What waits for a call.

    Attributes:
        call: describes the sender's collective.
        place: the line of its script.
    """

    call: str
    place: str
    payload: Buffer | Lent


class CollectiveCall(NamedTuple):
    """A collective as this worker makes it; for messages and errors.

    Attributes:
        text: equal on all workers.
        called: stands for `text` in errors of this worker, if it is not empty.
    """

    group: str
    number: int
    text: str
    place: str = ""
    timeout_s: float | None = None
    called: str = ""

    def head(self, part: int) -> list[object]:
        """Return what the header of a message has of it."""
        return [self.group, self.number, part, self.text, self.place]

    def __str__(self) -> str:
        called = self.called or self.text
        return f"{called} ({self.place})" if self.place else called


T = TypeVar("T")
LONGEST_PLACE = 200
"""Characters of a place: a header has a limit."""


class DifferentCalls(UsageError):
    """Workers make different calls. The job has failed, whatever the script does with the error."""

    exit_code = 1


class Mesh:
    """The messages of one worker to and from all others.

    Args:
        network, gather: see `LateLinks`.
        on_failure: called once with the error of a collective that fails here first.
        place: returns the line of the script that makes a call, such as `train.py, line 7`.
        neighbours: the ranks of the workers of this host.

    Attributes:
        memory: in which large payloads pass between the workers of this host.
        at_close: what is undone as this worker leaves.
    """

    def __init__(
        self,
        network: Network,
        gather: Gather,
        *,
        on_failure: Callable[[Exception], None] = lambda _: None,
        place: Callable[[], str] = lambda: "",
        neighbours: Collection[int] = (),
    ) -> None:
        self._links = links = LateLinks(network, gather, self._receive)
        self.memory = HostMemory(links, neighbours)
        self.store = JobStore(links, self.check)
        self._on_failure = on_failure
        self.place: Callable[[], str] = lambda: place()[:LONGEST_PLACE]
        self.at_close = ExitStack()
        self._failure: Exception | None = None
        self._inbox: dict[MessageId, Message] = {}
        self._sending: list[threading.Thread] = []
        """That send something once it is there."""
        self._ended: set[int] = set()
        """The workers that begin no more calls."""

    @property
    def rank(self) -> int:
        """The rank of this worker."""
        return self._links.network.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self._links.network.size

    @property
    def is_connected(self) -> bool:
        """Whether a message was sent or asked for."""
        return self._links.found is not None

    def send(
        self,
        receivers: Sequence[int],
        call: CollectiveCall,
        part: int,
        payload: Buffer,
        *,
        lasting: bool = False,
    ) -> None:
        """Send a message; returns at once.

        Args:
            call: the receivers compare its text with their own.
            lasting: the payload is not written to until it is certain that all receivers have it.
        """
        self._links.connected()
        self.check()
        places = self.memory.put(payload, receivers)
        if places:
            messages = (([rank], place) for rank, place in places.items())
            self._links.post(["Shared", *call.head(part)], *messages)
        others = [rank for rank in receivers if rank not in places]
        if others:
            own = payload if lasting else bytes(payload)
            self._links.post(["Data", *call.head(part)], (others, own))

    def receive(self, sender: int, call: CollectiveCall, part: int) -> Message:
        """Wait for a message. Arguments as for `send`.

        Raises:
            PeerLost: the sender has left, or is lost.
            StalenessTimeout: it did not come in time.
        """
        wanted = (sender, call.group, call.number, part)

        def arrived(inbox: dict[MessageId, Message]) -> Message | None:
            return inbox.pop(wanted) if wanted in inbox else None

        return self.wait_for(arrived, call, (sender,), f"worker {sender} did not take part")

    def wait_for(
        self,
        question: Callable[[dict[MessageId, Message]], T | None],
        call: CollectiveCall,
        senders: Collection[int],
        otherwise: str,
    ) -> T:
        """Wait until a question about the messages that are here has an answer; return that.

        Args:
            call: which needs them.
            senders: whose messages it may need.
            otherwise: the end of the sentence when they do not come in time.
        """
        links = self._links.connected()

        def ask() -> T | None:
            found = question(self._inbox)
            if found is None:
                self.check()
                if (links.left | self._ended).issuperset(senders):
                    raise DifferentCalls(
                        f"worker {self.rank} calls {call}, but worker {min(senders)} has left; "
                        f"{SAME_CALLS}"
                    )
            return found

        return self._links.monitor.wait_for(ask, f"{call}: {otherwise}", timeout_s=call.timeout_s)

    def payload_of(self, message: Message, sender: int, call: CollectiveCall) -> Buffer | Lent:
        """Return the payload of a message of the same call.

        Raises:
            DifferentCalls: it is of a different one.
        """
        if message.call != call.text:
            theirs = CollectiveCall("", 0, message.call, message.place)
            raise DifferentCalls(
                f"worker {self.rank} calls {call}, but worker {sender} {theirs}; {SAME_CALLS}"
            )
        return message.payload

    def check(self) -> None:
        """Raise the error of the first collective that has failed on any worker, if one has."""
        if self._failure is not None:
            raise self._failure

    def fail(self, error: Exception) -> None:
        """Let every call, now and later, on all workers, raise the error of a collective.

        Does nothing if one has failed before, or the connections have.
        """
        monitor, found = self._links.monitor, self._links.found
        with monitor:
            if self._failure is not None or monitor.closed or monitor.failure is not None:
                return
            self._failure = error
            if found is not None and found.others:
                self._links.post(["Failed"], (found.others, str(error).encode()))
        monitor.notify()
        self._on_failure(error)

    def sends(self, thread: threading.Thread) -> None:
        """Start a thread that sends something, and waits for no other worker."""
        self._sending = [one for one in self._sending if one.is_alive()]
        self._sending.append(thread)
        thread.start()

    def end(self) -> None:
        """Tell the others that this worker begins no more calls: those that wait for one have an
        error. It still answers for the store. Safe to call twice.
        """
        for thread in self._sending:
            thread.join()
        links = self._links.found
        if links is not None and self.rank not in self._ended:
            self._ended.add(self.rank)
            self._links.post(["Ended"], (links.others, b""))

    def flush(self) -> None:
        """Wait until all that was sent has left this host, so that `close` cuts nobody off. Rank 0
        waits for all others to leave if they have used the store, which ends with it.

        Raises:
            PeerLost: a worker that has not taken all is lost.
        """
        links, monitor = self._links.found, self._links.monitor
        if links is None:
            return
        self.end()
        if self.store.has_answered:  # others may still need what the store has
            monitor.wait_for(
                lambda: True if links.left.issuperset(links.others) else self.check(),
                "other workers have not left the store",
                limited=False,
            )
        links.flush()
        while not self.memory.is_done(links.left):
            with monitor:
                monitor.check()
            time.sleep(LOOK_S)

    def close(self) -> None:
        """Leave. Safe to call twice."""
        self.at_close.close()
        self._links.close()
        self.memory.close()

    def _receive(self, sender: int, frames: Frames) -> None:
        match read_header(frames[0]), len(frames):
            case [
                _,
                "Data" | "Shared" | "Lent" as kind,
                str(group),
                int(number),
                int(part),
                str(call),
                str(place),
            ], 2:
                key = sender, group, number, part
                if key in self._inbox:
                    raise RemoteProtocolError(f"worker {sender} has sent a message twice")
                payload: Buffer | Lent = frames[1]
                if kind != "Data":
                    payload = self.memory.payload(str(kind), sender, frames[1])
                self._inbox[key] = Message(call, place, payload)
            case [_, "Ask", int(number)], 2 if self.rank == 0:
                self.store.answer(sender, number, frames[1])
            case [_, "Answer", int(number)], 2 if sender == 0:
                self.store.note(number, unpacked(frames[1]))
            case [_, "Ended"], 2:
                self._ended.add(sender)
            case [_, "Failed"], 2:
                sentence = bytes(frames[1]).decode(errors="backslashreplace")
                self._failure = self._failure or DifferentCalls(printable(sentence))
            case [_, *header], 2:
                self.memory.hear(sender, header, frames[1])
            case _:
                raise RemoteProtocolError("a peer sent something that is not data")
