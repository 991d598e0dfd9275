"""The membership of one worker in its job, and what a builder of exchanges returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from poseidon.exchange.allreduce.process_group import GroupSettings
from poseidon.exchange.cost import ExchangePlan, Topology
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.kinds import ExchangeKind
from poseidon.exchange.options import DEFAULT_OPTIONS, ExchangeOptions, OnDivergence
from ps_server import Client, Precision, StoreSpec
from ps_server.keys import Keyring

TIMEOUT_S = 600.0

Connect = Callable[[str], Sequence[str]]
"""Reports the address at which this worker listens for the others, unless it is empty; waits for
the addresses of the job and returns them: of the shards in their order, or of rank 0 where there
are none.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The position of one worker in its job.

    Args:
        rank: of this worker's host, 0..workers-1.
        workers: number of hosts with workers: of those who push.
        shards: number of shards; 0 for a worker that is alone, and for all-reduce.
        host: the address at which the other hosts reach this one; an IPv6 address in brackets.
        token: the job's secret.
        keys: own key pair, and the public keys of all hosts' workers and of the shards; None: no
            encryption.
        homes: for each shard the client with workers on whose host it runs, or -1 - j for serving
            host j; empty: spread evenly over the hosts with workers.
        loads: relative load of each shard; empty: all equal.
        timeout_s: longest time that any call waits.
        local_rank: of this worker among those of its host; 0 is the leader.
        local_workers: workers on each host.
        local_address: where the leader listens for the followers (`LocalGroup`).
        options: of the exchange.
    """

    rank: int = 0
    workers: int = 1
    shards: int = 0
    host: str = "127.0.0.1"
    token: bytes = b""
    keys: Keyring | None = None
    homes: tuple[int, ...] = ()
    loads: tuple[int, ...] = ()
    timeout_s: float = TIMEOUT_S
    local_rank: int = 0
    local_workers: int = 1
    local_address: str = ""
    options: ExchangeOptions = DEFAULT_OPTIONS

    @property
    def alone(self) -> bool:
        """Whether there is no other host to exchange with."""
        return self.options.kind is ExchangeKind.LOCAL or (self.workers == 1 and self.shards == 0)

    @property
    def sums_in_clear(self) -> bool:
        """Whether tensors may travel by all-reduce, which is never encrypted."""
        return self.keys is None or self.options.allreduce_in_clear

    @property
    def measures(self) -> bool:
        """Whether `--exchange=auto` chooses by a measurement.

        Otherwise it chooses by bytes, as hybrid does.
        """
        options = self.options
        plain = (
            options.staleness == 0
            and options.sync_every == 0
            and options.precision is Precision.FLOAT32
        )
        return options.kind is ExchangeKind.AUTO and plain and self.workers > 1 and self.shards > 0

    @property
    def private_histories(self) -> bool:
        """`ExchangeState.private` of the exchange, before it is built; it is not where local
        steps are synchronous.
        """
        return self.options.sync_every > 0 or (self.options.staleness > 0 and not self.alone)

    @property
    def equal_bits(self) -> bool:
        """Whether the job ends where the processors of the replicas compute different bits."""
        return self.options.on_divergence is OnDivergence.STOP

    @property
    def group(self) -> GroupSettings:
        """The place of this worker's host in a process group."""
        host = self.host.strip("[]")
        return GroupSettings(rank=self.rank, size=self.workers, host=host, timeout_s=self.timeout_s)

    @property
    def topology(self) -> Topology:
        """The clients that push, and the load of each host's shards. Without shards:
        a shard on each host, to compare with.
        """
        if not self.shards:
            return Topology.colocated(self.workers)
        homes = self.homes or tuple(
            shard * self.workers // self.shards for shard in range(self.shards)
        )
        return Topology.of_shards(self.workers, homes, self.loads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An exchange that is not yet opened, with its parts.

    Attributes:
        exchange: the exchange.
        plan: the scheme of each tensor.
        store: the store that workers and shards agree on; None without shards.
        tables: for each table of the store the indices of its tensors.
        client: this worker's connection to the shards; None without shards.
        local_steps: iterations of a round of local steps; 0: workers exchange in every iteration.
        measured: whether `--exchange=auto` has chosen the plan by a measurement: a resumed run
            needs the same plan.
    """

    exchange: Exchange
    plan: ExchangePlan
    store: StoreSpec | None = None
    tables: Sequence[Sequence[int]] = ()
    client: Client | None = None
    local_steps: int = 0
    measured: bool = False
