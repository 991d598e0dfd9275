"""Sufficient vector broadcasting: factors go to all workers, and each rebuilds the gradient and applies the rule itself.

Laws:

* `base` is a weight with its history after all rounds taken: the same bits on every worker, since every worker takes
  the same rounds in the same order (`factor_session`).
* Staleness 0: `base` is the tensor's own memory. A round is applied in the background as soon as it is complete and
  this worker's backward pass has left the layer (`release`).
* Staleness s > 0: `base` is memory of its own. At `wait` the tensor becomes what `base` would be if the rounds that
  are not complete held this worker's own pairs alone: it sees its own updates at once, and the others' no later than
  the bound says.
* With a limit on the gradients' norm: at staleness 0 rank 0 tells everybody the norm over all layers, by whichever way
  they travel (`Client.total_norm`), and rounds are applied once it is known. At staleness > 0 every worker limits its
  own gradients before it sends, as it does for tables of the server.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from poseidon.exchange.base import ExchangeSettings, History, Trained
from poseidon.exchange.factors.peers import Peers
from poseidon.exchange.factors.products import Kernel, Scratch, apply_factors, factors_sum_of_squares
from poseidon.exchange.factors.session import FactorSession, FactorTable, Pair, Round
from poseidon.exchange.observe.traffic import Flights, Traffic
from poseidon.exchange.side_stream import Event, InOrder, SideStream
from ps_server.errors import as_server_error
from ps_server.keys import Keyring
from ps_server.numerics import prepare_thread
from ps_server.rules import clip_factor, history_count
from ps_server.trace import NO_TRACE, Tracer, Track


class NormMeeting(Protocol):
    """Where the norm over all gradients is agreed on; `ps_server.Client` is one."""

    def add_norm(self, clock: int, squares: float) -> None:
        """Rank 0: the sum of squares of the gradients that travel as factors."""

    def total_norm(self, clock: int) -> float:
        """The sum of squares over all gradients."""


class FactorChannel:
    """The tensors of an exchange that travel as factors, by their index there.

    Args:
        trained: index -> tensor.
        settings: common to all tensors.
        rank: this worker.
        workers: number of workers.
        staleness: the bound of every tensor.
        listen: address to listen on for the other workers.
        token: the job's secret.
        keys: own pair, and those of all workers by rank; None: all is in clear.
        norms: needed with `settings.clip` at staleness 0.
        timeout_s: longest time that any call waits.
        trace: told of each pair sent and received, and of each round applied.
    """

    def __init__(
        self,
        trained: Mapping[int, Trained],
        settings: ExchangeSettings,
        *,
        rank: int,
        workers: int,
        staleness: int,
        listen: str,
        token: bytes,
        keys: Keyring | None = None,
        norms: NormMeeting,
        timeout_s: float,
        trace: Tracer = NO_TRACE,
    ) -> None:
        self._settings = settings
        self._trace = trace
        self._flights = Flights(len(trained))
        self._workers = workers
        self._rank = rank
        self._staleness = staleness
        self._norms = norms
        self._iteration = self._start_clock = settings.start_clock
        device = next(iter(trained.values())).tensor.device
        self._side = SideStream(device)
        self._scratch = Scratch(device)
        self.kernel = Kernel.FUSED
        """The same on all workers; set before `open`."""
        self._weights = {
            index: _Weight(table, trained[index], settings.start_clock, staleness, self._side)
            for table, index in enumerate(sorted(trained))
        }
        tables = [
            FactorTable(name=w.name, outputs=w.tensor.shape[0], inputs=w.tensor.shape[1], staleness=staleness)
            for w in self._weights.values()
        ]
        session = FactorSession(rank, workers, tables, settings.start_clock)
        self.peers = Peers(session, listen=listen, token=token, keys=keys, timeout_s=timeout_s, trace=trace)
        self._in_order = InOrder(device, f"factors-out-{rank}", self._sending_failed)
        self._rebuilding = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._rebuild, name=f"rebuild-{rank}", daemon=True)

    def take_first(self, histories: Mapping[int, History]) -> None:
        """Take the tensors' present values as the first ones.

        Args:
            histories: index -> what the rule kept; empty: zeros.
        """
        for index, weight in self._weights.items():
            weight.open(histories.get(index, ()))

    def rewind(self, clock: int) -> None:
        """Begin at another clock; nobody has sent anything. `take_first` follows."""
        with self.peers.monitor:
            self._iteration = self._start_clock = clock
            session = self.peers.session
            self.peers.session = FactorSession(session.rank, session.workers, session.tables, clock)
            for weight in self._weights.values():
                weight.applied = weight.released = clock

    def open(self, addresses: Sequence[str]) -> None:
        """Meet the others; `take_first` comes before.

        Args:
            addresses: of all workers' channels, by rank.
        """
        self.peers.connect(addresses)
        self._thread.start()

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`."""
        with self.peers.monitor:
            self._iteration = iteration
            for weight in self._weights.values():
                weight.begun = False
                weight.rates[iteration] = rate

    def begin(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """See `Exchange.begin_factors`."""
        weight, iteration, event = self._weights[index], self._iteration, self._side.mark()
        weight.begun = True
        self._flights.depart(weight.table)

        def send() -> None:
            with self._side.after(event):
                pair = weight.copy(iteration, u_KN, v_KM)
            self._side.finish()
            if self._staleness and self._settings.clip is not None:
                weight.kept = pair
            else:
                self.peers.broadcast(weight.table, pair)

        self._in_order.call(send)

    def release(self, index: int) -> None:
        """See `Exchange`."""
        with self.peers.monitor:
            weight = self._weights[index]
            weight.released, weight.left = self._iteration + 1, self._side.mark()
            self.peers.monitor.notify()

    def wait(self, index: int) -> None:
        """See `Exchange`."""
        self._wait(index, self._iteration - self._staleness)

    def kept_sum_of_squares(self) -> float:
        """Staleness > 0 with a limit: of this worker's own gradients of this iteration."""
        self._in_order.drain()
        kept = [weight.kept for weight in self._weights.values() if weight.kept is not None]
        return sum(factors_sum_of_squares(torch.from_numpy(p.u), torch.from_numpy(p.v)) for p in kept)

    def finish(self, limit: float) -> None:
        """See `Exchange`.

        Args:
            limit: what to multiply this worker's gradients by that were kept back for it.
        """
        for index, weight in self._weights.items():
            if not weight.begun:
                outputs, inputs = weight.tensor.shape
                self.begin(index, torch.empty(0, outputs), torch.empty(0, inputs))
                self._in_order.drain()
            if weight.kept is not None:
                pair, weight.kept = weight.kept, None
                pair.u[:] *= limit
                self.peers.broadcast(weight.table, pair)
            if weight.released <= self._iteration:
                self.release(index)

    def settle(self, clock: int) -> None:
        """Bring every tensor to the state after all workers' first `clock` iterations."""
        for index in self._weights:
            self._wait(index, clock)

    def replicated_state(self) -> dict[str, Tensor]:
        """See `Exchange`: the histories, and at staleness > 0 the weights without this worker's own changes ahead of the others."""
        state: dict[str, Tensor] = {}
        for weight in self._weights.values():
            state |= {f"{weight.name}, history {number}": h for number, h in enumerate(weight.history)}
            if weight.base is not weight.tensor:
                state[f"{weight.name}, base"] = weight.base
        return state

    def history(self, index: int) -> History:
        """What the rule keeps for a tensor; call it after `settle`."""
        return [part.detach().cpu().numpy().copy() for part in self._weights[index].history]

    def traffic(self) -> dict[int, Traffic]:
        """See `CountsTraffic`."""
        peers = self.peers
        return {
            index: Traffic(
                bytes_out=peers.bytes_out[w.table],
                bytes_in=peers.bytes_in[w.table],
                on_way_s=self._flights.total_s(w.table),
            )
            for index, w in self._weights.items()
        }

    def close(self) -> None:
        """Stop. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        self._in_order.close()
        self.peers.close()
        if self._thread.ident is not None:
            self._thread.join()

    def _wait(self, index: int, clock: int) -> None:
        weight = self._weights[index]
        clock = max(clock, self._start_clock)
        self.peers.wait_for(
            lambda: True if weight.applied >= clock else None,
            f"the factors of '{weight.name}' of iteration {clock - 1} did not come",
            table=weight.table,
        )
        self._side.join(weight.done)
        if self._staleness:
            with self._rebuilding:
                self._publish(weight)

    def _sending_failed(self, error: Exception) -> None:
        self.peers.monitor.fail(as_server_error(error, "sending factors failed"))

    # -- the background ------------------------------------------------------------------------------------

    def _rebuild(self) -> None:
        prepare_thread()
        try:
            with torch.no_grad():
                while self._rebuild_next():
                    pass
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: its owner raises the error
            self.peers.monitor.fail(as_server_error(error, "rebuilding gradients from factors failed"))

    def _rebuild_next(self) -> bool:
        """Wait for work and do it; returns False once closed."""

        def found() -> list[_Weight] | None:
            return [] if self._closing else self._ready() or None

        ready = self.peers.monitor.wait_for(found, "there is nothing to apply", limited=False)
        if not ready:
            return False
        if self._staleness == 0 and self._settings.clip is not None:
            self._apply_limited()
        else:
            with self._rebuilding:  # no reader may see the time between taking a round and having applied it
                self._apply(ready[0], self._stacked(ready[0]), 1.0)
        return True

    def _ready(self) -> list[_Weight]:
        """The weights whose next round can be applied, most urgent first."""
        session = self.peers.session
        ready = [weight for weight in self._weights.values() if self._may_apply(weight, session)]
        limited = self._staleness == 0 and self._settings.clip is not None
        return [] if limited and len(ready) < len(self._weights) else ready

    def _may_apply(self, weight: _Weight, session: FactorSession) -> bool:
        left = self._staleness > 0 or weight.released > weight.applied
        return left and session.is_ready(weight.table)

    def _apply_limited(self) -> None:
        """All weights have their rounds of one iteration: agree on the norm, then apply them."""
        rounds = [(weight, self._stacked(weight)) for weight in self._weights.values()]
        clock = rounds[0][1].clock
        if self._rank == 0:
            squares = sum(factors_sum_of_squares(r.u_BN, r.v_BM) for _, r in rounds)
            self._norms.add_norm(clock, squares / self._workers**2)
        factor = clip_factor(self._norms.total_norm(clock), self._settings.clip)
        for weight, stacked in rounds:
            self._apply(weight, stacked, factor)

    def _stacked(self, weight: _Weight) -> _Stacked:
        taken = self.peers.take(weight.table)
        assert taken is not None
        name = str(weight.table) if self._settings.clip is not None else ""
        with self._side.after(weight.left):
            return _Stacked(taken, weight, name, self._scratch)

    def _apply(self, weight: _Weight, stacked: _Stacked, limit: float) -> None:
        began_ns = self._trace.now()
        with self._side.after(weight.left):
            scale = limit * self._settings.gradient_scale / self._workers
            weight.step(stacked.clock, stacked.u_BN, stacked.v_BM, scale, self._scratch, self.kernel)
            done = self._side.mark()
        self._side.finish()  # the rounds' memory on the host may go
        self._trace.span(Track.REBUILD, "apply", weight.name, began_ns, clock=stacked.clock)
        self._flights.arrive(weight.table)
        with self.peers.monitor:
            weight.applied, weight.done = stacked.clock + 1, done
            self.peers.monitor.notify()

    def _publish(self, weight: _Weight) -> None:
        """Staleness > 0: the tensor becomes `base` with this worker's own open pairs on top."""
        with self.peers.monitor:
            own = [
                (clock, pair)
                for clock, pair in self.peers.session.own(weight.table)
                if clock >= weight.applied
            ]
        with torch.no_grad():
            weight.replay(own, self._settings.gradient_scale / self._workers, self._scratch, self.kernel)


class _Stacked:
    """A round with its pairs below each other, on the weight's device."""

    def __init__(self, taken: Round, weight: _Weight, name: str, scratch: Scratch) -> None:
        outputs, inputs = weight.tensor.shape
        self.clock = taken.clock
        self.u_BN = scratch.stack(f"u{name}", [pair.u for pair in taken.pairs], outputs)
        self.v_BM = scratch.stack(f"v{name}", [pair.v for pair in taken.pairs], inputs)


class _Weight:
    """One tensor with what this worker keeps of it."""

    def __init__(self, table: int, trained: Trained, clock: int, staleness: int, side: SideStream) -> None:
        self.table = table
        self.name = trained.name
        self.rule = trained.rule
        self.tensor = trained.tensor.detach()
        self.base = torch.empty_like(self.tensor) if staleness else self.tensor
        self.history = [torch.zeros_like(self.tensor) for _ in range(history_count(self.rule.kind))]
        self.replayed = [torch.empty_like(h) for h in self.history] if staleness else []
        self.rates: dict[int, float] = {}
        self.begun = False
        self.kept: Pair | None = None
        self.applied = clock  # rounds of iterations < applied are in base
        self.released = clock  # this worker's passes of iterations < released have left the layer
        self.left: Event = None
        self.done: Event = None
        self._side = side
        # A pair's memory is free again once every other worker has it, which is sure 2 s + 2 iterations later: its
        # reader at clock c had everybody's pairs of iterations < c - s, each sent by one who had all of < c - 2s - 1.
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * (2 * staleness + 2)

    def open(self, history: History) -> None:
        """Take the tensor as the first value."""
        if self.base is not self.tensor:
            self.base.copy_(self.tensor)
        for own, given in zip(self.history, history, strict=False):
            own.copy_(torch.from_numpy(given).reshape(own.shape))

    def copy(self, iteration: int, u_KN: Tensor, v_KM: Tensor) -> Pair:
        """Copy a pair into memory on the host that is kept and reused; on the current stream."""
        place, rows = iteration % len(self._buffers), u_KN.shape[0]
        buffers = self._buffers[place]
        if buffers is None or buffers[0].shape[0] < rows:
            room = max(rows, 1)
            buffers = (
                self._side.host_buffer(room, u_KN.shape[1]),
                self._side.host_buffer(room, v_KM.shape[1]),
            )
            self._buffers[place] = buffers
        u, v = buffers[0][:rows], buffers[1][:rows]
        u.copy_(u_KN.detach(), non_blocking=True)
        v.copy_(v_KM.detach(), non_blocking=True)
        return Pair(u.numpy(), v.numpy())

    def step(
        self, clock: int, u_BN: Tensor, v_BM: Tensor, scale: float, scratch: Scratch, kernel: Kernel
    ) -> None:
        """Apply round `clock` to the base."""
        apply_factors(
            self.rule,
            u_BN,
            v_BM,
            self.base,
            self.history,
            rate=self.rates.pop(clock),
            step=clock,
            scale=scale,
            scratch=scratch,
            kernel=kernel,
        )

    def replay(self, own: Sequence[tuple[int, Pair]], scale: float, scratch: Scratch, kernel: Kernel) -> None:
        """Make the tensor what the base would be after rounds of these pairs alone."""
        self.tensor.copy_(self.base)
        if not own:
            return
        for copy, history in zip(self.replayed, self.history, strict=True):
            copy.copy_(history)
        outputs, inputs = self.tensor.shape
        for clock, pair in own:
            apply_factors(
                self.rule,
                scratch.stack("own u", [pair.u], outputs),
                scratch.stack("own v", [pair.v], inputs),
                self.tensor,
                self.replayed,
                rate=self.rates[clock],
                step=clock,
                scale=scale,
                scratch=scratch,
                kernel=kernel,
            )
