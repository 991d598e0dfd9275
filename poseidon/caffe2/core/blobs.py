"""References to blobs, operators that read and write them, and the devices of operators."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable
from typing import Any

from poseidon.caffe2 import scope, workspace
from poseidon.caffe2.operators import registry
from poseidon.caffe2.operators.system import blobs
from poseidon.caffe2.proto import DEVICE_NUMBERS, caffe2_pb2
from poseidon.caffe2.utils import MakeArgument

GradientSlice = namedtuple("GradientSlice", ["indices", "values"])
"""A sparse gradient: references to the indices and to the values."""


class BlobReference:
    """The name of a blob, and the net that made it. Equal to, and hashed as, its name.

    `reference.Relu(...)` adds an operator that reads the blob to its net.
    """

    def __init__(self, name: Any, net: Any = None) -> None:
        """Refer to a blob.

        Args:
            name: its full name.
            net: the net that the operators called on this reference go to.

        Raises:
            TypeError: the name is not a string.
        """
        if isinstance(name, bytes):
            name = name.decode()
        if not isinstance(name, str):
            raise TypeError(f"Blob name should be a string, not {type(name).__name__}: {name}")
        self._name = name
        self._from_net = net
        self.meta: dict[str, Any] = {}

    def __hash__(self) -> int:
        return hash(self._name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (str, bytes)):
            return self._name == (other.decode() if isinstance(other, bytes) else other)
        return self._name == other._name if isinstance(other, BlobReference) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: object) -> bool:
        return self._name < str(other)

    def __str__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f'BlobReference("{self._name}")'

    def __add__(self, other: str) -> BlobReference:
        if not isinstance(other, str):
            raise RuntimeError(f"Cannot add BlobReference to a non-string: {other!r}")
        return BlobReference(self._name + other, self._from_net)

    def __radd__(self, other: str) -> BlobReference:
        if not isinstance(other, str):
            raise RuntimeError(f"Cannot add a non-string to BlobReference: {other!r}")
        return BlobReference(other + self._name, self._from_net)

    def Net(self) -> Any:
        """Return the net that the reference belongs to, or None."""
        return self._from_net

    def GetNameScope(self) -> str:
        """Return the part of the name up to its last "/", that included."""
        return self._name[: self._name.rfind(scope._NAMESCOPE_SEPARATOR) + 1]

    def GetUnscopedName(self) -> str:
        """Return the part of the name behind its last "/"."""
        return self._name[self._name.rfind(scope._NAMESCOPE_SEPARATOR) + 1 :]

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if op_type.startswith("__"):
            raise AttributeError(f"Attribute {op_type} not found.")
        if self._from_net is None:
            raise AttributeError(f"A blob reference without a net cannot call {op_type}.")
        if not registry.is_registered(op_type):
            raise AttributeError(unknown_operator(op_type))
        return lambda *args, **kwargs: self._add(op_type, *args, **kwargs)

    def __dir__(self) -> Iterable[str]:
        return sorted({*super().__dir__(), *registry.registered()})

    def _add(self, op_type: str, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Add an operator of which this blob is the first input."""
        net = self._from_net
        more = [] if inputs is None else inputs if isinstance(inputs, (list, tuple)) else [inputs]
        return getattr(net, op_type)([self, *more], *args, **kwargs)


def unknown_operator(op_type: str) -> str:
    """Return the sentence for an operator that does not exist."""
    near = ",".join(registry.nearest(op_type))
    return f"Method {op_type} is not a registered operator. Did you mean: [{near}]"


def ScopedName(name: Any) -> str:
    """Return a name with the current scope before it."""
    return scope.CurrentNameScope() + str(name.decode() if isinstance(name, bytes) else name)


def ScopedBlobReference(name: str, *args: Any, **kwargs: Any) -> BlobReference:
    """Return a reference to the blob of a name in the current scope."""
    return BlobReference(ScopedName(name), *args, **kwargs)


def _RectifyInputOutput(blobs: Any, net: Any = None) -> list[BlobReference]:
    """Return references for one blob or several; names get the current scope.

    Raises:
        TypeError: a blob is given as something else.
    """
    if isinstance(blobs, (str, bytes)):
        return [ScopedBlobReference(blobs, net=net)]  # type: ignore[arg-type]
    if type(blobs) is BlobReference:
        return [blobs]
    if isinstance(blobs, (list, tuple)):
        rectified = []
        for index, blob in enumerate(blobs):
            if isinstance(blob, (str, bytes)):
                rectified.append(ScopedBlobReference(blob, net=net))  # type: ignore[arg-type]
            elif type(blob) is BlobReference:
                rectified.append(blob)
            else:
                raise TypeError(f"blob #{index} is {blob!r}, of unsupported type {type(blob)}")
        return rectified
    raise TypeError(f"Unknown input/output type: {blobs!r} of type {type(blobs)}.")


def output_to_list(op_output: Any) -> list[Any]:
    """Return what an operator call gave as a list.

    Raises:
        AssertionError: it is neither a reference nor a tuple or list.
    """
    assert isinstance(op_output, (BlobReference, list, tuple)), f"not an output: {op_output!r}"
    return [op_output] if isinstance(op_output, BlobReference) else list(op_output)


def _get_blob_ref(blob_name_or_ref: Any) -> BlobReference:
    return (
        blob_name_or_ref
        if isinstance(blob_name_or_ref, BlobReference)
        else BlobReference(blob_name_or_ref)
    )


_ENGINES = {"FC": ("PACKED",), "Unique": ("SparseHash",)}
"""Engines of operators on the CPU: other ways to the same values, of which there is one here."""


def IsOperator(op_type: str) -> bool:
    """Return whether an operator exists; `<name>_ENGINE_<engine>` asks for an engine."""
    name, _, engine = op_type.partition("_ENGINE_")
    return registry.is_registered(name) and engine in ("", *_ENGINES.get(name, ()))


def IsOperatorWithEngine(op_type: str, engine: str) -> bool:
    """Return whether an operator exists for an engine: `DEFAULT`, or `CUDNN`, the same."""
    return registry.is_registered(op_type) and engine in ("", "DEFAULT", "CUDNN")


def RefreshRegisteredOperators(trigger_lazy: bool = True) -> None:
    """Do nothing: the list of operators is always the present one."""


def CreateOperator(
    operator_type: str,
    inputs: Any,
    outputs: Any,
    name: str = "",
    control_input: Any = None,
    device_option: caffe2_pb2.DeviceOption | None = None,
    arg: Iterable[caffe2_pb2.Argument] | None = None,
    engine: str | None = None,
    debug_info: str | None = None,
    **kwargs: Any,
) -> caffe2_pb2.OperatorDef:
    """Return an operator's definition; its type may be one that does not exist.

    Args:
        operator_type: the type.
        inputs, outputs: names (in the current scope) or references of blobs, one or several.
        name: of the operator.
        control_input: blobs that must be made before it runs.
        device_option: where it runs; by default the current device scope.
        arg: ready arguments.
        engine, debug_info: fields of the definition.
        kwargs: further arguments, None left out; `random_seed` goes to the device option.

    Raises:
        TypeError: a blob is neither name nor reference.
        ValueError: an argument cannot hold its value.
    """
    operator = caffe2_pb2.OperatorDef(type=operator_type, name=name)
    operator.input.extend(str(blob) for blob in _RectifyInputOutput(inputs))
    operator.output.extend(str(blob) for blob in _RectifyInputOutput(outputs))
    if control_input:
        operator.control_input.extend(str(blob) for blob in _RectifyInputOutput(control_input))
    device = device_option if device_option is not None else scope.CurrentDeviceScope()
    if device is not None:
        operator.device_option.CopyFrom(device)
    if engine is not None:
        operator.engine = engine
    if debug_info is not None:
        operator.debug_info = debug_info
    if "random_seed" in kwargs:
        operator.device_option.random_seed = kwargs.pop("random_seed")
    if arg is not None:
        operator.arg.extend(arg)
    for key, value in kwargs.items():
        if value is not None:
            operator.arg.add().CopyFrom(MakeArgument(key, value))
    if workspace.IsImmediate():
        workspace.RunOperatorImmediate(operator)
    return operator


GPU_TYPES = frozenset((DEVICE_NUMBERS["CUDA"], DEVICE_NUMBERS["HIP"]))


class DataType:
    """The data types of tensors by name: `DataType.FLOAT` is 1."""

    UNDEFINED = caffe2_pb2.TensorProto.UNDEFINED
    FLOAT = caffe2_pb2.TensorProto.FLOAT
    INT32 = caffe2_pb2.TensorProto.INT32
    BYTE = caffe2_pb2.TensorProto.BYTE
    STRING = caffe2_pb2.TensorProto.STRING
    BOOL = caffe2_pb2.TensorProto.BOOL
    UINT8 = caffe2_pb2.TensorProto.UINT8
    INT8 = caffe2_pb2.TensorProto.INT8
    UINT16 = caffe2_pb2.TensorProto.UINT16
    INT16 = caffe2_pb2.TensorProto.INT16
    INT64 = caffe2_pb2.TensorProto.INT64
    FLOAT16 = caffe2_pb2.TensorProto.FLOAT16
    DOUBLE = caffe2_pb2.TensorProto.DOUBLE


def IsGPUDeviceType(device_type: int) -> bool:
    """Return whether a device type is CUDA or HIP."""
    return device_type in GPU_TYPES


def DeviceOption(
    device_type: int,
    device_id: int = 0,
    random_seed: int | None = None,
    node_name: str | None = None,
    numa_node_id: int | None = None,
    extra_info: list[str] | None = None,
) -> caffe2_pb2.DeviceOption:
    """Return a device option.

    Raises:
        AssertionError: a NUMA node is given for another device than the CPU.
    """
    option = caffe2_pb2.DeviceOption(device_type=device_type, device_id=device_id)
    if numa_node_id is not None:
        assert device_type == DEVICE_NUMBERS["CPU"], "Only the CPU has NUMA nodes"
        option.numa_node_id = numa_node_id
    if node_name is not None:
        option.node_name = node_name
    if random_seed is not None:
        option.random_seed = random_seed
    option.extra_info.extend(extra_info or [])
    return option


def device_option_equal(
    opt1: Any, opt2: Any, ignore_node_name: bool = True, ignore_random_seed: bool = True
) -> bool:
    """Return whether two device options mean the same device; None is the CPU."""
    if not opt1 or not opt2:
        return bool(opt1 == opt2)
    if not ignore_node_name and opt1.node_name != opt2.node_name:
        return False
    if not ignore_random_seed and opt1.random_seed != opt2.random_seed:
        return False
    if not opt1.device_type or not opt2.device_type:
        # One of them is the CPU: its id has no meaning, its NUMA node has.
        return bool(opt1.device_type == opt2.device_type and opt1.numa_node_id == opt2.numa_node_id)
    return (opt1.device_type, opt1.device_id) == (opt2.device_type, opt2.device_id)


def _RegisterPythonImpl(
    f: Any, grad_f: Any = None, python_func_type: Any = None, pass_workspace: bool = False
) -> str:
    """Register a function, or a tuple (builder, args, kwargs), and its gradient; return the token.

    Args:
        f: `f(inputs, outputs)`, with the workspace as third argument where `pass_workspace` is set.
        grad_f: `grad_f(inputs, outputs)`; its inputs are f's, f's outputs and their gradients.
        python_func_type: a class made with `f`, with the methods `forward` and `backward`.
        pass_workspace: see above.
    """
    if python_func_type is not None:
        instance = python_func_type(f)
        f, grad_f = instance.forward, instance.backward
    return blobs.register(f, grad_f, pass_workspace)


def CreatePythonOperator(
    f: Any,
    inputs: Any,
    outputs: Any,
    grad_f: Any = None,
    pass_workspace: bool = False,
    python_func_type: Any = None,
    *args: Any,
    **kwargs: Any,
) -> caffe2_pb2.OperatorDef:
    """Return the definition of an operator that calls a function; see `_RegisterPythonImpl`."""
    kwargs["token"] = _RegisterPythonImpl(f, grad_f, python_func_type, pass_workspace)
    return CreateOperator("Python", inputs, outputs, *args, **kwargs)
