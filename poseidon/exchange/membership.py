"""The membership of one worker in its job."""

from __future__ import annotations

from dataclasses import dataclass

from poseidon.exchange.cost import Topology
from poseidon.exchange.kinds import ExchangeKind
from poseidon.exchange.options import DEFAULT_OPTIONS, ExchangeOptions, OnDivergence
from ps_server.network import Network

ALONE = Network()


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The position of one worker in its job.

    Args:
        network: the place of this worker's host among the hosts with workers, which are those that
            push. Its keys are those of the hosts' leaders and of the shards.
        shards: number of shards; 0 for a worker that is alone, and for all-reduce.
        homes: for each shard the client with workers on whose host it runs, or -1 - j for serving
            host j; empty: spread evenly over the hosts with workers.
        loads: relative load of each shard; empty: all equal.
        local_rank: of this worker among those of its host; 0 is the leader.
        local_workers: workers on each host.
        local_address: where the leader listens for the followers (`LocalGroup`).
        options: of the exchange.
    """

    network: Network = ALONE
    shards: int = 0
    homes: tuple[int, ...] = ()
    loads: tuple[int, ...] = ()
    local_rank: int = 0
    local_workers: int = 1
    local_address: str = ""
    options: ExchangeOptions = DEFAULT_OPTIONS

    @property
    def alone(self) -> bool:
        """Whether there is no other host to exchange with."""
        return self.options.kind is ExchangeKind.LOCAL or (
            self.network.size == 1 and self.shards == 0
        )

    @property
    def sums_in_clear(self) -> bool:
        """Whether tensors may travel by all-reduce, which is never encrypted."""
        return self.network.keys is None or self.options.allreduce_in_clear

    @property
    def chooses(self) -> bool:
        """Whether `--exchange=auto` chooses the scheme of each tensor by time, and records it.

        Otherwise it chooses by bytes, as hybrid does.
        """
        return self.options.chooses and self.network.size > 1 and self.shards > 0

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
    def topology(self) -> Topology:
        """The clients that push, and the load of each host's shards. Without shards:
        a shard on each host, to compare with.
        """
        clients = self.network.size
        if not self.shards:
            return Topology.colocated(clients)
        homes = self.homes or tuple(shard * clients // self.shards for shard in range(self.shards))
        return Topology.of_shards(clients, homes, self.loads)
