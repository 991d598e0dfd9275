"""Nets for predictions: the part of a training net that computes given outputs from given inputs, the
parts of a MetaNetDef by name (nets, plans, lists of blobs), and messages as bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

from poseidon.caffe2 import core, scope
from poseidon.caffe2.core.gradient_sums import rename
from poseidon.caffe2.proto import caffe2_pb2


def create_predict_net(predictor_export_meta: Any) -> Any:
    """Return the NetDef that predicts: its inputs are the predictor's, then the parameters."""
    meta = predictor_export_meta
    proto = core.Net(meta.predict_net.name or "predict").Proto()
    proto.op.extend(meta.predict_net.op)
    proto.partition_info.extend(meta.predict_net.partition_info)
    proto.arg.extend(meta.predict_net.arg)
    proto.external_input.extend([*meta.inputs, *meta.parameters])
    proto.external_output.extend(meta.outputs)
    if meta.net_type is not None:
        proto.type = meta.net_type
    if meta.num_workers is not None:
        proto.num_workers = meta.num_workers
    return proto


def create_predict_init_net(ws: Any, predictor_export_meta: Any) -> Any:
    """Return the NetDef that zeros inputs and outputs, then runs the meta's `extra_init_net`.

    Args:
        ws: the workspace whose blobs give the shapes that the meta does not.
        predictor_export_meta: the predictor.

    Raises:
        Exception: a shape is neither given nor known from the workspace.
    """
    meta = predictor_export_meta
    net = core.Net("predict-init")
    external = [*meta.inputs, *meta.outputs]
    for blob in external:
        shape = meta.shapes.get(blob)
        if shape is None:
            if blob not in ws.blobs:
                raise Exception(f"{blob} is not in the workspace, and its shape is not given")
            shape = ws.blobs[blob].fetch().shape
        with scope.EmptyDeviceScope():
            net.ConstantFill([], blob, shape=shape, value=0.0)
    net.Proto().external_input.extend(external)
    if meta.extra_init_net:
        net.AppendNet(meta.extra_init_net)
    AddModelIdArg(meta, net.Proto())
    return net.Proto()


def get_comp_name(string: str, name: str | None) -> str:
    """Return the key of a part of a named predictor; without a name it is the plain key."""
    return f"{string}_{name}" if name else string


def _value_of(entries: Iterable[Any], key: str) -> Any:
    return next((entry.value for entry in entries if entry.key == key), None)


def GetPlan(meta_net_def: Any, key: str) -> Any:
    """Return the plan of a key, None where there is none."""
    return _value_of(meta_net_def.plans, key)


def GetPlanOriginal(meta_net_def: Any, key: str) -> Any:
    """Return what `GetPlan` does."""
    return GetPlan(meta_net_def, key)


def GetBlobs(meta_net_def: Any, key: str) -> Any:
    """Return the names of the blobs of a key, an empty list where there are none."""
    blobs = _value_of(meta_net_def.blobs, key)
    return [] if blobs is None else blobs


def GetBlobsByTypePrefix(meta_net_def: Any, blob_type_prefix: str) -> list[str]:
    """Return the names of the blobs of all keys that begin with a text, each once."""
    found: dict[str, None] = {}
    for entry in meta_net_def.blobs:
        if entry.key.startswith(blob_type_prefix):
            found.update(dict.fromkeys(entry.value))
    return list(found)


def GetNet(meta_net_def: Any, key: str) -> Any:
    """Return the NetDef of a key, None where there is none."""
    return _value_of(meta_net_def.nets, key)


def GetNetOriginal(meta_net_def: Any, key: str) -> Any:
    """Return what `GetNet` does."""
    return GetNet(meta_net_def, key)


def GetApplicationSpecificInfo(meta_net_def: Any, key: str) -> Any:
    """Return the text that an application has left under a key, None where there is none."""
    return _value_of(meta_net_def.applicationSpecificInfo, key)


def GetApplicationSpecificInfoDict(meta_net_def: Any) -> dict[str, str]:
    """Return all texts that applications have left, by key."""
    return {entry.key: entry.value for entry in meta_net_def.applicationSpecificInfo}


def AddBlobs(meta_net_def: Any, blob_name: str, blob_def: Iterable[str]) -> None:
    blobs = _value_of(meta_net_def.blobs, blob_name)
    if blobs is None:
        blobs = meta_net_def.blobs.add(key=blob_name).value
    blobs.extend(blob_def)


def ReplaceBlobs(meta_net_def: Any, blob_name: str, blob_def: Iterable[str]) -> None:
    """Replace the names of blobs under a key.

    Raises:
        AssertionError: there are none.
    """
    blobs = _value_of(meta_net_def.blobs, blob_name)
    assert blobs is not None, f"The blobs {blob_name} do not exist"
    blobs[:] = blob_def


def AddPlan(meta_net_def: Any, plan_name: str, plan_def: Any) -> None:
    meta_net_def.plans.add(key=plan_name, value=plan_def)


def AddNet(meta_net_def: Any, net_name: str, net_def: Any) -> None:
    meta_net_def.nets.add(key=net_name, value=net_def)


def SetBlobsOrder(meta_net_def: Any, blobs_order: Iterable[str]) -> None:
    """Set the order in which blobs are loaded."""
    meta_net_def.blobsOrder[:] = blobs_order


def SetPreLoadBlobs(meta_net_def: Any, pre_load_blobs: Iterable[str]) -> None:
    """Set the blobs that are loaded before the others."""
    meta_net_def.preLoadBlobs[:] = pre_load_blobs


def GetArgumentByName(net_def: Any, arg_name: str) -> Any:
    """Return the argument of a net of a name, None where there is none."""
    return next((argument for argument in net_def.arg if argument.name == arg_name), None)


def AddModelIdArg(meta_net_def: Any, net_def: Any) -> None:
    """Give a NetDef the `model_id` of the predictor's net, where that has one."""
    given = GetArgumentByName(meta_net_def.predict_net, "model_id")
    if given is None:
        return
    argument = GetArgumentByName(net_def, "model_id") or net_def.arg.add(name="model_id")
    argument.i = given.i


Proto = TypeVar("Proto", bound=Message)


def serialize_protobuf_struct(protobuf_struct: Message) -> bytes:
    return protobuf_struct.SerializeToString()


def deserialize_protobuf_struct(serialized_protobuf: bytes, struct_type: type[Proto]) -> Proto:
    """Return the message of a type that bytes hold.

    Raises:
        google.protobuf.message.DecodeError: they hold none.
    """
    return struct_type.FromString(serialized_protobuf)


def ExtractPredictorNet(
    net_proto: Any,
    input_blobs: Iterable[Any],
    output_blobs: Iterable[Any],
    device: Any = None,
    renames: Mapping[str, str] | None = None,
    disabled_inputs: Iterable[str] | None = None,
) -> tuple[Any, list[Any]]:
    """Return the net that computes outputs from inputs, and the parameters that it reads.

    Args:
        net_proto: the NetDef of the training net.
        input_blobs: the blobs that are fed.
        output_blobs: the blobs that are wanted.
        device: the device of all operators, in place of their own.
        renames: new names of blobs.
        disabled_inputs: inputs of operators that are taken away.

    Raises:
        Exception: an operator still trains (`is_test` is 0).
    """
    names = dict(renames or {})
    inputs = {str(blob) for blob in input_blobs}
    outputs = {str(blob) for blob in output_blobs}
    disabled = {str(blob) for blob in disabled_inputs or ()}
    net = core.Net(net_proto.name + "_predict" if net_proto.name else "predict")
    proto = net.Proto()
    forward = _forward(net_proto, inputs)
    ssa, versions = core.get_ssa(_net_of(forward))
    fed = [name for name in sorted(inputs) if name in versions]
    keep = core.get_op_ids_in_path(ssa, versions, fed, sorted(outputs))
    made: set[str] = set()
    parameters: list[str] = []
    for index in keep:
        op = copy.deepcopy(forward[index])
        _check_test_mode(op)
        left = [name for name in op.input if name not in disabled]
        op.input[:] = left
        for name in left:
            if name not in made and name not in inputs and name not in parameters:
                parameters.append(name)
        made.update(op.output)
        if device is not None:
            op.device_option.CopyFrom(device)
        _place_steps(op, device)
        rename(op.input, names)
        rename(op.output, names)
        proto.op.extend([op])
    proto.external_input.extend(names.get(name, name) for name in [*sorted(inputs), *parameters])
    proto.external_output.extend(names.get(name, name) for name in sorted(outputs))
    net._InvalidateLookupTables()
    return net, [names.get(name, name) for name in parameters]


def _place_steps(op: Any, device: Any) -> None:
    """Set the device of a recurrent operator's step net, and drop its steps' gradient."""
    for argument in op.arg if op.type.startswith("RecurrentNetwork") else ():
        if argument.name == "backward_step_net":
            argument.ClearField("n")
        elif argument.name == "step_net" and device is not None:
            for inner in argument.n.op:
                inner.device_option.CopyFrom(device)


def _forward(net_proto: Any, inputs: set[str]) -> list[Any]:
    """Return the operators that are not gradients and do not make an input."""
    return [op for op in net_proto.op if not (op.is_gradient_op or inputs.intersection(op.output))]


def _net_of(operators: list[Any]) -> Any:
    net = caffe2_pb2.NetDef()
    net.op.extend(operators)
    return net


def _check_test_mode(op: Any) -> None:
    for argument in op.arg:
        if argument.name == "is_test" and argument.i == 0:
            raise Exception(
                "An operator had is_test=0, did you try to extract a predictor from a train model "
                f"(instead of test model)? Op was: {op}"
            )
