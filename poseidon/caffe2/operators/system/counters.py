"""Counters, mutexes, atomic numbers and booleans."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import operator
from poseidon.caffe2.proto.caffe2_pb2 import BlobProto, TensorProto
from poseidon.caffe2.runtime.serialization import READERS

COUNTER = "std::unique_ptr<Counter<int64_t>>"
"""The type of a counter in a file."""


class Counter:
    """A number that threads count up and down. It is `Serializable`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.lock = threading.Lock()

    def blob_type(self) -> str:
        return COUNTER

    def fill_message(self, message: BlobProto) -> None:
        message.tensor.name = message.name
        message.tensor.dims.append(1)
        message.tensor.data_type = TensorProto.INT64
        message.tensor.int64_data.append(self.count)

    def add(self, step: int) -> int:
        """Add a step and return the number before."""
        with self.lock:
            before = self.count
            self.count += step
        return before

    def reset(self, count: int) -> int:
        """Set the number and return the one before."""
        with self.lock:
            before, self.count = self.count, count
        return before


class AtomicBool:
    """A boolean that threads share."""

    def __init__(self) -> None:
        self.value = False


def _integer(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int64)


READERS[COUNTER] = lambda message: Counter(message.tensor.int64_data[0])


@operator("CreateCounter")
def create_counter(*, init_count: int = 0) -> Any:
    """Return a counter.

    Raises:
        ValueError: the first count is negative.
    """
    if init_count < 0:
        raise ValueError("the first count must not be negative")
    return Counter(init_count)


@operator("ResetCounter", outputs=(0, 1))
def reset_counter(counter: Any, *, init_count: int = 0) -> Tensor:
    """Set a counter and return its count before."""
    return _integer(counter.reset(init_count))


@operator("CountUp")
def count_up(counter: Any) -> Tensor:
    """Add 1 to a counter and return its count before."""
    return _integer(counter.add(1))


@operator("CountDown")
def count_down(counter: Any) -> Tensor:
    """Take 1 from a counter and return whether it was at 0 already."""
    return torch.tensor(counter.add(-1) <= 0)


@operator("CheckCounterDone")
def check_counter_done(counter: Any) -> Tensor:
    """Return whether a counter is at 0."""
    return torch.tensor(counter.count <= 0)


@operator("RetrieveCount")
def retrieve_count(counter: Any) -> Tensor:
    return _integer(counter.count)


@operator("CreateMutex")
def create_mutex() -> Any:
    return threading.Lock()


@operator("AtomicFetchAdd", "AtomicFetchAdd64")
def atomic_fetch_add(mutex: Any, value: Tensor, increment: Tensor) -> tuple[Tensor, Tensor]:
    """Add to a number in one step; return the number, and a copy of what it was."""
    with mutex:
        before = value.clone()
        value += increment
    return value, before


@operator("CreateAtomicBool")
def create_atomic_bool() -> Any:
    return AtomicBool()


@operator("ConditionalSetAtomicBool")
def conditional_set_atomic_bool(target: Any, condition: Tensor) -> None:
    """Set a boolean to true where the condition holds."""
    if bool(condition):
        target.value = True


@operator("CheckAtomicBool")
def check_atomic_bool(target: Any) -> Tensor:
    return torch.tensor(target.value)
