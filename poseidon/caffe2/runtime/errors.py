"""Errors of operators and workspaces: RuntimeError, as Caffe2's users catch it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from poseidon.caffe2.proto.caffe2_pb2 import OperatorDef

EnforceNotMet = RuntimeError
"""A condition of an operator or of a workspace does not hold."""


def operator_error(reason: str, definition: OperatorDef, net: str, index: int) -> RuntimeError:
    """Return the error of an operator that cannot be made, or has failed.

    Args:
        reason: what happened.
        definition: the operator; the message shows it.
        net: the name of its net, "" where it has none.
        index: its place in the net.
    """
    error = RuntimeError(
        f"[enforce fail at {definition.type or 'operator'}] {reason}\nError from operator:\n{definition}"
    )
    error.operator = (net, index)  # type: ignore[attr-defined]
    return error


_STRINGS = re.compile(r"numpy\.ndarray|bytes|'str'|sequence by non-int")
_OTHER = re.compile(r"^'(\w+)' object |must be Tensor, not (\w+)")
_DIMENSIONS = re.compile(r"tuple index out of range|Dimension out of range|too many indices|0-d(im)?\b")


def cause(error: Exception, inputs: Mapping[str, Any]) -> str:
    """Return why an operator has failed; what Python reports of a value of a wrong kind becomes a sentence on the input.

    Args:
        error: what it has raised.
        inputs: the values of its inputs, by name.
    """
    text = " ".join(str(error).split())
    if isinstance(error, (AttributeError, TypeError)):
        strings = [name for name, value in inputs.items() if isinstance(value, np.ndarray)]
        if strings and _STRINGS.search(text):
            return f"{strings[0]} is a tensor of strings, expected numbers"
        kind = next(filter(None, found.groups())) if (found := _OTHER.search(text)) else None
        given = {name: value for name, value in inputs.items() if value is not None}
        wrong = [name for name, value in given.items() if type(value).__name__ == kind]
        if wrong:
            return f"{wrong[0]} is of type {kind}, expected another type of blob"
    if isinstance(error, (IndexError, TypeError)) and _DIMENSIONS.search(text):
        return "an input has too few dimensions"
    if isinstance(error, ZeroDivisionError):
        return "the size of an input, or an argument, is 0"
    return f"{type(error).__name__}: {text}" + (
        " (a blob that it reads is empty)" if "NoneType" in text else ""
    )


def place_of(error: BaseException) -> tuple[str, int] | None:
    """Return the net and the index of the operator that an error is of; None for an error of another kind."""
    return getattr(error, "operator", None)


def sentence(error: BaseException) -> str:
    """Return the first line of an error's message, without the operator and the classes of its causes."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^(\[enforce fail at \w+\] )?(\w*Error: )*", "", line)
