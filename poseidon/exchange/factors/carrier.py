"""The carrier of tensors that travel as sufficient factors: factors go to all workers, and each
rebuilds the gradient and applies the rule itself.

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

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from poseidon.exchange.base import ExchangeSettings, History, Trained
from poseidon.exchange.broadcast import bring_histories
from poseidon.exchange.carrier import FactoredCarrier, LocalHistories, SharedNorm, Step
from poseidon.exchange.device import Event, Streams, device_of
from poseidon.exchange.factors.factor_rounds import FactorPeers, FactorSession, FactorTable, Pair
from poseidon.exchange.factors.products import Scratch, factors_sum_of_squares
from poseidon.exchange.factors.weight import FactorWeight
from poseidon.exchange.job_control import JobControl
from poseidon.exchange.membership import Membership
from poseidon.exchange.observer import Traffic
from poseidon.exchange.replicas import common_kernel, introduce
from poseidon.exchange.serial_executor import SerialExecutor, join_within
from ps_server.link import LinkPriority
from ps_server.numerics import prepare_thread
from ps_server.rules import clip_factor
from ps_server.trace import NO_TRACE, Tracer, Track


class FactorCarrier(FactoredCarrier):
    """Broadcasts factors to all workers.

    Args:
        tensors: by their index in the exchange.
        norms: used with `settings.clip` at staleness 0.
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
        norms: SharedNorm,
        link: LinkPriority | None = None,
        trace: Tracer = NO_TRACE,
    ) -> None:
        self.indices = tuple(sorted(tensors))
        self.by_factors = frozenset(tensors)
        self._settings = settings
        self._member = member
        network, self._staleness = member.network, member.options.staleness
        self._control = control
        self._norms = norms
        self._iteration = settings.start_clock
        device = next(iter(tensors.values())).tensor.device
        self._streams = Streams.of(device_of(device))
        self._scratch = Scratch(device)
        self.state = FactorState(tensors)
        self._weights = {
            index: FactorWeight(
                table,
                tensors[index],
                self.state.of[index].history,
                clock=settings.start_clock,
                staleness=self._staleness,
                scratch=self._scratch,
            )
            for table, index in enumerate(self.indices)
        }
        weights = self._weights.values()
        if self._staleness:
            self.state.bases = {f"{w.trained.name}, base": w.base for w in weights}
        tables = [
            FactorTable(w.trained.name, w.tensor.shape[0], w.tensor.shape[1], self._staleness)
            for w in weights
        ]
        session = FactorSession(network.rank, network.size, tables, settings.start_clock)
        self.peers = FactorPeers(session, network, trace=trace, link=link)
        self._in_order = SerialExecutor(
            f"factors-out-{network.rank}",
            self.peers.peers.failing("sending factors failed"),
            threaded=not self._streams.device.is_host,
            timeout_s=network.timeout_s,
        )
        self._copies: list[Event] = []
        """Of this iteration's factors."""
        self._rebuilding = threading.Lock()
        self._thread = threading.Thread(
            target=self._rebuild, name=f"rebuild-{network.rank}", daemon=True
        )

    def open(self, histories: Sequence[History] | None, clock: int | None) -> None:
        addresses: list[str] = []
        if clock is None:
            offer = {"factors": self.peers.links.address}
            trained = [weight.trained for weight in self._weights.values()]
            offers, samples = introduce(self._control, trained, offer)
            addresses = self.peers.peers.addresses(offers, "factors")
            self._scratch.kernel = common_kernel(samples, required=self._member.equal_bits)
        else:
            self._rewind(clock)
        for weight in self._weights.values():
            weight.open()
        self.state.load(histories)
        # no worker sends factors before all have come here
        bring_histories(self.state.flat(), self._control, given=bool(histories))
        if clock is None:
            self.peers.links.connect(addresses)
            self._thread.start()

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
        ready = self._streams.device.event()
        with self.peers.monitor:
            weight.progress.hand_in(iteration)
        self.peers.transit.depart(weight.table)
        pair, copied = weight.copy(iteration, u_KN, v_KM, self._streams.out, ready)
        self._copies.append(copied)

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
            left = self._streams.device.event()
            self._weights[index].progress.release(self._iteration, left)
            self.peers.monitor.notify()

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
        for copied in self._copies:  # the factors' memory may be written to from here on
            self._streams.device.wait(copied)
        self._copies.clear()
        self._iteration += 1  # `wait` needs the round that has just left

    def settle(self, clock: int) -> None:
        for index in self._weights:
            self._wait(index, clock)

    def traffic(self) -> Mapping[int, Traffic]:
        return {index: self.peers.traffic(w.table) for index, w in self._weights.items()}

    def close(self) -> None:
        self._in_order.close()
        self.peers.links.close()
        if self._thread.ident is not None:
            join_within(self._thread, self._member.network.timeout_s)

    def _wait(self, index: int, clock: int) -> None:
        weight = self._weights[index]
        self.peers.wait_for(
            lambda: True if weight.progress.applied >= clock else None,
            f"the factors of '{weight.trained.name}' of iteration {clock - 1} did not arrive",
            table=weight.table,
        )
        self._streams.device.wait(weight.progress.done)
        if self._staleness:
            with self._rebuilding:
                self._publish(weight)

    def _rebuild(self) -> None:
        prepare_thread()
        try:
            with torch.no_grad(), self._streams.device.on(self._streams.into):
                while self._rebuild_next():
                    pass
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: its owner raises the error
            self.peers.peers.failing("rebuilding gradients from factors failed")(error)

    def _rebuild_next(self) -> bool:
        """Wait for a round that can be applied, and apply it; returns False once closed."""

        def found() -> list[FactorWeight] | None:
            return [] if self.peers.monitor.closed else self._ready() or None

        ready = self.peers.monitor.wait_for(found, "there is nothing to apply", limited=False)
        if ready:
            self._rebuild_first(ready)
        return bool(ready)

    def _rebuild_first(self, ready: Sequence[FactorWeight]) -> None:
        """Apply the next round of the most urgent weight; with a limit on the norm, of all."""
        with self._rebuilding:  # `wait` must not run between taking a round and having applied it
            rounds = [self._take(w) for w in (ready if self._is_limited else ready[:1])]
            factor = self._limit(rounds) if self._is_limited else 1.0
            for stacked in rounds:
                self._apply(stacked, factor)

    @property
    def _is_limited(self) -> bool:
        """Whether the norm of all gradients of an iteration is agreed on before its rounds are
        applied.
        """
        return self._staleness == 0 and self._settings.clip is not None

    def _ready(self) -> list[FactorWeight]:
        """Return the weights whose next round can be applied, most urgent first: all, or with a
        limit on the norm all or none.
        """
        is_ready = self.peers.session.is_ready
        ready = [w for w in self._weights.values() if w.progress.may_apply and is_ready(w.table)]
        return [] if self._is_limited and len(ready) < len(self._weights) else ready

    def _limit(self, rounds: Sequence[_Stacked]) -> float:
        clock = rounds[0].weight.progress.applied
        if self._member.network.rank == 0:
            count = self._member.placed.count
            squares = [factors_sum_of_squares(r.u_BN, r.v_BM) / count**2 for r in rounds]
            self._norms.add("factors", clock, squares)
        return clip_factor(self._norms.total(clock), self._settings.clip)

    def _take(self, weight: FactorWeight) -> _Stacked:
        """Take the weight's next round, and stack its pairs on the weight's device."""
        with self.peers.monitor:
            pairs = self.peers.session.take(weight.table)
            assert pairs is not None
            rate = weight.progress.begin_round()
        outputs, inputs = weight.tensor.shape
        name = str(weight.table) if self._settings.clip is not None else ""
        self._streams.device.wait(weight.progress.left)
        u_BN = self._scratch.stack(f"u{name}", [pair.u for pair in pairs], outputs)
        v_BM = self._scratch.stack(f"v{name}", [pair.v for pair in pairs], inputs)
        return _Stacked(weight, rate, u_BN, v_BM)

    def _apply(self, stacked: _Stacked, limit: float) -> None:
        weight, rate, u_BN, v_BM = stacked
        trace, began_ns = self.peers.trace, self.peers.trace.now()
        scale = limit * self._settings.gradient_scale / self._member.placed.count
        weight.apply(u_BN, v_BM, rate=rate, scale=scale)
        done = self._streams.device.event()
        done.synchronize()  # the rounds' memory on the host may go
        name, clock = weight.trained.name, weight.progress.applied
        trace.span(Track.REBUILD, "apply", name, began_ns, clock=clock)
        self.peers.transit.arrive(weight.table)
        with self.peers.monitor:
            weight.progress.end_round(done)
            self.peers.monitor.notify()

    def _publish(self, weight: FactorWeight) -> None:
        """Staleness > 0: make the tensor `base` with this worker's own open pairs on top."""
        progress = weight.progress
        with self.peers.monitor:
            own = [
                (clock, progress.rate(clock), pair)
                for clock, pair in self.peers.session.own(weight.table)
                if clock >= progress.applied
            ]
        device, _, side = self._streams
        scale, ready = self._settings.gradient_scale / self._member.placed.count, device.event()
        # where rounds are applied: they use the same memory
        with torch.no_grad(), device.on(side):
            device.wait(ready)
            weight.replay(own, scale=scale)
            done = device.event()
        device.wait(done)


class _Stacked(NamedTuple):
    """The next round of a weight with its pairs below each other, on the weight's device, and the
    solver's rate of its iteration.
    """

    weight: FactorWeight
    rate: float
    u_BN: Tensor
    v_BM: Tensor


class FactorState(LocalHistories):
    """The histories of the weights, and at staleness > 0 the weights without this worker's changes
    ahead of the others: both are the same on all workers.
    """

    def __init__(self, tensors: Mapping[int, Trained]) -> None:
        super().__init__(tensors, replicated=True)
        self.bases: dict[str, Tensor] = {}

    def replicated(self) -> Mapping[str, Tensor]:
        return {**super().replicated(), **self.bases}
