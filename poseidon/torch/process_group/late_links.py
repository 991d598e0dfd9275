"""The connections of a worker to all others, for its process groups: made at the first message of any
of them.

Workers learn each other's public keys and addresses through `gather`, which is the launcher's channel
in a job: where its traffic is encrypted this one is, with a new key pair for each worker.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgpack

from poseidon.exchange.worker_links import VERSION, WorkerLinks
from ps_server.keys import KeyPair, Keyring
from ps_server.network import Network
from ps_server.transport.base import Buffer, Frames

Gather = Callable[[str], Sequence[str]]
"""Returns the payloads of all workers by rank; all workers call it together."""


class LateLinks:
    """The connections of one worker.

    Args:
        network: the place of this worker among all workers of the job. Its keys are not used, but
            if any worker has keys, the messages of all are encrypted.
        receive: see `WorkerLinks`.

    Attributes:
        monitor: guards what is to be sent and what `receive` changes.
        found: the connections; None: nobody has needed them.
    """

    def __init__(
        self, network: Network, gather: Gather, receive: Callable[[int, Frames], None]
    ) -> None:
        self.network, self._gather, self._receive = network, gather, receive
        self.monitor = network.new_monitor(closed="the process group is destroyed", hangs="")
        self.found: WorkerLinks | None = None
        self._connecting = threading.Lock()

    def connected(self) -> WorkerLinks:
        """Return the connections, and make them first where nobody has."""
        with self._connecting:  # each receive has a thread
            if self.found is None:
                self.found = self._connect()
            return self.found

    def post(self, header: Sequence[object], *messages: tuple[Sequence[int], Buffer]) -> None:
        """Send messages with one header: to some workers each.

        Args:
            header: without the version.
        """
        links, packed = self.connected(), msgpack.packb([VERSION, *header])
        with self.monitor:
            for ranks, frame in messages:
                links.send(ranks, 0, [packed, frame])
        links.wake()

    def close(self) -> None:
        """Leave. Safe to call twice."""
        if self.found is not None:
            self.found.close()

    def _connect(self) -> WorkerLinks:
        own = KeyPair.new()
        facts = {"public": own.public, "encrypted": self.network.keys is not None}
        offers = [json.loads(text) for text in self._gather(json.dumps(facts))]
        keys = None
        if any(offer["encrypted"] for offer in offers):
            keys = Keyring(own=own, admit=tuple(offer["public"] for offer in offers))
        network, name = replace(self.network, keys=keys), f"mesh-{self.network.rank}"
        links = WorkerLinks(network, name, monitor=self.monitor, receive=self._receive)
        links.connect(self._gather(links.address))
        return links
