"""Records: structures of named, typed columns, and the blobs that hold them."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Sequence
from typing import Any

import numpy as np

from poseidon.caffe2 import workspace

FIELD_SEPARATOR = ":"

Metadata = namedtuple("Metadata", ["categorical_limit", "expected_value", "feature_specs"])
Metadata.__new__.__defaults__ = (None, None, None)


def _join_field_name(prefix: str, suffix: str) -> str:
    return f"{prefix}{FIELD_SEPARATOR}{suffix}" if prefix and suffix else prefix or suffix


class Field:
    """A column, or a structure of columns; the columns are its scalars in order."""

    def children(self) -> list[tuple[str, Field]]:
        """Return the parts with their names."""
        return []

    def named_scalars(self) -> list[tuple[str, Scalar]]:
        """Return all columns with their full names."""
        return [
            (_join_field_name(name, inner), scalar)
            for name, child in self.children()
            for inner, scalar in child.named_scalars()
        ]

    def all_scalars(self) -> list[Scalar]:
        """Return all columns."""
        return [scalar for _, scalar in self.named_scalars()]

    def field_names(self) -> list[str]:
        """Return the full names of the columns."""
        return [name for name, _ in self.named_scalars()]

    def field_types(self) -> list[Any]:
        """Return the numpy types of the columns."""
        return [scalar.dtype for scalar in self.all_scalars()]

    def field_metadata(self) -> list[Any]:
        """Return what else is known of the columns."""
        return [scalar.metadata for scalar in self.all_scalars()]

    def field_blobs(self) -> list[Any]:
        """Return the blobs of the columns.

        Raises:
            AssertionError: a column has none.
        """
        return [scalar() for scalar in self.all_scalars()]

    def has_blobs(self) -> bool:
        """Return whether all columns have blobs."""
        return all(scalar.has_blobs() for scalar in self.all_scalars())

    def clone(self, keep_blobs: bool = True) -> Any:
        """Return a copy, with the same blobs or none."""
        raise NotImplementedError

    def clone_schema(self) -> Any:
        """Return a copy without blobs."""
        return self.clone(keep_blobs=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Field) and equal_schemas(self, other) and self._blobs() == other._blobs()

    __hash__ = object.__hash__

    def _blobs(self) -> list[Any]:
        return [scalar._blob for scalar in self.all_scalars()]


class Scalar(Field):
    """A column: its numpy type, its blob."""

    def __init__(self, dtype: Any = None, blob: Any = None, metadata: Any = None) -> None:
        """Describe a column.

        Args:
            dtype: a numpy type, with a shape for rows of a fixed shape: `(np.float32, (3,))`; None where it is not known.
            blob: a reference, or an array.
            metadata: a `Metadata`.
        """
        self.dtype = None if dtype is None else np.dtype(dtype)
        self.metadata = metadata
        self._blob = blob

    def named_scalars(self) -> list[tuple[str, Scalar]]:
        """See `Field`."""
        return [("", self)]

    def __call__(self) -> Any:
        return self.get()

    def get(self) -> Any:
        """Return the blob.

        Raises:
            AssertionError: there is none.
        """
        assert self._blob is not None, "Value is not set for this field."
        return self._blob

    def has_blobs(self) -> bool:
        """See `Field`."""
        return self._blob is not None

    def set_value(self, blob: Any, throw_on_type_mismatch: bool = False, unsafe: bool = False) -> None:
        """Set the blob."""
        self.set(dtype=self.dtype, blob=blob, metadata=self.metadata)

    def set(self, dtype: Any = None, blob: Any = None, metadata: Any = None, unsafe: bool = False) -> None:
        """Set type, blob and metadata."""
        self.__init__(dtype, blob, metadata)  # type: ignore[misc]

    def set_type(self, dtype: Any) -> None:
        """Set the type."""
        self.dtype = np.dtype(dtype)

    def set_metadata(self, value: Any) -> None:
        """Set the metadata."""
        self.metadata = value

    def clone(self, keep_blobs: bool = True) -> Scalar:
        """See `Field`."""
        return Scalar(self.dtype, self._blob if keep_blobs else None, self.metadata)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row."""
        return () if self.dtype is None else self.dtype.shape

    def __repr__(self) -> str:
        return f"Scalar({self.dtype!r}, {self._blob!r})"


class Struct(Field):
    """Named parts; `record.a.b` and `record["a:b"]` are the same one."""

    fields: OrderedDict[str, Field]

    def __init__(self, *fields: tuple[str, Any]) -> None:
        """Describe a structure of (name, part) pairs; a part may be a numpy type, a colon in a name nests."""
        self.__dict__["fields"] = OrderedDict()
        for name, part in fields:
            self._add(name, as_record_field(part))

    def _add(self, name: str, part: Field) -> None:
        head, _, rest = name.partition(FIELD_SEPARATOR)
        if not rest:
            assert name not in self.fields, f"Duplicate field name: {name}"
            self.fields[name] = part
            return
        inner = self.fields.setdefault(head, Struct())
        assert isinstance(inner, Struct), f"{head} is a column"
        inner._add(rest, part)

    def children(self) -> list[tuple[str, Field]]:
        """See `Field`."""
        return list(self.fields.items())

    get_children = children

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self.__dict__["fields"]:
            raise AttributeError(name)
        return self.fields[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self.fields[name] = as_record_field(value)

    def __getitem__(self, name: Any) -> Any:
        if isinstance(name, (list, tuple)):
            return Struct(*[(each, self[each]) for each in name])
        if isinstance(name, int):
            return list(self.fields.values())[name]
        head, _, rest = name.partition(FIELD_SEPARATOR)
        found: Any = self.fields[head]
        return found[rest] if rest else found

    def get(self, name: str, default: Any = None) -> Any:
        """Return a part, or a default where there is none."""
        try:
            return self[name]
        except (KeyError, TypeError):
            return default

    def __contains__(self, name: object) -> bool:
        return self.get(name) is not None  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.fields)

    def __add__(self, other: Struct) -> Struct:
        made = Struct(*self.children())
        for name, part in other.children():
            known = made.fields.get(name)
            if isinstance(known, Struct) and isinstance(part, Struct):
                made.fields[name] = known + part
            else:
                made._add(name, part)
        return made

    def clone(self, keep_blobs: bool = True) -> Struct:
        """See `Field`."""
        return Struct(*[(name, part.clone(keep_blobs)) for name, part in self.children()])

    def __repr__(self) -> str:
        return f"Struct({', '.join(f'{name}={part!r}' for name, part in self.children())})"


class List(Field):
    """Lists of rows: how long each is, and the rows of all."""

    def __init__(self, values: Any, lengths_blob: Any = None) -> None:
        self.lengths = lengths_blob if isinstance(lengths_blob, Scalar) else Scalar(np.int32, lengths_blob)
        self._items = as_record_field(values)

    @property
    def items(self) -> Any:
        """The rows."""
        return self._items

    def children(self) -> list[tuple[str, Field]]:
        """See `Field`."""
        return [("lengths", self.lengths), ("values", self._items)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._items if name == "values" else getattr(self._items, name)

    def __getitem__(self, name: str) -> Any:
        head, _, rest = name.partition(FIELD_SEPARATOR)
        found: Any = dict(self.children())[head]
        return found[rest] if rest else found

    def clone(self, keep_blobs: bool = True) -> List:
        """See `Field`."""
        return List(self._items.clone(keep_blobs), self.lengths.clone(keep_blobs))


def Tuple(*fields: Any) -> Struct:
    """Return a structure of parts with the names field_0, field_1, ..."""
    return Struct(*[(f"field_{index}", part) for index, part in enumerate(fields)])


def RawTuple(num_fields: int, name: str = "field") -> Struct:
    """Return a structure of so many columns of unknown type."""
    return Struct(*[(f"{name}_{index}", Scalar()) for index in range(num_fields)])


def Map(
    keys: Any, values: Any, keys_name: str = "keys", values_name: str = "values", lengths_blob: Any = None
) -> List:
    """Return lists of keys and values."""
    return List(Struct((keys_name, keys), (values_name, values)), lengths_blob)


def as_record_field(value: Any) -> Field:
    """Return a part as it is; a numpy type is a column of that type, an array or a blob one that has it."""
    if isinstance(value, Field):
        return value
    return (
        Scalar(blob=value)
        if isinstance(value, np.ndarray) or hasattr(value, "GetNameScope")
        else Scalar(value)
    )


def as_record(value: Any) -> Field:
    """Return a record for a record, a list or a dictionary of records, or a blob."""
    if isinstance(value, Field):
        return value
    if isinstance(value, (list, tuple)):
        if isinstance(value, list) and all(isinstance(item, tuple) and len(item) == 2 for item in value):
            return Struct(*[(name, as_record(part)) for name, part in value])
        return Tuple(*[as_record(part) for part in value])
    if isinstance(value, dict):
        return Struct(*[(name, as_record(part)) for name, part in value.items()])
    return Scalar(blob=value) if isinstance(value, str) else as_record_field(value)


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
    """Return whether all columns of a record are in another one."""
    return set(schema.field_names()) <= set(original_schema.field_names())


def from_column_list(
    col_names: Sequence[str],
    col_types: Sequence[Any] | None = None,
    col_blobs: Sequence[Any] | None = None,
    col_metadata: Sequence[Any] | None = None,
) -> Struct:
    """Return the record of columns with full names."""
    nothing = [None] * len(col_names)
    rows = zip(col_names, col_types or nothing, col_blobs or nothing, col_metadata or nothing, strict=True)
    return Struct(*[(name, Scalar(dtype, blob, metadata)) for name, dtype, blob, metadata in rows])


def from_blob_list(schema: Field, values: Sequence[Any], throw_on_type_mismatch: bool = False) -> Any:
    """Return a copy of a record with these blobs, in the order of the columns."""
    made = schema.clone(keep_blobs=False)
    scalars = made.all_scalars()
    assert len(scalars) == len(values), f"Values must have {len(scalars)} elements"
    for scalar, value in zip(scalars, values, strict=True):
        scalar.set_value(value)
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
    """Return a record whose blobs a net fills with no rows."""
    made = schema_or_record if schema_or_record.has_blobs() else NewRecord(net, schema_or_record)
    for dtype, blob in zip(made.field_types(), made.field_blobs(), strict=True):
        shape = [0] if dtype is None else [0, *dtype.shape]
        net.ConstantFill(
            [], blob, shape=shape, dtype=workspace.data_type_of(np.float32 if dtype is None else dtype.base)
        )
    return made


def FeedRecord(blob_record: Field, arrays: Any, ws: Any = None) -> None:
    """Feed the blobs of a record with arrays, given in the order of the columns or as a record."""
    values = arrays.field_blobs() if isinstance(arrays, Field) else list(arrays)
    for blob, value in zip(blob_record.field_blobs(), values, strict=True):
        if ws is None:
            workspace.FeedBlob(str(blob), value)
        else:
            ws.create_blob(str(blob)).feed(value)


def FetchRecord(blob_record: Field, ws: Any = None, throw_on_type_mismatch: bool = False) -> Any:
    """Return a copy of a record with arrays in place of the blobs."""
    fetch = workspace.FetchBlob if ws is None else ws.fetch_blob
    return from_blob_list(blob_record, [fetch(str(blob)) for blob in blob_record.field_blobs()])


def attach_metadata_to_scalars(field: Field, metadata: Any) -> None:
    """Set the metadata of all columns."""
    for scalar in field.all_scalars():
        scalar.set_metadata(metadata)


def data_type_for_dtype(dtype: Any) -> int:
    """Return the number of `TensorProto.DataType` for a numpy type."""
    return workspace.data_type_of(np.dtype(dtype).base)
