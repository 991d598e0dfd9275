"""The blobs of a net under construction: names that are free, external inputs and outputs."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2 import schema
from poseidon.caffe2.core.blobs import BlobReference, ScopedBlobReference, ScopedName, _get_blob_ref
from poseidon.caffe2.proto import caffe2_pb2


class DuplicateInputError(AssertionError, ValueError):
    """A net declares an external input twice; scripts for Caffe2 catch it as an AssertionError."""


class NetBlobs:
    """The part of a net that knows its blobs."""

    _net: caffe2_pb2.NetDef
    _op_outputs: set[str]
    _external_input_map: set[str]
    _registered_blob_names: set[str]
    _next_name_index: int

    def _InvalidateLookupTables(self) -> None:
        self._recreate_lookup_tables = True

    def _refresh(self) -> None:
        if self._recreate_lookup_tables:
            self._op_outputs = {name for op in self._net.op for name in op.output}
            self._external_input_map = set(self._net.external_input)
            self._recreate_lookup_tables = False

    def _CheckLookupTables(self) -> None:
        """Raise AssertionError when the tables differ from the NetDef."""
        outputs = {name for op in self._net.op for name in op.output}
        external = set(self._net.external_input)
        assert self._recreate_lookup_tables or outputs == self._op_outputs
        assert self._recreate_lookup_tables or external == self._external_input_map

    def BlobIsDefined(self, blob: Any) -> bool:
        """Return whether an operator of the net makes a blob, or it is an external input."""
        self._refresh()
        return str(blob) in self._op_outputs or str(blob) in self._external_input_map

    def is_external_input(self, blob: Any) -> bool:
        self._refresh()
        return str(blob) in self._external_input_map

    def UsesBlob(self, blob: Any) -> bool:
        """Return whether an operator reads a blob, or it is an external input."""
        name = str(blob)
        return any(name in op.input for op in self._net.op) or name in self._net.external_input

    def UsedBlobNames(self) -> set[str]:
        """Return the names of all blobs of the net."""
        names = {name for op in self._net.op for name in (*op.input, *op.output)}
        return names.union(self._net.external_input, self._net.external_output)

    def GetBlobRef(self, blob_name: str) -> BlobReference:
        """Return a reference to a blob of the net.

        Raises:
            AssertionError: the net has no such blob.
        """
        assert self.BlobIsDefined(blob_name), f"{blob_name} is not a blob of net {self._net.name}"
        return BlobReference(blob_name, self)

    def NextBlob(self, prefix: str = "unnamed") -> BlobReference:
        """Return an unused reference: the prefix, or `<prefix>_auto_<n>`.

        The blob may be fed: the reference belongs to no net.
        """
        name, index = prefix, 0
        while name in self._registered_blob_names or self.BlobIsDefined(name):
            name = f"{prefix}_auto_{index}"
            index += 1
        self._registered_blob_names.add(name)
        return BlobReference(name)

    def NextScopedBlob(self, prefix: str = "unnamed") -> BlobReference:
        """Return what `NextBlob` gives for the prefix in the current scope."""
        return self.NextBlob(ScopedName(prefix))

    def NextName(self, prefix: str | None = None, output_id: int | None = None) -> str:
        """Return a name for an output that was given none.

        Args:
            prefix: the operator's type; by default `blob` and a number.
            output_id: the index of the output, where there are several.
        """
        if not prefix:
            self._next_name_index += 1
            return f"{self._net.name}_blob_{self._next_name_index - 1}"
        suffix = "" if output_id is None else f":{output_id}"
        name, index = f"{self._net.name}/{prefix}{suffix}", 2
        while self.BlobIsDefined(ScopedName(name)):
            name = f"{self._net.name}/{prefix}_{index}{suffix}"
            index += 1
        return name

    def AddExternalInput(self, *inputs: Any) -> Any:
        """Declare blobs that the net reads and does not make.

        Args:
            *inputs: names, references, or records: their blobs, or without blobs their fields.

        Raises:
            DuplicateInputError: one is declared already, or given twice.
        """
        assert inputs
        self._refresh()
        refs = [_get_blob_ref(blob) for given in inputs for blob in _blobs_of(given)]
        for index, ref in enumerate(refs):
            if ref in self._external_input_map or ref in refs[:index]:
                raise DuplicateInputError(f"Net already contained an input named {ref}")
        self._net.external_input.extend(str(ref) for ref in refs)
        self._external_input_map.update(str(ref) for ref in refs)
        made = tuple(BlobReference(str(ref), self) for ref in refs)
        return made[0] if len(made) == 1 else made

    def AddScopedExternalInputs(self, *inputs: str) -> Any:
        """Declare external inputs in the current scope."""
        return self.AddExternalInput(*[ScopedBlobReference(blob) for blob in inputs])

    def AddExternalInputs(self, *inputs: Any) -> Any:
        """Do what `AddExternalInput` does; a list of blobs is allowed too."""
        given = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], (list, tuple)) else inputs
        return self.AddExternalInput(*given)

    def AddExternalOutput(self, *outputs: Any) -> None:
        """Declare outputs that are read outside.

        Raises:
            AssertionError: one is not a BlobReference, or not a blob of the net.
        """
        for blob in outputs:
            assert isinstance(blob, BlobReference), (
                f"AddExternalOutput: expected a BlobReference, found {blob!r}"
            )
            assert self.BlobIsDefined(blob), f"{blob} is not a blob of net {self._net.name}"
            self._net.external_output.append(str(blob))

    def AddExternalOutputs(self, *outputs: Any) -> None:
        """Do what `AddExternalOutput` does."""
        self.AddExternalOutput(*outputs)

    def AddScopedExternalOutputs(self, *outputs: str) -> None:
        """Declare external outputs in the current scope."""
        self.AddExternalOutput(*[ScopedBlobReference(blob) for blob in outputs])

    @property
    def external_inputs(self) -> list[BlobReference]:
        return [_get_blob_ref(name) for name in self._net.external_input]

    @property
    def external_outputs(self) -> list[BlobReference]:
        return [_get_blob_ref(name) for name in self._net.external_output]

    def RemoveExternalInput(self, blob: Any) -> None:
        self._net.external_input.remove(str(blob))
        self._InvalidateLookupTables()


def _blobs_of(given: Any) -> list[Any]:
    """Return the blobs of a record, or its field names; anything else is one blob."""
    if not isinstance(given, schema.Field):
        return [given]
    return list(given.field_blobs() if given.has_blobs() else given.field_names())
