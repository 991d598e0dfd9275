"""Nets that run: a NetDef compiled once to calls over the blobs of a workspace."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2.operators.registry import find
from poseidon.caffe2.proto.caffe2_pb2 import NetDef, OperatorDef
from poseidon.caffe2.runtime.bind import Step, bind
from poseidon.caffe2.runtime.blob import Blob
from poseidon.caffe2.runtime.chains import chains
from poseidon.caffe2.runtime.dag import ChainRun
from poseidon.caffe2.runtime.errors import EnforceNotMet, operator_error, place_of
from poseidon.caffe2.runtime.lifetimes import overwritten
from poseidon.errors import JobError

THREADED = frozenset({"dag", "async_dag", "async_scheduling", "async_polling", "prof_dag", "parallel"})
"""The net types whose independent operators run on threads, where the net has more than one worker."""


class Net:
    """A compiled net.

    Attributes:
        definition: a copy of its NetDef.
        steps: one call for each operator.
        threads: how many run it.
        chains: the plan of a net that runs on threads.
    """

    def __init__(self, definition: NetDef, workspace: Any) -> None:
        """Compile a net.

        Args:
            definition: the net.
            workspace: a `runtime.Workspace`; it must have the blobs that the net reads and does not make.

        Raises:
            RuntimeError: an operator is unknown, wrongly used, or reads a blob that does not exist.
        """
        self.definition = NetDef()
        self.definition.CopyFrom(definition)
        self.name = definition.name
        self.steps: list[Step] = []
        check_sources(self.definition)
        for index, operator in enumerate(self.definition.op):
            if self.definition.HasField("device_option") and not operator.HasField("device_option"):
                operator = _on(operator, self.definition)
            self.steps.append(compile_operator(operator, workspace, self.name, index))
        self.threads = definition.num_workers if definition.type in THREADED else 1
        self.chains = chains(self.definition.op) if self.threads > 1 else []
        self._free_overwritten(workspace)

    def run(self) -> None:
        """Run all operators once: in order, or independent chains of them on threads.

        Raises:
            RuntimeError: an operator has failed; the cause is what it raised.
        """
        if len(self.chains) > 1:
            ChainRun(self.chains, self._run_step)(min(self.threads, len(self.chains)))
            return
        step = None
        try:
            for step in self.steps:
                step()
        except Exception as error:
            index = self.steps.index(step)  # type: ignore[arg-type]
            raise failure(error, self.definition.op[index], self.name, index) from error

    def _free_overwritten(self, workspace: Any) -> None:
        """Let the steps free the values that later steps overwrite: behind the last reader, or on threads before the writer."""
        for name, last, writer in overwritten(self.definition.op):
            blob, index = workspace.get(name), writer if self.chains else last
            self.steps[index] = (_freeing_before if self.chains else _freeing_after)(self.steps[index], blob)

    def _run_step(self, index: int) -> None:
        try:
            self.steps[index]()
        except Exception as error:
            raise failure(error, self.definition.op[index], self.name, index) from error


def _freeing_after(step: Step, blob: Blob) -> Step:
    def run() -> None:
        step()
        blob.value = None

    return run


def _freeing_before(step: Step, blob: Blob) -> Step:
    def run() -> None:
        blob.value = None
        step()

    return run


def compile_operator(definition: OperatorDef, workspace: Any, net: str = "", index: int = 0) -> Step:
    """Return the call of one operator; its outputs come into being as empty blobs.

    Raises:
        RuntimeError: it is unknown, wrongly used, or reads a blob that does not exist.
    """
    try:
        find(definition.type)
    except KeyError as error:
        raise operator_error(str(error.args[0]), definition, net, index) from error
    inputs: list[Blob] = []
    for name in definition.input:
        blob = workspace.find(name)
        if blob is None:
            raise operator_error(
                f"op {definition.type}: Encountered a non-existing input blob: {name}", definition, net, index
            )
        inputs.append(blob)
    outputs = [workspace.create(name) for name in definition.output]
    try:
        return bind(definition, inputs, outputs, workspace)
    except (KeyError, ValueError) as error:
        raise operator_error(str(error.args[0]), definition, net, index) from error


def failure(error: Exception, definition: OperatorDef, net: str, index: int) -> Exception:
    """Return what to raise for an operator that has failed.

    Errors of Python functions, of inner nets and of jobs (one sentence for the user) stay as they are.
    """
    if place_of(error) is not None or isinstance(error, JobError) or definition.type.startswith("Python"):
        return error
    empty = " (a blob that it reads is empty)" if "NoneType" in str(error) else ""
    return operator_error(f"{type(error).__name__}: {error}{empty}", definition, net, index)


def check_sources(definition: NetDef) -> None:
    """Raise RuntimeError when a net that declares its inputs reads a blob that is neither an input nor made before.

    A declared output that no operator makes is an error too.
    """
    known = set(definition.external_input)
    declares = bool(known)
    for index, operator in enumerate(definition.op):
        for name in operator.input:
            if declares and name not in known:
                reason = f"op {operator.type}: Source for input {name} is unknown for net {definition.name}"
                raise operator_error(reason, operator, definition.name, index)
        known.update(operator.output)
    missing = [name for name in definition.external_output if name not in known]
    if missing:
        raise EnforceNotMet(
            f"{missing[0]} is declared as an output of net {definition.name}, which never makes it"
        )


def _on(operator: OperatorDef, net: NetDef) -> OperatorDef:
    placed = OperatorDef()
    placed.CopyFrom(operator)
    placed.device_option.CopyFrom(net.device_option)
    return placed
