"""Shape inference: the operators of a net run on tensors without data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from poseidon.caffe2.operators.registry import find
from poseidon.caffe2.proto.caffe2_pb2 import NetDef, OperatorDef
from poseidon.caffe2.runtime.bind import function_of

META = torch.device("meta")
WITHOUT_INFERENCE = frozenset({"LRN"})
"""Operators whose outputs Caffe2 does not infer; what is inferred behind them stays."""


def infer(nets: Iterable[NetDef], known: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a meta tensor for each blob whose shape and type follow from those that are known.

    Args:
        nets: the nets in the order in which they run.
        known: meta tensors of blobs that exist before.
    """
    values: dict[str, Any] = dict(known)
    hidden: set[str] = set()
    for net in nets:
        for op in net.op:
            _infer_operator(op, values)
            if op.type in WITHOUT_INFERENCE:
                hidden.update(op.output)
                hidden.update(f"{name}_grad" for name in op.output)
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and name not in hidden
    }


def _infer_operator(op: OperatorDef, values: dict[str, Any]) -> None:
    if not all(name in values for name in op.input):
        return
    try:
        known = find(op.type)
        made = function_of(op, None, META)(*[values[name] for name in op.input])
    except Exception:  # noqa: BLE001 (an operator whose shapes depend on data says so in many ways)
        _assume_gradients(op, values)
        return
    for name, value in zip(op.output, [made] if known.single else made or (), strict=False):
        values[name] = value


def _assume_gradients(op: OperatorDef, values: dict[str, Any]) -> None:
    """Give the gradients that an operator makes the shapes of their blobs, which their names
    tell.
    """
    for name in op.output if op.is_gradient_op else ():
        blob = name.removesuffix("_grad")
        if blob != name and blob in values:
            values[name] = values[blob]
