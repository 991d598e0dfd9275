"""The renaming of blobs in a NetDef, and checks that a renamed net computes the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf import text_format

from poseidon.caffe2.core.ssa import rename
from poseidon.caffe2.operators import registry
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.runtime.errors import operator_error
from poseidon.caffe2.runtime.lifetimes import STEP_NETS

log = logging.getLogger("memonger")

_IN_PLACE = {
    "AtomicIter": ((1, 0),),
    "IndexFreeze": ((0, 0),),
    "Iter": ((0, 0),),
    "MomentumSGDUpdate": ((0, 0), (1, 1), (3, 2)),
    "ScatterAssign": ((0, 0),),
    "ScatterWeightedSum": ((0, 0),),
    "SparseMomentumSGDUpdate": ((0, 0), (1, 1), (3, 2)),
    "SpatialBN": ((3, 1), (4, 2)),
}
"""The (input, output) that must be one blob, by the type of the operator."""


def apply_assignments(net: Any, blob_assignments: Mapping[str, str]) -> None:
    """Rename the blobs of the operators of a NetDef, in place; nets inside recurrent operators too.

    Args:
        net: the NetDef.
        blob_assignments: new names by old ones.
    """

    def canonical(blob: str) -> str:
        return blob_assignments.get(blob, blob)

    for op in net.op:
        if op.type.startswith("RecurrentNetwork"):
            apply_recurrent_blob_assignments(op, blob_assignments, canonical)
        rename(op.input, blob_assignments)
        rename(op.output, blob_assignments)


def apply_recurrent_blob_assignments(
    op: Any, blob_assignments: Mapping[str, str], canonical_name: Callable[[str], str]
) -> None:
    """Rename blobs in the step nets of a recurrent operator, and note the new names of its own
    blobs as arguments.
    """
    for argument in op.arg:
        if argument.name not in STEP_NETS:
            continue
        step = caffe2_pb2.NetDef()
        if argument.HasField("n"):
            step = argument.n
        else:
            text_format.Parse(argument.s.decode(), step)
        apply_assignments(step, blob_assignments)
        for blobs in (step.external_input, step.external_output):
            blobs[:] = map(canonical_name, blobs)
        if not argument.HasField("n"):
            argument.s = str(step).encode()
    for name in dict.fromkeys([*op.input, *op.output]):
        if canonical_name(name) != name:
            op.arg.add(name=f"{name}.rename", s=canonical_name(name).encode())


def check_operators(net: Any) -> None:
    """Raise RuntimeError when an operator of a NetDef is used in a way that its schema forbids."""
    for index, op in enumerate(net.op):
        try:
            if registry.is_registered(op.type):
                registry.find(op.type).check(op)
        except ValueError as error:
            raise operator_error(str(error), op, net.name, index) from error
        for read, made in _IN_PLACE.get(op.type, ()):
            if made < len(op.output) and (
                read >= len(op.input) or op.input[read] != op.output[made]
            ):
                reason = (
                    f"{op.type}: output {made}, {op.output[made]}, must be the blob of input {read}"
                )
                raise operator_error(reason, op, net.name, index)


def verify_inplace_blobs(net_a: Any, net_b: Any) -> bool:
    """Return whether the operators of two NetDefs work in place at the same inputs and outputs."""

    def in_place(op: Any) -> list[tuple[int, int]]:
        made = list(op.output)
        return [(index, made.index(name)) for index, name in enumerate(op.input) if name in made]

    return all(
        a.type == b.type and in_place(a) == in_place(b)
        for a, b in zip(net_a.op, net_b.op, strict=False)
    )


def verify_graph_equality(net_a: Any, net_b: Any) -> bool:
    """Return whether two NetDefs have the same operators, and each reads what
    the same others make; names do not count.
    """
    if len(net_a.op) != len(net_b.op):
        return False
    for a, b in zip(net_a.op, net_b.op, strict=True):
        if (a.type, a.device_option, a.engine) != (b.type, b.device_option, b.engine):
            return False
    parents_a, parents_b = _parents(net_a), _parents(net_b)
    for index, (a, b) in enumerate(zip(parents_a, parents_b, strict=True)):
        if a != b:
            log.debug(
                "Operator %d, %s, reads from %s and from %s", index, net_a.op[index].type, a, b
            )
            return False
    return True


def _parents(net: Any) -> list[list[int]]:
    """Return for each operator those that made its inputs, in the order of the inputs."""
    maker: dict[str, int] = {}
    parents = []
    for index, op in enumerate(net.op):
        parents.append([maker[name] for name in op.input if name in maker])
        maker.update(dict.fromkeys(op.output, index))
    return parents
