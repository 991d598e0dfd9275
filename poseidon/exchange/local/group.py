"""Several workers on one host: they sum among themselves first, and one of
them, the leader, exchanges with other hosts.

Laws:

* The leader (local rank 0) holds the inner exchange, whose replicas are hosts. It contributes the
  mean over the workers of its host. Each host has as many workers, so the mean over hosts is the
  mean over all workers.
* Parts are added in the order of local ranks: repeated runs have the same bits.
* The workers of a host stay in step: whatever the staleness of the inner exchange, a value is
  published to all of them once, and the next one only after each has contributed to the sum before.
* Rank of a worker = rank of its host * local workers + local rank, in collections too.

`leader.py` and `follower.py` are the two sides. A `Reduction` (`reduction.py`) moves tensors: in
memory that the processes share, or by a process group (NCCL on GPUs). Messages over the connections
(`connection.py`) say when.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ps_server import Signal, SignalKind
from ps_server.monitor import Monitor

LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGroup:
    """The local group of one worker: the workers of its host.

    Args:
        address: path of a socket in a folder that only this user can enter; the same for all
            workers of the host, and of no other job.
        rank: this worker's local rank; 0 leads.
        workers: number of workers on the host, the same on every host.
        timeout_s: longest time that any call waits for another worker of the host.
    """

    address: str
    rank: int
    workers: int
    timeout_s: float = 600.0

    def new_monitor(self) -> Monitor:
        """Return a monitor for the state that the threads of one worker's exchange share."""
        return Monitor(
            self.timeout_s,
            closed="the exchange is closed",
            hangs=": a worker of this machine hangs",
        )


def pack(payloads: Sequence[bytes]) -> bytes:
    """Join payloads into one, each after its length."""
    return b"".join(LENGTH.pack(len(payload)) + payload for payload in payloads)


def unpack(packed: bytes | bytearray) -> tuple[bytes, ...]:
    """Split what `pack` has joined."""
    found, start = [], 0
    while start < len(packed):
        (length,) = LENGTH.unpack_from(packed, start)
        start += LENGTH.size
        found.append(bytes(packed[start : start + length]))
        start += length
    return tuple(found)


def pack_signals(signals: Sequence[Signal]) -> bytes:
    """Encode signals."""
    return json.dumps([[signal.kind.value, signal.clock] for signal in signals]).encode()


def unpack_signals(packed: bytes | bytearray) -> tuple[Signal, ...]:
    """Decode what `pack_signals` has encoded."""
    return tuple(Signal(SignalKind(kind), clock) for kind, clock in json.loads(packed))
