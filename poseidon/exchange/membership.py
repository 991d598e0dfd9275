"""The membership of one worker in its job."""

from __future__ import annotations

from dataclasses import dataclass

from poseidon.exchange.cost import Topology
from poseidon.exchange.kinds import ExchangeKind
from poseidon.exchange.options import DEFAULT_OPTIONS, ExchangeOptions, OnDivergence
from ps_server.network import Network
from ps_server.protocol.settings import CHUNKS_A_SERVER, CHUNKS_A_SHARD
from ps_server.protocol.virtual_workers import VirtualWorkers

ALONE = Network()


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The position of one worker in its job.

    Args:
        network: the place of this worker's host among the hosts with workers, which push. Its keys
            belong to the hosts' leaders and the shards.
        shards: number of shards; 0 for a worker that is alone, and for all-reduce.
        homes: for each shard the client with workers on whose host it runs, or -1 - j for serving
            host j; empty: spread evenly over the hosts with workers.
        loads: relative load of each shard; empty: all equal.
        local_rank: of this worker among the workers of its host; 0 is the leader.
        local_workers: workers on each host.
        local_address: where the leader listens for the followers (`LocalGroup`).
        virtual_workers: the job's, and the workers that compute for them: of all hosts, in the
            order of ranks. None: each computes for one, and the plan follows from the cluster.
        quorum: hosts whose changes end a round, and the seconds that it then waits for others: of
            the exchange of rounds. 0: all, in each iteration.
    """

    network: Network = ALONE
    shards: int = 0
    homes: tuple[int, ...] = ()
    loads: tuple[int, ...] = ()
    local_rank: int = 0
    local_workers: int = 1
    local_address: str = ""
    virtual_workers: VirtualWorkers | None = None
    quorum: tuple[int, float] = (0, 0.0)
    options: ExchangeOptions = DEFAULT_OPTIONS

    @property
    def placed(self) -> VirtualWorkers:
        """The virtual workers, and the hosts that compute for them."""
        if self.virtual_workers is None:
            return VirtualWorkers.one_each(self.network.size)
        return VirtualWorkers(self.virtual_workers.bounds[:: self.local_workers])

    @property
    def own(self) -> range:
        """The virtual workers of this worker."""
        rank = self.network.rank * self.local_workers + self.local_rank
        virtual = self.virtual_workers
        return range(rank, rank + 1) if virtual is None else virtual.of(rank)

    @property
    def alone(self) -> bool:
        """Whether there is no other host to exchange with."""
        return self.options.kind is ExchangeKind.LOCAL or (
            self.network.size == 1 and self.shards == 0
        )

    @property
    def chunks(self) -> int:
        """Least chunks that a shard's part is cut into."""
        return CHUNKS_A_SERVER if min(self.homes, default=0) < 0 else CHUNKS_A_SHARD

    @property
    def chooses(self) -> bool:
        """Whether `--exchange=auto` chooses the scheme of each tensor by time, and records it.

        Otherwise it chooses by bytes, as hybrid does: the plan of virtual workers is the same on
        all clusters.
        """
        by_time = self.network.size > 1 and self.shards > 0 and self.virtual_workers is None
        return self.options.chooses and by_time

    @property
    def private_histories(self) -> bool:
        """`ExchangeState.private` of the exchange, before it is built; it is not where local
        steps are synchronous.
        """
        return self.options.local_steps > 0 or (self.options.staleness > 0 and not self.alone)

    @property
    def equal_bits(self) -> bool:
        """Whether the job ends where the processors of the replicas compute different bits."""
        return self.options.on_divergence is OnDivergence.STOP

    @property
    def topology(self) -> Topology:
        """The clients that push, and the load of each host's shards. Without shards:
        a shard on each host, to compare with. With virtual workers: as many such hosts as there are
        of them, so that the plan depends on their number alone.
        """
        if self.virtual_workers is not None:
            return Topology.colocated(self.virtual_workers.count)
        clients = self.network.size
        if not self.shards:
            return Topology.colocated(clients)
        homes = self.homes or tuple(shard * clients // self.shards for shard in range(self.shards))
        return Topology.of_shards(clients, homes, self.loads)
