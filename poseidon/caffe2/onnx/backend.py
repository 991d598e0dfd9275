"""ONNX models as nets of Caffe2: `prepare`, `run_model`, `run_node`.

    prepared = backend.prepare(onnx.load("net.onnx"))
    (y,) = prepared.run([x])

The nets are `prepared.init_net` and `prepared.predict_net`; their blobs are in
`prepared.workspace`. `poseidon.caffe2.onnx.frontend` goes the other way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.caffe.export.graph import onnx_module
from poseidon.caffe2 import core
from poseidon.caffe2 import workspace as workspaces
from poseidon.caffe2.onnx import elementwise as _elementwise  # noqa: F401 - registers converters
from poseidon.caffe2.onnx import elementwise as _products  # noqa: F401 - registers converters
from poseidon.caffe2.onnx import elementwise as _recurrent  # noqa: F401 - registers converters
from poseidon.caffe2.onnx import vision as _shaping  # noqa: F401 - registers converters
from poseidon.caffe2.onnx import vision as _vision  # noqa: F401 - registers converters
from poseidon.caffe2.onnx.nodes import Facts, NoForm, convert
from poseidon.caffe2.onnx.workspace import Workspace, named_outputs
from poseidon.caffe2.predictor.mobile_exporter import add_tensor
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.proto.caffe2_pb2 import DeviceOption, NetDef, OperatorDef
from poseidon.errors import DefinitionError, UsageError

__all__ = [
    "Caffe2Backend",
    "Caffe2Rep",
    "Workspace",
    "is_compatible",
    "prepare",
    "run_model",
    "run_node",
    "supports_device",
]


class Caffe2Rep:
    """A model that is ready to run.

    Attributes:
        init_net: the net that makes the parameters; it has run.
        predict_net: the net that computes.
        workspace: their blobs. An input has ones until it is given.
        uninitialized: the names of the inputs.
    """

    def __init__(
        self, init_net: NetDef, predict_net: NetDef, workspace: Workspace, uninitialized: list[str]
    ) -> None:
        self.init_net, self.predict_net = init_net, predict_net
        self.workspace, self.uninitialized = workspace, uninitialized
        with core.DeviceScope(predict_net.device_option):
            workspace.RunNetOnce(init_net)
            self._net = workspace.CreateNet(predict_net) and predict_net.name

    def run(self, inputs: Any, **_: Any) -> Any:
        """Return the outputs, a named tuple.

        Args:
            inputs: arrays in the order of the inputs or by name; or the only one.

        Raises:
            RuntimeError: there are more or fewer inputs, or an operator fails.
        """
        if isinstance(inputs, Mapping):
            named = dict(inputs)
        elif isinstance(inputs, Sequence):
            if len(inputs) != len(self.uninitialized):
                raise RuntimeError(
                    f"{len(inputs)} inputs are given; the model has {len(self.uninitialized)}: "
                    f"{', '.join(self.uninitialized)}"
                )
            named = dict(zip(self.uninitialized, inputs, strict=True))
        else:
            named = {self.uninitialized[0]: inputs}
        with core.DeviceScope(self.predict_net.device_option):
            for name, value in named.items():
                self.workspace.FeedBlob(name, np.asarray(value))
            self.workspace.RunNet(self.predict_net.name)
        return named_outputs(self.workspace, self.predict_net.external_output)


def _option(device: str) -> DeviceOption:
    """Return the device of a name such as CPU or CUDA:1.

    Raises:
        UsageError: there is no such device.
    """
    kind, _, number = device.partition(":")
    kinds = {"CPU": caffe2_pb2.PROTO_CPU, "CUDA": caffe2_pb2.PROTO_CUDA}
    if kind not in kinds or not (number or "0").isdigit():
        raise UsageError(f"there is no device {device}; use CPU, CUDA or CUDA:1")
    return core.DeviceOption(kinds[kind], int(number or 0))


def _facts(model: Any) -> Facts:
    """Return what is known about a model's values."""
    onnx = onnx_module()
    versions = [each.version for each in model.opset_import if each.domain in ("", "ai.onnx")]
    graph = onnx.shape_inference.infer_shapes(model).graph
    facts = Facts(version=max(versions, default=1))
    for tensor in graph.initializer:
        facts.constants[tensor.name] = onnx.numpy_helper.to_array(tensor)
    for node in graph.node:
        facts.taken.update([*node.input, *node.output])
        facts.read.update(node.input)
        if node.op_type == "Constant":
            facts.constants[node.output[0]] = _constant(node)
    for info in (*graph.input, *graph.value_info, *graph.output):
        if info.type.tensor_type.HasField("shape"):
            facts.shapes[info.name] = [
                dim.dim_value if dim.HasField("dim_value") else None
                for dim in info.type.tensor_type.shape.dim
            ]
    facts.shapes |= {name: list(value.shape) for name, value in facts.constants.items()}
    facts.read.update(info.name for info in graph.output)
    facts.taken |= facts.constants.keys() | facts.shapes.keys()
    return facts


def _constant(node: Any) -> NDArray[Any]:
    (attribute,) = node.attribute
    onnx = onnx_module()
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.name == "value":
        found: NDArray[Any] = onnx.numpy_helper.to_array(value)
        return found
    types = {
        "value_int": np.int64,
        "value_ints": np.int64,
        "value_float": np.float32,
        "value_floats": np.float32,
    }
    return np.array(value, types.get(attribute.name, object))


class Caffe2Backend:
    """Runs ONNX models by Caffe2's operators."""

    @classmethod
    def onnx_graph_to_caffe2_net(
        cls, model: Any, device: str = "CPU", **_: Any
    ) -> tuple[NetDef, NetDef]:
        """Return the net that makes the parameters, and the net that computes.

        The first external inputs of the second are the model's inputs.

        Args:
            model: a ModelProto, of any version of ONNX's operators.
            device: CPU, CUDA or CUDA:1.

        Raises:
            DefinitionError: nodes have no form in Caffe2; the sentence names all.
            UsageError: there is no such device, or `onnx` is not installed.
        """
        facts, graph = _facts(model), model.graph
        net = NetDef(name=f"{graph.name or 'onnx'}_predict", device_option=_option(device))
        faults: dict[str, str] = {}
        for node in graph.node:
            if node.op_type == "Constant":
                continue
            try:
                net.op.extend(convert(node, facts))
            except NoForm as why:
                label = next(filter(None, node.output), "")
                faults.setdefault(f"{node.op_type} ({label})", str(why))
        if faults:
            text = "; ".join(f"{name}: {why}" if why else name for name, why in faults.items())
            raise DefinitionError(
                f"the model '{graph.name}' has operators without a form in Caffe2: {text}. Run it "
                "with onnxruntime"
            )
        read = {name for op in net.op for name in op.input} | {each.name for each in graph.output}
        parameters = [name for name in facts.constants if name in read]
        net.external_input.extend([*_inputs(model), *parameters])
        net.external_output.extend(each.name for each in graph.output)
        init_net = NetDef(name=f"{graph.name or 'onnx'}_init", device_option=net.device_option)
        for name in parameters:
            try:
                add_tensor(init_net, name, facts.constants[name])
            except ValueError as error:
                raise DefinitionError(str(error)) from error
        return init_net, net

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **_: Any) -> Caffe2Rep:
        """Return a model that is ready to run; see `onnx_graph_to_caffe2_net`."""
        init_net, net = cls.onnx_graph_to_caffe2_net(model, device)
        workspace, given = Workspace(), _inputs(model)
        for info in model.graph.input:
            if info.name in given and info.type.HasField("tensor_type"):
                tensor = info.type.tensor_type
                shape = [max(dim.dim_value, 1) for dim in tensor.shape.dim]
                dtype = onnx_module().helper.tensor_dtype_to_np_dtype(tensor.elem_type)
                workspace.FeedBlob(info.name, np.ones(shape, dtype))
        return Caffe2Rep(init_net, net, workspace, given)

    @classmethod
    def run_model(cls, model: Any, inputs: Any, device: str = "CPU", **_: Any) -> Any:
        """Return the outputs of a model, a named tuple; see `prepare` and `Caffe2Rep.run`."""
        return cls.prepare(model, device).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: Any,
        inputs: Any,
        device: str = "CPU",
        opset_version: int | None = None,
        outputs_info: Any = None,
        **_: Any,
    ) -> Any:
        """Return the outputs of a node, a named tuple.

        Args:
            node: a NodeProto.
            inputs: arrays in the order of its inputs, or by name.
            device: CPU, CUDA or CUDA:1.
            opset_version: the version of ONNX's operators; by default the newest.
            outputs_info: not needed.

        Raises:
            DefinitionError: it has no form in Caffe2.
        """
        onnx = onnx_module()
        names = [name for name in node.input if name]
        named = inputs if isinstance(inputs, Mapping) else dict(zip(names, inputs, strict=True))
        facts = Facts(version=opset_version or onnx.defs.onnx_opset_version())
        facts.constants = {name: np.asarray(value) for name, value in named.items()}
        facts.shapes = {name: list(value.shape) for name, value in facts.constants.items()}
        facts.taken, facts.read = {*node.input, *node.output}, set(node.output)
        try:
            operators: list[OperatorDef] = convert(node, facts)
        except NoForm as why:
            raise DefinitionError(
                f"{node.op_type} has no form in Caffe2: {why}".rstrip(": ")
            ) from why
        workspace = Workspace()
        with core.DeviceScope(_option(device)):
            for name, value in facts.constants.items():
                workspace.FeedBlob(name, value)
            for op in operators:
                op.device_option.CopyFrom(_option(device))
            workspace.RunOperatorsOnce(operators)
        return named_outputs(workspace, [name for name in node.output if name])

    @classmethod
    def supports_device(cls, device_str: str) -> bool:
        """Return whether this machine has a device."""
        try:
            option = _option(device_str)
        except UsageError:
            return False
        return (
            option.device_type == caffe2_pb2.PROTO_CPU
            or option.device_id < workspaces.NumCudaDevices()
        )

    @classmethod
    def is_compatible(cls, model: Any, device: str = "CPU", **_: Any) -> bool:
        """Return whether all nodes of a model have a form in Caffe2."""
        try:
            cls.onnx_graph_to_caffe2_net(model, device)
        except DefinitionError:
            return False
        return True


def _inputs(model: Any) -> list[str]:
    """Return the inputs of a model that have no values."""
    known = {tensor.name for tensor in model.graph.initializer}
    return [info.name for info in model.graph.input if info.name not in known]


is_compatible = Caffe2Backend.is_compatible
prepare = Caffe2Backend.prepare
run_model = Caffe2Backend.run_model
run_node = Caffe2Backend.run_node
supports_device = Caffe2Backend.supports_device
