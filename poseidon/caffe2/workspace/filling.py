"""Random values for what a net reads and does not make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from poseidon.caffe2.proto.caffe2_pb2 import NetDef
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.workspace.current import current
from poseidon.caffe2.workspace.nets import _net_def

TYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "uint8_t": torch.uint8,
    "unsigned char": torch.uint8,
    "int8_t": torch.int8,
    "int16_t": torch.int16,
    "uint16_t": torch.uint16,
    "int": torch.int32,
    "int32_t": torch.int32,
    "int64_t": torch.int64,
    "long": torch.int64,
    "bool": torch.bool,
}
"""The types by the names that C++ gives them."""


def FillRandomNetworkInputs(
    net: Any, input_dims: Sequence[Sequence[Sequence[int]]], input_types: Sequence[Sequence[str]]
) -> None:
    """Feed what a net reads and does not make: fractions from 0 to 1, or whole numbers 0 and 1.

    Args:
        net: a net or its NetDef.
        input_dims: for each operator that reads such blobs a list: the shape of each.
        input_types: likewise their types, such as "float" and "int"; see `TYPES`.

    Raises:
        RuntimeError: there are not as many shapes and types as such operators and blobs, or none.
        ValueError: there is no type of a name.
    """
    readers = _outside(_net_def(net))
    if not readers:
        raise EnforceNotMet("the net reads no blob that it does not make")
    for what, given in (("shapes", input_dims), ("types", input_types)):
        _check(what, len(given), [f"{kind} reads {', '.join(names)}" for kind, names in readers])
        for (_, names), values in zip(readers, given, strict=True):
            _check(what, len(values), names)
    made = {}
    for (_, names), dims, types in zip(readers, input_dims, input_types, strict=True):
        for name, shape, kind in zip(names, dims, types, strict=True):
            made[name] = _random(list(shape), kind)
    for name, value in made.items():
        current().create(name).value = value


def _outside(net: NetDef) -> list[tuple[str, list[str]]]:
    """Return the operators that read blobs which none makes: their types and these blobs."""
    made = {name for op in net.op for name in op.output}
    found = [(op.type, [name for name in op.input if name not in made]) for op in net.op]
    return [(kind, names) for kind, names in found if names]


def _check(what: str, count: int, wanted: Sequence[str]) -> None:
    if count != len(wanted):
        names = "; ".join(wanted)
        raise EnforceNotMet(f"{count} {what} are given, {len(wanted)} expected: {names}")


def _random(shape: list[int], kind: str) -> torch.Tensor:
    if kind not in TYPES:
        raise ValueError(f"there is no type {kind!r}; the types are {', '.join(TYPES)}")
    dtype = TYPES[kind]
    if dtype.is_floating_point:
        return torch.rand(shape, dtype=dtype)
    return torch.randint(0, 2, shape).to(dtype)
