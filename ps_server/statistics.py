"""The statistics of a client and of a shard: what `Client.statistics` and `Server.statistics`
return.

Law: all numbers count from the start of the process and only grow, except the momentary values
(`queue`, `memory_bytes`); the numbers of an interval are the difference of two reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStatistics:
    """One table, as seen by one client.

    Attributes:
        name: the table's.
        bytes_out: of its pushes, message heads included.
        bytes_in: of the values that follow from them, message heads included.
        waited_s: how long reads of it have blocked.
        hidden_s: how long its gradients and values were on their way while no read waited for them:
            from a push to the arrival of the last piece of the value that follows from it, less
            what `waited_s` has of that time.
    """

    name: str
    bytes_out: int = 0
    bytes_in: int = 0
    waited_s: float = 0.0
    hidden_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStatistics:
    """One worker's connection to the store.

    Attributes:
        iterations: its clock, less the clock it started with.
        tables: by table id.
        other_bytes_out: of messages that belong to no table's iterations: joining, first values,
            clocks, collections, snapshots.
        other_bytes_in: likewise.
        row_tables: by number: bytes of pushes and requests, and of the rows that came; no times.
    """

    iterations: int
    tables: Sequence[TableStatistics]
    other_bytes_out: int = 0
    other_bytes_in: int = 0
    row_tables: Sequence[TableStatistics] = ()


@dataclass(slots=True, kw_only=True)
class ShardStatistics:
    """One shard; its meter counts in one of these.

    Attributes:
        bytes_in: payload received.
        bytes_out: payload sent.
        messages_in: messages received.
        messages_out: messages sent.
        queue: packets received and not handled yet, at this moment.
        longest_queue: the most there have been.
        updates: chunks that have a new value.
        busy_s: time not spent waiting for messages.
        memory_bytes: of the chunks with their histories, at this moment.
        peak_bytes: the most memory that the process has held.
        refused: connections that were not authenticated.
        dropped: messages that were not legal, and changed nothing.
    """

    bytes_in: int = 0
    bytes_out: int = 0
    messages_in: int = 0
    messages_out: int = 0
    queue: int = 0
    longest_queue: int = 0
    updates: int = 0
    busy_s: float = 0.0
    memory_bytes: int = 0
    peak_bytes: int = 0
    refused: int = 0
    dropped: int = 0
