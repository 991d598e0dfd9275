"""Messages between any two workers of a job, for the collectives of process groups.

    [VERSION, "Data", group, number, part, call, place] payload
    [VERSION, "Shared", ...]               as "Data": the place of the payload in memory of the host
    [VERSION, "Lent", ...]                 as "Data": its place in memory of the sender's GPU
    [VERSION, "Taken", number] empty       what was lent in this block is copied
    [VERSION, "Offer"] handle              of a pattern in memory of the sender's GPU
    [VERSION, "Reads"] problem             the pattern could be read, if empty
    [VERSION, "Failed"] sentence
    [VERSION, "Ask", number] request       of the store, to rank 0
    [VERSION, "Answer", number] answer
    [VERSION, "Ended"] empty               its sender begins no more calls

A message is identified by its sender, its group, the number of the collective within the group, and
its part of the collective. It waits at the receiver until it is asked for. `call` describes the
collective and `place` has the line of the script that makes it, both for errors.

Law: once a collective has failed on one worker, workers no longer agree on what comes next. That
worker tells all others, and each call from then on raises the first error at once.

Workers connect at the first message of any of them. They learn each other's public keys and
addresses through `gather`, which is the launcher's channel in a job: where its traffic is encrypted
this one is, with a new key pair for each worker.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgpack
from torch import Tensor

from poseidon.errors import JobError, UsageError, printable
from poseidon.exchange.job_control import SAME_CALLS
from poseidon.exchange.worker_links import LOOK_S, VERSION, WorkerLinks, read_header
from poseidon.torch.process_group.lent_blocks import Lent, LentBlocks
from poseidon.torch.process_group.shared_blocks import LEAST_BYTES, Place, SharedBlocks
from poseidon.torch.process_group.store import Request, SharedStore, StoreTable
from ps_server import RemoteProtocolError
from ps_server.keys import KeyPair, Keyring
from ps_server.network import Network
from ps_server.transport.base import Buffer, Frames

LOGGER = logging.getLogger(__name__)
Gather = Callable[[str], Sequence[str]]
"""Returns the payloads of all workers by rank; all workers call it together."""
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
    """A collective as this worker makes it; for messages and errors."""

    group: str
    number: int
    text: str
    place: str = ""
    timeout_s: float | None = None

    def __str__(self) -> str:
        return f"{self.text} ({self.place})" if self.place else self.text


T = TypeVar("T")
LONGEST_PLACE = 200
"""Characters of a place: a header has a limit."""


class DifferentCalls(UsageError):
    """Workers make different calls. The job has failed, whatever the script does with the error."""

    exit_code = 1


class Mesh:
    """The messages of one worker to and from all others.

    Args:
        network: the place of this worker among all workers of the job. Its keys are not used, but
            if any worker has keys, the messages of all are encrypted.
        gather: exchanges public keys and addresses.
        on_failure: called once with the error of a collective that fails here first.
        place: returns the line of the script that makes a call, such as `train.py, line 7`.
        neighbours: the ranks of the workers of this host; large payloads for them pass in memory.
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
        self._network = network
        self._gather = gather
        self.neighbours = frozenset(neighbours) | {network.rank}
        """The ranks of the workers of this host."""
        self._blocks = SharedBlocks()
        self._lent = LentBlocks()
        self._on_failure = on_failure
        self.place: Callable[[], str] = lambda: place()[:LONGEST_PLACE]
        self.at_close = ExitStack()
        """What is undone as this worker leaves."""
        self._failure: Exception | None = None
        self._links: WorkerLinks | None = None
        self._connecting = threading.Lock()
        self._inbox: dict[MessageId, Message] = {}
        self._table = StoreTable()
        self._answers: dict[int, object] = {}
        self._has_answered = False
        self._sending: list[threading.Thread] = []
        """That send something once it is there."""
        self._ended: set[int] = set()
        """The workers that begin no more calls."""
        self._asked = itertools.count()
        self._stores = itertools.count()
        self._monitor = network.new_monitor(closed="the process group is destroyed", hangs="")

    @property
    def rank(self) -> int:
        """The rank of this worker."""
        return self._network.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self._network.size

    @property
    def is_connected(self) -> bool:
        """Whether a message was sent or asked for."""
        return self._links is not None

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
            part: of the collective.
            lasting: the payload is not written to until it is certain that all receivers have it.
        """
        links = self._connected()
        self.check()
        near: Sequence[int] = ()
        if memoryview(payload).nbytes >= LEAST_BYTES:
            near = [rank for rank in receivers if rank in self.neighbours]
        place = self._blocks.put(payload, len(near)) if near else None
        rest = [call.group, call.number, part, call.text, call.place]
        messages: list[tuple[Sequence[int], list[Buffer]]] = []
        if place is not None:
            header = msgpack.packb([VERSION, "Shared", *rest])
            messages = [
                ([rank], [header, msgpack.packb([*place, number])])
                for number, rank in enumerate(near)
            ]
            receivers = [rank for rank in receivers if rank not in near]
        if receivers:
            header = msgpack.packb([VERSION, "Data", *rest])
            messages.append((receivers, [header, payload if lasting else bytes(payload)]))
        with self._monitor:
            for ranks, frames in messages:
                links.send(ranks, 0, frames)
        links.wake()

    def lends_to(self, ranks: Collection[int]) -> bool:
        """Return whether large tensors of a GPU may pass between this worker and one of these
        others within the GPUs of this host. No other worker has to know.
        """
        return not self._lent.refused and bool(self._near(ranks))

    def lend(
        self, receivers: Sequence[int], call: CollectiveCall, part: int, tensor: Tensor
    ) -> list[int]:
        """Send a tensor of this worker's GPU to those that can read it there, and wait until it is
        there; return the others. Arguments as for `send`.
        """
        left = list(receivers)
        if tensor.nbytes < LEAST_BYTES or not self.lends_to(receivers):
            return left
        self.answer_offers(tensor)
        for rank in self._near(receivers):
            try:
                handle = self._lent.offer(rank, tensor)
            except RuntimeError as error:  # torch's own errors are such
                self._note_reader(rank, str(error).partition("\n")[0])
                return left
            if handle:
                self._post([rank], ["Offer"], handle)
        readers = self._lent.readers_of(receivers)
        places = self._lent.put(tensor, readers) if readers else []
        head = ["Lent", call.group, call.number, part, call.text, call.place]
        for reader, place in zip(readers, places, strict=False):
            self._post([reader], head, msgpack.packb(place))
            left.remove(reader)
        return left

    def answer_offers(self, like: Tensor) -> None:
        """Answer the workers that would lend memory of their GPUs.

        Args:
            like: a tensor of this worker's GPU.
        """
        for owner, problem in self._lent.answers(like):
            self._post([owner], ["Reads"], problem.encode())

    def take(self, sender: int, lent: Lent, like: Tensor) -> Tensor:
        """Return a copy of what a worker has lent, on the device of `like`."""
        found = self._lent.take(sender, lent, like)
        self._post([sender], ["Taken", lent.number], b"")
        return found

    def _near(self, ranks: Collection[int]) -> list[int]:
        return [rank for rank in ranks if rank in self.neighbours and rank != self.rank]

    def _post(self, ranks: Sequence[int], header: Sequence[object], frame: Buffer) -> None:
        links = self._connected()
        with self._monitor:
            links.send(ranks, 0, [msgpack.packb([VERSION, *header]), frame])
        links.wake()

    def receive(self, sender: int, call: CollectiveCall, part: int) -> Buffer | Lent:
        """Wait for a message, and return its payload. Arguments as for `send`.

        Raises:
            PeerLost: the sender has left, or is lost.
            StalenessTimeout: it did not come in time.
            DifferentCalls: the sender makes a different call.
        """
        wanted = (sender, call.group, call.number, part)

        def arrived(inbox: dict[MessageId, Message]) -> Message | None:
            return inbox.pop(wanted) if wanted in inbox else None

        message = self.wait_for(arrived, call, (sender,), f"worker {sender} did not take part")
        return self.checked(message, sender, call)

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
        links = self._connected()

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

        return self._monitor.wait_for(ask, f"{call}: {otherwise}", timeout_s=call.timeout_s)

    def checked(self, message: Message, sender: int, call: CollectiveCall) -> Buffer | Lent:
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
        with self._monitor:
            left = self._monitor.closed or self._monitor.failure is not None
            if self._failure is not None or left:
                return
            self._failure = error
            if self._links is not None and self._links.others:
                header = msgpack.packb([VERSION, "Failed"])
                self._links.send(self._links.others, 0, [header, str(error).encode()])
                self._links.wake()
        self._monitor.notify()
        self._on_failure(error)

    def new_store(self) -> SharedStore:
        """Return a store that all workers share; the n-th ones of all workers are one."""
        return SharedStore(self._ask_store, f"{next(self._stores)}/")

    def _ask_store(self, request: Request, timeout_s: float) -> Any:
        self.check()
        number = next(self._asked)
        links = self._connected() if self.size > 1 else None
        with self._monitor:
            if self.rank == 0:
                self._table.ask(request, partial(self._answers.__setitem__, number))
            elif links is not None:
                header = msgpack.packb([VERSION, "Ask", number])
                links.send((0,), 0, [header, msgpack.packb(request)])
        if self.rank == 0:
            self._monitor.notify()  # a thread of this worker may wait for what was set
        if links is not None:
            links.wake()

        def answered() -> tuple[object] | None:
            if number in self._answers:
                return (self._answers.pop(number),)
            self.check()
            if links is not None and self.rank and 0 in links.left:
                raise JobError(
                    f"worker {self.rank} uses the store of the process group, but worker 0, which "
                    "holds it, has ended; let worker 0 wait for the others"
                )
            return None

        what = f"the store of the process group did not answer {request[0]}()"
        return self._monitor.wait_for(answered, what, timeout_s=timeout_s)[0]

    def _answer_store(self, sender: int, number: int, frame: Buffer) -> None:
        links = self._connected()

        def reply(answer: object) -> None:
            if not self._monitor.closed and self._monitor.failure is None:
                header = msgpack.packb([VERSION, "Answer", number])
                links.send((sender,), 0, [header, msgpack.packb(answer)])

        self._has_answered = True
        try:
            self._table.ask(tuple(msgpack.unpackb(frame)), reply)
        except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
            raise RemoteProtocolError(
                f"worker {sender} sent the store an invalid request"
            ) from error

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
        links = self._links
        if links is None or self.rank in self._ended:
            return
        self._ended.add(self.rank)
        with self._monitor:
            links.send(links.others, 0, [msgpack.packb([VERSION, "Ended"]), b""])
        links.wake()

    def flush(self) -> None:
        """Wait until all that was sent has left this host, so that `close` cuts nobody off. Rank 0
        waits for all others to leave if they have used the store, which ends with it.

        Raises:
            PeerLost: a worker that has not taken all is lost.
        """
        links = self._links
        if links is None:
            return
        self.end()
        if self._has_answered:  # others may still need what the store has
            self._monitor.wait_for(
                lambda: True if links.left.issuperset(links.others) else self.check(),
                "other workers have not left the store",
                limited=False,
            )
        links.flush()
        while not (
            (self._blocks.all_open and self._lent.all_read(links.left))
            or links.left.issuperset(self.neighbours - {self.rank})
        ):
            with self._monitor:
                self._monitor.check()
            time.sleep(LOOK_S)

    def close(self) -> None:
        """Leave. Safe to call twice."""
        self.at_close.close()
        if self._links is not None:
            self._links.close()
        self._blocks.close()
        self._lent.close()

    def _connected(self) -> WorkerLinks:
        with self._connecting:  # each receive has a thread
            if self._links is None:
                self._links = self._connect()
            return self._links

    def _connect(self) -> WorkerLinks:
        own = KeyPair.new()
        facts = {"public": own.public, "encrypted": self._network.keys is not None}
        offers = [json.loads(text) for text in self._gather(json.dumps(facts))]
        keys = None
        if any(offer["encrypted"] for offer in offers):
            keys = Keyring(own=own, admit=tuple(offer["public"] for offer in offers))
        links = WorkerLinks(
            replace(self._network, keys=keys),
            f"mesh-{self.rank}",
            monitor=self._monitor,
            receive=self._receive,
        )
        links.connect(self._gather(links.address))
        return links

    def _receive(self, sender: int, frames: Frames) -> None:
        match read_header(frames[0]), len(frames):
            case [_, "Data", str(group), int(number), int(part), str(call), str(place)], 2:
                if (sender, group, number, part) in self._inbox:
                    raise RemoteProtocolError(f"worker {sender} has sent a message twice")
                self._inbox[sender, group, number, part] = Message(call, place, frames[1])
            case [_, "Shared", str(group), int(number), int(part), str(call), str(place)], 2:
                if (sender, group, number, part) in self._inbox:
                    raise RemoteProtocolError(f"worker {sender} has sent a message twice")
                payload = self._shared(sender, frames[1])
                self._inbox[sender, group, number, part] = Message(call, place, payload)
            case [_, "Lent", str(group), int(number), int(part), str(call), str(place)], 2:
                if (sender, group, number, part) in self._inbox:
                    raise RemoteProtocolError(f"worker {sender} has sent a message twice")
                self._inbox[sender, group, number, part] = Message(
                    call, place, self._lent_place(sender, frames[1])
                )
            case [_, "Taken", int(number)], 2:
                self._lent.read(number, sender)
            case [_, "Offer"], 2 if sender in self.neighbours:
                self._lent.offered(sender, bytes(frames[1]))
            case [_, "Reads"], 2 if sender in self.neighbours:
                self._note_reader(sender, bytes(frames[1]).decode(errors="backslashreplace"))
            case [_, "Ask", int(number)], 2 if self.rank == 0:
                self._answer_store(sender, number, frames[1])
            case [_, "Answer", int(number)], 2 if sender == 0:
                self._answers[number] = msgpack.unpackb(frames[1])
            case [_, "Ended"], 2:
                self._ended.add(sender)
            case [_, "Failed"], 2:
                sentence = bytes(frames[1]).decode(errors="backslashreplace")
                self._failure = self._failure or DifferentCalls(printable(sentence))
            case _:
                raise RemoteProtocolError("a peer sent something that is not data")

    def _lent_place(self, sender: int, frame: Buffer) -> Lent:
        match msgpack.unpackb(frame) if sender in self.neighbours else None:
            case [int(number), int(size), bytes(handle)]:
                return Lent(number, size, handle)
            case _:
                raise RemoteProtocolError(f"worker {sender} lends no memory to this one")

    def _note_reader(self, sender: int, problem: str) -> None:
        if self._lent.answered(sender, problem) and self.rank == min(self.neighbours):
            LOGGER.warning(
                "the GPUs of this machine do not share memory (worker %d, GPU of worker %d: %s); "
                "torch.distributed passes their tensors through the host's memory",
                sender,
                self.rank,
                printable(problem),
            )

    def _shared(self, sender: int, frame: Buffer) -> Buffer:
        """Return the payload of a message of this host.

        Raises:
            RemoteProtocolError: the sender is of another host, or the place cannot be.
            TransportError: the memory cannot be opened.
        """
        match msgpack.unpackb(frame) if sender in self.neighbours else None:
            case [int(process), int(file), int(block), int(size), int(number)]:
                return self._blocks.get(Place(process, file, block, size), number)
            case _:
                raise RemoteProtocolError(f"worker {sender} shares no memory with this one")
