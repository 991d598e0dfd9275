"""Messages between any two workers of a job, for the collectives of process groups.

    [VERSION, "Data", group, number, part, call] payload

A message is identified by its sender, its group, the number of the collective within the group, and
its part of the collective. It waits at the receiver until it is asked for.

Workers connect at the first message of any of them. They learn each other's public keys and
addresses through `gather`, which is the launcher's channel in a job: where its traffic is encrypted
this one is, with a new key pair for each worker.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgpack

from poseidon.errors import UsageError
from poseidon.exchange.job_control import SAME_CALLS
from poseidon.exchange.worker_links import VERSION, WorkerLinks, read_header
from ps_server import RemoteProtocolError
from ps_server.keys import KeyPair, Keyring
from ps_server.network import Network
from ps_server.transport.base import Buffer, Frames

Gather = Callable[[str], Sequence[str]]
"""Returns the payloads of all workers by rank; all workers call it together."""
MessageId = tuple[int, str, int, int]
"""The sender's rank, the group, the number of the collective, and the part of it."""


class Mesh:
    """The messages of one worker to and from all others.

    Args:
        network: the place of this worker among all workers of the job. Its keys are not used, but
            if any worker has keys, the messages of all are encrypted.
        gather: exchanges public keys and addresses.
    """

    def __init__(self, network: Network, gather: Gather) -> None:
        self._network = network
        self._gather = gather
        self._links: WorkerLinks | None = None
        self._inbox: dict[MessageId, tuple[str, Buffer]] = {}
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
        self, receiver: int, group: str, number: int, part: int, call: str, payload: Buffer
    ) -> None:
        """Send a message; returns at once.

        The payload must not be written to until it is certain that the receiver has it.

        Args:
            number: of the collective within the group.
            part: of the collective.
            call: describes the collective; the receiver compares it with its own.
        """
        links = self._connected()
        header = msgpack.packb([VERSION, "Data", group, number, part, call])
        with self._monitor:
            links.send((receiver,), 0, [header, payload])
        links.wake()

    def receive(self, sender: int, group: str, number: int, part: int, call: str) -> Buffer:
        """Wait for a message, and return its payload. Arguments as for `send`.

        Raises:
            PeerLost: the sender has left, or is lost.
            StalenessTimeout: it did not come in time.
            UsageError: the sender makes a different call.
        """
        links = self._connected()
        wanted = (sender, group, number, part)

        def arrived() -> tuple[str, Buffer] | None:
            if wanted in self._inbox:
                return self._inbox.pop(wanted)
            if sender in links.left:
                raise UsageError(
                    f"worker {self.rank} calls {call}, and worker {sender} has left; {SAME_CALLS}"
                )
            return None

        theirs, payload = self._monitor.wait_for(
            arrived, f"{call}: worker {sender} did not take part"
        )
        if theirs != call:
            raise UsageError(
                f"worker {self.rank} calls {call}, and worker {sender} {theirs}; {SAME_CALLS}"
            )
        return payload

    def flush(self) -> None:
        """Wait until all that was sent has left this host, so that `close` cuts nobody off.

        Raises:
            PeerLost: a worker that has not taken all is lost.
        """
        if self._links is not None:
            self._links.flush()

    def close(self) -> None:
        """Leave. Safe to call twice."""
        if self._links is not None:
            self._links.close()

    def _connected(self) -> WorkerLinks:
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
            case [_, "Data", str(group), int(number), int(part), str(call)], 2:
                if (sender, group, number, part) in self._inbox:
                    raise RemoteProtocolError(f"worker {sender} has sent a message twice")
                self._inbox[sender, group, number, part] = (call, frames[1])
            case _:
                raise RemoteProtocolError("a peer sent something that is not data")
