"""References to blobs, and names with the current scope."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable
from typing import Any

from poseidon.caffe2 import scope
from poseidon.caffe2.operators import registry

GradientSlice = namedtuple("GradientSlice", ["indices", "values"])
"""A sparse gradient: references to the indices and to the values."""


class BlobReference:
    """The name of a blob, and the net that made it. Equal to, and hashed as, its name.

    `reference.Relu(...)` adds an operator that reads the blob to its net.
    """

    def __init__(self, name: Any, net: Any = None) -> None:
        """Refer to a blob.

        Args:
            name: its full name.
            net: the net that the operators called on this reference go to.

        Raises:
            TypeError: the name is not a string.
        """
        if isinstance(name, bytes):
            name = name.decode()
        if not isinstance(name, str):
            raise TypeError(f"Blob name should be a string, not {type(name).__name__}: {name}")
        self._name = name
        self._from_net = net
        self.meta: dict[str, Any] = {}

    def __hash__(self) -> int:
        return hash(self._name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (str, bytes)):
            return self._name == (other.decode() if isinstance(other, bytes) else other)
        return self._name == other._name if isinstance(other, BlobReference) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: object) -> bool:
        return self._name < str(other)

    def __str__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f'BlobReference("{self._name}")'

    def __add__(self, other: str) -> BlobReference:
        if not isinstance(other, str):
            raise RuntimeError(f"Cannot add BlobReference to a non-string: {other!r}")
        return BlobReference(self._name + other, self._from_net)

    def __radd__(self, other: str) -> BlobReference:
        if not isinstance(other, str):
            raise RuntimeError(f"Cannot add a non-string to BlobReference: {other!r}")
        return BlobReference(other + self._name, self._from_net)

    def Net(self) -> Any:
        """Return the net that the reference belongs to, or None."""
        return self._from_net

    def GetNameScope(self) -> str:
        """Return the part of the name up to its last "/", that included."""
        return self._name[: self._name.rfind(scope._NAMESCOPE_SEPARATOR) + 1]

    def GetUnscopedName(self) -> str:
        """Return the part of the name behind its last "/"."""
        return self._name[self._name.rfind(scope._NAMESCOPE_SEPARATOR) + 1 :]

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if op_type.startswith("__"):
            raise AttributeError(f"Attribute {op_type} not found.")
        if self._from_net is None:
            raise AttributeError(
                f"You cannot use a blob reference that does not have a net to call {op_type}."
            )
        if not registry.is_registered(op_type):
            raise AttributeError(unknown_operator(op_type))
        return lambda *args, **kwargs: self._add(op_type, *args, **kwargs)

    def __dir__(self) -> Iterable[str]:
        return sorted({*super().__dir__(), *registry.registered()})

    def _add(self, op_type: str, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Add an operator of which this blob is the first input."""
        net = self._from_net
        more = [] if inputs is None else inputs if isinstance(inputs, (list, tuple)) else [inputs]
        return getattr(net, op_type)([self, *more], *args, **kwargs)


def unknown_operator(op_type: str) -> str:
    """Return the sentence for an operator that does not exist."""
    near = ",".join(registry.nearest(op_type))
    return f"Method {op_type} is not a registered operator. Did you mean: [{near}]"


def ScopedName(name: Any) -> str:
    """Return a name with the current scope before it."""
    return scope.CurrentNameScope() + str(name.decode() if isinstance(name, bytes) else name)


def ScopedBlobReference(name: str, *args: Any, **kwargs: Any) -> BlobReference:
    """Return a reference to the blob of a name in the current scope."""
    return BlobReference(ScopedName(name), *args, **kwargs)


def _RectifyInputOutput(blobs: Any, net: Any = None) -> list[BlobReference]:
    """Return references for one blob or several, given as names or references; names get the
    current scope.

    Raises:
        TypeError: a blob is given as something else.
    """
    if isinstance(blobs, (str, bytes)):
        return [ScopedBlobReference(blobs, net=net)]  # type: ignore[arg-type]
    if type(blobs) is BlobReference:
        return [blobs]
    if isinstance(blobs, (list, tuple)):
        rectified = []
        for index, blob in enumerate(blobs):
            if isinstance(blob, (str, bytes)):
                rectified.append(ScopedBlobReference(blob, net=net))  # type: ignore[arg-type]
            elif type(blob) is BlobReference:
                rectified.append(blob)
            else:
                raise TypeError(
                    f"I/O blob #{index} of unsupported type: {blob!r} of type {type(blob)}"
                )
        return rectified
    raise TypeError(f"Unknown input/output type: {blobs!r} of type {type(blobs)}.")


def output_to_list(op_output: Any) -> list[Any]:
    """Return what an operator call gave as a list.

    Raises:
        AssertionError: it is neither a reference nor a tuple or list.
    """
    assert isinstance(op_output, (BlobReference, list, tuple)), f"not an output: {op_output!r}"
    return [op_output] if isinstance(op_output, BlobReference) else list(op_output)


def _get_blob_ref(blob_name_or_ref: Any) -> BlobReference:
    return (
        blob_name_or_ref
        if isinstance(blob_name_or_ref, BlobReference)
        else BlobReference(blob_name_or_ref)
    )
