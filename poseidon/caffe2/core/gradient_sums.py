"""The versions of a net's blobs, and the sum of the gradients of a blob with several readers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from poseidon.caffe2.core.blobs import (
    BlobReference,
    CreateOperator,
    GradientSlice,
    device_option_equal,
)
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.proto.caffe2_pb2 import DeviceOption, OperatorDef

Versions = list[tuple[list[tuple[str, int]], list[tuple[str, int]]]]


def get_ssa(
    net: Any, blob_versions: dict[str, int] | None = None
) -> tuple[Versions, dict[str, int]]:
    """Return the versions of the blobs that each operator reads and makes.

    Args:
        net: a NetDef, or a net with one.
        blob_versions: versions before the net, by name; they are brought up to date.

    Returns:
        each operator's inputs and outputs as (name, version), and the versions after the net.
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


SUM_TAG = "is_auto_gen_sum_ops"
"""Marks, in the device option, an operator that sums gradients."""

KEEP_ONLY_SUM_TAG = "only_keep_is_auto_gen_sum_ops_tag"
"""Asks, in the device option of an operator, that the sum of its gradients has nothing but
`SUM_TAG` in its own.
"""


@dataclass(slots=True)
class GradientSource:
    """What makes one share of the gradient of a version of a blob.

    Attributes:
        gradient: a name, or a GradientSlice.
        makers: the operators that make it (indices and values if sparse); None if passed on.
        places: the index of it among the outputs of each maker.
        device: the device option of the operator that asks for it.
        local: all gradient operators of one forward operator; some may work in place.
    """

    gradient: Any
    makers: tuple[OperatorDef | None, ...]
    places: tuple[int, ...]
    device: DeviceOption
    local: list[OperatorDef] = field(default_factory=list)

    def rename(self, part: int, count: int) -> str:
        """Give what is made a name of its own, so that it can be summed; return that name."""
        maker, place = self.makers[part], self.places[part]
        assert maker is not None
        old = maker.output[place]
        new = f"_{old}_autosplit_{count}"
        if sum(name == old for name in maker.output) == 1:
            earlier = False
            for operator in self.local:
                # The gradient of the output may have the same name, where the forward operator
                # works in place.
                if earlier:
                    rename(operator.input, {old: new})
                earlier = earlier or old in operator.output
                rename(operator.output, {old: new})
        maker.output[place] = new
        if maker.type == "If":
            rename_inner_outputs(maker, old, new)
        return new


def rename_inner_outputs(op: OperatorDef, old: str, new: str) -> None:
    """Rename a blob that the inner nets of an operator make."""
    for argument in op.arg:
        for inner in argument.n.op:
            rename(inner.output, {old: new})


def must_sum(sources: Sequence[GradientSource]) -> bool:
    """Return whether there are gradients to sum.

    Raises:
        RuntimeError: dense and sparse ones, or gradients on several devices, come together.
    """
    if len({isinstance(source.gradient, GradientSlice) for source in sources}) > 1:
        raise RuntimeError("dense and sparse gradients of one blob cannot be summed")
    if len(sources) < 2:
        return False
    first = sources[0].device
    if not all(device_option_equal(first, source.device) for source in sources[1:]):
        raise RuntimeError("Unexpected behavior: not all grad ops have the same device option.")
    return True


def make_sum(sources: Sequence[GradientSource], name: str) -> tuple[list[OperatorDef], Any]:
    """Return the operators that sum the sources of a blob's gradient, and the name of the sum."""
    base = _base_name(sources, name)
    total: Any = base
    if isinstance(sources[0].gradient, GradientSlice):
        operators, total = _concatenate(sources, base)
    else:
        operators = _add(sources, base)
    marked_only = any(f"{KEEP_ONLY_SUM_TAG}:1" in source.device.extra_info for source in sources)
    for operator in operators:
        if not marked_only:
            operator.device_option.CopyFrom(sources[0].device)
        operator.device_option.extra_info.append(f"{SUM_TAG}:1")
    return operators, total


def _base_name(sources: Sequence[GradientSource], name: str) -> str:
    for source in sources:
        suffixes = ("_indices", "_values") if isinstance(source.gradient, GradientSlice) else ("",)
        for maker, place, suffix in zip(source.makers, source.places, suffixes, strict=True):
            if maker is not None:
                return maker.output[place].removesuffix(suffix)
    return f"{name}_grad"


def _add(sources: Sequence[GradientSource], base: str) -> list[OperatorDef]:
    names: list[str] = []
    splits = 0
    first = True
    for source in sources:
        if source.makers[0] is None:
            names.append(_checked(str(source.gradient), base))
        elif first:
            first = False
            names.append(source.makers[0].output[source.places[0]])
        else:
            names.append(source.rename(0, splits))
            splits += 1
    if base in names:
        # A Sum in place must have its output as the first input.
        place = names.index(base)
        names[0], names[place] = names[place], names[0]
    return [CreateOperator("Sum", [BlobReference(n) for n in names], BlobReference(base))]


def _concatenate(
    sources: Sequence[GradientSource], base: str
) -> tuple[list[OperatorDef], GradientSlice]:
    operators, outputs = [], []
    for part, suffix in enumerate(("indices", "values")):
        names: list[str] = []
        splits = 0
        for source in sources:
            if source.makers[part] is None:
                names.append(_checked(str(source.gradient[part]), base))
            else:
                names.append(source.rename(part, splits))
                splits += 1
        made = [f"{base}_{suffix}_concat", f"{base}_{suffix}_concat_split"]
        blobs = [BlobReference(n) for n in names], [BlobReference(n) for n in made]
        operators.append(CreateOperator("Concat", *blobs, axis=0))
        outputs.append(made[0])
    return operators, GradientSlice(*outputs)


def _checked(gradient: str, base: str) -> str:
    if gradient == base:
        raise RuntimeError(f"The gradient {gradient} passes through and has the sum's name.")
    return gradient
