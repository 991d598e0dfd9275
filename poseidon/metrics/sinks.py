"""Where records go: the contract of every sink.

Law: a sink never changes training. `on_train` and `on_test` come from the training loop, in order of
iterations, and cost it little; nothing comes after `close`, which may be called twice.
"""

from __future__ import annotations

from typing import Protocol

from poseidon.metrics.record import TestRecord, TrainRecord


class Sink(Protocol):
    """Takes what was measured."""

    def on_train(self, record: TrainRecord) -> None:
        """A displayed iteration."""

    def on_test(self, record: TestRecord) -> None:
        """A tested net."""

    def close(self) -> None:
        """Write what is waiting and let go."""
