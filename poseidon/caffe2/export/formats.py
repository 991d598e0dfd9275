"""A Caffe2 net in the format of a file's suffix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from poseidon.caffe.export.formats import check_suffix, tensor_file, traced_program
from poseidon.caffe.export.graph import GraphBlob, left_out, shape_text
from poseidon.caffe2.export.files import Predictor, arrays
from poseidon.caffe2.export.net import export_predictor, traced
from poseidon.caffe2.export.trace import CPU, Trace, zeros
from poseidon.caffe2.runtime.bind import function_of
from poseidon.engine.snapshots.files import write_atomically
from poseidon.errors import DefinitionError


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
    """Return an exported program, with a dynamic batch where the operators allow it, and a line
    about it.
    """
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
