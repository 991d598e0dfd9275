"""The operators that a net's outputs need, in order, with the shapes of all values.

Law: a value is a number. The net runs once on zeros, so the runtime itself gives shapes and types.
A value that depends on no input becomes a constant with the value that the runtime gives. Recurrent
networks become the operators of their steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe.export.graph import OPERATORS, Shape
from poseidon.caffe2.operators.recurrent import Link, RecurrentNetwork
from poseidon.caffe2.operators.registry import find, is_registered
from poseidon.caffe2.proto.caffe2_pb2 import NetDef, OperatorDef
from poseidon.caffe2.runtime.bind import function_of
from poseidon.caffe2.runtime.chains import first_reads
from poseidon.caffe2.utils import MakeArgument
from poseidon.errors import DefinitionError

CPU = torch.device("cpu")
RECURRENT = "RecurrentNetwork"
WITH_LABELS = {"SoftmaxWithLoss": "Softmax"}
"""Operators with labels whose first output needs none, and what gives that."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a net.

    Attributes:
        name: of its blob.
        tensor: its value when the inputs are zero.
        constant: whether no input decides it.
    """

    name: str
    tensor: Tensor
    constant: bool

    @property
    def shape(self) -> Shape:
        """Its extents."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        """Its type, as numpy names it."""
        return str(self.tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Op:
    """An operator with the numbers of its values.

    Attributes:
        definition: the operator; no output has the name of an input.
        inputs, outputs: numbers of values; an output that the runtime does not give is None.
    """

    definition: OperatorDef
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]

    def __getitem__(self, name: str) -> Any:
        """Return an argument, or its default."""
        return find(self.definition.type).argument(self.definition, name)

    @property
    def label(self) -> str:
        """The type and the first output, for messages."""
        return f"{self.definition.type} ({', '.join(self.definition.output[:1])})"


@dataclass(slots=True)
class Trace:
    """The operators and values of a net.

    Attributes:
        ops: in order.
        values: all values.
        inputs, outputs: numbers of values by name.
        absent: outputs that are left out, since they need inputs whose shape is not given.
    """

    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor, *, constant: bool) -> int:
        """Add a value, and return its number."""
        self.values.append(Value(name, tensor, constant))
        return len(self.values) - 1


def trace_net(
    net: NetDef,
    parameters: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str],
) -> Trace:
    """Return the operators that the outputs need.

    Args:
        net: the net that predicts.
        parameters: blobs that exist before it runs.
        inputs: zeros in the shapes of its inputs; an external input without a value is absent.
        outputs: names of blobs.

    Raises:
        DefinitionError: an operator has no form in other formats, or fails.
    """
    ops, absent = _needed(net, {*parameters, *inputs}, outputs)
    if absent >= set(outputs):
        raise DefinitionError(_nothing_left(net, {*parameters, *inputs}))
    _check_forms(ops, net.name, set(parameters) - set(inputs))
    trace = Trace(absent=[name for name in outputs if name in absent])
    names: dict[str, int] = {}
    for name, tensor in inputs.items():
        names[name] = trace.inputs[name] = trace.add(name, tensor, constant=False)
    for name, tensor in parameters.items():
        if name not in inputs:
            names[name] = trace.add(name, tensor, constant=True)
    tracer = _Tracer(trace, net.name)
    with torch.no_grad():
        for op in ops:
            tracer.run(op, names)
    trace.outputs = {name: names[name] for name in outputs if name not in absent}
    return trace


def _needed(
    net: NetDef, given: set[str], outputs: Sequence[str]
) -> tuple[list[OperatorDef], set[str]]:
    """Return the operators that outputs need and inputs allow; and the absent blobs."""
    kept: list[OperatorDef] = []
    present, absent = set(given), set()
    for op in net.op:
        made = op
        if op.type in WITH_LABELS and op.input[0] in present and set(op.input) - present:
            made = OperatorDef(type=WITH_LABELS[op.type], input=op.input[:1], output=op.output[:1])
            made.arg.extend(argument for argument in op.arg if argument.name == "axis")
            absent |= set(op.output[1:])
            present -= set(op.output[1:])
        if set(made.input) <= present:
            kept.append(made)
            present |= set(made.output)
            absent -= set(made.output)
        else:
            absent |= set(op.output)
            present -= set(op.output)
    wanted = set(outputs) - absent
    needed = []
    for op in reversed(kept):
        if wanted & set(op.output):
            needed.append(op)
            wanted = (wanted - set(op.output)) | set(op.input)
    absent |= {name for name in outputs if name not in present}
    return needed[::-1], absent


def _nothing_left(net: NetDef, given: set[str]) -> str:
    """Return why a net has no outputs: the blobs that it reads, does not make and was not given."""
    lacking = first_reads(net.op, known=given)
    if not lacking:
        return f"the net '{net.name}' has no outputs"
    return f"the net '{net.name}': its outputs need {', '.join(lacking)}, which have no value; add --input=NAME:N,C,H,W for data"


def _check_forms(ops: Sequence[OperatorDef], name: str, constants: Iterable[str]) -> None:
    """Raise DefinitionError with all operators without a form that `constants` do not decide."""
    without: dict[str, str] = {}
    known = set(constants)
    for op in ops:
        if is_registered(op.type) and set(op.input) <= known and _repeats(op.type):
            known |= set(op.output)
            continue
        known -= set(op.output)
        steps = [step for arg in op.arg if arg.name == "step_net" for step in arg.n.op]
        for each in (op, *steps):
            if each.type != RECURRENT and each.type not in OPERATORS:
                without.setdefault(each.type, op.output[0] if op.output else "")
    if without:
        shown = ", ".join(f"{kind} ({output})" for kind, output in without.items())
        raise DefinitionError(f"no other format has these operators of the net '{name}': {shown}")


def _repeats(kind: str) -> bool:
    """Return whether an operator gives the same in every run."""
    known = find(kind)
    return not (kind in RANDOM or known.blobs or ".operators.system." in known.make.__module__)


RANDOM = frozenset(
    {
        "UniformFill",
        "UniformIntFill",
        "GaussianFill",
        "XavierFill",
        "MSRAFill",
        "Dropout",
        "WeightedSample",
    }
)
"""Operators that draw."""


class _Tracer:
    """Runs operators on zeros and collects them."""

    def __init__(self, trace: Trace, net: str) -> None:
        self.trace, self.net = trace, net
        self.count = 0

    def run(self, op: OperatorDef, names: dict[str, int]) -> None:
        """Run one operator; `names` has the number of the value of each blob."""
        if op.type == RECURRENT:
            self._unroll(op, names)
            return
        inputs = tuple(names[name] for name in op.input)
        values = [self.trace.values[index] for index in inputs]
        definition = self._renamed(op)
        constant = all(value.constant for value in values)
        made = self._results(definition, [value.tensor for value in values])
        outputs: list[int | None] = []
        for name, result in zip(op.output, made, strict=False):
            number = (
                self.trace.add(name, result, constant=constant)
                if isinstance(result, Tensor)
                else None
            )
            outputs.append(number)
            if number is not None:
                names[name] = number
        if not constant:
            outputs += [None] * (len(op.output) - len(outputs))
            self.trace.ops.append(Op(definition, inputs, tuple(outputs)))

    def _renamed(self, op: OperatorDef) -> OperatorDef:
        """Return an operator that is not in place."""
        made = deepcopy(op)
        made.ClearField("device_option")
        made.ClearField("input")
        made.input.extend(f"{index}:{name}" for index, name in enumerate(op.input))
        return made

    def _results(self, op: OperatorDef, tensors: list[Tensor]) -> Sequence[Any]:
        try:
            made = function_of(op, None, CPU)(*tensors)
        except Exception as error:
            found = _shapes_of(op, tensors)
            if found is not None:
                return found
            shapes = ", ".join("x".join(map(str, tensor.shape)) for tensor in tensors)
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise DefinitionError(
                f"the operator {op.type} ({', '.join(op.output[:1])}) of the net '{self.net}' "
                f"does not run on {shapes}: {why}"
            ) from error
        return [made] if find(op.type).single else list(made or ())

    def _unroll(self, op: OperatorDef, names: dict[str, int]) -> None:
        """Run the steps of a recurrent network as operators of the net itself."""
        network = function_of(op, None, CPU)
        assert isinstance(network, RecurrentNetwork)
        sequence = self.trace.values[names[op.input[0]]].tensor
        states = {
            name: self._first_states(op.input[index], names, sequence)
            for name, index in network.initial.items()
        }
        begins = {name: len(elements) for name, elements in states.items()}
        for step in range(len(sequence)):
            inner = dict(names)
            number = torch.tensor([step], dtype=torch.int32)
            inner[network.timestep] = self.trace.add(
                f"{network.timestep}{step}", number, constant=True
            )
            for link in network.reads:
                name = network.earlier.get(link.internal, link.internal)
                self._read_link(link, name, step, states, inner)
            for each in network.net.op:
                self.run(each, inner)
            for link in network.writes:
                if link.offset >= begins[link.external]:
                    states[link.external].append(inner[link.internal])
        for name in op.output[:-1]:
            state, offset = network.parts[name]
            self._join(states[state][offset:], name, names)

    def _first_states(self, name: str, names: dict[str, int], sequence: Tensor) -> list[int]:
        """Return the first elements of a state, each of shape (1, N, D)."""
        inner, shape = dict(names), self.trace.values[names[name]].shape
        if len(shape) < 3:
            self._apply(
                "ExpandDims",
                [name],
                f"{name}_first",
                inner,
                dims=[0] if len(shape) == 2 else [0, 1],
            )
            name = f"{name}_first"
            if len(shape) == 1:
                self._apply("Tile", [name], f"{name}_all", inner, tiles=sequence.shape[1], axis=1)
                name = f"{name}_all"
            return [inner[name]]
        return [self._element(name, index, index + 1, inner) for index in range(shape[0])]

    def _read_link(
        self,
        link: Link,
        name: str,
        step: int,
        states: Mapping[str, list[int]],
        inner: dict[str, int],
    ) -> None:
        part = link.part(step)
        if link.external in states:
            self._join(states[link.external][part], name, inner)
        else:
            inner[name] = self._element(link.external, part.start, part.stop, inner)

    def _element(self, name: str, start: int, stop: int, names: Mapping[str, int]) -> int:
        """Return the elements from `start` to before `stop` of a tensor of a sequence."""
        inner, rank = dict(names), len(self.trace.values[names[name]].shape)
        made, rest = f"{name}_{start}", [0] * (rank - 1)
        self._apply(
            "Slice", [name], made, inner, starts=[start, *rest], ends=[stop, *(-1 for _ in rest)]
        )
        return inner[made]

    def _join(self, elements: Sequence[int], name: str, names: dict[str, int]) -> None:
        """Let a blob be elements along the first axis."""
        inner = {f"{name}_{index}": element for index, element in enumerate(elements)}
        self._apply("Concat", list(inner), name, inner, axis=0)
        names[name] = inner[name]

    def _apply(
        self, kind: str, inputs: Sequence[str], output: str, names: dict[str, int], **arguments: Any
    ) -> None:
        definition = OperatorDef(type=kind, input=inputs, output=[output])
        definition.arg.extend(MakeArgument(key, value) for key, value in arguments.items())
        self.run(definition, names)


def _shapes_of(op: OperatorDef, tensors: Sequence[Tensor]) -> list[Any] | None:
    """Return zeros in the results' shapes where zeros are not legal inputs, or None."""
    meta = torch.device("meta")
    try:
        made = function_of(op, None, meta)(*(tensor.to(meta) for tensor in tensors))
    except Exception:  # noqa: BLE001 (an operator whose shapes depend on data says so in many ways)
        return None
    results = [made] if find(op.type).single else list(made or ())
    return [
        torch.zeros(each.shape, dtype=each.dtype) if isinstance(each, Tensor) else each
        for each in results
    ]


def zeros(shape: Shape, dtype: str) -> Tensor:
    """Return zeros of a type that numpy names."""
    return torch.from_numpy(np.zeros(shape, np.dtype(dtype)))
