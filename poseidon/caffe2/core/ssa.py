"""Versions of blobs in a net, and what follows from them: missing inputs, makers, paths."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from poseidon.caffe2.proto import caffe2_pb2

Versions = list[tuple[list[tuple[str, int]], list[tuple[str, int]]]]


def get_ssa(
    net: Any, blob_versions: dict[str, int] | None = None
) -> tuple[Versions, dict[str, int]]:
    """Return the versions of the blobs that each operator reads and makes.

    Args:
        net: a NetDef, or a net with one.
        blob_versions: versions before the net, by name; they are brought up to date.

    Returns:
        for each operator its inputs and its outputs as (name, version), and the versions after the
        net.
    """
    proto = net if isinstance(net, caffe2_pb2.NetDef) else net.Proto()
    assert isinstance(proto, caffe2_pb2.NetDef)
    versions = {} if blob_versions is None else blob_versions
    for name in proto.external_input:
        versions.setdefault(name, 0)
    ssa: Versions = []
    for operator in proto.op:
        if not proto.external_input:
            for name in operator.input:
                versions.setdefault(name, 0)
        inputs = [(name, versions.get(name, 0)) for name in operator.input]
        for name in operator.output:
            versions[name] = versions.get(name, 0) + 1
        ssa.append((inputs, [(name, versions[name]) for name in operator.output]))
    return ssa, versions


def get_undefined_blobs(ssa: Versions) -> set[str]:
    """Return the blobs that are read before any operator makes them."""
    return {name for inputs, _ in ssa for name, version in inputs if version == 0}


def get_output_producers(ssa: Versions) -> dict[tuple[str, int], int]:
    """Return the index of the operator that makes each version of a blob."""
    return {made: index for index, (_, outputs) in enumerate(ssa) for made in outputs}


def get_op_ids_in_path(
    ssa: Versions, blob_versions: dict[str, int], inputs: Iterable[Any], outputs: Iterable[Any]
) -> list[int]:
    """Return the operators, in order, that are needed to make the outputs from the inputs."""
    given = {(str(name), blob_versions[str(name)]) for name in inputs}
    producers = get_output_producers(ssa)
    queue = [(str(name), blob_versions[str(name)]) for name in outputs]
    needed: set[int] = set()
    while queue:
        blob = queue.pop()
        index = producers.get(blob)
        if blob not in given and index is not None and index not in needed:
            needed.add(index)
            queue.extend(ssa[index][0])
    return sorted(needed)


def rename(blobs: Any, names: Mapping[str, str]) -> None:
    """Give the blobs of a field of a message new names; those without one keep their own."""
    blobs[:] = [names.get(name, name) for name in blobs]


def recurrent_network_op_remap(op: Any, prefix: str, blob_remap: dict[str, str]) -> None:
    """Rename the blobs that a RecurrentNetwork operator names in its arguments."""

    def renamed(text: bytes | str) -> bytes:
        plain = text.decode() if isinstance(text, bytes) else str(text)
        return blob_remap.get(plain, plain).encode()

    for argument in op.arg:
        if argument.name.endswith("step_net") and argument.HasField("n"):
            argument.n.CopyFrom(remap_proto(argument, blob_remap, prefix).n)
        if argument.name in ("recurrent_states", "link_external", "alias_dst", "alias_src"):
            argument.strings[:] = map(renamed, argument.strings)
        elif argument.name == "timestep":
            argument.s = renamed(argument.s)


def control_op_remap(op: Any, prefix: str, blob_remap: dict[str, str]) -> None:
    """Rename the blobs in the inner nets of an operator `If`, `AsyncIf` or `While`."""
    for argument in op.arg:
        if argument.HasField("n"):
            argument.n.CopyFrom(remap_proto(argument, blob_remap, prefix).n)


def remap_proto(argument: Any, blob_remap: dict[str, str], prefix: str = "") -> Any:
    """Return an argument whose net has its blobs renamed."""
    made = copy.deepcopy(argument)
    net = made.n
    for names in (
        *((op.input, op.output) for op in net.op),
        (net.external_input, net.external_output),
    ):
        for blobs in names:
            rename(blobs, blob_remap)
    net.name = prefix + net.name
    return made
