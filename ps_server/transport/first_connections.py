"""First connections: a process that cannot be reached within a limit ends the wait for it.

Laws:

* Only connections that never came about count; `losses.py` watches the others. A process that is
  stopped, or too busy to accept, is reached: its kernel answers.
* The limit counts time in which this process ran: a longer pause between two looks counts for
  `LONGEST_STEP_S`.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ps_server.errors import PeerUnreachable

LONGEST_STEP_S = 1.0
PROBE_S = 1.0
"""How long the last attempt may take. It tells the reason, which ZeroMQ does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectLimit:
    """How long first connections may take, and the names in the sentence when one takes longer.

    Args:
        seconds: the limit.
        own: this process, as `worker 1 on 10.0.0.2`.
        peers: the processes at the addresses, as `shard 0`.
    """

    seconds: float
    own: str
    peers: Sequence[str]


class FirstConnections:
    """Waits for the first connection to each of some addresses.

    Args:
        addresses: `tcp://host:port`.
        limit: None: it waits for ever.
        now: seconds, on the clock that `check` uses.
    """

    def __init__(self, addresses: Sequence[str], limit: ConnectLimit | None, now: float) -> None:
        self.addresses = addresses
        self._limit = limit
        self._missing = {} if limit is None else dict(enumerate(addresses))
        self._waited_s = 0.0
        self._looked_s = now

    def check(self, reached: Collection[int], now: float) -> None:
        """Note which addresses were reached.

        Raises:
            PeerUnreachable: one was not within the limit, and still cannot be.
        """
        if self._limit is None or not self._missing:
            return
        for number in self._missing.keys() & reached:
            del self._missing[number]
        self._waited_s += min(now - self._looked_s, LONGEST_STEP_S)
        self._looked_s = now
        if self._waited_s < self._limit.seconds:
            return
        for number, address in self._missing.items():
            if reason := _reason(address):
                raise PeerUnreachable(
                    f"{self._limit.own} could not connect to {self._limit.peers[number]} at "
                    f"{address.removeprefix('tcp://')} within {self._limit.seconds:g} s: {reason}; "
                    "open the ports between the two hosts; `poseidon doctor --hostfile=FILE` "
                    "tests each connection"
                )
        self._waited_s = 0.0  # TCP itself waits up to a minute before its next attempt


def _reason(address: str) -> str:
    """Return why an address cannot be reached; empty: it can."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S).close()
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)
    return ""
