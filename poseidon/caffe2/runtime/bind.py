"""Binds an operator's definition to a workspace's blobs: a call without arguments."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from poseidon.caffe2.operators.input_shapes import InputShapes
from poseidon.caffe2.operators.registry import Context, Operator, find
from poseidon.caffe2.proto import DEVICE_NUMBERS
from poseidon.caffe2.proto.caffe2_pb2 import DeviceOption, NetDef, OperatorDef
from poseidon.caffe2.runtime.values import Blob
from poseidon.caffe2.shards.buckets import Buckets, Pending

log = logging.getLogger("caffe2")

Step = Callable[[], None]
Start = Callable[[Buckets], Pending]
"""Starts an operator, without waiting for its result."""

GPU_TYPES = (DEVICE_NUMBERS["CUDA"], DEVICE_NUMBERS["HIP"])


def device_of(option: DeviceOption) -> torch.device:
    """Return torch's device of a device option.

    On a machine without a GPU it is the CPU, with one warning.

    Raises:
        RuntimeError: the machine has GPUs, but not this one.
    """
    if option.device_type not in GPU_TYPES or not _gpu_count():
        return torch.device("cpu")
    if option.device_id >= _gpu_count():
        raise RuntimeError(
            f"device option: GPU {option.device_id} is not on this machine, whose GPUs are "
            f"0 to {_gpu_count() - 1}; use one of them"
        )
    return torch.device("cuda", option.device_id)


@functools.cache
def _gpu_count() -> int:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        log.warning("This machine has no GPU: operators of GPUs run on the CPU")
    return found


def function_of(
    definition: OperatorDef, workspace: Any, device: torch.device | None = None
) -> Callable[..., Any]:
    """Return an operator's function with its arguments and context set.

    Args:
        definition: the operator.
        workspace: a `runtime.Workspace`, for operators that use more than their inputs.
        device: the device of the outputs; by default the definition's.

    Raises:
        KeyError: there is no such operator.
        ValueError: inputs, outputs or arguments are not what the operator takes.
    """
    known = find(definition.type)
    known.check(definition)
    arguments = known.arguments(definition)
    if known.context is not None:
        arguments[known.context] = _context(definition, workspace, device)
    if known.stateful:
        made: Callable[..., Any] = known.make(**arguments)
        return made
    if arguments:
        return functools.partial(known.make, **arguments)
    return known.plain or known.make


def bind(
    definition: OperatorDef, inputs: Sequence[Blob], outputs: Sequence[Blob], workspace: Any
) -> Step:
    """Return a call that reads and checks the inputs, runs and sets the outputs."""
    known, function = find(definition.type), function_of(definition, workspace)
    if known.shapes is not None:
        function = _ordered(known.shapes, definition).guard(function, definition.input)
    return step(known, function, inputs, outputs)


def misfit(definition: OperatorDef, values: Sequence[Any]) -> str:
    """Return a sentence on an operator's first input of unexpected shape, or "".

    Args:
        definition: the operator.
        values: the values of its inputs.
    """
    expected = find(definition.type).expected
    if expected is not None:
        try:
            _ordered(expected, definition).check(
                [getattr(value, "shape", None) for value in values], definition.input
            )
        except ValueError as error:
            return str(error)
    return ""


def _ordered(shapes: InputShapes, definition: OperatorDef) -> InputShapes:
    """Return shapes of the order that an operator has."""
    last = any(argument.name == "order" and argument.s == b"NHWC" for argument in definition.arg)
    return shapes.channels_last() if last else shapes


def bind_start(definition: OperatorDef, inputs: Sequence[Blob]) -> Start | None:
    """Return a call that reads inputs and starts the operator; None if it does not wait.

    An operator that reports its failure in a blob only runs as a whole.
    """
    known = find(definition.type)
    arguments = known.arguments(definition)
    if known.start is None or arguments.pop("status_blob", ""):
        return None
    begin = functools.partial(known.start, **arguments)
    in_place = len(inputs) > 1 and list(definition.output[:1]) == [definition.input[1]]

    def start(buckets: Buckets) -> Pending:
        owned = in_place and is_owned(inputs[1])
        return begin(buckets, owned, *[blob.value for blob in inputs])  # type: ignore[no-any-return]

    return start


def is_owned(blob: Blob) -> bool:
    """Return whether a blob alone owns a contiguous tensor on the CPU and its memory."""
    value = blob.value
    if (
        not isinstance(value, torch.Tensor)
        or value.device.type != "cpu"
        or not value.is_contiguous()
    ):
        return False
    del value
    return _holders(blob) == _ALONE


def _holders(blob: Blob) -> tuple[int, int]:
    """Return how many refer to a blob's tensor and its memory; 0 for the second if unknown."""
    value = blob.value
    count = getattr(torch._C, "_storage_Use_Count", None)
    return sys.getrefcount(value), 0 if count is None else count(value.untyped_storage()._cdata)


_ALONE = _holders(Blob(torch.empty(1)))
if _ALONE[1] == 0:
    _ALONE = (-1, -1)  # never: views would not be noticed


def set_outputs(outputs: Sequence[Blob], values: Sequence[Any]) -> None:
    """Give blobs the values that an operator has returned."""
    for blob, value in zip(outputs, values, strict=False):
        blob.value = value


def step(
    known: Operator, function: Callable[..., Any], inputs: Sequence[Blob], outputs: Sequence[Blob]
) -> Step:
    """Return the function's call by numbers of inputs and outputs; common ones have no loop."""
    if known.blobs:
        return functools.partial(function, inputs, outputs)
    if not outputs:
        return lambda: _drop(function(*[blob.value for blob in inputs]))
    if not known.single:
        return _several(function, inputs, outputs)
    (out,) = outputs
    if len(inputs) == 1:
        (x,) = inputs

        def one() -> None:
            out.value = function(x.value)

        return one
    if len(inputs) == 2:
        x, y = inputs

        def two() -> None:
            out.value = function(x.value, y.value)

        return two
    if len(inputs) == 3:
        x, y, z = inputs

        def three() -> None:
            out.value = function(x.value, y.value, z.value)

        return three

    def many() -> None:
        out.value = function(*[blob.value for blob in inputs])

    return many


def _several(function: Callable[..., Any], inputs: Sequence[Blob], outputs: Sequence[Blob]) -> Step:
    def run() -> None:
        set_outputs(outputs, function(*[blob.value for blob in inputs]))

    return run


def _drop(_: Any) -> None:
    """Ignore what an operator without outputs returns."""


def _context(definition: OperatorDef, workspace: Any, device: torch.device | None) -> Context:
    option = definition.device_option
    device = device_of(option) if device is None else device
    generator = None
    if option.random_seed and device.type != "meta":
        generator = torch.Generator(device).manual_seed(option.random_seed)
    return Context(definition, device, workspace, generator)


META = torch.device("meta")
WITHOUT_INFERENCE = frozenset({"LRN"})
"""Operators whose outputs Caffe2 does not infer; what is inferred behind them stays."""


def infer(nets: Iterable[NetDef], known: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a meta tensor for each blob whose shape and type follow from those that are known.

    Args:
        nets: the nets in the order in which they run.
        known: meta tensors of blobs that exist before.
    """
    values: dict[str, Any] = dict(known)
    hidden: set[str] = set()
    for net in nets:
        for op in net.op:
            _infer_operator(op, values)
            if op.type in WITHOUT_INFERENCE:
                hidden.update(op.output)
                hidden.update(f"{name}_grad" for name in op.output)
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and name not in hidden
    }


def _infer_operator(op: OperatorDef, values: dict[str, Any]) -> None:
    if not all(name in values for name in op.input):
        return
    try:
        known = find(op.type)
        made = function_of(op, None, META)(*[values[name] for name in op.input])
    except Exception:  # noqa: BLE001 (an operator whose shapes depend on data says so in many ways)
        _assume_gradients(op, values)
        return
    for name, value in zip(op.output, [made] if known.single else made or (), strict=False):
        values[name] = value


def _assume_gradients(op: OperatorDef, values: dict[str, Any]) -> None:
    """Give an operator's gradients the shapes of their blobs, known by their names."""
    for name in op.output if op.is_gradient_op else ():
        blob = name.removesuffix("_grad")
        if blob != name and blob in values:
            values[name] = values[blob]
