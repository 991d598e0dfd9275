"""A Caffe2 net as an ONNX model.

Law: the model computes what the net computes. The first axis of inputs is the dynamic batch where
every value allows it. Operators that ONNX has no form of are an error that names all of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from poseidon.caffe.export.formats import check_suffix, tensor_file, traced_program
from poseidon.caffe.export.graph import OPERATORS, Exported, Graph, GraphBlob, left_out, shape_text
from poseidon.caffe.layers.base import LayerError
from poseidon.caffe2.export import arrays as _arrays  # noqa: F401 - registers its emitters
from poseidon.caffe2.export import arrays as _rows  # noqa: F401 - registers its emitters
from poseidon.caffe2.export import elementwise as _elementwise  # noqa: F401 - registers its emitters
from poseidon.caffe2.export import products as _products  # noqa: F401 - registers its emitters
from poseidon.caffe2.export import vision as _vision  # noqa: F401 - registers its emitters
from poseidon.caffe2.export.files import Predictor, arrays
from poseidon.caffe2.export.trace import CPU, Op, Trace, Value, trace_net, zeros
from poseidon.caffe2.runtime.bind import function_of
from poseidon.engine.snapshot_files import write_atomically
from poseidon.errors import DefinitionError


def export_predictor(predictor: Predictor) -> Exported:
    """Return the ONNX model of a predictor.

    Raises:
        DefinitionError: operators have no form in ONNX, or do not run.
        UsageError: `onnx` is not installed.
    """
    trace, dynamic, fixed = traced(predictor)
    graph = Graph()
    names: dict[int, str] = {}
    given: list[GraphBlob] = []
    for name, number in trace.inputs.items():
        blob = _blob(trace.values[number], number in dynamic, name)
        names[number] = graph.input(name, blob.shape, dynamic=blob.dynamic, dtype=blob.dtype)
        given.append(blob)
    faults = []
    needed = {*trace.outputs.values(), *(number for op in trace.ops for number in op.inputs)}
    for op in trace.ops:
        made = [number for number in op.outputs if number is not None]
        try:
            _emit(graph, trace, op, names, dynamic)
            _check_outputs(trace, op, names, needed)
        except LayerError as error:
            faults.append(f"{op.label} {error}")
            names.update(dict.fromkeys(made, ""))
        for number in made:
            name = trace.values[number].name
            if names.get(number) and trace.outputs.get(name, number) == number:
                names[number] = graph.rename(names[number], name)
    if faults:
        raise DefinitionError(
            f"the net '{predictor.net.name}' has operators without a form in ONNX: "
            f"{'; '.join(faults)}"
        )
    outputs = [
        _output(graph, trace, name, number, names, number in dynamic)
        for name, number in trace.outputs.items()
    ]
    return Exported(
        model=graph.model(predictor.net.name, outputs),
        inputs=tuple(given),
        outputs=tuple(outputs),
        fixed=fixed,
        absent=tuple(trace.absent),
    )


def _check_outputs(trace: Trace, op: Op, names: dict[int, str], needed: set[int]) -> None:
    """Raise LayerError when the form of an operator lacks an output that is needed."""
    for number in op.outputs:
        if number in needed and number not in names:
            raise LayerError(f"has no form of its output {trace.values[number].name}")


def _output(
    graph: Graph, trace: Trace, name: str, number: int, names: dict[int, str], dynamic: bool
) -> GraphBlob:
    graph.scope = name
    if number not in names:
        names[number] = graph.constant(array(trace.values[number].tensor))
    value = names[number]
    if value != name or number in trace.inputs.values() or graph.known(value) is not None:
        value = graph.rename(graph.op("Identity", value), name)
    return _blob(trace.values[number], dynamic, value)


def traced(predictor: Predictor) -> tuple[Trace, frozenset[int], str]:
    """Return a predictor's operators, its values with the batch first, and why there are none."""
    trace = _trace(predictor, 0)
    firsts = {shape[0] for shape, _ in predictor.inputs.values() if shape}
    if any(op.definition.type in ("LSTMUnit", "GRUUnit") for op in trace.ops) or _unrolled(
        predictor
    ):
        return trace, frozenset(), "the steps of its recurrent networks are unrolled"
    if len(firsts) != 1 or not all(shape for shape, _ in predictor.inputs.values()):
        return trace, frozenset(), "its inputs have different first extents"
    (batch,) = firsts
    only = f"its operators allow a batch of {batch} only"
    try:
        other = _trace(predictor, 1)
    except DefinitionError:
        return trace, frozenset(), only
    if len(other.values) != len(trace.values):
        return trace, frozenset(), only
    found = set()
    for number, (before, after) in enumerate(zip(trace.values, other.values, strict=True)):
        if before.shape == after.shape:
            continue
        if after.shape != (batch + 1, *before.shape[1:]) or before.shape[0] != batch:
            return trace, frozenset(), "an operator moves the batch to a different axis"
        found.add(number)
    return trace, frozenset(found), ""


def _trace(predictor: Predictor, more: int) -> Trace:
    inputs = {
        name: zeros((shape[0] + more, *shape[1:]) if shape else (), dtype)
        for name, (shape, dtype) in predictor.inputs.items()
    }
    return trace_net(predictor.net, predictor.parameters, inputs, predictor.outputs)


def _unrolled(predictor: Predictor) -> bool:
    return any(op.type == "RecurrentNetwork" for op in predictor.net.op)


def _emit(
    graph: Graph, trace: Trace, op: Op, names: dict[int, str], dynamic: frozenset[int]
) -> None:
    graph.scope = op.definition.output[0]
    for number in op.inputs:
        if number not in names:
            value = trace.values[number]
            names[number] = graph.constant(array(value.tensor), value.name)
    if any(not names[number] for number in op.inputs):
        names.update((number, "") for number in op.outputs if number is not None)
        return  # an operator before it has no form
    inputs = [_blob(trace.values[number], number in dynamic, names[number]) for number in op.inputs]
    outputs = [
        _blob(trace.values[number], number in dynamic)
        for number in op.outputs
        if number is not None
    ]
    made = OPERATORS[op.definition.type](graph, op, inputs, outputs)
    taken = {blob.name for blob in inputs}
    for number, name in zip((each for each in op.outputs if each is not None), made, strict=False):
        names[number] = graph.op("Identity", name) if name in taken else name


def _blob(value: Value, dynamic: bool, name: str = "") -> GraphBlob:
    return GraphBlob(name=name, shape=value.shape, dynamic=dynamic, dtype=value.dtype)


def array(tensor: Tensor) -> NDArray[np.generic]:
    """Return the values of a tensor."""
    values: NDArray[np.generic] = tensor.detach().cpu().numpy()
    return values


def write_predictor(predictor: Predictor, path: Path) -> str:
    """Write a predictor in the format of the file's suffix. Return a line about it.

    Raises:
        UsageError: the suffix is unknown, or an optional package is missing.
        DefinitionError: operators have no form in this format.
        SnapshotError: the file cannot be written.
    """
    suffix = check_suffix(path)
    if suffix == ".onnx":
        exported = export_predictor(predictor)
        content, line = exported.model.SerializeToString(), exported.summary()
    elif suffix == ".pt2":
        content, line = _pt2(predictor)
    else:
        content, line = tensor_file(arrays(predictor), suffix)
    write_atomically(path, content)
    return line


class PredictorModule(nn.Module):
    """The operators of a predictor as a torch module: positional inputs, a tuple of outputs."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        self.calls = [(function_of(op.definition, None, CPU), op) for op in trace.ops]
        used = {number for op in trace.ops for number in op.inputs} | set(trace.outputs.values())
        for number in sorted(used):
            if trace.values[number].constant:
                self.register_buffer(f"value{number}", trace.values[number].tensor)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs."""
        values: dict[int, Any] = dict(zip(self.trace.inputs.values(), inputs, strict=True))
        for function, op in self.calls:
            made = function(*(self._value(values, number) for number in op.inputs))
            results = made if isinstance(made, tuple | list) else (made,)
            values.update(
                (number, result)
                for number, result in zip(op.outputs, results, strict=False)
                if number is not None
            )
        return tuple(self._value(values, number).clone() for number in self.trace.outputs.values())

    def _value(self, values: dict[int, Any], number: int) -> Tensor:
        found: Tensor = values[number] if number in values else getattr(self, f"value{number}")
        return found


def _pt2(predictor: Predictor) -> tuple[bytes, str]:
    """Return an exported program, with a dynamic batch where possible, and a line about it."""
    trace, dynamic, fixed = traced(predictor)
    given = dict(predictor.inputs)
    if dynamic:  # a batch of 1 would be fixed
        given = {name: ((2, *shape[1:]), dtype) for name, (shape, dtype) in given.items()}
        trace, _, _ = traced(replace(predictor, inputs=given))
    inputs = tuple(zeros(shape, dtype) for shape, dtype in given.values())
    try:
        content = traced_program(PredictorModule(trace), inputs, dynamic=bool(dynamic))
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DefinitionError(f"torch.export cannot trace this net ({why}); use .onnx") from error
    shown = [
        f"{name} {shape_text(GraphBlob(shape=shape, dynamic=bool(dynamic)))}"
        for name, (shape, _) in given.items()
    ]
    line = f"inputs: {', '.join(shown)}; outputs: {', '.join(trace.outputs)}"
    line += f"; the batch is fixed: {fixed}" if fixed else ""
    return content, line + left_out(trace.absent)
