"""The hybrid exchange: each tensor goes through the parameter server, or as factors to all other workers.

Laws: the weights are the same whichever scheme a tensor has. A tensor that travels as factors has a table on the shards,
too, a copy: it brings the first value to every worker, and `HybridState.histories`, which a snapshot calls, updates it.

At staleness 0 a worker's pushes wait until its factors have left. Both need the link of its host. A push causes an addition
on a shard; factors cause a product on every worker, which takes longer than the work for any other message. So
products are computed while pushes and values travel. At staleness s > 0 factors of later iterations could delay pushes
that other workers wait for, so both share the link.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from poseidon.exchange.base import Array, ExchangeSettings, History, Trained
from poseidon.exchange.factors.channel import FactorChannel
from poseidon.exchange.factors.products import Kernel
from poseidon.exchange.observe.statistics import Traffic
from poseidon.exchange.ps import ServerExchange
from poseidon.exchange.replicas import Arithmetic, arithmetic_sample, common_kernel
from poseidon.exchange.server_tables import ServerState
from ps_server import Client, RemoteProtocolError, StoreSpec
from ps_server.keys import Keyring
from ps_server.link import LinkPriority
from ps_server.trace import NO_TRACE, Tracer


class HybridExchange:
    """See `Exchange`.

    Args:
        client: connected to every shard; this exchange closes it.
        tensors: one per table of the store, in the same order.
        store: made by `store_spec`.
        settings: common to all tensors.
        by_factors: indices of the tensors that travel as factors; their tables are copies.
        listen: `tcp://host:port` where this worker listens for the others; port 0 takes a free one.
        token: the job's secret.
        keys: own pair, and those of all workers by rank; None: no encryption.
        equal_bits: whether the job ends where the processors of the replicas compute different bits.
        timeout_s: longest time that any call waits.
        trace: where spans of factors that are sent, received and applied go.
    """

    def __init__(
        self,
        client: Client,
        tensors: Sequence[Trained],
        store: StoreSpec,
        settings: ExchangeSettings,
        *,
        by_factors: Sequence[int],
        listen: str,
        token: bytes = b"",
        keys: Keyring | None = None,
        equal_bits: bool = True,
        timeout_s: float = 600.0,
        trace: Tracer = NO_TRACE,
    ) -> None:
        self._client = client
        self._tensors = tensors
        self._equal_bits = equal_bits
        self._server = ServerExchange(client, tensors, store, settings)
        self._indices = list(by_factors)
        self.by_factors = frozenset(self._indices)
        self.control = self._server.control
        link, staleness = LinkPriority(), store.tables[self._indices[0]].staleness
        if staleness == 0:
            client.yield_link(link)
        self._factors = FactorChannel(
            {index: tensors[index] for index in self._indices},
            settings,
            rank=client.rank,
            workers=store.workers,
            staleness=staleness,
            listen=listen,
            token=token,
            keys=keys,
            norms=client,
            timeout_s=timeout_s,
            trace=trace,
            link=link,
        )
        self.state = HybridState(self._server.state, self._factors, self._indices, client, tensors)

    def open(self, histories: Sequence[History] | None, clock: int | None = None) -> None:
        """See `Exchange`."""
        if clock is not None:
            self._factors.rewind(clock)  # first: a worker that has its values may send factors at once
        self._server.open(histories, clock)
        of_factors = {index: histories[index] if histories else () for index in self._indices}
        if clock is None:
            addresses, self._factors.kernel = self._rendezvous()
            self._factors.take_first(of_factors)
            self._factors.open(addresses)
        else:
            self._factors.take_first(of_factors)

    def _rendezvous(self) -> tuple[list[str], Kernel]:
        """Collect the addresses of all workers, and choose a kernel that computes the same bits on all of them."""
        sample = arithmetic_sample([self._tensors[index] for index in self._indices])
        own = json.dumps({"factors": self._factors.peers.address, "arithmetic": sample.to_json()}).encode()
        addresses, samples = [], []
        for rank, payload in enumerate(self.control.all_gather(own)):
            try:
                fields = json.loads(payload)
                addresses.append(_address(fields))
                samples.append(Arithmetic.from_json(fields["arithmetic"]))
            except (ValueError, KeyError, TypeError) as error:
                raise RemoteProtocolError(f"worker {rank} sent no address at the rendezvous") from error
        return addresses, common_kernel(samples, required=self._equal_bits)

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`."""
        self._server.start(iteration, rate)
        self._factors.start(iteration, rate)

    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`."""
        self._server.begin(index, gradient)

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """See `Exchange`."""
        self._factors.begin(index, u_KN, v_KM)

    def release(self, index: int) -> None:
        """See `Exchange`."""
        self._factors.release(index)

    def wait(self, index: int) -> None:
        """See `Exchange`."""
        if index in self.by_factors:
            self._factors.wait(index)
        else:
            self._server.wait(index)

    def skip(self, index: int) -> None:
        """See `EarlyExchange`."""
        self._server.skip(index)

    def wait_early(self, index: int) -> None:
        """See `EarlyExchange`."""
        self._server.wait_early(index)

    def finish(self) -> None:
        """See `Exchange`."""
        limit = self._server.push_remaining(self._factors.held_sum_of_squares())
        self._factors.finish(limit)
        self._server.end_iteration()

    def settle(self) -> None:
        """See `Exchange`."""
        self._server.settle()
        self._factors.settle(self._client.iterations)

    def traffic(self) -> dict[int, Traffic]:
        """See `CountsTraffic`."""
        return {**self._server.traffic(), **self._factors.traffic()}

    def close(self) -> None:
        """See `Exchange`."""
        self._server.close()  # first: the thread that applies factors may wait there for a norm
        self._factors.close()


class HybridState:
    """See `ExchangeState`.

    Args:
        server: the state of the tensors that go through the shards.
        factors: the channel of the others.
        indices: of the tensors that travel as factors.
        client: connected to every shard, which keep a copy of these.
        tensors: all of them.
    """

    def __init__(
        self,
        server: ServerState,
        factors: FactorChannel,
        indices: Sequence[int],
        client: Client,
        tensors: Sequence[Trained],
    ) -> None:
        self._server = server
        self._factors = factors
        self._indices = indices
        self._client = client
        self._tensors = tensors
        self.private = server.private

    def histories(self) -> list[History]:
        """See `ExchangeState`. Rank 0 brings the shards' copies up to date."""
        histories = self._server.histories()
        for index in self._indices:
            tensor = self._tensors[index].tensor
            histories[index] = self._factors.history(index)
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
        return self._factors.replicated_state()


def _address(fields: dict[str, Any]) -> str:
    address = fields["factors"]
    if not isinstance(address, str) or not address.startswith("tcp://"):
        raise ValueError(address)
    return address
