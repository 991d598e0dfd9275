"""Operators written in Python: functions of lists of tensors, known by a token in this process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.registry import Context, operator
from poseidon.caffe2.runtime.blob import Blob, is_tensor
from poseidon.caffe2.runtime.facade import WorkspaceView
from poseidon.caffe2.runtime.views import BlobView, TensorView

_numbers = itertools.count()
_lock = threading.Lock()


@dataclass
class PythonFunction:
    """A function, or a builder that makes one for each operator.

    Attributes:
        function: `f(inputs, outputs)`, or a tuple of builder, arguments and keyword arguments.
        pass_workspace: whether it gets the workspace too.
        gradient: the function of its gradient, None where it has none.
    """

    function: Any
    pass_workspace: bool
    gradient: Any = None


_functions: dict[str, PythonFunction] = {}


def register(function: Any, gradient: Any = None, pass_workspace: bool = False) -> str:
    """Keep a function and the function of its gradient; return the token for operators."""
    with _lock:
        token = f"{getattr(function, '__name__', 'python')}:{next(_numbers)}"
        _functions[token] = PythonFunction(function, pass_workspace, gradient)
    return token


def _python_gradient(maker: GradientMaker) -> None:
    """Give the gradient function the inputs, the outputs and the gradients of the outputs."""
    of_outputs = maker.argument("grad_output_indices") or range(len(maker.forward.output))
    of_inputs = maker.argument("grad_input_indices") or range(len(maker.forward.input))
    inputs = [
        *maker.forward.input,
        *maker.forward.output,
        *(maker.GO(index) for index in of_outputs),
    ]
    maker.op(f"{maker.forward.type}Gradient", inputs, [maker.GI(index) for index in of_inputs])


class _Call:
    """A function with the blobs of an operator."""

    def __init__(self, token: str, context: Context, gradient: bool) -> None:
        found = _functions.get(token)
        if found is None:
            raise ValueError(f"the Python function {token} is not registered in this process")
        chosen = found.gradient if gradient else found.function
        if chosen is None:
            raise ValueError(f"the Python function {token} has no gradient")
        if isinstance(chosen, tuple):
            builder, arguments, keywords = chosen
            chosen = builder(*arguments, **keywords)
        self.function: Callable[..., Any] = chosen
        self.extra = [WorkspaceView(context.workspace)] if found.pass_workspace else []

    def __call__(self, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
        self.function(list(map(_view, inputs)), list(map(_view, outputs)), *self.extra)


def _view(blob: Blob) -> TensorView | BlobView:
    return TensorView(blob) if blob.value is None or is_tensor(blob.value) else BlobView("", blob)


@operator("Python", "PythonDLPack", gradient=_python_gradient, blobs=True)
class Python(_Call):
    """Calls the function of the argument `token`."""

    def __init__(self, *, context: Context, token: str) -> None:
        super().__init__(token, context, gradient=False)


@operator("PythonGradient", "PythonDLPackGradient", blobs=True)
class PythonGradient(_Call):
    """Calls the gradient function of the argument `token`."""

    def __init__(self, *, context: Context, token: str) -> None:
        super().__init__(token, context, gradient=True)
