"""The rounds of factors on one worker: a thread rebuilds each gradient from the factors of all workers,
and applies the rule.

Law: a call of the thread follows each change after which a round can be applied.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from poseidon.exchange.base import ExchangeSettings
from poseidon.exchange.device import Streams, device_of
from poseidon.exchange.factors.factor_rounds import FactorPeers
from poseidon.exchange.factors.products import Scratch, factors_sum_of_squares
from poseidon.exchange.factors.weight import FactorWeight
from poseidon.exchange.membership import Membership
from poseidon.exchange.serial_executor import SerialExecutor
from ps_server import Client
from ps_server.rules import clip_factor
from ps_server.trace import Track


class Rebuilding:
    """Applies the rounds of all weights.

    Args:
        weights: by table.
        scratch: memory for products, of all weights.
        norms: the connection to the shards, used with `settings.clip` at staleness 0.

    Attributes:
        streams: of the weights' device.
    """

    def __init__(
        self,
        weights: Sequence[FactorWeight],
        peers: FactorPeers,
        scratch: Scratch,
        settings: ExchangeSettings,
        member: Membership,
        norms: Client,
    ) -> None:
        self.scratch = scratch
        self.streams = Streams.of(device_of(weights[0].tensor.device))
        self._weights = weights
        self._peers = peers
        self._settings = settings
        self._member = member
        self._norms = norms
        self._lock = threading.Lock()
        """Held from taking a round until it is applied, and by `publish`."""
        self._calls = SerialExecutor(
            f"rebuild-{peers.session.rank}",
            peers.peers.failing("rebuilding gradients from factors failed"),
            threaded=True,
            timeout_s=peers.peers.timeout_s,
        )
        peers.changed = self.advance

    def advance(self) -> None:
        """Let the thread apply what can be applied. Under the monitor, after each change."""
        if self._ready():
            self._calls.call(self._apply_ready)

    def close(self) -> None:
        """End the thread, once the connections are closed."""
        self._calls.close()

    def _apply_ready(self) -> None:
        with self.streams.device.on(self.streams.into):
            while ready := self._ready():
                self._apply_first(ready)

    def _apply_first(self, ready: Sequence[FactorWeight]) -> None:
        """Apply the next round of the most urgent weight; with a limit on the norm, of all."""
        with self._lock:  # `wait` must not run between taking a round and having applied it
            rounds = [self._take(w) for w in (ready if self._is_limited else ready[:1])]
            factor = self._limit(rounds) if self._is_limited else 1.0
            for stacked in rounds:
                self._apply(stacked, factor)

    @property
    def _is_limited(self) -> bool:
        """Whether the norm of all gradients of an iteration is agreed on before its rounds are
        applied.
        """
        return self._member.options.staleness == 0 and self._settings.clip is not None

    def _ready(self) -> list[FactorWeight]:
        """Return the weights whose next round can be applied, most urgent first: all, or with a
        limit on the norm all or none.
        """
        with self._peers.monitor:
            if self._peers.monitor.closed:
                return []
            is_ready = self._peers.session.is_ready
            ready = [w for w in self._weights if w.progress.may_apply and is_ready(w.table)]
            return [] if self._is_limited and len(ready) < len(self._weights) else ready

    def _limit(self, rounds: Sequence[_Stacked]) -> float:
        clock = rounds[0].weight.progress.applied
        if self._member.network.rank == 0:
            count = self._member.placed.count
            squares = [factors_sum_of_squares(r.u_BN, r.v_BM) / count**2 for r in rounds]
            self._norms.add_norm(clock, squares)
        return clip_factor(self._norms.total_norm(clock), self._settings.clip)

    def _take(self, weight: FactorWeight) -> _Stacked:
        """Take the weight's next round, and stack its pairs on the weight's device."""
        with self._peers.monitor:
            pairs = self._peers.session.take(weight.table)
            assert pairs is not None
            rate = weight.progress.begin_round()
        outputs, inputs = weight.tensor.shape
        name = str(weight.table) if self._settings.clip is not None else ""
        self.streams.device.wait(weight.progress.left)
        u_BN = self.scratch.stack(f"u{name}", [pair.u for pair in pairs], outputs)
        v_BM = self.scratch.stack(f"v{name}", [pair.v for pair in pairs], inputs)
        return _Stacked(weight, rate, u_BN, v_BM)

    def _apply(self, stacked: _Stacked, limit: float) -> None:
        weight, rate, u_BN, v_BM = stacked
        trace, began_ns = self._peers.trace, self._peers.trace.now()
        scale = limit * self._settings.gradient_scale / self._member.placed.count
        weight.apply(u_BN, v_BM, rate=rate, scale=scale)
        done = self.streams.device.event()
        done.synchronize()  # the rounds' memory on the host may go
        name, clock = weight.trained.name, weight.progress.applied
        trace.span(Track.REBUILD, "apply", name, began_ns, clock=clock)
        self._peers.transit.arrive(weight.table)
        with self._peers.monitor:
            weight.progress.end_round(done)
            self._peers.monitor.notify()

    def publish(self, weight: FactorWeight) -> None:
        """Staleness > 0: make the tensor `base` with this worker's own open pairs on top."""
        device, _, side = self.streams
        scale, ready = self._settings.gradient_scale / self._member.placed.count, device.event()
        progress = weight.progress
        # where rounds are applied: they use the same memory
        with self._lock, torch.no_grad(), device.on(side):
            with self._peers.monitor:
                own = [
                    (clock, progress.rate(clock), pair)
                    for clock, pair in self._peers.session.own(weight.table)
                    if clock >= progress.applied
                ]
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
