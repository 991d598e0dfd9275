"""Errors of operators and workspaces: RuntimeError, as Caffe2's users catch it."""

from __future__ import annotations

import re

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


def place_of(error: BaseException) -> tuple[str, int] | None:
    """Return the net and the index of the operator that an error is of; None for an error of another kind."""
    return getattr(error, "operator", None)


def sentence(error: BaseException) -> str:
    """Return the first line of an error's message, without the operator and the classes of its causes."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^(\[enforce fail at \w+\] )?(\w*Error: )*", "", line)
