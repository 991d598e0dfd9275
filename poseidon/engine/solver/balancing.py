"""The measurements of one process for the balance of its job, and their collection.

Law: measuring changes no bit. While nothing moves it costs a few looks at a clock in an iteration,
and a collection of two numbers for each measurement, for which nobody waits: its result is read
one iteration later.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence

import torch

from poseidon.engine.solver.balancer import Balancer, Move, Times
from poseidon.engine.solver.replica import WorkerNets
from poseidon.exchange.job_control import JobControl
from ps_server import Collection

_TIMES = struct.Struct("<dd")


class Balancing:
    """The balance of a job, as one of its processes takes part in it.

    Args:
        balancer: decides, on all processes alike.
        control: of the exchange.
        device: that computes.
        waited_s: returns the seconds that this process has waited for others so far.
        on_arrival: called with the nets that a move has brought to this process.
        now_s: seconds, monotonic.
    """

    def __init__(
        self,
        balancer: Balancer,
        control: JobControl,
        *,
        device: torch.device,
        waited_s: Callable[[], float],
        on_arrival: Callable[[Sequence[WorkerNets]], None] = lambda _: None,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._balancer = balancer
        self._control = control
        self._device = device
        self._waited_s = waited_s
        self._now_s = now_s
        self.on_arrival = on_arrival
        self._began = (0.0, 0.0)
        self._own_s: list[float] = []
        self._whole_s: list[float] = []
        self._times: Collection | None = None

    def begin(self) -> None:
        """Note that an iteration begins."""
        self._began = (self._now_s(), self._waited_s())

    def end(self, iteration: int) -> None:
        """Note that it has ended.

        Args:
            iteration: iterations finished before it.
        """
        if not self._balancer.counts(iteration):
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        began_s, waited_s = self._began
        whole_s = self._now_s() - began_s
        self._whole_s.append(whole_s)
        self._own_s.append(max(0.0, whole_s - (self._waited_s() - waited_s)))

    def decide(self, iteration: int, *, last: bool) -> Move | None:
        """Return the move that is due after so many iterations; all processes call it after each.

        Args:
            iteration: iterations finished.
            last: no iteration follows.
        """
        if self._times is not None:
            return self._decision(self._times, iteration)
        if self._balancer.is_due(iteration) and not last:
            own_s, whole_s = (sum(times) / len(times) for times in (self._own_s, self._whole_s))
            self._times = self._control.gather(_TIMES.pack(own_s, whole_s))
        return None

    def _decision(self, collected: Collection, iteration: int) -> Move | None:
        payloads = collected.result()
        self._times = None
        self._own_s.clear()
        self._whole_s.clear()
        found = map(_TIMES.unpack, payloads)
        times = [Times(own_s=own_s, whole_s=whole_s) for own_s, whole_s in found]
        return self._balancer.decide(iteration, times)

    def finish(self) -> None:
        """End the collection that is open, if any; all processes call it after the same
        iteration.
        """
        if self._times is not None:
            self._times.result()
