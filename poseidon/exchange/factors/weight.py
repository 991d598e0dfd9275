"""One weight that travels as factors, with what this worker keeps of it: its base, its history, memory
for its pairs, and how far this worker is with it.

`WeightProgress` is a state machine without I/O. Each clock counts iterations, from the one that the job
begins at:

    handed_in   this worker has handed in its pair of all iterations below it       loop: `hand_in`
    released    this worker's backward passes below it have left the weight         loop: `release`
    applied     the rounds of all workers below it are in the weight's base         rebuild thread: `end_round`

An iteration's transitions, in this order: `start`, `hand_in`, (`hold`, `take_held`), `release`,
`begin_round`, `end_round`. At staleness s > 0 the rounds follow up to s iterations later, and need no
`release`.

Law: all its calls are made under one lock, the monitor of `FactorPeers`. Each field is written by the
methods named here and by `rewind`, which is called while no pair is on its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from poseidon.exchange.device import DONE, Event, device_of
from poseidon.exchange.factors.factor_rounds import Pair
from poseidon.exchange.factors.products import Scratch, apply_factors
from poseidon.exchange.ruled import RuledTensor


class WeightProgress:
    """The clocks of one weight on one worker.

    Args:
        clock: the iteration to begin at.
    """

    def __init__(self, clock: int, staleness: int) -> None:
        self._needs_release = staleness == 0
        self.rewind(clock)

    def rewind(self, clock: int) -> None:
        """Begin at a different clock."""
        self.handed_in = self.released = self.applied = clock
        self.done: Event = DONE
        """After which the rounds below `applied` are in the base."""
        self.left: Event = DONE
        """After which the base may be written to."""
        self.held: Pair | None = None
        """The pair that is kept back, if any."""
        self._rates: dict[int, float] = {}

    def start(self, iteration: int, rate: float) -> None:
        """Begin an iteration."""
        self._rates[iteration] = rate

    def hand_in(self, iteration: int) -> None:
        """Note that this worker's pair of the iteration is on its way to `FactorPeers`."""
        self.handed_in = iteration + 1

    def hold(self, pair: Pair) -> None:
        """Keep the pair back until the limit on the gradients' norm is known."""
        assert self.held is None, "a pair is held already"
        self.held = pair

    def take_held(self) -> Pair | None:
        """Return the pair that is kept back, if any, and keep it no longer."""
        held, self.held = self.held, None
        return held

    def release(self, iteration: int, left: Event) -> None:
        """Note that the iteration's backward pass has left the weight.

        Args:
            left: after which it has, on a GPU.
        """
        self.released, self.left = iteration + 1, left

    @property
    def may_apply(self) -> bool:
        """Whether the weight's base may be written to."""
        return self.released > self.applied or not self._needs_release

    def rate(self, iteration: int) -> float:
        """Return the solver's rate of an iteration that is started and not applied."""
        return self._rates[iteration]

    def begin_round(self) -> float:
        """Begin to apply the next round; return the solver's rate of its iteration."""
        assert self.may_apply, "the backward pass has not left the weight"
        return self._rates[self.applied]

    def end_round(self, done: Event) -> None:
        """Note that the round is applied.

        Args:
            done: after which it is, on a GPU.
        """
        del self._rates[self.applied]
        self.applied, self.done = self.applied + 1, done


class FactorWeight:
    """One weight on one worker.

    Args:
        table: its id among the weights that travel as factors.
        ruled: the tensor, N x M.
        clock: the iteration to begin at.
        scratch: memory for products, of all weights.
    """

    def __init__(
        self,
        table: int,
        ruled: RuledTensor,
        *,
        clock: int,
        staleness: int,
        scratch: Scratch,
    ) -> None:
        self.table = table
        self.trained = trained = ruled.trained
        self.tensor = trained.tensor.detach()
        self.base = torch.empty_like(self.tensor) if staleness else self.tensor
        """The weight after all rounds that are applied."""
        self.history = [own.view_as(self.tensor) for own in ruled.history]
        """What the rule keeps, after the same rounds."""
        self.progress = WeightProgress(clock, staleness)
        self._replayed = [torch.empty_like(h) for h in self.history] if staleness else []
        self._device = device_of(self.tensor.device)
        self._scratch = scratch
        # A pair's memory is free again once every other worker has it, which is certain 2 s + 2
        # iterations later: a worker at clock c has all pairs of iterations < c - s, each sent by a
        # worker that had all of < c - 2s - 1.
        self._buffers: list[Tensor | None] = [None] * (2 * staleness + 2)

    def open(self) -> None:
        """Take the tensor as the first value."""
        if self.base is not self.tensor:
            self.base.copy_(self.tensor)

    def copy(
        self, iteration: int, u_KN: Tensor, v_KM: Tensor, stream: Any, ready: Event
    ) -> tuple[Pair, Event]:
        """Begin to copy a pair into memory on the host that is kept and reused. Return it, and the
        event after which it is there.

        Args:
            stream: for copies from a device.
            ready: the event after which the pair may be read.
        """
        place, size = iteration % len(self._buffers), u_KN.numel() + v_KM.numel()
        memory = self._buffers[place]
        if memory is None or len(memory) < size:
            memory = self._buffers[place] = self._device.host_memory(max(size, 1))
        u, v = memory[:size].split([u_KN.numel(), v_KM.numel()])
        self._device.copy(u_KN.detach(), u.view_as(u_KN), stream, ready)
        copied = self._device.copy(v_KM.detach(), v.view_as(v_KM), stream, ready)
        pair = Pair.over(memory[:size].numpy(), len(u_KN), u_KN.shape[1], v_KM.shape[1])
        return pair, copied

    def apply(self, u_BN: Tensor, v_BM: Tensor, *, rate: float, scale: float) -> None:
        """Apply the next round to the base.

        Args:
            u_BN: the left factors of all workers, below each other.
            v_BM: the right factors.
            rate: the solver's rate.
            scale: what to multiply the product by.
        """
        apply_factors(
            self.trained.rule,
            u_BN,
            v_BM,
            self.base,
            self.history,
            rate=rate,
            step=self.progress.applied,
            scale=scale,
            scratch=self._scratch,
        )

    def replay(self, own: Sequence[tuple[int, float, Pair]], *, scale: float) -> None:
        """Make the tensor what the base would be after rounds of these pairs alone.

        Args:
            own: this worker's pairs, in their order, as (iteration, rate, pair).
            scale: what to multiply each product by.
        """
        self.tensor.copy_(self.base)
        if not own:
            return
        for copy, history in zip(self._replayed, self.history, strict=True):
            copy.copy_(history)
        for clock, rate, pair in own:
            apply_factors(
                self.trained.rule,
                self._scratch.own("own u", pair.u),
                self._scratch.own("own v", pair.v),
                self.tensor,
                self._replayed,
                rate=rate,
                step=clock,
                scale=scale,
                scratch=self._scratch,
            )
