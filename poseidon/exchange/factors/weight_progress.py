"""How far this worker is with one weight that travels as factors. A state machine without I/O.

Each clock counts iterations, from the one that the job begins at:

    handed_in   this worker has handed in its pair of all iterations below it       loop: `hand_in`
    released    this worker's backward passes below it have left the weight         loop: `release`
    applied     the rounds of all workers below it are in the weight's base         rebuild thread: `end_round`

An iteration's transitions, in this order: `start`, `hand_in`, (`hold`, `take_held`), `release`,
`begin_round`, `end_round`. At staleness s > 0 the rounds follow up to s iterations later, and need
no `release`.

Law: all calls are made under one lock, the monitor of `FactorPeers`. Each field is written by the methods
named here and by `rewind`, which is called while no pair is on its way.
"""

from __future__ import annotations

from typing import NamedTuple

from poseidon.exchange.device import DONE, Event
from poseidon.exchange.factors.factor_rounds import Pair


class RoundStep(NamedTuple):
    """What a round needs besides its pairs.

    Attributes:
        rate: the solver's rate of the round's iteration.
        left: after which the weight may be written to.
    """

    rate: float
    left: Event


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
        self._left: Event = DONE
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
        self.released, self._left = iteration + 1, left

    @property
    def may_apply(self) -> bool:
        """Whether the weight's base may be written to."""
        return self.released > self.applied or not self._needs_release

    def rate(self, iteration: int) -> float:
        """Return the solver's rate of an iteration that is started and not applied."""
        return self._rates[iteration]

    def begin_round(self, clock: int) -> RoundStep:
        """Begin to apply the round of iteration `clock`."""
        assert clock == self.applied, f"round {clock} comes after {self.applied} rounds"
        assert self.may_apply, "the backward pass has not left the weight"
        return RoundStep(self._rates[clock], self._left)

    def end_round(self, done: Event) -> None:
        """Note that the round is applied.

        Args:
            done: after which it is, on a GPU.
        """
        del self._rates[self.applied]
        self.applied, self.done = self.applied + 1, done
