"""Several workers on one machine: they add up among themselves first, and one of them, the leader, speaks for all.

Laws:

* The leader (local rank 0) holds the inner exchange, whose replicas are machines. It hands in the mean over its
  machine's workers, so that the mean over machines, each with as many workers, is the mean over all workers.
* Parts are added in the order of local ranks: repeated runs have the same bits.
* The workers of a machine move together: whatever the inner exchange's staleness, a value is published to all of
  them once, and the next one only after each has contributed to the sum before.
* Rank of a worker = machine * local workers + local rank, in `gather` too.

`leader.py` and `follower.py` are the two sides. How tensors move is a `Reduction` (`reduction.py`): memory that
the processes share, or a process group (NCCL on GPUs). Messages over the connections (`connection.py`) say when.
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
    """One worker's place on its machine.

    Args:
        address: path of a socket in a folder that only this user can enter; the same for all workers of the machine,
            and of no other job.
        rank: this worker's local rank; 0 leads.
        workers: number of workers on the machine, the same on every machine.
        timeout_s: longest time that any call waits for a sibling.
    """

    address: str
    rank: int
    workers: int
    timeout_s: float = 600.0

    def new_monitor(self) -> Monitor:
        """Return a monitor for the state that the threads of one worker's exchange share."""
        return Monitor(
            self.timeout_s, closed="the exchange is closed", hangs=": a worker of this machine hangs"
        )


def pack(payloads: Sequence[bytes]) -> bytes:
    """Several payloads as one: each behind its length."""
    return b"".join(LENGTH.pack(len(payload)) + payload for payload in payloads)


def unpack(packed: bytes | bytearray) -> tuple[bytes, ...]:
    """Return the payloads that `pack` packed."""
    found, place = [], 0
    while place < len(packed):
        (length,) = LENGTH.unpack_from(packed, place)
        place += LENGTH.size
        found.append(bytes(packed[place : place + length]))
        place += length
    return tuple(found)


def pack_signals(signals: Sequence[Signal]) -> bytes:
    """Signals as bytes."""
    return json.dumps([[signal.kind.value, signal.clock] for signal in signals]).encode()


def unpack_signals(packed: bytes | bytearray) -> tuple[Signal, ...]:
    """Return the signals that `pack_signals` packed."""
    return tuple(Signal(SignalKind(kind), clock) for kind, clock in json.loads(packed))
