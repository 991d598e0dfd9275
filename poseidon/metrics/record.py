"""What was measured, as values.

Law: numbers here are averages over all workers already; a sink formats them and computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One number that a net puts out; a blob of several numbers is several outputs of one name.

    Attributes:
        name: the blob's.
        value: the number.
        loss_weight: its weight in the loss; 0 if it is no loss.
    """

    name: str
    value: float
    loss_weight: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRecord:
    """Training at one displayed iteration.

    Attributes:
        iteration: finished iterations.
        loss: the total loss, averaged over the last `average_loss` iterations.
        elapsed_s: seconds of training since the job began.
        outputs: of the train net.
        rate: the learning rate of this iteration.
    """

    iteration: int
    loss: float
    elapsed_s: float
    outputs: tuple[Output, ...]
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRecord:
    """One test net, tested.

    Attributes:
        iteration: finished iterations of training.
        net: which test net, from 0.
        elapsed_s: seconds of training since the job began.
        outputs: of the test net, averaged over its iterations.
        loss: the total loss if the solver asks for it (`test_compute_loss`), else None.
    """

    __test__ = False  # not a test, whatever pytest makes of its name

    iteration: int
    net: int
    elapsed_s: float
    outputs: tuple[Output, ...]
    loss: float | None = None
