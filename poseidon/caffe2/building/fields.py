"""Columns: the parts of a record's schema, and the blobs that hold its values."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

log = logging.getLogger("poseidon.caffe2.schema")

FIELD_SEPARATOR = ":"


class FeatureSpec(NamedTuple):
    """What is known of the features in a column."""

    feature_type: Any = None
    feature_names: Any = None
    feature_ids: Any = None
    feature_is_request_only: Any = None
    desired_hash_size: Any = None
    feature_to_index: Any = None


class Metadata(NamedTuple):
    """What is known of a column: the limit of its integers, the mean of its values, features."""

    categorical_limit: Any = None
    expected_value: Any = None
    feature_specs: Any = None


def join_name(prefix: str, suffix: str) -> str:
    """Return the full name of a part of a part; either may be empty."""
    return f"{prefix}{FIELD_SEPARATOR}{suffix}" if prefix and suffix else prefix or suffix


class Field:
    """A column, or a structure of columns; the columns are its scalars in order."""

    _parent: tuple[Field | None, int] = (None, 0)

    def children(self) -> list[tuple[str, Field]]:
        """Return the parts with their names."""
        return []

    def _adopt(self) -> None:
        """Note in each part that this is what it belongs to."""
        for place, (_, part) in enumerate(self.children()):
            part._parent = (self, place)

    def named_scalars(self) -> list[tuple[str, Scalar]]:
        """Return all columns with their full names."""
        return [
            (join_name(name, inner), scalar)
            for name, child in self.children()
            for inner, scalar in child.named_scalars()
        ]

    def all_scalars(self) -> list[Scalar]:
        """Return all columns."""
        return [scalar for _, scalar in self.named_scalars()]

    def field_names(self) -> list[str]:
        """Return the full names of the columns."""
        return [name for name, _ in self.named_scalars()]

    def field_types(self) -> list[np.dtype[Any]]:
        """Return the numpy types of the columns; np.void where they are not known."""
        return [scalar.dtype for scalar in self.all_scalars()]

    def field_metadata(self) -> list[Metadata | None]:
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

    def slice(self) -> slice:
        """Return the places of the columns among the columns of the whole record."""
        begin = self._begin()
        return slice(begin, begin + len(self.all_scalars()))

    def _begin(self) -> int:
        parent, place = self._parent
        if parent is None:
            return 0
        before = [part for _, part in parent.children()[:place]]
        return parent._begin() + sum(len(part.all_scalars()) for part in before)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Field) and (
            self.field_names() == other.field_names()
            and self.field_types() == other.field_types()
            and self.field_metadata() == other.field_metadata()
        )

    __hash__ = object.__hash__

    def _lines(self) -> Iterator[str]:
        yield f"{type(self).__name__}("
        for name, part in self.children():
            yield f"  {name}="
            yield from (f"    {line}" for line in part._lines())
        yield ")"

    def __repr__(self) -> str:
        return "".join(f"{line}\n" for line in self._lines())


class Scalar(Field):
    """A column: its numpy type, its blob."""

    dtype: np.dtype[Any]

    def __init__(
        self, dtype: Any = None, blob: Any = None, metadata: Metadata | None = None
    ) -> None:
        """Describe a column.

        Args:
            dtype: a numpy type, with a shape for rows of a fixed shape:
                `(np.float32, (3,))`; None where it is not known.
            blob: a reference, an array, or values that make one.
            metadata: what else is known.
        """
        self._metadata: Metadata | None = None
        self.set(dtype, blob, metadata, unsafe=True)

    def named_scalars(self) -> list[tuple[str, Scalar]]:
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
        return self._blob is not None

    def field_type(self) -> np.dtype[Any]:
        """Return the numpy type."""
        return self.dtype

    def id(self) -> int:
        """Return the place of this column among the columns of the whole record."""
        return self._begin()

    @property
    def metadata(self) -> Metadata | None:
        """What else is known of the column."""
        return self._metadata

    def set_metadata(self, value: Metadata) -> None:
        """Set what else is known.

        Raises:
            AssertionError: it is not `Metadata`, or it has a limit and the column has no integers.
        """
        assert isinstance(value, Metadata), f"metadata must be Metadata, got {type(value)}"
        self._metadata = value
        self._check_metadata()

    def _check_metadata(self) -> None:
        known = self._metadata is not None and self._metadata.categorical_limit is not None
        assert not known or np.issubdtype(self.dtype, np.integer), (
            f"`categorical_limit` can be specified only in integral fields but got {self.dtype}"
        )

    def set_value(
        self, blob: Any, throw_on_type_mismatch: bool = False, unsafe: bool = False
    ) -> None:
        """Set the blob.

        Raises:
            AssertionError: with `throw_on_type_mismatch`, it is not an array of the column's type.
        """
        if self.dtype.base != np.void and throw_on_type_mismatch:
            assert isinstance(blob, np.ndarray), f"Got {blob!r}"
            assert blob.dtype.base == self.dtype.base, f"Expected {self.dtype}, got {blob.dtype}"
        self.set(dtype=self._given, blob=blob, unsafe=unsafe)

    def set(
        self,
        dtype: Any = None,
        blob: Any = None,
        metadata: Metadata | None = None,
        unsafe: bool = False,
    ) -> None:
        """Set type, blob and metadata.

        Args:
            dtype, blob, metadata: see `Scalar`.
            unsafe: whether no warning is logged: columns should not change once they are in use.

        Raises:
            ValueError: the blob is a string, which may be a name or a value.
            TypeError: the type is an array of np.void.
        """
        if not unsafe:
            log.warning(
                "Scalar should be considered immutable; call Scalar.set() with unsafe=True on a "
                "new one"
            )
        if isinstance(blob, str):
            raise ValueError(
                "Scalar.set() of a str is ambiguous: pass np.array(blob) or BlobReference(blob)"
            )
        self._given = dtype
        kind = _type_of(dtype)
        if blob is not None and not hasattr(blob, "GetNameScope"):
            blob, kind = _array_of(blob, kind)
        self.dtype = np.dtype(np.void) if kind is None else kind
        assert not self.dtype.fields, "A structured dtype cannot be a Scalar: use from_dtype."
        self._blob = blob
        if metadata is not None:
            self.set_metadata(metadata)
        self._check_metadata()

    def set_type(self, dtype: Any) -> None:
        self._given = dtype
        self.dtype = np.dtype(np.void if dtype is None else dtype)
        self._check_metadata()

    def clone(self, keep_blobs: bool = True) -> Scalar:
        return Scalar(self._given, self._blob if keep_blobs else None, self._metadata)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row."""
        return self.dtype.shape

    def _lines(self) -> Iterator[str]:
        yield f"Scalar({self.dtype!r}, {self._blob!r}, {self._metadata!r})"


def _type_of(dtype: Any) -> np.dtype[Any] | None:
    """Return a numpy type, None for an unknown one; `(type, 1)`, which numpy would drop, stays."""
    if isinstance(dtype, tuple):
        if dtype[0] == np.void:
            raise TypeError(f"Cannot set the Scalar: the type of values of {dtype} is not known")
        if dtype[1] == 1:
            dtype = (dtype[0], (1,))
    return None if dtype is None else np.dtype(dtype)


def _array_of(values: Any, kind: np.dtype[Any] | None) -> tuple[np.ndarray, np.dtype[Any] | None]:
    """Return values as an array of a type, and the type with the shape of a row."""
    whole = isinstance(values, np.ndarray)
    if kind is None or kind == np.void:
        assert whole, f"Invalid blob type: {type(values)}"
        return values, kind
    values = np.array(values, dtype=kind.base)
    if not whole and values.size == 0:
        values = values.reshape((0, *kind.shape))
    if not whole and values.ndim == 0:
        values = values.reshape(1)
    return values, np.dtype((kind.base, values.shape[1:])) if values.ndim > 1 else kind


def normalized(value: Any, keep_blobs: bool = True) -> Any:
    """Return a copy of a part; a type becomes its column, anything else the blob of one."""
    if isinstance(value, Field):
        return value.clone(keep_blobs=keep_blobs)
    return Scalar(dtype=value) if isinstance(value, (type, np.dtype, tuple)) else Scalar(blob=value)
