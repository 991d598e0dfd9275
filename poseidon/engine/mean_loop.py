"""The loop of an exchange whose means somebody else applies: torch's DistributedDataParallel and
`fully_shard`, or a solver of pycaffe.

Law: an iteration begins with the first gradient, and ends once all means are there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import nn

from poseidon.base.call_names import STEP
from poseidon.engine.loop_collections import LoopCollections
from poseidon.engine.loop_table import Act, Applies, LoopEvent, State
from poseidon.engine.memory import StopRequested
from poseidon.engine.session import TrainingSession
from poseidon.engine.worker_context import Observed, WorkerContext
from poseidon.errors import UsageError, counted
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.exchange import Exchange


class MeanLoop(ABC):
    """Brings means by an exchange, which `_open` builds."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        """The worker in its job, and in its loop once the exchange is open."""
        self._session = TrainingSession(Applies.WORKERS, rank=context.rank)
        self._observed: Observed | None = None

    def close(self) -> None:
        """Leave the exchange."""
        if self._observed is not None:
            self._observed.close()

    def is_asked_to_stop(self) -> bool:
        """Return whether the job was asked to stop after an iteration that this loop has made."""
        return self._exchange.control.is_asked_to_stop(self._session.iterations)

    def _open(
        self,
        context: WorkerContext,
        tensors: Sequence[Trained],
        module: nn.Module,
        *,
        shards: Sequence[Sequence[Trained]] = (),
        iterations: int = 0,
    ) -> None:
        """Open the exchange.

        Args:
            module: its layers are observed.
            shards: see `build_exchange`.
            iterations: that were made before.
        """
        self._context = context
        settings = ExchangeSettings(start_clock=iterations)
        self._observed = context.build(list(tensors), settings, module, shards)
        control = self._exchange.control
        self._collections = LoopCollections(self._session, control, context.report)
        self._exchange.open(None)
        self._on(LoopEvent.OPEN)
        self._session.continue_from(iterations=iterations)
        context.job.opened(self._observed.built)

    def _on(self, event: LoopEvent) -> None:
        for act in self._session.on(event):
            _ACTS[act](self)

    @property
    def _exchange(self) -> Exchange:
        assert self._observed is not None
        return self._observed.exchange

    def _end_pass(self) -> None:
        """End a pass whose gradients are here, or have left, with all means."""
        for event in (LoopEvent.PASS, LoopEvent.AVERAGE, LoopEvent.APPLY):
            self._on(event)

    # The acts of the session.

    def _start(self) -> None:
        self._exchange.start(self._session.iterations, 0.0)

    @abstractmethod
    def _send_rest(self) -> None:
        """Send the gradients that have not left."""

    def _finish(self) -> None:
        self._exchange.finish()
        self._session.end_iteration(self._exchange.finished)

    @abstractmethod
    def _take_means(self) -> None:
        """Wait for the means, which the iteration that has begun waits for, and use them."""


_ACTS: dict[Act, Callable[[MeanLoop], None]] = {
    Act.START: lambda loop: loop._start(),
    Act.START_PRESENT: lambda loop: loop._start(),
    Act.SEND: lambda loop: loop._send_rest(),
    Act.FINISH: lambda loop: loop._finish(),
    Act.WAIT: lambda loop: loop._take_means(),
}


TAKES_TURNS = (
    "{what} cannot be used with {virtual} virtual workers on {workers}; start as many workers as "
    "virtual workers, or use poseidon.distribute"
)


def check_one_batch(context: WorkerContext, what: str) -> None:
    """Raise UsageError if a worker computes for several virtual workers."""
    if context.member.takes_turns:
        virtual = context.member.by_worker
        workers = counted(virtual.processes, "worker")
        raise UsageError(TAKES_TURNS.format(virtual=virtual.count, workers=workers, what=what))


class MeanReducer(MeanLoop):
    """Reduces the gradients of a module of torch within `backward()`, which ends once all means are
    there: so an error is raised in the script's `backward()`.
    """

    def check_asked_to_stop(self) -> None:
        """Raise KeyboardInterrupt, before a forward pass, if the job was asked to stop."""
        if self._observed is not None and self.is_asked_to_stop():
            raise StopRequested(f"the job was asked to stop after step {self._session.steps}")

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
        self._collections.report(STEP)

    def _collect(self, payload: bytes) -> Sequence[bytes]:
        return self._exchange.control.all_gather(payload)
