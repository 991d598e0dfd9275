"""The carrier of tensors that travel as sufficient factors: factors go to all workers, and each
rebuilds the gradient and applies the rule itself (`rebuilding.py`).

Laws:

* `base` is a weight with its history after all rounds taken: the same bits on every worker, since
  every worker takes the same rounds in the same order (`factor_rounds.py`).
* Staleness 0: `base` is the tensor's own memory. A round is applied in the background as soon as it
  is complete and this worker's backward pass has left the weight (`release`).
* Staleness s > 0: `base` is memory of its own. At `wait` the tensor becomes what `base` would be if
  the rounds that are not complete held this worker's own pairs alone: it sees its own updates at
  once, and the others' no later than the bound says.
* With a limit on the gradients' norm: at staleness 0 rank 0 sends all workers the norm over all
  tensors of every scheme (`Client.total_norm`), and rounds are applied once it is known. At
  staleness > 0 every worker limits its own gradients before it sends them, as it does for tables of
  the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from poseidon.exchange.base import ExchangeSettings, History, Trained
from poseidon.exchange.broadcast import bring_histories
from poseidon.exchange.carrier import Carrier, Step
from poseidon.exchange.device import DONE, Event
from poseidon.exchange.factors.factor_rounds import FactorPeers, FactorSession, FactorTable, Pair
from poseidon.exchange.factors.products import Scratch, factors_sum_of_squares
from poseidon.exchange.factors.rebuilding import Rebuilding
from poseidon.exchange.factors.weight import FactorWeight
from poseidon.exchange.job_control import JobControl
from poseidon.exchange.membership import Membership
from poseidon.exchange.observer import Traffic
from poseidon.exchange.replicas import common_kernel, introduce
from poseidon.exchange.ruled import LocalHistories
from poseidon.exchange.serial_executor import SerialExecutor
from ps_server import Client
from ps_server.protocol.schedule import LinkPriority
from ps_server.trace import NO_TRACE, Tracer


class FactorCarrier(Carrier):
    """Broadcasts factors to all workers.

    Args:
        tensors: by their index in the exchange.
        norms: the connection to the shards, used with `settings.clip` at staleness 0.
        link: taken as long as pairs have to leave this host; None: no other sender waits for it.
    """

    state: FactorState

    def __init__(
        self,
        tensors: Mapping[int, Trained],
        settings: ExchangeSettings,
        *,
        member: Membership,
        control: JobControl,
        norms: Client,
        link: LinkPriority | None = None,
        trace: Tracer = NO_TRACE,
    ) -> None:
        self.indices = tuple(sorted(tensors))
        self.by_factors = frozenset(tensors)
        self._settings = settings
        self._member = member
        network, staleness = member.network, member.options.staleness
        self._control = control
        self._iteration = settings.start_clock
        scratch = Scratch(tensors[self.indices[0]].tensor.device)
        self.state = FactorState(tensors)
        self._weights = {
            index: FactorWeight(
                table,
                self.state.of[index],
                clock=settings.start_clock,
                staleness=staleness,
                scratch=scratch,
            )
            for table, index in enumerate(self.indices)
        }
        weights = list(self._weights.values())
        if staleness:
            self.state.bases = {f"{w.trained.name}, base": w.base for w in weights}
        tables = [
            FactorTable(w.trained.name, w.tensor.shape[0], w.tensor.shape[1], staleness)
            for w in weights
        ]
        session = FactorSession(network.rank, network.size, tables, settings.start_clock)
        self.peers = FactorPeers(session, network, trace=trace, link=link)
        self._rebuilding = Rebuilding(weights, self.peers, scratch, settings, member, norms)
        self._in_order = SerialExecutor(
            f"factors-out-{network.rank}",
            self.peers.peers.failing("sending factors failed"),
            threaded=not self._rebuilding.streams.device.is_host,
            timeout_s=network.timeout_s,
        )
        self._copied: Event = DONE
        """After which the factors of this iteration may be written to."""

    @property
    def _staleness(self) -> int:
        return self._member.options.staleness

    def open(self, histories: Sequence[History] | None, clock: int | None) -> None:
        addresses: list[str] = []
        if clock is None:
            offer = {"factors": self.peers.links.address}
            trained = [weight.trained for weight in self._weights.values()]
            offers, samples = introduce(self._control, trained, offer)
            addresses = self.peers.peers.addresses(offers, "factors")
            self._rebuilding.scratch.kernel = common_kernel(
                samples, required=self._member.equal_bits
            )
        else:
            self._rewind(clock)
        for weight in self._weights.values():
            weight.open()
        self.state.load(histories)
        # no worker sends factors before all have come here
        bring_histories(self.state.flat(), self._control, given=bool(histories))
        if clock is None:
            self.peers.links.connect(addresses)

    def _rewind(self, clock: int) -> None:
        """Begin at a different clock, before any worker has sent a pair."""
        with self.peers.monitor:
            self._iteration = clock
            session = self.peers.session
            self.peers.session = FactorSession(session.rank, session.workers, session.tables, clock)
            for weight in self._weights.values():
                weight.progress.rewind(clock)

    def start(self, step: Step) -> None:
        with self.peers.monitor:
            self._iteration = step.iteration
            for weight in self._weights.values():
                weight.progress.start(step.iteration, step.rates[weight.trained.rate_index])

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        weight, iteration = self._weights[index], self._iteration
        streams = self._rebuilding.streams
        ready = streams.device.event()
        with self.peers.monitor:
            weight.progress.hand_in(iteration)
        self.peers.transit.depart(weight.table)
        pair, copied = weight.copy(iteration, u_KN, v_KM, streams.out, ready)
        self._copied = copied

        def send() -> None:
            copied.synchronize()
            del factors[:]
            if self._staleness and self._settings.clip is not None:
                with self.peers.monitor:
                    weight.progress.hold(pair)
            else:
                self._broadcast(weight, pair, 1.0)

        factors = [u_KN, v_KM]  # until they are copied
        self._in_order.call(send)

    def _broadcast(self, weight: FactorWeight, pair: Pair, limit: float) -> None:
        if (scale := limit * (self._member.weight if self._staleness else 1.0)) != 1.0:
            pair.u[:] *= scale
        self.peers.broadcast(weight.table, pair)

    def release(self, index: int) -> None:
        with self.peers.monitor:
            left = self._rebuilding.streams.device.event()
            self._weights[index].progress.release(self._iteration, left)
            self._rebuilding.advance()

    def wait(self, index: int) -> None:
        self._wait(index, self._iteration - self._staleness)

    def held_squares(self) -> list[float]:
        self._in_order.drain()
        with self.peers.monitor:
            held = [weight.progress.held for weight in self._weights.values()]
        pairs = [pair for pair in held if pair is not None]
        return [factors_sum_of_squares(torch.from_numpy(p.u), torch.from_numpy(p.v)) for p in pairs]

    def finish(self, limit: float) -> None:
        for index, weight in self._weights.items():
            if weight.progress.handed_in <= self._iteration:
                outputs, inputs = weight.tensor.shape
                self.begin_factors(index, torch.empty(0, outputs), torch.empty(0, inputs))
                self._in_order.drain()
            with self.peers.monitor:
                held = weight.progress.take_held()
            if held is not None:
                self._broadcast(weight, held, limit)
            if weight.progress.released <= self._iteration:
                self.release(index)
        self._rebuilding.streams.device.wait(self._copied)
        self._iteration += 1  # `wait` needs the round that has just left

    def settle(self, clock: int) -> None:
        for index in self._weights:
            self._wait(index, clock)

    def traffic(self) -> Mapping[int, Traffic]:
        return {index: self.peers.traffic(w.table) for index, w in self._weights.items()}

    def close(self) -> None:
        self._in_order.close()
        self.peers.links.close()
        self._rebuilding.close()

    def _wait(self, index: int, clock: int) -> None:
        weight = self._weights[index]
        self.peers.wait_for(
            lambda: True if weight.progress.applied >= clock else None,
            f"the factors of '{weight.trained.name}' of iteration {clock - 1} did not arrive",
            table=weight.table,
        )
        self._rebuilding.streams.device.wait(weight.progress.done)
        if self._staleness:
            self._rebuilding.publish(weight)


class FactorState(LocalHistories):
    """The histories of the weights, and at staleness > 0 the weights without this worker's changes
    ahead of the others: both are the same on all workers.
    """

    def __init__(self, tensors: Mapping[int, Trained]) -> None:
        super().__init__(tensors, replicated=True)
        self.bases: dict[str, Tensor] = {}

    def replicated(self) -> Mapping[str, Tensor]:
        return {**super().replicated(), **self.bases}
