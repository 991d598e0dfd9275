"""Nets of Caffe2 as ONNX models.

    value_info = {"data": (onnx.TensorProto.FLOAT, (1, 3, 224, 224))}
    model = frontend.caffe2_net_to_onnx_model(predict_net, init_net, value_info)

`poseidon export` does the same with files; docs/export.md has what a model contains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from poseidon.caffe.export.graph import onnx_module
from poseidon.caffe2.export.files import predictor_of
from poseidon.caffe2.export.net import export_predictor
from poseidon.caffe2.proto.caffe2_pb2 import NetDef
from poseidon.caffe2.runtime.workspace import Workspace
from poseidon.errors import UsageError

__all__ = [
    "Caffe2Frontend",
    "caffe2_init_net_to_initializer",
    "caffe2_net_to_onnx_graph",
    "caffe2_net_to_onnx_model",
]


class Caffe2Frontend:
    """Makes ONNX models of nets of Caffe2."""

    @classmethod
    def caffe2_net_to_onnx_model(
        cls,
        predict_net: Any,
        init_net: Any = None,
        value_info: Mapping[str, tuple[int, Sequence[int]]] | None = None,
    ) -> Any:
        """Return the ModelProto of a net.

        Args:
            predict_net: the net that computes, a NetDef or a net.
            init_net: the net that makes its parameters.
            value_info: the type (`onnx.TensorProto.FLOAT`) and the shape of each input.

        Raises:
            DefinitionError: operators have no form in ONNX, or do not run.
            UsageError: `value_info` names no input or a missing one, or `onnx` is not installed.
        """
        net, workspace = _definition(predict_net), Workspace()
        if init_net is not None:
            workspace.run_once(_definition(init_net))
        if not value_info:
            raise UsageError(
                f"the shapes of the inputs of the net '{net.name}' are not known: give value_info="
                '{"data": (onnx.TensorProto.FLOAT, (1, 3, 224, 224))}'
            )
        helper = onnx_module().helper
        inputs = {
            name: (tuple(shape), str(helper.tensor_dtype_to_np_dtype(kind)))
            for name, (kind, shape) in value_info.items()
        }
        return export_predictor(predictor_of(net, workspace, inputs, (), Path(net.name))).model

    @classmethod
    def caffe2_net_to_onnx_graph(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the GraphProto of a net; see `caffe2_net_to_onnx_model`."""
        return cls.caffe2_net_to_onnx_model(*args, **kwargs).graph

    @classmethod
    def caffe2_init_net_to_initializer(cls, init_net: Any) -> list[Any]:
        """Return what a net makes as TensorProtos of ONNX, by name."""
        workspace, net = Workspace(), _definition(init_net)
        workspace.run_once(net)
        made = {name: workspace.get(name).value for op in net.op for name in op.output}
        convert = onnx_module().numpy_helper.from_array
        return [
            convert(
                made[name].cpu().numpy() if isinstance(made[name], Tensor) else made[name], name
            )
            for name in sorted(made)
        ]


def _definition(net: Any) -> NetDef:
    found: NetDef = net if isinstance(net, NetDef) else net.Proto()
    return found


caffe2_init_net_to_initializer = Caffe2Frontend.caffe2_init_net_to_initializer
caffe2_net_to_onnx_graph = Caffe2Frontend.caffe2_net_to_onnx_graph
caffe2_net_to_onnx_model = Caffe2Frontend.caffe2_net_to_onnx_model
