"""The place of a process among those that exchange tensors, and how they reach each other: of a worker;
of a shard, as its launcher tells it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ps_server.errors import SpecError
from ps_server.keys import Keyring
from ps_server.monitor import Interruption, Monitor
from ps_server.transport.base import Wire
from ps_server.transport.first_connections import ConnectLimit

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The place of one worker among those that exchange tensors: facts that all carriers need.

    Args:
        rank: of this worker, 0..size-1.
        size: number of workers.
        ranks: of these workers in the job; empty: the same.
        host: the address at which the others reach this worker; an IPv6 address in brackets.
        token: the job's secret.
        keys: own pair, and the public keys of the other workers and of the shards; None: all is in
            clear.
        timeout_s: longest time that any call waits.
        connect_s: longest time until a first connection stands, where every process listens before
            any gets the addresses; None: as long as calls wait.
        wire: makes the connections, and tells the time; None: ZeroMQ.
        interruption: may end all waits of this worker.
    """

    rank: int = 0
    size: int = 1
    ranks: Sequence[int] = field(default=(), compare=False)
    host: str = "127.0.0.1"
    token: bytes = field(default=b"", repr=False)
    keys: Keyring | None = None
    timeout_s: float = TIMEOUT_S
    connect_s: float | None = None
    wire: Wire | None = field(default=None, repr=False, compare=False)
    interruption: Interruption = field(default_factory=Interruption, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise SpecError(f"the rank is {self.rank} of {self.size} workers")

    def rank_of(self, rank: int) -> int:
        """Return the rank in the job of one of these workers."""
        return self.ranks[rank] if self.ranks else rank

    def name(self, rank: int) -> str:
        """Return the name of one of these workers in messages: all have that of the job's rank."""
        return f"worker {self.rank_of(rank)}"

    def connect_limit(self, peers: Sequence[str]) -> ConnectLimit | None:
        """Return the limit of connections to some processes; None: they have none.

        Args:
            peers: their names.
        """
        if self.connect_s is None:
            return None
        own = f"{self.name(self.rank)} on {self.bare_host}"
        return ConnectLimit(seconds=self.connect_s, own=own, peers=peers)

    @property
    def bare_host(self) -> str:
        """The host without the brackets of an IPv6 address."""
        return self.host.strip("[]")

    def new_monitor(self, *, closed: str, hangs: str) -> Monitor:
        """Return a monitor whose waits the interruption ends; arguments as for `Monitor`."""
        monitor = Monitor(self.timeout_s, closed=closed, hangs=hangs)
        self.interruption.on_interrupt(monitor.interrupt)
        return monitor


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDocument:
    """One shard of a start, as JSON (`json_fields.py`): the first line of its standard input, and of
    each later start.

    Attributes:
        shard: its number, from 0.
        workers: how many join.
        address: where to listen; port 0: any free one.
        token: the secret that workers show.
        keys: its own; None: nothing is encrypted.
        trace: the file of a trace; empty: none.
        supervised: whether a launcher sends commands.
    """

    shard: int
    workers: int
    address: str
    token: bytes = field(repr=False)
    keys: Keyring | None = None
    trace: str = ""
    supervised: bool = True
