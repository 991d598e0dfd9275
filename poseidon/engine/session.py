"""The session: the training loop of one worker, which follows a table (`loop_table.py`) and counts.

A driver reports what happens as events: the module runs, a backward pass begins or ends, the script
calls `step`. It does the acts that it gets back, in their order, on the exchange.

Law: this file does no I/O and reads no clock. It knows neither the exchange nor the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from poseidon.base.call_names import LoopPosition
from poseidon.engine.loop_table import (
    BETWEEN,
    ILLEGAL,
    SENTENCES,
    Act,
    Applies,
    LoopEvent,
    State,
    table_of,
)
from poseidon.errors import UsageError


class TrainingSession:
    """The training loop of one worker.

    Args:
        passes: backward passes of a step, at most.
        turns: virtual workers of this process.
        behind, alone: see `table_of`.
        words: returns what the driver knows beside, for messages.

    Attributes:
        passes: backward passes of this turn that have ended.
        turn: the place of the virtual worker whose turn it is among those of this process.
        steps: finished.
        iterations: of the exchange, ended.
        left_out: those among both that the job has made without this worker
            (`poseidon/exchange/rounds/quorum.py`).
        collections: waits for all other workers, begun.
    """

    def __init__(
        self,
        applies: Applies,
        *,
        passes: int = 1,
        turns: int = 1,
        behind: bool = False,
        alone: bool = False,
        rank: int = 0,
        words: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        self._table = table_of(applies, behind=behind, alone=alone)
        self._most, self._turns, self.rank, self._words = passes, turns, rank, words
        self.state = State.NEW
        self.passes = self.turn = 0
        self.steps = self.iterations = self.left_out = self.collections = 0

    def check(self, event: LoopEvent, **words: object) -> tuple[Act, ...]:
        """Return what the driver will do at an event, which does not happen yet.

        Args:
            words: for messages; `call` is the script's call.

        Raises:
            UsageError: it is not legal now.
        """
        found = self._table[self.state].get(event)
        if found is None:
            raise UsageError(self._sentence(event, words))
        return found.acts

    def on(self, event: LoopEvent, **words: object) -> tuple[Act, ...]:
        """Change the state at an event. Return what the driver does.

        Raises:
            UsageError: it is not legal now; nothing has changed.
        """
        acts = self.check(event, **words)
        after = self._table[self.state][event].state
        if after is None:
            return acts
        if after is State.PASSED:
            self.passes += 1
        elif after not in (State.BACKWARD, State.APPLYING):
            self.passes = 0
        if event is LoopEvent.TURN:
            self.turn += 1
        elif event is LoopEvent.REPEAT or after in (State.COMING, State.MEANS):
            self.turn = 0
        self.state = self._exact(after)
        return acts

    def _exact(self, after: State) -> State:
        """Return the state that the counts make of a state of the table."""
        if after is State.PASSED and self.passes >= self._most:
            return State.FULL
        if after is State.BEGUN and self.turn:
            return State.TURN
        return after

    def end_iteration(self, finished: int) -> None:
        """Count an iteration."""
        self.iterations += 1
        left_out = finished - self.iterations
        self.iterations, self.steps = self.iterations + left_out, self.steps + left_out
        self.left_out += left_out

    def continue_from(self, *, steps: int | None = None, iterations: int | None = None) -> None:
        """Set counts to a saved state's."""
        self.steps = self.steps if steps is None else steps
        self.iterations = self.iterations if iterations is None else iterations

    def position(self, current: str = "") -> LoopPosition:
        """Return what the launcher is told.

        Args:
            current: the call in which this worker waits for the others; empty: none.
        """
        return LoopPosition(
            steps=self.steps,
            iterations=self.iterations,
            collections=self.collections,
            collection=current,
            loop=None if self.left_out else 0,
        )

    @property
    def has_begun(self) -> bool:
        """Whether an iteration of the exchange is under way."""
        return self.state not in BETWEEN

    @property
    def is_first_turn(self) -> bool:
        return self.turn == 0

    @property
    def is_last_turn(self) -> bool:
        return self.turn == self._turns - 1

    @property
    def last_step(self) -> int:
        """The step that is under way since its forward pass, else the last one that has ended; the
        first one is 1.
        """
        return self.steps + (self.state not in (*BETWEEN, State.AHEAD))

    @property
    def place(self) -> str:
        """Where in its loop this worker is, for messages."""
        if self.state is State.MEANS:
            return f"in step {self.steps + 1}, after average_gradients()"
        if self.state in (State.BACKWARD, State.PASSED, State.FULL, State.APPLYING, State.TURN):
            return f"in step {self.steps + 1}, after backward()"
        return f"after step {self.steps}" if self.steps else "before step 1"

    def _sentence(self, event: LoopEvent, words: Mapping[str, object]) -> str:
        of_event = SENTENCES.get(event, {})
        sentence = of_event.get(self.state) or of_event.get(None) or ILLEGAL
        known = {
            "call": event.value,
            "state": self.state.value,
            "legal": ", ".join(one.value for one in self._table[self.state]) or "nothing",
            "place": self.place,
            "rank": self.rank,
            "step": self.steps + 1,
            "steps": self.steps,
            "passes": self.passes,
            "most": self._most,
        }
        return sentence.format_map({**known, **self._words(), **words})
