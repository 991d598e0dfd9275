"""Operators on whole blobs: copies between devices, counters, timers, calls of Python functions."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.registry import ANY, NO_GRADIENT, Context, operator
from poseidon.caffe2.proto.caffe2_pb2 import Argument, BlobProto, TensorProto
from poseidon.caffe2.runtime.values import READERS, Blob, is_tensor, strings_of
from poseidon.caffe2.runtime.views import BlobView, TensorView, WorkspaceView


@operator("Free", blobs=True, inputs=(1, ANY), outputs=(1, ANY))
def free(inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
    """Empty its outputs, which are its inputs, so that their memory is free."""
    for blob in outputs:
        blob.value = None


@operator("FeedBlob")
def feed_blob(*, value: Argument) -> bytes:
    """Return a string, which the net has.

    Raises:
        ValueError: the argument has a different type.
    """
    if not value.HasField("s"):
        raise ValueError("FeedBlob: the argument value is not a string")
    return value.s


@operator("GetAllBlobNames")
def get_all_blob_names(*, context: Context, include_shared: bool = True) -> np.ndarray:
    """Return the names of the workspace's blobs and, unless `include_shared` is 0, its parents'."""
    workspace, names = context.workspace, list[str]()
    while workspace is not None:
        names += workspace.blobs
        workspace = workspace.parent if include_shared else None
    return strings_of([name.encode() for name in sorted(set(names))])


@operator("CopyGPUToCPU", gradient="CopyCPUToGPU(GO0) -> GI0")
@operator("EnsureCPUOutput", gradient=NO_GRADIENT)
def copy_to_cpu(x: Tensor) -> Tensor:
    """Return a copy on the CPU, wherever the input is."""
    return x.to("cpu", copy=True)


@operator("CopyCPUToGPU", gradient="CopyGPUToCPU(GO0) -> GI0")
@operator("CopyFromCPUInput")
def copy_cpu_to_gpu(x: Tensor, *, context: Context) -> Tensor:
    """Return a copy on the operator's device."""
    return x.to(context.device, copy=True)


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


_numbers = itertools.count()
_lock = threading.Lock()


@dataclass
class PythonFunction:
    """A function, or a builder that makes one for each operator.

    Attributes:
        function: `f(inputs, outputs)`, or a tuple of builder, arguments and keyword arguments.
        pass_workspace: whether it gets the workspace too.
        gradient: the function of its gradient, None where it has none.
    """

    function: Any
    pass_workspace: bool
    gradient: Any = None


_functions: dict[str, PythonFunction] = {}


def register(function: Any, gradient: Any = None, pass_workspace: bool = False) -> str:
    """Keep a function and the function of its gradient; return the token for operators."""
    with _lock:
        token = f"{getattr(function, '__name__', 'python')}:{next(_numbers)}"
        _functions[token] = PythonFunction(function, pass_workspace, gradient)
    return token


def _python_gradient(maker: GradientMaker) -> None:
    """Give the gradient function the inputs, the outputs and the gradients of the outputs."""
    of_outputs = maker.argument("grad_output_indices") or range(len(maker.forward.output))
    of_inputs = maker.argument("grad_input_indices") or range(len(maker.forward.input))
    given = (maker.GO(index) for index in of_outputs)
    inputs = [*maker.forward.input, *maker.forward.output, *given]
    maker.op(f"{maker.forward.type}Gradient", inputs, [maker.GI(index) for index in of_inputs])


class _Call:
    """A function with the blobs of an operator."""

    def __init__(self, token: str, context: Context, gradient: bool) -> None:
        found = _functions.get(token)
        if found is None:
            raise ValueError(f"the Python function {token} is not registered in this process")
        chosen = found.gradient if gradient else found.function
        if chosen is None:
            raise ValueError(f"the Python function {token} has no gradient")
        if isinstance(chosen, tuple):
            builder, arguments, keywords = chosen
            chosen = builder(*arguments, **keywords)
        self.function: Callable[..., Any] = chosen
        self.extra = [WorkspaceView(context.workspace)] if found.pass_workspace else []

    def __call__(self, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
        self.function(list(map(_view, inputs)), list(map(_view, outputs)), *self.extra)


def _view(blob: Blob) -> TensorView | BlobView:
    return TensorView(blob) if blob.value is None or is_tensor(blob.value) else BlobView("", blob)


@operator("Python", "PythonDLPack", gradient=_python_gradient, blobs=True)
class Python(_Call):
    """Calls the function of the argument `token`."""

    def __init__(self, *, context: Context, token: str) -> None:
        super().__init__(token, context, gradient=False)


@operator("PythonGradient", "PythonDLPackGradient", blobs=True)
class PythonGradient(_Call):
    """Calls the gradient function of the argument `token`."""

    def __init__(self, *, context: Context, token: str) -> None:
        super().__init__(token, context, gradient=True)
