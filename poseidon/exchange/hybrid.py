"""The hybrid exchange: each tensor goes through the parameter server, as
factors to all other workers, or by all-reduce.

Laws: the weights are the same whichever scheme a tensor has. A tensor that does not go through the server is in a
`Plane`, and has a table on the shards, too, a copy: it brings the first value to every worker, and
`HybridState.histories`, which a snapshot calls, updates it. At least one tensor goes through the server, so requests of
rank 0 are in step with training.

At staleness 0 a worker's pushes wait until its factors have left. Both need the link of its host. A push causes an
addition on a shard; factors cause a product on every worker, which takes longer than the work for any other message. So
products are computed while pushes and values travel. At staleness s > 0 factors of later iterations could delay pushes
that other workers wait for, so both share the link. All-reduce needs staleness 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from poseidon.exchange.allreduce.plane import AllReducePlane
from poseidon.exchange.allreduce.process_group import GroupSettings
from poseidon.exchange.base import Array, ExchangeSettings, History, Trained
from poseidon.exchange.factors.channel import FactorChannel
from poseidon.exchange.factors.peers import PeerSettings
from poseidon.exchange.factors.products import Kernel
from poseidon.exchange.observe.statistics import Traffic
from poseidon.exchange.plane import Plane, SharedNorm
from poseidon.exchange.ps import ServerExchange
from poseidon.exchange.replicas import Arithmetic, arithmetic_sample, common_kernel
from poseidon.exchange.server_tables import ServerState
from ps_server import Client, RemoteProtocolError, StoreSpec
from ps_server.link import LinkPriority


class HybridExchange:
    """See `Exchange`.

    Args:
        client: connected to every shard; this exchange closes it.
        tensors: one per table of the store, in the same order.
        store: made by `store_spec`.
        settings: common to all tensors.
        by_factors: indices of the tensors that travel as factors; their tables are copies.
        by_allreduce: indices of the tensors that travel by all-reduce; their tables are copies. Staleness 0, in clear.
        peers: how the workers reach each other.
        equal_bits: whether the job ends where the processors of the replicas compute different bits.
    """

    def __init__(
        self,
        client: Client,
        tensors: Sequence[Trained],
        store: StoreSpec,
        settings: ExchangeSettings,
        *,
        by_factors: Sequence[int] = (),
        by_allreduce: Sequence[int] = (),
        peers: PeerSettings,
        equal_bits: bool = True,
    ) -> None:
        self._client = client
        self._tensors = tensors
        self._equal_bits = equal_bits
        self._server = ServerExchange(client, tensors, store, settings)
        self.by_factors = frozenset(by_factors)
        self.control = self._server.control
        norms = SharedNorm(client, bool(by_factors) + bool(by_allreduce))
        self._planes: list[Plane] = []
        self._plane_of: dict[int, Plane] = {}
        if by_factors:
            link, staleness = LinkPriority(), store.tables[by_factors[0]].staleness
            if staleness == 0:
                client.yield_link(link)
            self._factors = FactorChannel(
                {index: tensors[index] for index in by_factors},
                settings,
                rank=client.rank,
                workers=store.workers,
                staleness=staleness,
                peers=peers,
                norms=norms.of_plane(0),
                link=link,
            )
            self._planes.append(self._factors)
            self._plane_of |= dict.fromkeys(by_factors, self._factors)
        if by_allreduce:
            self._sums = AllReducePlane(
                {index: tensors[index] for index in by_allreduce},
                settings,
                group=GroupSettings(
                    rank=client.rank,
                    size=store.workers,
                    host=peers.host.strip("[]"),
                    timeout_s=peers.timeout_s,
                ),
                norms=norms.of_plane(1),
            )
            self._planes.append(self._sums)
            self._plane_of |= dict.fromkeys(by_allreduce, self._sums)
        self._by_allreduce = frozenset(by_allreduce)
        self.state = HybridState(self._server.state, self._plane_of, client, tensors)

    def open(self, histories: Sequence[History] | None, clock: int | None = None) -> None:
        """See `Exchange`."""
        if clock is not None:
            for plane in self._planes:
                plane.rewind(clock)  # first: a worker that has its values may send factors at once
        self._server.open(histories, clock)
        found = {index: histories[index] if histories else () for index in self._plane_of}
        offers, kernel = self._rendezvous() if clock is None else ([], None)
        for plane in self._planes:
            plane.take_first(found)
            if kernel is not None:
                plane.connect(offers, kernel)

    def _rendezvous(self) -> tuple[list[dict[str, Any]], Kernel]:
        """Collect the offers of all workers, and choose a kernel that computes the same bits on all of them."""
        own: dict[str, Any] = {
            "arithmetic": arithmetic_sample([self._tensors[index] for index in self._plane_of]).to_json()
        }
        for plane in self._planes:
            own |= plane.offer()
        offers, samples = [], []
        for rank, payload in enumerate(self.control.all_gather(json.dumps(own).encode())):
            try:
                fields = json.loads(payload)
                samples.append(Arithmetic.from_json(fields["arithmetic"]))
            except (ValueError, KeyError, TypeError) as error:
                raise RemoteProtocolError(f"worker {rank} sent no address at the rendezvous") from error
            offers.append(fields)
        return offers, common_kernel(samples, required=self._equal_bits)

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`."""
        self._server.start(iteration, rate)
        for plane in self._planes:
            plane.start(iteration, rate)

    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`."""
        if index in self._by_allreduce:
            self._sums.begin(index, gradient)
        else:
            self._server.begin(index, gradient)

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """See `Exchange`."""
        if index in self._by_allreduce:
            self._sums.begin_factors(index, u_KN, v_KM)
        else:
            self._factors.begin(index, u_KN, v_KM)

    def release(self, index: int) -> None:
        """See `Exchange`."""
        if index in self.by_factors:
            self._factors.release(index)

    def wait(self, index: int) -> None:
        """See `Exchange`."""
        plane = self._plane_of.get(index)
        (self._server if plane is None else plane).wait(index)

    def skip(self, index: int) -> None:
        """See `EarlyExchange`."""
        self._server.skip(index)

    def wait_early(self, index: int) -> None:
        """See `EarlyExchange`."""
        self._server.wait_early(index)

    def finish(self) -> None:
        """See `Exchange`."""
        limit = self._server.push_remaining(self._factors.held_sum_of_squares() if self.by_factors else 0.0)
        for plane in self._planes:
            plane.finish(limit)
        self._server.end_iteration()

    def settle(self) -> None:
        """See `Exchange`."""
        self._server.settle()
        for plane in self._planes:
            plane.settle(self._client.iterations)

    def traffic(self) -> dict[int, Traffic]:
        """See `CountsTraffic`."""
        found = self._server.traffic()
        for plane in self._planes:
            found |= plane.traffic()
        return found

    def close(self) -> None:
        """See `Exchange`."""
        self._server.close()  # first: the thread that applies factors may wait there for a norm
        for plane in self._planes:
            plane.close()


class HybridState:
    """See `ExchangeState`.

    Args:
        server: the state of the tensors that go through the shards.
        planes: the plane of each other tensor, by its index.
        client: connected to every shard, which keep a copy of these.
        tensors: all of them.
    """

    def __init__(
        self,
        server: ServerState,
        planes: Mapping[int, Plane],
        client: Client,
        tensors: Sequence[Trained],
    ) -> None:
        self._server = server
        self._planes = planes
        self._client = client
        self._tensors = tensors
        self.private = server.private

    def histories(self) -> list[History]:
        """See `ExchangeState`. Rank 0 brings the shards' copies up to date."""
        histories = self._server.histories()
        for index, plane in self._planes.items():
            tensor = self._tensors[index].tensor
            histories[index] = plane.history(index)
            if self._client.rank == 0:
                self._client.store_copy(index, tensor.detach().reshape(-1).cpu().numpy())
        return histories

    def held_back(self) -> Mapping[str, Array]:
        """See `ExchangeState`."""
        return self._server.held_back()

    def hold_back(self, held_back: Mapping[str, Array]) -> None:
        """See `ExchangeState`."""
        self._server.hold_back(held_back)

    def replicated(self) -> Mapping[str, Tensor]:
        """See `ExchangeState`."""
        found: dict[str, Tensor] = {}
        for plane in dict.fromkeys(self._planes.values()):
            found |= plane.replicated_state()
        return found
