"""A net under construction: operators in order, names of blobs, external inputs and outputs."""

from __future__ import annotations

import copy
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from poseidon.caffe2 import schema, scope, workspace
from poseidon.caffe2.core.blobs import (
    BlobReference,
    CreateOperator,
    DataType,
    IsOperator,
    _RectifyInputOutput,
    _RegisterPythonImpl,
    unknown_operator,
)
from poseidon.caffe2.core.cloning import NetCopies
from poseidon.caffe2.core.gradients import GradientRegistry
from poseidon.caffe2.core.net_blobs import NetBlobs
from poseidon.caffe2.operators import registry
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.utils import MakeArgument

_FILLERS = {
    "int32": "GivenTensorIntFill",
    "int64": "GivenTensorInt64Fill",
    "bool": "GivenTensorBoolFill",
    "float64": "GivenTensorFill",
    "float32": "GivenTensorFill",
}
"""The filler of each numpy type; doubles are stored as floats."""
_PACKAGE = str(Path(__file__).parents[1])
_DEPTH = 8
"""How many calls are kept of where an operator was made."""


def _callers() -> list[tuple[str, int, str]]:
    """Return file, line and function of an operator's callers, outside this package first."""
    frames: list[tuple[str, int, str]] = []
    frame = sys._getframe(1)
    while frame is not None and len(frames) < _DEPTH:
        code = frame.f_code
        if frames or not code.co_filename.startswith(_PACKAGE):
            frames.append((code.co_filename, frame.f_lineno, code.co_name))
        if frame.f_back is None:
            break
        frame = frame.f_back
    return frames


class _Prefixes(threading.local):
    """The names of the net builders that are open in a thread."""

    def __init__(self) -> None:
        self.names: list[str] = []


_prefixes = _Prefixes()


class Net(NetCopies, NetBlobs):
    """A net built by calls: `net.Relu(x, y)` adds an operator and returns its output's reference.

    Each net has a name of its own in the process: a second `Net("train")` is `train_1`.
    """

    _net_names_used: ClassVar[set[str]] = set()
    operator_registry_: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init__(self, name_or_proto: Any, inplace: bool = False) -> None:
        """Make an empty net, or one from a NetDef.

        Args:
            name_or_proto: a name, or a NetDef.
            inplace: whether the NetDef itself is used, not a copy.
        """
        self._InvalidateLookupTables()
        self._input_record: Any = None
        self._output_record: Any = None
        self._external_input_map: set[str] = set()
        self._op_outputs: set[str] = set()
        self._registered_blob_names: set[str] = set()
        self._next_name_index = 0
        self._attr_dict: dict[str, list[Any]] = {}
        if isinstance(name_or_proto, caffe2_pb2.NetDef):
            self._net = name_or_proto if inplace else caffe2_pb2.NetDef()
            if not inplace:
                self._net.CopyFrom(name_or_proto)
            self._external_input_map.update(self._net.external_input)
            prefix = f"{self._net.name}_blob_"
            for op in self._net.op:
                self._op_outputs.update(op.output)
                numbers = [name[len(prefix) :] for name in op.output if name.startswith(prefix)]
                self._next_name_index = max(
                    [self._next_name_index, *(int(n) + 1 for n in numbers if n.isdigit())]
                )
            name = self._net.name
        else:
            if not isinstance(name_or_proto, str | None):
                raise TypeError(f"core.Net: expected a name or a NetDef, found {name_or_proto!r}")
            self._net = caffe2_pb2.NetDef()
            name = name_or_proto or ("" if Net.current_prefix() else "untitled")
        self._net.name = Net._get_next_net_name(name)
        workspace.operator_tracebacks.pop(self._net.name, None)

    @staticmethod
    def current_prefix() -> str:
        """Return the name of the net builder around, which new nets have before their own."""
        return _prefixes.names[-1] if _prefixes.names else ""

    @staticmethod
    def _reset_used_names() -> None:
        Net._net_names_used = set()

    @staticmethod
    def _get_next_net_name(basename: str) -> str:
        name = basename = "/".join(part for part in (Net.current_prefix(), basename) if part)
        index = 0
        while name in Net._net_names_used:
            index += 1
            name = f"{basename}_{index}"
        Net._net_names_used.add(name)
        return name

    def Name(self) -> str:
        return self._net.name

    def __str__(self) -> str:
        return self.Name()

    def Proto(self) -> Any:
        """Return the NetDef itself; what is changed in it is changed in the net."""
        self._InvalidateLookupTables()
        return self._net

    def PopulateProtoWithFileName(self) -> None:
        """Name each operator after the file, line and function that made it."""
        tracebacks = workspace.operator_tracebacks.get(self.Name())
        for index, op in enumerate(self.Proto().op):
            if tracebacks and index in tracebacks:
                op.name = ":".join(map(str, tracebacks[index][0]))

    # Operators.

    def __getattr__(self, op_type: str) -> Any:
        if op_type.startswith("_"):
            raise AttributeError(f"Attribute {op_type} not found.")
        if not IsOperator(op_type):
            raise AttributeError(unknown_operator(op_type))
        return lambda *args, **kwargs: self._CreateAndAddToSelf(op_type, *args, **kwargs)

    def __dir__(self) -> Iterable[str]:
        return sorted({*super().__dir__(), *registry.registered()})

    def _CreateAndAddToSelf(
        self, op_type: str, inputs: Any, outputs: Any = None, **kwargs: Any
    ) -> Any:
        """Add an operator; return a reference to its output, or a tuple of them."""
        inputs = _RectifyInputOutput(inputs)
        for blob in inputs:
            if not self.BlobIsDefined(blob):
                assert blob.Net() != self
                self.AddExternalInput(blob)
        if outputs is None:
            outputs = self.NextName(prefix=op_type)
        elif type(outputs) is int:
            # Several anonymous outputs.
            outputs = [self.NextName(prefix=op_type, output_id=index) for index in range(outputs)]
        outputs = _RectifyInputOutput(outputs, net=self)
        op = CreateOperator(op_type, inputs, outputs, **kwargs)
        self._ExtendOps([op])
        workspace.operator_tracebacks[self.Name()][len(self._net.op) - 1] = _callers()
        if not op.output:
            return None
        made = tuple(BlobReference(name, self) for name in op.output)
        return made[0] if len(made) == 1 else made

    def Python(
        self,
        f: Any,
        grad_f: Any = None,
        python_func_type: Any = None,
        pass_workspace: bool = False,
        grad_output_indices: Sequence[int] | None = None,
        grad_input_indices: Sequence[int] | None = None,
    ) -> Callable[..., Any]:
        """Return a call `(inputs, outputs)` that adds an operator written in Python.

        Args:
            f, grad_f, python_func_type, pass_workspace: see `CreatePythonOperator`.
            grad_output_indices: the outputs whose gradients `grad_f` gets; by default all.
            grad_input_indices: the inputs whose gradients it makes; by default all.
        """
        arguments: dict[str, Any] = {
            "token": _RegisterPythonImpl(f, grad_f, python_func_type, pass_workspace)
        }
        if grad_output_indices:
            arguments["grad_output_indices"] = grad_output_indices
        if grad_input_indices:
            arguments["grad_input_indices"] = grad_input_indices
        return lambda *args, **kwargs: self._CreateAndAddToSelf(
            "Python", *args, **{**kwargs, **arguments}
        )

    def Const(self, array: Any, blob_out: Any = None, dtype: Any = None) -> Any:
        """Add an operator that fills a blob with values; a bool makes a boolean scalar.

        Args:
            array: a number, a string, or an array of these.
            blob_out: the blob; by default one with a name of its own.
            dtype: the numpy type of the values.
        """
        if isinstance(array, bool):
            return self.ConstantFill([], blob_out or 1, dtype=DataType.BOOL, value=array)
        values = np.array(array) if dtype is None else np.array(array, dtype=dtype)
        kind = _FILLERS.get(
            values.dtype.name,
            "GivenTensorStringFill" if values.dtype.kind in "SUO" else "GivenTensorFill",
        )
        return getattr(self, kind)(
            [], blob_out or 1, shape=values.shape, values=values.flatten().tolist()
        )

    def _ExtendOps(self, new_ops: Iterable[caffe2_pb2.OperatorDef]) -> None:
        ops = list(new_ops)
        self._net.op.extend(ops)
        for op in ops:
            self._op_outputs.update(op.output)

    def AddOperators(self, operators: Iterable[caffe2_pb2.OperatorDef]) -> None:
        self._ExtendOps(operators)

    extend_ops = AddOperators

    def insert_op_at_idx(self, op: caffe2_pb2.OperatorDef, op_idx: int) -> None:
        assert op_idx >= 0
        self.Proto().op.insert(op_idx, op)

    def AddArgument(self, arg_name: str, arg_value: Any) -> None:
        self._net.arg.append(MakeArgument(arg_name, arg_value))

    def AddGradientOperators(self, ys: Any, skip: int = 0) -> dict[Any, Any]:
        """Append the gradient operators of the net.

        Args:
            ys: the blobs to differentiate: a list, or a dict to their gradients.
            skip: how many operators at the start have no part in it.

        Returns:
            the gradient of each blob: a BlobReference, or a GradientSlice.
        """
        operators, gradients = GradientRegistry.GetBackwardPass(self._net.op[skip:], ys)
        self._ExtendOps(operators)
        return gradients

    def AppendNet(self, net: Any, device_option: Any = None) -> Net:
        """Append the operators of another net, and its external inputs that this one does not make.

        Args:
            net: a Net or its proto's owner.
            device_option: the device for the appended operators, in place of their own.
        """
        assert isinstance(net, Net), f"AppendNet: expected a core.Net, found {net!r}"
        for blob in net.Proto().external_input:
            if blob not in self.external_inputs and blob not in self._outputs():
                self.Proto().external_input.append(blob)
        known = set(self.Proto().external_output)
        self.Proto().external_output.extend(
            name for name in net.Proto().external_output if name not in known
        )
        ops = net.Proto().op
        if device_option is not None:
            ops = [copy.deepcopy(op) for op in ops]
            for op in ops:
                op.device_option.CopyFrom(device_option)
        self._ExtendOps(ops)
        return self

    def _outputs(self) -> set[str]:
        return {name for op in self._net.op for name in op.output}

    def RunAllOnGPU(self, gpu_id: int = 0, use_cudnn: bool = False) -> None:
        option = caffe2_pb2.DeviceOption(device_type=workspace.GpuDeviceType, device_id=gpu_id)
        self._net.device_option.CopyFrom(option)
        for argument in (argument for op in self._net.op for argument in op.arg):
            if argument.name.endswith("step_net"):
                argument.n.device_option.CopyFrom(option)
        if use_cudnn:
            for op in self._net.op:
                op.engine = "CUDNN"

    def RunAllOnMKL(self) -> None:
        """Place the net on MKL's devices, which do not exist any more."""
        self.Proto().device_option.CopyFrom(caffe2_pb2.DeviceOption(device_type=2))

    # Attributes of the net, records.

    def add_attribute(self, name: str, value: Any) -> None:
        """Append a value to an attribute, which survives in clones."""
        self._attr_dict.setdefault(name, []).append(value)

    AddAttribute = add_attribute

    def get_attributes(self, name: str) -> list[Any]:
        return self._attr_dict.get(name, [])

    def input_record(self) -> Any:
        """Return the record of the net's inputs, None where it has none."""
        return self._input_record

    def output_record(self) -> Any:
        """Return the record of the net's outputs, None where it has none."""
        return self._output_record

    def set_input_record(self, input_record: Any) -> Any:
        """Set the record of the net's inputs, which become external inputs; return it with blobs.

        Raises:
            AssertionError: the net has a different record.
        """
        assert self._input_record is None or input_record == self._input_record, (
            "Input schema cannot be reset"
        )
        if not input_record.has_blobs():
            with scope.NameScope(self.Name()):
                input_record = schema.NewRecord(self, input_record)
        self._input_record = input_record
        for blob in input_record.field_blobs():
            if str(blob) not in self._net.external_input:
                self.AddExternalInput(blob)
        return input_record

    def set_output_record(self, record: Any) -> Any:
        """Set the record of the net's outputs, which become external outputs.

        Raises:
            AssertionError: the net has a different record, or does not make a blob of this one.
        """
        assert self._output_record is None or record == self._output_record, (
            "Output schema cannot be reset"
        )
        for blob in record.field_blobs():
            assert self.BlobIsDefined(blob), f"Output blob is not in net: {blob}"
        for blob in record.field_blobs():
            if str(blob) not in self._net.external_output:
                self.AddExternalOutput(blob)
        self._output_record = record
        return record

    def set_rand_seed(
        self, seed: int = 100, sequence_seed: bool = True, seed_on_op_def: bool = False
    ) -> None:
        """Give each operator a random seed of its own.

        Args:
            seed: the seed of the first operator; each further operator has one more.
            sequence_seed: False: all operators have the same seed.
            seed_on_op_def: without `sequence_seed`, the seed depends on the operator's definition.

        Raises:
            ValueError: both ways are chosen.
        """
        if sequence_seed and seed_on_op_def:
            raise ValueError("sequence_seed and seed_on_op_def exclude each other")
        for index, op in enumerate(self._net.op):
            own = zlib.crc32(f"{op}{seed}".encode()) if seed_on_op_def else seed
            op.device_option.random_seed = own + index if sequence_seed else own

    def LogInfo(self, *msg_or_blobs: Any) -> None:
        """Print texts and blobs whenever the net runs."""
        for item in msg_or_blobs:
            if not isinstance(item, BlobReference):
                name = self.NextName("log")
                item = self.GivenTensorStringFill([], name, shape=[], values=[str(item)])
            self.Print(item, [])

    def DeduplicateGradientSlices(self, g: Any, aggregator: str = "sum") -> Any:
        """Return a sparse gradient with each index once, its values summed or averaged.

        Raises:
            ValueError: the aggregator is neither `sum` nor `mean`.
        """
        if aggregator.lower() not in ("sum", "mean"):
            raise ValueError(f"{aggregator} is not supported")
        unique, remap = self.Unique([g.indices], 2)
        kind = "UnsortedSegmentSum" if aggregator.lower() == "sum" else "UnsortedSegmentMean"
        summed = getattr(self, kind)([g.values, remap])
        return type(g)(indices=unique, values=summed)
