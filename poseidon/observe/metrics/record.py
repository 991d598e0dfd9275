"""The records of training and testing, and the interface of sinks that write them.

Law: the values of a record are averages over all workers. A sink formats them, computes nothing and
does not affect training.

Names of what scripts log: which are learning rates and losses, and which curves share a panel.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A value of a net's output blob. A blob of several values is several outputs of the same name.

    Attributes:
        loss_weight: the loss weight; 0 if the blob is not a loss.
    """

    name: str
    value: float
    loss_weight: float = 0.0


def repeated(names: Iterable[str]) -> set[str]:
    """Return the names that occur more than once."""
    return {name for name, count in Counter(names).items() if count > 1}


def own_names(names: Iterable[str], several: Container[str]) -> list[str]:
    """Return a name of its own for each value: its name, or `probability[1]` where several have it.

    Args:
        several: the names that several values have.
    """
    seen: Counter[str] = Counter()
    own = []
    for name in names:
        own.append(f"{name}[{seen[name]}]" if name in several else name)
        seen[name] += 1
    return own


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRecord:
    """The record of a displayed iteration.

    Attributes:
        iteration: the number of finished iterations.
        loss: the total loss, averaged over the last `average_loss` iterations.
        elapsed_s: the seconds of training since the start of the job.
    """

    iteration: int
    loss: float
    elapsed_s: float
    outputs: tuple[Output, ...]
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRecord:
    """The record of a tested net.

    Attributes:
        iteration: finished iterations of training.
        net: the index of the test net, from 0.
        elapsed_s: the seconds of training since the start of the job.
        outputs: the outputs of the test net, averaged over its iterations.
        loss: the total loss with `test_compute_loss`, else None.
        classes: label and average precision of each class, for each output that has them, by index.
    """

    __test__ = False  # pytest would take the class for a test

    iteration: int
    net: int
    elapsed_s: float
    outputs: tuple[Output, ...]
    loss: float | None = None
    classes: tuple[tuple[tuple[int, float], ...], ...] = ()


class Sink(Protocol):
    """An output for records.

    The training loop calls `on_train` and `on_test` in the order of iterations; they must be fast.
    No call follows `close` except a second `close`.
    """

    def on_train(self, record: TrainRecord) -> None:
        """Write the record of a displayed iteration."""

    def on_test(self, record: TestRecord) -> None:
        """Write the record of a tested net."""

    def close(self) -> None:
        """Write buffered records and close the output."""


RATES = ("learning_rate", "lr")
"""The names of a script's learning rate."""
_PART_OF_DATA = re.compile(r"^(train|training|val|valid|validation|eval|test)[_/.:-]")
_PERIOD = re.compile(r"_(step|epoch)$")


def is_loss(name: str) -> bool:
    """Return whether a name is of a loss."""
    return "loss" in name.lower()


def score(name: str) -> str:
    """Return what a value is, whatever data it is of: curves of one score share a panel.

    >>> score("val_accuracy"), score("train/accuracy_epoch"), score("grad_norm")
    ('accuracy', 'accuracy', 'grad_norm')
    """
    return _PERIOD.sub("", _PART_OF_DATA.sub("", name)) or name
