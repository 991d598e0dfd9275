"""The loop of a module whose gradients torch reduces in `backward()`, by an exchange of its own.

Law: an iteration begins with the first gradient of a backward pass, and the pass ends once all
means are there. So an error is raised in the script's `backward()`.
"""

from __future__ import annotations

from collections.abc import Sequence

from poseidon.base.call_names import STEP
from poseidon.engine.loop_table import LoopEvent, State
from poseidon.engine.mean_loop import MeanLoop
from poseidon.engine.worker_context import WorkerContext
from poseidon.errors import UsageError, counted

TAKES_TURNS = (
    "{what} cannot be used with {virtual} virtual workers on {workers}; start as many workers as "
    "virtual workers, or use poseidon.distribute"
)


def check_one_batch(context: WorkerContext, what: str) -> None:
    """Check that each worker computes for itself alone.

    Raises:
        UsageError: one computes for several virtual workers.
    """
    if context.member.takes_turns:
        virtual = context.member.by_worker
        workers = counted(virtual.processes, "worker")
        raise UsageError(TAKES_TURNS.format(virtual=virtual.count, workers=workers, what=what))


class MeanReducer(MeanLoop):
    """Reduces gradients by an exchange."""

    def check_asked_to_stop(self) -> None:
        """Check whether training continues, before a forward pass.

        Raises:
            KeyboardInterrupt: the job was asked to stop.
        """
        if self._observed is not None and self.is_asked_to_stop():
            raise KeyboardInterrupt(f"the job was asked to stop after step {self._session.steps}")

    def _watch(self) -> None:
        """Begin the first forward pass of the exchange, which is open, and watch its layers."""
        self._on(LoopEvent.FORWARD)
        assert self._observed is not None
        self._observed.watch()

    def _begin(self) -> None:
        """Note that a gradient is to be sent."""
        if self._session.state is not State.BACKWARD:
            self._on(LoopEvent.BACKWARD)

    def _send_rest(self) -> None:
        self._report(STEP)

    def _collect(self, payload: bytes) -> Sequence[bytes]:
        return self._exchange.control.all_gather(payload)

    def _report(self, current: str = "") -> None:
        self._context.report(self._session.position(current))
