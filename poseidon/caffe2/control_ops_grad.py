"""Gradients of operators that run nets, under the name that scripts import; see
`core.control_gradients`.
"""

from __future__ import annotations

from poseidon.caffe2.core.control_gradients import (
    gen_do_gradient,
    gen_if_gradient,
    gen_while_gradient,
)
from poseidon.caffe2.core.gradient_sums import rename_inner_outputs
from poseidon.caffe2.proto.caffe2_pb2 import OperatorDef

__all__ = [
    "disambiguate_grad_if_op_output",
    "gen_do_gradient",
    "gen_if_gradient",
    "gen_while_gradient",
]


def disambiguate_grad_if_op_output(grad_op: OperatorDef, idx: int, new_grad_output: str) -> None:
    """Rename an output of an `If`, in its branches too."""
    rename_inner_outputs(grad_op, grad_op.output[idx], new_grad_output)
    grad_op.output[idx] = new_grad_output
