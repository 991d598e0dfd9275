"""Operators written in Python: their registration, and the calls that add them."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2.core.operators import CreateOperator
from poseidon.caffe2.operators.system import python
from poseidon.caffe2.proto import caffe2_pb2


def _RegisterPythonImpl(
    f: Any, grad_f: Any = None, python_func_type: Any = None, pass_workspace: bool = False
) -> str:
    """Register a function, or a tuple (builder, args, kwargs), and its gradient; return the token.

    Args:
        f: `f(inputs, outputs)`, with the workspace as third argument where `pass_workspace` is set.
        grad_f: `grad_f(inputs, outputs)`, whose inputs are the inputs of f, its outputs and their
            gradients.
        python_func_type: a class made with `f`; its methods `forward` and `backward` are the
            functions.
        pass_workspace: see above.
    """
    if python_func_type is not None:
        instance = python_func_type(f)
        f, grad_f = instance.forward, instance.backward
    return python.register(f, grad_f, pass_workspace)


def CreatePythonOperator(
    f: Any,
    inputs: Any,
    outputs: Any,
    grad_f: Any = None,
    pass_workspace: bool = False,
    python_func_type: Any = None,
    *args: Any,
    **kwargs: Any,
) -> caffe2_pb2.OperatorDef:
    """Return the definition of an operator that calls a Python function; see
    `_RegisterPythonImpl`.
    """
    kwargs["token"] = _RegisterPythonImpl(f, grad_f, python_func_type, pass_workspace)
    return CreateOperator("Python", inputs, outputs, *args, **kwargs)
