"""Records: structures of named, typed columns, and the blobs that hold them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from poseidon.caffe2 import workspace
from poseidon.caffe2.building.fields import (
    FIELD_SEPARATOR,
    FeatureSpec,
    Field,
    Metadata,
    Scalar,
    normalized,
)
from poseidon.caffe2.building.structures import List, ListWithEvicted, Struct, names_of
from poseidon.caffe2.proto.caffe2_pb2 import TensorProto

__all__ = [
    "FIELD_SEPARATOR",
    "ConstRecord",
    "FeatureSpec",
    "FeedRecord",
    "FetchRecord",
    "Field",
    "InitEmptyRecord",
    "List",
    "ListWithEvicted",
    "Map",
    "MapWithEvicted",
    "Metadata",
    "NamedTuple",
    "NewRecord",
    "RawTuple",
    "Scalar",
    "Struct",
    "Tuple",
    "as_record",
    "attach_metadata_to_scalars",
    "data_type_for_dtype",
    "dtype_for_core_type",
    "equal_schemas",
    "from_blob_list",
    "from_column_list",
    "from_dtype",
    "is_schema_subset",
    "schema_check",
]

logger = logging.getLogger(__name__)

_DATA_TYPES = {
    str: TensorProto.STRING,
    np.float16: TensorProto.FLOAT16,
    np.float32: TensorProto.FLOAT,
    np.float64: TensorProto.DOUBLE,
    bool: TensorProto.BOOL,
    np.int8: TensorProto.INT8,
    np.int16: TensorProto.INT16,
    np.int32: TensorProto.INT32,
    np.int64: TensorProto.INT64,
    np.uint8: TensorProto.UINT8,
    np.uint16: TensorProto.UINT16,
}


def NamedTuple(name_prefix: str, *fields: Any) -> Struct:
    """Return a structure of parts with the names <prefix>_0, <prefix>_1, ..."""
    return Struct(*names_of(fields, name_prefix))


def Tuple(*fields: Any) -> Struct:
    """Return a structure of parts with the names field_0, field_1, ..."""
    return NamedTuple("field", *fields)


def RawTuple(num_fields: int, name_prefix: str = "field") -> Struct:
    """Return a structure of so many columns of unknown type."""
    assert isinstance(num_fields, int)
    assert num_fields >= 0
    return NamedTuple(name_prefix, *[np.void] * num_fields)


def Map(
    keys: Any,
    values: Any,
    keys_name: str = "keys",
    values_name: str = "values",
    lengths_blob: Any = None,
) -> List:
    """Return lists of keys and values."""
    return List(Struct((keys_name, keys), (values_name, values)), lengths_blob=lengths_blob)


def MapWithEvicted(
    keys: Any,
    values: Any,
    keys_name: str = "keys",
    values_name: str = "values",
    lengths_blob: Any = None,
    evicted_values: Any = None,
) -> ListWithEvicted:
    """Return lists of keys and values with a column of the values that an LRU hash has dropped."""
    return ListWithEvicted(
        Struct((keys_name, keys), (values_name, values)), lengths_blob, evicted_values
    )


def from_dtype(dtype: Any, _outer_shape: tuple[int, ...] = ()) -> Field:
    """Return the column of a numpy type, or the structure of the columns of a structured one."""
    kind = np.dtype(dtype)
    shape = (*_outer_shape, *kind.shape)
    if not kind.base.fields:
        return Scalar(np.dtype((kind.base, shape)))
    return Struct(*[(name, from_dtype(part[0], shape)) for name, part in kind.base.fields.items()])


def as_record(value: Any) -> Field:
    """Return a record for a record, a list or a dictionary of records, a type or a blob."""
    if isinstance(value, Field):
        return value
    if isinstance(value, (list, tuple)):
        if isinstance(value, list) and all(
            isinstance(item, tuple) and len(item) == 2 for item in value
        ):
            return Struct(*[(name, as_record(part)) for name, part in value])
        return Tuple(*[as_record(part) for part in value])
    if isinstance(value, dict):
        return Struct(*[(name, as_record(part)) for name, part in value.items()])
    return normalized(value)  # type: ignore[no-any-return]


def schema_check(schema: Any, previous: Field | None = None) -> Field:
    """Return a value as a record.

    Raises:
        AssertionError: it has other columns than the previous one.
    """
    record = as_record(schema)
    assert previous is None or equal_schemas(record, previous)
    return record


def equal_schemas(
    schema: Field,
    original_schema: Field,
    check_field_names: bool = True,
    check_field_types: bool = True,
    check_field_metas: bool = False,
) -> bool:
    """Return whether two records have the same columns, blobs aside."""
    return (
        (not check_field_names or schema.field_names() == original_schema.field_names())
        and (not check_field_types or schema.field_types() == original_schema.field_types())
        and (not check_field_metas or schema.field_metadata() == original_schema.field_metadata())
    )


def is_schema_subset(schema: Field, original_schema: Field) -> bool:
    """Return whether the second record has all columns of the first."""
    return set(schema.field_names()) <= set(original_schema.field_names())


def from_column_list(
    col_names: Sequence[str],
    col_types: Sequence[Any] | None = None,
    col_blobs: Sequence[Any] | None = None,
    col_metadata: Sequence[Any] | None = None,
) -> Any:
    """Return the record of named columns; parts lengths and values (and keys) are a list.

    Raises:
        AssertionError: there is not one type, blob and metadata for each name.
    """
    count = len(col_names)
    given = [
        list(values) if values is not None else [None] * count
        for values in (col_types, col_blobs, col_metadata)
    ]
    for what, values in zip(("col_types", "col_blobs", "col_metadata"), given, strict=True):
        assert len(values) == count, f"col_names and {what} must have the same length."
    tree: dict[str, Any] = {}
    for name, dtype, blob, metadata in zip(col_names, *given, strict=True):
        *above, last = name.split(FIELD_SEPARATOR)
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = Scalar(dtype, blob, metadata)
    return _field_of(tree)


def _field_of(node: Any) -> Any:
    if isinstance(node, Field):
        return node
    parts = {name: _field_of(child) for name, child in node.items()}
    if set(parts) == {"lengths", "values"}:
        return List(parts["values"], parts["lengths"])
    if set(parts) == {"lengths", "keys", "values"}:
        return Map(parts["keys"], parts["values"], lengths_blob=parts["lengths"])
    return Struct(*parts.items())


def from_blob_list(schema: Field, values: Any, throw_on_type_mismatch: bool = False) -> Any:
    """Return a copy of a record with these blobs, in the order of the columns.

    Raises:
        AssertionError: there is a different number of columns, or with `throw_on_type_mismatch` a
            column of a different type.
    """
    assert isinstance(schema, Field), "Argument `schema` must be a Field."
    values = [values] if hasattr(values, "GetNameScope") else values
    made = schema.clone_schema()
    scalars = made.all_scalars()
    assert len(scalars) == len(values), f"expected {len(scalars)} values, got {len(values)}."
    for scalar, value in zip(scalars, values, strict=True):
        scalar.set_value(value, throw_on_type_mismatch, unsafe=True)
    return made


def NewRecord(net: Any, schema: Field) -> Any:
    """Return a copy of a record with new blobs of a net."""
    names = [name or "unnamed_scalar" for name in schema.field_names()]
    return from_blob_list(schema, [net.NextScopedBlob(name) for name in names])


def ConstRecord(net: Any, array_record: Field) -> Any:
    """Return a copy of a record of arrays, with blobs that a net fills with these."""
    made = NewRecord(net, array_record)
    for blob, array in zip(made.field_blobs(), array_record.field_blobs(), strict=True):
        net.Const(array, blob)
    return made


def InitEmptyRecord(net: Any, schema_or_record: Field, enforce_types: bool = False) -> Any:
    """Return a record whose blobs a net fills with no rows.

    Raises:
        TypeError: with `enforce_types`, a column has no type of a tensor; else it has float32.
    """
    made = schema_or_record if schema_or_record.has_blobs() else NewRecord(net, schema_or_record)
    for dtype, blob in zip(made.field_types(), made.field_blobs(), strict=True):
        try:
            net.ConstantFill([], blob, shape=[0, *dtype.shape], dtype=data_type_for_dtype(dtype))
        except TypeError:
            if enforce_types:
                raise
            logger.warning("The type of the blob %s is not known", blob)
            net.ConstantFill([], blob, shape=[0])
    return made


def FeedRecord(blob_record: Field, arrays: Any, ws: Any = None) -> None:
    """Feed the blobs of a record with arrays, given in the order of the columns or as a record.

    Raises:
        AssertionError: there is a different number of arrays.
    """
    values = arrays.field_blobs() if isinstance(arrays, Field) else list(arrays)
    blobs = blob_record.field_blobs()
    assert len(values) == len(blobs), f"Values must contain exactly {len(blobs)} ndarrays."
    for blob, value in zip(blobs, values, strict=True):
        if ws is None:
            workspace.FeedBlob(str(blob), value)
        else:
            ws.create_blob(str(blob)).feed(value)


def FetchRecord(blob_record: Field, ws: Any = None, throw_on_type_mismatch: bool = False) -> Any:
    """Return a copy of a record with arrays in place of the blobs."""
    fetch = workspace.FetchBlob if ws is None else ws.fetch_blob
    values = [fetch(str(blob)) for blob in blob_record.field_blobs()]
    return from_blob_list(blob_record, values, throw_on_type_mismatch)


def attach_metadata_to_scalars(field: Field, metadata: Any) -> None:
    for scalar in field.all_scalars():
        scalar.set_metadata(metadata)


def data_type_for_dtype(dtype: Any) -> int:
    """Return the number of `TensorProto.DataType` for a numpy type.

    Raises:
        TypeError: no tensor has this type.
    """
    base = np.dtype(dtype).base
    for kind, number in _DATA_TYPES.items():
        if base == kind or (kind is str and base.kind in "SUO"):
            return number
    raise TypeError(f"Unknown dtype: {base}")


def dtype_for_core_type(core_type: int) -> Any:
    """Return the numpy type for a number of `TensorProto.DataType`.

    Raises:
        TypeError: there is none.
    """
    for kind, number in _DATA_TYPES.items():
        if number == core_type:
            return kind
    raise TypeError(f"Unknown core type: {core_type}")
