"""Nets that run: a NetDef compiled once to calls over the blobs of a workspace."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from poseidon.caffe2.operators.registry import find
from poseidon.caffe2.proto.caffe2_pb2 import NetDef, OperatorDef
from poseidon.caffe2.runtime.bind import (
    Start,
    Step,
    bind,
    bind_start,
    device_of,
    misfit,
    set_outputs,
)
from poseidon.caffe2.runtime.chains import Part, chains, nodes, overwritten
from poseidon.caffe2.runtime.dag import MOST_THREADS, ChainRun, lending
from poseidon.caffe2.runtime.errors import EnforceNotMet, cause, is_own, operator_error, place_of
from poseidon.caffe2.runtime.values import Blob, is_tensor
from poseidon.caffe2.shards.buckets import Buckets, Pending
from poseidon.errors import JobError

THREADED = frozenset(
    {"dag", "async_dag", "async_scheduling", "async_polling", "prof_dag", "parallel"}
)
"""The net types whose independent operators run on threads, where the net has more than one
worker.
"""
SEQUENTIAL = frozenset({"", "simple", "simple_refcount", "async_simple", "singlethread_async"})
"""The other net types: their operators run in order."""
MOST_SHAPES = 8
"""How many shapes an error names."""


class Net:
    """A compiled net.

    Attributes:
        definition: a copy of its NetDef.
        steps: one call for each operator, which waits for its result.
        starts: what starts the operators that wait for other machines, by index.
        threads: how many run it.
        computing: how many of them compute at the same time, at most; others wait for machines.
        chains: the plan of a net that runs on threads.
        nodes: the order of the parts of a net on one thread that has `starts`.
        last_starts: the operators at which a group that is started together ends.
    """

    def __init__(self, definition: NetDef, workspace: Any) -> None:
        """Compile a net.

        Args:
            definition: the net.
            workspace: a `runtime.Workspace` with the blobs that the net reads and does not make.

        Raises:
            RuntimeError: the net's or an operator's type is unknown, or its use is wrong.
        """
        if definition.type not in THREADED | SEQUENTIAL:
            known = ", ".join(sorted(THREADED | SEQUENTIAL - {""}))
            raise EnforceNotMet(
                f"net {definition.name} has the unknown type '{definition.type}'; expected one of "
                f"{known}"
            )
        self.definition = copy.deepcopy(definition)
        self.name = definition.name
        self.steps: list[Step] = []
        self._inputs: list[list[Blob]] = []  # of each operator
        check_sources(self.definition)
        for index, operator in enumerate(self.definition.op):
            if self.definition.HasField("device_option") and not operator.HasField("device_option"):
                operator = _on(operator, self.definition)
            self.steps.append(compile_operator(operator, workspace, self.name, index))
            self._inputs.append([workspace.get(name) for name in operator.input])
        self.threads = definition.num_workers if definition.type in THREADED else 1
        freeing = self._free_overwritten(workspace)
        self.starts = self._bind_starts(workspace, freeing)
        self.computing = computing_threads(self.definition.op) if self.starts else MOST_THREADS
        self.chains = chains(self.definition.op, self.starts) if self.threads > 1 else []
        self.nodes = nodes(self.definition.op, self.starts) if self.starts else []
        follow = zip(self.nodes, self.nodes[1:], strict=False)
        self.last_starts = {
            index
            for (part, index), (then, _) in follow
            if part is Part.START and then is not Part.START
        }

    def run(self) -> None:
        """Run all operators once: in order, or independent chains of them on threads.

        Raises:
            RuntimeError: an operator has failed; the cause is what it raised.
        """
        if len(self.chains) > 1:
            run = ChainRun(self.chains, self._run_step, StartedOperators(self), self.computing)
            run(min(self.threads, len(self.chains)))
            return
        if self.starts:
            self._run_nodes()
            return
        step = None
        try:
            for step in self.steps:
                step()
        except Exception as error:
            index = self.steps.index(step)  # type: ignore[arg-type]
            raise self.failure(error, index) from error

    def _run_nodes(self) -> None:
        """Run all operators in order on this thread."""
        started = StartedOperators(self)
        for part, index in self.nodes:
            if part is Part.START:
                started.start(index)
            elif part is Part.END:
                started.end(index)
            else:
                self._run_step(index)

    def _free_overwritten(self, workspace: Any) -> set[int]:
        """Let steps free values that later ones overwrite, after or on threads before the writer.

        Return the indices of the last readers and of the writers.
        """
        found: set[int] = set()
        threaded = self.threads > 1
        for name, last, writer in overwritten(self.definition.op):
            blob, index = workspace.get(name), writer if threaded else last
            self.steps[index] = (_freeing_before if threaded else _freeing_after)(
                self.steps[index], blob
            )
            found.update((last, writer))
        return found

    def _bind_starts(
        self, workspace: Any, freeing: set[int]
    ) -> dict[int, tuple[Start, list[Blob]]]:
        """Return what starts an operator, and its outputs, for those that wait and free nothing."""
        found = {}
        for index, operator in enumerate(self.definition.op):
            # The function of a Python operator may wait for another operator's.
            if operator.type.startswith("Python"):
                self.steps[index] = _lending(self.steps[index])
            if index not in freeing:
                start = bind_start(operator, self._inputs[index])
                if start is not None:
                    found[index] = start, [workspace.get(name) for name in operator.output]
        return found

    def _run_step(self, index: int) -> None:
        try:
            self.steps[index]()
        except Exception as error:
            raise self.failure(error, index) from error

    def failure(self, error: Exception, index: int) -> Exception:
        """Return what to raise for an operator of this net that has failed."""
        return failure(error, self.definition.op[index], self._inputs[index], self.name, index)


class StartedOperators:
    """The operators of one run of a net that were started, and are waited for later."""

    def __init__(self, net: Net) -> None:
        self._net = net
        self._buckets = Buckets()
        self._pending: dict[int, Pending] = {}
        self._closed: list[int] = []  # not started yet: in a bucket

    def start(self, index: int) -> list[int]:
        """Start an operator; return the indices of those that can be waited for from now on.

        The last one of a group, see `chains.nodes`, starts all that are in buckets.
        """
        try:
            self._pending[index] = self._net.starts[index][0](self._buckets)
            if index in self._net.last_starts:
                self._buckets.flush()
        except Exception as error:
            raise self._net.failure(error, index) from error
        waiting = [*self._closed, index]
        self._closed = [one for one in waiting if not self._pending[one].started]
        return [one for one in waiting if self._pending[one].started]

    def end(self, index: int) -> None:
        """Wait for an operator, and set its outputs."""
        try:
            values = self._pending.pop(index).wait()
        except Exception as error:
            raise self._net.failure(error, index) from error
        set_outputs(self._net.starts[index][1], values)


def computing_threads(operators: Sequence[OperatorDef]) -> int:
    """Return the threads of a net that waits for other machines: on CPUs one a replica.

    More would compete with torch's own threads inside operators, and with threads that send. On
    GPUs threads wait for the device, and the net sets their number.
    """
    devices: defaultdict[int, set[int]] = defaultdict(set)
    for operator in operators:
        if device_of(operator.device_option).type != "cpu":
            return MOST_THREADS
        devices[operator.device_option.device_type].add(operator.device_option.device_id)
    return max(map(len, devices.values()))


def _lending(step: Step) -> Step:
    def run() -> None:
        with lending():
            step()

    return run


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


def compile_operator(
    definition: OperatorDef, workspace: Any, net: str = "", index: int = 0
) -> Step:
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
                f"op {definition.type}: Encountered a non-existing input blob: {name}",
                definition,
                net,
                index,
            )
        inputs.append(blob)
    outputs = [workspace.create(name) for name in definition.output]
    try:
        return bind(definition, inputs, outputs, workspace)
    except (KeyError, ValueError) as error:
        raise operator_error(str(error.args[0]), definition, net, index) from error


def failure(
    error: Exception, definition: OperatorDef, inputs: Sequence[Blob], net: str = "", index: int = 0
) -> Exception:
    """Return a failed operator's error: it names the net, the blobs and their shapes.

    Errors of Python functions, inner nets and jobs (one sentence for the user) stay as they are.
    """
    if (
        place_of(error) is not None
        or isinstance(error, JobError)
        or definition.type.startswith("Python")
    ):
        return error
    values = [(name, blob.value) for name, blob in zip(definition.input, inputs, strict=True)]
    shapes = [f"{name} {_shape(value)}" for name, value in values if is_tensor(value)]
    place = f"operator {index} of net {net}" if net else "this operator"
    if len(shapes) > MOST_SHAPES:
        shapes[MOST_SHAPES:] = [f"and {len(shapes) - MOST_SHAPES} more"]
    given = f"; {place}, {definition.type}, has the inputs {', '.join(shapes)}" if shapes else ""
    wrong = "" if is_own(error) else misfit(definition, [value for _, value in values])
    return operator_error((wrong or cause(error, dict(values))) + given, definition, net, index)


def _shape(value: Any) -> str:
    """Return the shape of a tensor, and its type where that is not float32."""
    kind = str(value.dtype).removeprefix("torch.").replace("object", "string")
    return f"{tuple(value.shape)}" + (f" {kind}" if kind != "float32" else "")


def check_sources(definition: NetDef) -> None:
    """Raise RuntimeError when a net with declared inputs reads an undeclared, unmade blob.

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
        raise EnforceNotMet(f"net {definition.name} never makes its output {missing[0]}")


def _on(operator: OperatorDef, net: NetDef) -> OperatorDef:
    placed = copy.deepcopy(operator)
    placed.device_option.CopyFrom(net.device_option)
    return placed
