"""The creation and running of nets, operators and plans in the current workspace."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from google.protobuf.message import DecodeError, Message

from poseidon.caffe2 import operators
from poseidon.caffe2.operators import registry
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.runtime.errors import EnforceNotMet, place_of
from poseidon.caffe2.runtime.views import WorkspaceView
from poseidon.caffe2.runtime.workspace import Workspace, run_plan
from poseidon.caffe2.workspace.current import current, log

assert operators  # the import registers them

M = TypeVar("M", bound=Message)

MOST_SHOWN = 40
"""Bytes that an error shows of input that is not a message."""

operator_tracebacks: defaultdict[str, dict[int, Any]] = defaultdict(dict)
"""Where each operator of a net was made, by the net's name and the operator's index."""


def RegisteredOperators() -> list[str]:
    return registry.registered()


def GetNetName(net: Any) -> str:
    """Return the name of a net, given as a name, a net, a NetDef or its bytes."""
    return StringifyNetName(net)


def StringifyNetName(name: Any) -> str:
    """Return the name of a net, given as a name, a net or a NetDef."""
    if isinstance(name, (str, bytes)):
        return name.decode() if isinstance(name, bytes) else name
    return str(name.name if isinstance(name, caffe2_pb2.NetDef) else name.Proto().name)


def StringifyBlobName(name: Any) -> str:
    """Return the name of a blob, given as a name or a reference.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(name, (str, bytes)):
        return name.decode() if isinstance(name, bytes) else name
    if type(name).__name__ == "BlobReference":
        return str(name)
    raise ValueError(f"Expected a string or BlobReference, got {type(name).__name__}: {name!r}")


def StringifyProto(obj: Any) -> bytes:
    """Return the bytes of a message, given as bytes, a message, or an object with `Proto()`.

    Raises:
        ValueError: it has a different type.
    """
    if isinstance(obj, (str, bytes)):
        return obj.encode() if isinstance(obj, str) else obj
    if isinstance(obj, Message):
        return obj.SerializeToString()
    if hasattr(obj, "Proto"):
        return bytes(obj.Proto().SerializeToString())
    raise ValueError(f"Unexpected argument to StringifyProto of type {type(obj).__name__}")


def parsed(kind: type[M], given: Any) -> M:
    """Return a message from its bytes, or from an object with `Proto()`.

    Raises:
        RuntimeError: the bytes do not encode such a message.
    """
    data = StringifyProto(given)
    try:
        return kind.FromString(data)
    except DecodeError as error:
        what = "a net or" if kind is caffe2_pb2.NetDef else "an object or"
        shown = given if isinstance(given, (str, bytes)) else data
        raise EnforceNotMet(
            f"Expected {what} the bytes of a {kind.__name__}, found {shown[:MOST_SHOWN]!r}"
        ) from error


def _net_def(net: Any) -> caffe2_pb2.NetDef:
    if isinstance(net, caffe2_pb2.NetDef):
        return net
    if hasattr(net, "Proto"):
        proto = net.Proto()
        assert isinstance(proto, caffe2_pb2.NetDef)
        return proto
    return parsed(caffe2_pb2.NetDef, net)


def CallWithExceptionIntercept(
    func: Callable[..., Any], op_id_fetcher: Any, net_name: str, *args: Any, **kwargs: Any
) -> Any:
    """Call a function; where an operator fails, log where the script made it."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        net, index = place_of(error) or (net_name, -1)
        frames = operator_tracebacks.get(net or net_name, {}).get(index)
        if frames:
            lines = [f'  File "{path}", line {line}, in {name}' for path, line, name in frames]
            log.warning(
                "Original python traceback for operator %d in network %s:\n%s",
                index,
                net,
                "\n".join(lines),
            )
        raise


def CreateNet(net: Any, overwrite: bool = False, input_blobs: Iterable[Any] | None = None) -> bool:
    """Compile a net and keep it under its name.

    Args:
        net: a net, a NetDef or its bytes.
        overwrite: whether a net of the same name is replaced.
        input_blobs: blobs to create, empty, before.

    Raises:
        RuntimeError: the name is taken, or the operator that the message names cannot be made.
    """
    for name in input_blobs or ():
        current().create(StringifyBlobName(name))
    definition = _net_def(net)
    CallWithExceptionIntercept(current().create_net, None, definition.name, definition, overwrite)
    return True


def RunNetOnce(net: Any) -> bool:
    """Compile a net, run it once and forget it; raises as `CreateNet` and `RunNet` do."""
    definition = _net_def(net)
    CallWithExceptionIntercept(current().run_once, None, definition.name, definition)
    return True


def RunNet(name: Any, num_iter: int = 1, allow_fail: bool = False) -> bool:
    """Run a net that was created.

    Args:
        name: the net or its name.
        num_iter: how often.
        allow_fail: whether a failure gives False instead of an error.

    Raises:
        RuntimeError: there is no such net, or the operator that the message names has failed.
    """
    net = current().nets.get(StringifyNetName(name))
    if net is None:
        raise EnforceNotMet(f"Can't find net {StringifyNetName(name)}")
    try:
        for _ in range(num_iter):
            CallWithExceptionIntercept(net.run, None, net.name)
    except RuntimeError:
        if not allow_fail:
            raise
        return False
    return True


def DeleteNet(name: Any) -> None:
    current().nets.pop(StringifyNetName(name), None)


def RunOperatorOnce(operator: Any) -> bool:
    """Run one operator, given as an OperatorDef or its bytes."""
    if not isinstance(operator, caffe2_pb2.OperatorDef):
        operator = parsed(caffe2_pb2.OperatorDef, operator)
    current().run_operator(operator)
    return True


def RunOperatorsOnce(operators: Iterable[Any]) -> bool:
    return all(RunOperatorOnce(operator) for operator in operators)


def _plan_def(plan_or_step: Any) -> caffe2_pb2.PlanDef:
    if isinstance(plan_or_step, caffe2_pb2.PlanDef):
        return plan_or_step
    if hasattr(plan_or_step, "AllNets"):
        plan = caffe2_pb2.PlanDef(name=plan_or_step.Name())
        plan.execution_step.add().CopyFrom(plan_or_step.Proto())
        plan.network.extend(net.Proto() for net in plan_or_step.AllNets())
        return plan
    return parsed(caffe2_pb2.PlanDef, plan_or_step)


def RunPlan(plan_or_step: Any, policy: Any = None) -> bool:
    """Run a plan, or a step."""
    run_plan(_plan_def(plan_or_step), current())
    return True


class BackgroundPlan:
    """A plan that runs on a thread."""

    def __init__(self, plan: caffe2_pb2.PlanDef, workspace: Workspace) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(plan, workspace), daemon=True)
        self._thread.start()

    def _run(self, plan: caffe2_pb2.PlanDef, workspace: Workspace) -> None:
        try:
            run_plan(plan, workspace)
        except BaseException as error:  # noqa: BLE001 (the owner of the plan asks for it)
            self._error = error

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def is_succeeded(self) -> bool:
        """Return whether the plan has ended without an error."""
        return self.is_done() and self._error is None


def RunPlanInBackground(plan_or_step: Any) -> BackgroundPlan:
    """Start a plan on a thread."""
    return BackgroundPlan(_plan_def(plan_or_step), current())


class Predictor:
    """Runs a net on inputs; parameters come from the init net or the current workspace."""

    def __init__(self, init_net: Any, predict_net: Any) -> None:
        """Run the init net and create the other.

        Args:
            init_net, predict_net: NetDefs, their bytes, or nets.
        """
        self._workspace = Workspace(parent=current())
        self._net = parsed(caffe2_pb2.NetDef, predict_net)
        init = parsed(caffe2_pb2.NetDef, init_net)
        self._workspace.run_once(init)
        self._inputs = list(self._net.external_input)
        for name in self._inputs:
            self._workspace.create(name)
        self._compiled = self._workspace.create_net(self._net, overwrite=True)

    def run(self, inputs: Sequence[np.ndarray] | Mapping[str, np.ndarray]) -> list[Any]:
        """Return the net's outputs for inputs, given by name or in the external inputs' order.

        Inputs that are not given keep their values from the init net or from the run before.

        Raises:
            TypeError: the inputs are one array, not a list of arrays.
            RuntimeError: there are more inputs than the net has, or others; an operator failed.
        """
        if isinstance(inputs, (np.ndarray, torch.Tensor)):
            raise TypeError("run: expected a list of an array for each input, found one array")
        named = (
            dict(inputs)
            if isinstance(inputs, Mapping)
            else dict(zip(self._inputs, inputs, strict=False))
        )
        if len(named) < len(inputs):
            raise RuntimeError(f"{len(inputs)} inputs are given, the net has {len(self._inputs)}")
        unknown = [name for name in named if name not in self._inputs]
        if unknown:
            raise RuntimeError(f"The net has no input {unknown[0]}: only {', '.join(self._inputs)}")
        view = WorkspaceView(self._workspace)
        for name, value in named.items():
            view.create_blob(name).feed(value)
        self._compiled.run()
        return [view.fetch_blob(name) for name in self._net.external_output]
