"""Copies of a net, whole or in part, with other names for its blobs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from poseidon.caffe2 import schema
from poseidon.caffe2.core.blobs import BlobReference
from poseidon.caffe2.core.gradient_sums import (
    control_op_remap,
    get_op_ids_in_path,
    get_ssa,
    get_undefined_blobs,
    recurrent_network_op_remap,
    rename,
)
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.runtime.chains import first_reads

RemapFunction = Callable[[Any, str, dict[str, str]], None]

DEFAULT_REMAP_FUNCS: dict[str, RemapFunction] = {
    "RecurrentNetwork": recurrent_network_op_remap,
    "RecurrentNetworkGradient": recurrent_network_op_remap,
    "If": control_op_remap,
    "AsyncIf": control_op_remap,
    "While": control_op_remap,
}
"""Operators that name blobs in their arguments, and what renames these."""


class NetCopies:
    """The part of a net that copies it."""

    _net: caffe2_pb2.NetDef
    _attr_dict: dict[str, list[Any]]
    _input_record: Any
    _output_record: Any

    def Clone(
        self,
        name: str,
        blob_remap: dict[Any, Any] | None = None,
        op_id_mask: Iterable[int] | None = None,
        remap_funcs: dict[str, RemapFunction] | None = None,
        keep_schema: bool = True,
        update_external_list: bool = False,
    ) -> Any:
        """Return a copy of the net.

        Args:
            name: of the copy.
            blob_remap: new names of blobs.
            op_id_mask: the operators to copy; by default all.
            remap_funcs: what renames blobs in the arguments of an operator, by its type.
            keep_schema: whether the copy has the net's records, with the new names.
            update_external_list: whether external inputs and outputs are found again.
        """
        functions = {**DEFAULT_REMAP_FUNCS, **(remap_funcs or {})}
        names = {str(old): str(new) for old, new in (blob_remap or {}).items()}
        proto = copy.deepcopy(self._net)
        proto.name = name
        del proto.op[:]
        for index in range(len(self._net.op)) if op_id_mask is None else op_id_mask:
            op = proto.op.add()
            op.CopyFrom(self._net.op[index])
            rename(op.input, names)
            rename(op.output, names)
            if op.type in functions:
                functions[op.type](op, f"{name}/" if name else "", names)
        rename(proto.external_input, names)
        rename(proto.external_output, names)
        if update_external_list:
            find_external(proto)
        made = type(self)(proto)  # type: ignore[call-arg]
        if keep_schema:
            made._input_record = _renamed(self._input_record, names)
            made._output_record = _renamed(self._output_record, names)
        made._attr_dict.update(self._attr_dict)
        return made

    def ClonePartial(
        self,
        name: str,
        inputs: Any,
        outputs: Iterable[Any],
        remap_funcs: dict[str, RemapFunction] | None = None,
    ) -> tuple[Any, list[BlobReference]]:
        """Return a copy of the operators between some inputs and outputs, and the new outputs.

        Args:
            name: of the copy; it is the prefix of the blobs inside.
            inputs: blobs, or pairs (or a dict) of blob and its name in the copy.
            outputs: blobs.
            remap_funcs: see `Clone`.

        Raises:
            AssertionError: an output is not of this net, or a needed operator would make an input.
        """
        given = _named(inputs)
        wanted = [str(blob) for blob in outputs]
        for blob in wanted:
            assert self.BlobIsDefined(blob), f"{blob} is not defined"  # type: ignore[attr-defined]
        ssa, versions = get_ssa(self._net)
        used = get_op_ids_in_path(ssa, versions, given, wanted)
        makers = get_op_ids_in_path(ssa, versions, [], given)
        assert not set(used) & set(makers), (
            "Cannot partially clone net: some of the ops required would generate the given input."
        )
        part = [ssa[index] for index in used]
        undefined = sorted(get_undefined_blobs(part) - set(given))
        prefix = f"{name}/" if name else ""
        names = {blob: prefix + blob for reads, makes in part for blob, _ in (*reads, *makes)}
        names.update({blob: blob for blob in undefined})
        names.update(given)
        made = self.Clone(name, names, used, remap_funcs)
        proto = made.Proto()
        for field, blobs in (
            (proto.external_input, [*given.values(), *undefined]),
            (proto.external_output, [names[blob] for blob in wanted]),
        ):
            field[:] = blobs
        return made, [made.GetBlobRef(names[blob]) for blob in wanted]

    def reroute_tensor(
        self, tensor: Any, new_producer: Any, can_modify: Iterable[Any] | None = None
    ) -> int:
        """Let the readers of a blob read what another operator makes of it.

        Args:
            tensor: the blob.
            new_producer: an operator that reads and makes the blob, or makes it under another name.
            can_modify: the operators that may be changed; by default all behind the new one.

        Returns:
            the number of operators that were changed.
        """
        name = str(tensor)
        ops = list(self._net.op)
        made = [op for op in ops if name in op.output]
        place = ops.index(made[-1]) if made else -1
        new_name = next((o for o in new_producer.output if o != name), new_producer.output[0])
        allowed = None if can_modify is None else list(can_modify)
        changed = 0
        for op in ops[place + 1 :]:
            if op != new_producer and name in op.input and (allowed is None or op in allowed):
                rename(op.input, {name: new_name})
                changed += 1
        if new_producer not in ops:
            self._net.op.insert(place + 1, new_producer)
        return changed


def find_external(proto: caffe2_pb2.NetDef) -> None:
    """Set external inputs to what is read before it is made, outputs to what is not read."""
    made: dict[str, None] = {}
    read: set[str] = set()
    for op in proto.op:
        read.update(name for name in op.input if name in made)
        made.update(dict.fromkeys(op.output))
    proto.external_input[:] = first_reads(proto.op)
    proto.external_output[:] = [name for name in made if name not in read]


def _renamed(record: Any, names: dict[str, str]) -> Any:
    if record is None or not record.has_blobs():
        return record
    blobs = [BlobReference(names.get(str(blob), str(blob))) for blob in record.field_blobs()]
    return schema.from_blob_list(record, blobs)


def _named(inputs: Any) -> dict[str, str]:
    if isinstance(inputs, dict):
        return {str(blob): str(name) for blob, name in inputs.items()}
    pairs = [it if isinstance(it, tuple) and len(it) == 2 else (it, it) for it in inputs]
    return {str(blob): str(name) for blob, name in pairs}


def clone_and_bind_net(
    net: Any,
    name: str,
    prefix: str,
    blob_remap: dict[str, str] | None = None,
    inputs: Any = None,
    keep_schema: bool = True,
) -> tuple[Any, dict[str, str]]:
    """Return a copy of a net that reads other inputs, and its names by those in the net.

    Args:
        net: the net.
        name: of the copy.
        prefix: put before the names of the blobs that the net makes.
        blob_remap: new names, by the names in the net; the copy's names are added to it.
        inputs: a record that takes the place of the net's input record.
        keep_schema: whether the copy has input and output records.

    Raises:
        AssertionError: the record lacks a field of the net's.
    """
    names = {} if blob_remap is None else blob_remap
    if inputs is not None:
        assert isinstance(inputs, schema.Field)
        original = net.input_record()
        assert original is not None, f"The net {net} has no input record."
        given = dict(zip(inputs.field_names(), inputs.field_blobs(), strict=True))
        missing = sorted(set(original.field_names()) - set(given))
        assert not missing, f"Schemas don't match, extra fields {missing} found in the net {net}"
        for field, blob in zip(original.field_names(), original.field_blobs(), strict=True):
            names[str(blob)] = str(given[field])
    ssa, versions = get_ssa(net.Proto())
    outside = get_undefined_blobs(ssa)
    for blob in versions:
        names.setdefault(blob, blob if blob in outside else prefix + blob)
    return net.Clone(name, names, keep_schema=keep_schema), names
