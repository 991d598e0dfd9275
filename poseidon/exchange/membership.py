"""The membership of one worker in its job, and of its plane.

Law: ranks go host by host. Plane l has the workers with local rank l of all hosts; there are as
many planes as the host with the fewest workers has workers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from poseidon.exchange.options import DEFAULT_OPTIONS, ExchangeKind, ExchangeOptions, OnDivergence
from ps_server.errors import SpecError
from ps_server.network import Network
from ps_server.protocol.seats import Seat, Seats, seats_of
from ps_server.protocol.settings import CHUNKS_A_SERVER, CHUNKS_A_SHARD
from ps_server.protocol.virtual_workers import VirtualWorkers

ALONE = Network()


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The position of one worker in its job.

    Args:
        network: the place of this worker among all workers of the job. Its keys belong to the
            workers and the shards.
        hosts: workers of each host with workers, in the order of ranks; empty: one on each.
        shards: number of shards; 0 for a worker that is alone, and for all-reduce.
        homes: for each shard the client with workers on whose host it runs, or -1 - j for serving
            host j; empty: spread evenly over the hosts with workers.
        loads: relative load of each shard; empty: all equal.
        local_address: a path in a folder of the host's, where its workers meet; empty: the host has
            one worker.
        virtual_workers: the job's, and the workers that compute for them, by rank. None: each
            computes for one, and the plan follows from the cluster if all hosts have as many.
        divides: whether the L workers of each host divide a module among them. Together they
            compute for virtual hosts: virtual host j has the virtual workers j L to j L + L - 1,
            the first of which are of the workers with local rank 0.
        weight: of the changes of this worker's host in a sum over hosts: its workers in relation to
            the mean host's. Where workers apply the rule themselves (staleness > 0), it is for
            these changes.
        one_machine: whether all hosts are the same machine, so that no link lies between them.
    """

    network: Network = ALONE
    hosts: tuple[int, ...] = ()
    shards: int = 0
    homes: tuple[int, ...] = ()
    loads: tuple[int, ...] = ()
    local_address: str = ""
    virtual_workers: VirtualWorkers | None = None
    divides: bool = False
    one_machine: bool = False
    weight: float = 1.0
    options: ExchangeOptions = DEFAULT_OPTIONS

    def __post_init__(self) -> None:
        seats_of(self.hosts, self.network.size)  # which refuses others
        if self.shards < 0:
            raise SpecError(f"shards is {self.shards}; expected 0 or more")

    @property
    def seats(self) -> Seats:
        """The seats of all workers."""
        return seats_of(self.hosts, self.network.size)

    @property
    def seat(self) -> Seat:
        """The seat of this worker."""
        return self.seats.of(self.network.rank)

    @property
    def host_ranks(self) -> range:
        """The ranks in the job of the workers of this host."""
        first = self.network.rank - self.seat.local_rank
        return range(first, first + self.seat.local_workers)

    @property
    def shares_hosts(self) -> bool:
        """Whether some host has several workers."""
        return max(self.hosts, default=1) > 1

    @property
    def averages(self) -> bool:
        """Whether a host divides the sum of its workers by their number: each worker counts as much
        as any other in a mean over hosts, or the changes of a host have its weight.
        """
        is_even = self.virtual_workers is None and len(set(self.hosts)) <= 1
        return is_even or self.options.staleness > 0

    @property
    def placed(self) -> VirtualWorkers:
        """The virtual workers, and the hosts that compute for them. Where hosts average, each
        computes for one. Where they divide a module, the virtual hosts.
        """
        if self.averages:
            return VirtualWorkers.one_each(self.seat.host_count)
        firsts, bounds = self.seats.members(0), self.by_worker.bounds
        found = [bounds[rank] for rank in (*firsts, self.network.size)]
        if self.divides:
            return VirtualWorkers.spread(
                found[-1] // self.seat.local_workers, [b - a for a, b in pairwise(found)]
            )
        return VirtualWorkers(tuple(found))

    @property
    def by_worker(self) -> VirtualWorkers:
        """The virtual workers, and the workers that compute for them."""
        return self.virtual_workers or VirtualWorkers.one_each(self.network.size)

    @property
    def own(self) -> range:
        """The virtual workers of this worker."""
        if not self.divides:
            return self.by_worker.of(self.network.rank)
        seat, hosts = self.seat, self.placed.of(self.seat.host)
        workers, first = seat.local_workers, seat.local_rank
        return range(hosts.start * workers + first, hosts.stop * workers + first, workers)

    @property
    def takes_turns(self) -> bool:
        """Whether some worker computes for several virtual workers."""
        return not self.by_worker.is_one_each

    @property
    def plane_ranks(self) -> tuple[int, ...]:
        """The ranks in the job of the workers with this one's local rank, by host."""
        return tuple(self.seats.members(self.seat.local_rank))

    @property
    def of_plane(self) -> Membership:
        """The membership of this worker's host in its plane, of which each host is one member.

        A worker whose local rank is `Seats.planes` or more owns nothing. Its plane has the hosts that
        have such a worker, too.
        """
        network, ranks = self.network, self.plane_ranks
        keys = network.keys
        if keys is not None:
            keys = replace(keys, admit=tuple(keys.admit[rank] for rank in ranks))
        return replace(
            self,
            network=replace(
                network, rank=ranks.index(network.rank), size=len(ranks), ranks=ranks, keys=keys
            ),
            hosts=(),
            local_address="",
            virtual_workers=None if self.averages else self.placed,
            weight=self.seat.local_workers * self.seat.host_count / self.network.size,
            divides=False,
        )

    @property
    def alone(self) -> bool:
        """Whether this host exchanges with no other."""
        return self.options.kind is ExchangeKind.LOCAL or (
            self.seat.host_count == 1 and self.shards == 0
        )

    @property
    def chunks(self) -> int:
        """Least chunks that a shard's part is cut into. They keep links busy; without links each
        costs its messages for nothing.
        """
        if self.one_machine:
            return 1
        return CHUNKS_A_SERVER if min(self.homes, default=0) < 0 else CHUNKS_A_SHARD

    @property
    def chooses(self) -> bool:
        """Whether `--exchange=auto` chooses the scheme of each tensor by time, and records it.

        Otherwise it chooses by bytes, as hybrid does: the plan of virtual workers, and of hosts
        with different numbers of workers, is the same on all clusters.
        """
        by_time = self.seat.host_count > 1 and self.shards > 0 and self.averages
        return self.options.chooses and by_time

    @property
    def is_stale(self) -> bool:
        """Whether workers apply the rule to their own gradients, within a bound."""
        return self.options.staleness > 0 and not self.alone

    @property
    def equal_bits(self) -> bool:
        """Whether the job ends where the processors of the replicas compute different bits."""
        return self.options.on_divergence is OnDivergence.STOP
