"""Errors of operators and workspaces: RuntimeError, as Caffe2's users catch it."""

from __future__ import annotations

import dis
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
        f"[enforce fail at {definition.type or 'operator'}] {reason}\nError from "
        f"operator:\n{definition}"
    )
    error.operator = (net, index)  # type: ignore[attr-defined]
    return error


_STRINGS = re.compile(
    r"numpy\.ndarray|NumPy arrays|bytes|'str'|sequence by non-int|'(tuple|bool|int)' "
    r"object|invalid literal"
)
_OTHER = re.compile(r"^'(\w+)' object |must be Tensor, not (\w+)")
_DIMENSIONS = re.compile(
    r"tuple index out of range|dimension out of range|too many indices|0-d(im)?\b|not enough "
    r"values to unpack"
    r"|at least 1D",
    re.I,
)
_TYPES = "the type of an input is not one that the operator takes"
_REASONS = {
    "": r"allocat|CUDA error",
    "an axis to reduce has the size 0": r"non-zero size|reduction dim",
    "an index lies outside of the input that it is for": r"out of (bounds|range)|larger than self",
    _TYPES: r"dtype|scalar type|bool tensor|not implemented for"
    r"|not supported for|only integer|must be (\w+, )*\w+ or|same type|floating "
    r"point|non-complex|integral"
    r"|can't be cast|\btype|does not support|schema|itensor",
    "an input has several values, or none, where one is expected": r"Boolean value of|truth value "
    r"of",
    "an input has a negative value where none is allowed": "negative",
    "the shapes of the inputs do not fit "
    "together": r"shape|size|dim|expand|broadcast|multipl|elements|empty|primitive"
    r"|number of|same length|0 or "
    r"more|rank|scalar|vector|matri(x|ces)|repeats|groups|length|unpack|zip\(",
}
"""What a text of torch, NumPy or Python is about, the first that matches; "" where nothing
clearer can be said.
"""
_FOREIGN = (RuntimeError, IndexError, TypeError, ValueError, AttributeError, AssertionError)
_RAISE = dis.opmap["RAISE_VARARGS"]


def cause(error: Exception, inputs: Mapping[str, Any]) -> str:
    """Return why an operator has failed.

    A report of torch, NumPy or Python about inputs that they cannot compute with becomes a sentence
    on the inputs; the report stays as the exception's own cause.

    Args:
        error: what it has raised.
        inputs: the values of its inputs, by name.
    """
    text = " ".join(str(error).split())
    if isinstance(error, ZeroDivisionError) or text == "ZeroDivisionError":
        return "the size of an input, or an argument, is 0"
    if is_own(error) and isinstance(error, (RuntimeError, ValueError, IndexError, TypeError)):
        return text
    if is_own(error) or not isinstance(error, _FOREIGN):
        return f"{type(error).__name__}: {text}"
    empty = [name for name, value in inputs.items() if value is None]
    if empty and ("None" in text or isinstance(error, TypeError)):
        return f"{empty[0]} is empty: no operator has given it a value"
    if isinstance(error, (AttributeError, TypeError, ValueError)):
        strings = [name for name, value in inputs.items() if isinstance(value, np.ndarray)]
        if strings and _STRINGS.search(text):
            return f"{strings[0]} is a tensor of strings, expected numbers"
        plain = "bytes" if "bytes" in text or "invalid literal" in text else None
        kind = next(filter(None, found.groups())) if (found := _OTHER.search(text)) else plain
        given = {name: value for name, value in inputs.items() if value is not None}
        wrong = [name for name, value in given.items() if type(value).__name__ == kind]
        if not wrong and isinstance(error, AttributeError):
            wrong = [name for name, value in given.items() if isinstance(value, bytes)]
            kind = "bytes"
        if wrong:
            return f"{wrong[0]} is of type {kind}, expected another type of blob"
    if _DIMENSIONS.search(text):
        return "an input has too few dimensions"
    otherwise = _TYPES if isinstance(error, TypeError) else ""
    reason = next(
        (reason for reason, about in _REASONS.items() if re.search(about, text, re.I)), otherwise
    )
    return reason or f"{type(error).__name__}: {text}"


def is_own(error: BaseException) -> bool:
    """Return whether this package's `raise` raised an error: its text is for users.

    Others come from torch, NumPy or Python, given values that they cannot compute with.
    """
    trace = error.__traceback__
    if trace is None:
        return True
    while trace.tb_next is not None:
        trace = trace.tb_next
    code, module = trace.tb_frame.f_code, str(trace.tb_frame.f_globals.get("__name__"))
    return module.partition(".")[0] == "poseidon" and code.co_code[trace.tb_lasti] == _RAISE


def place_of(error: BaseException) -> tuple[str, int] | None:
    """Return the net and the index of an error's operator, or None."""
    return getattr(error, "operator", None)


def sentence(error: BaseException) -> str:
    """Return the first line of an error's message, without operator and classes."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^(\[enforce fail at \w+\] )?(\w*Error: )*", "", line)
