"""Outputs of tasks: blobs, lists of blobs and records, with their values once the task has run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from poseidon.caffe2 import schema


class TaskOutput:
    """What a task hands out: a blob, blobs, or a record."""

    def __init__(self, names: Any) -> None:
        self._schema = names if isinstance(names, schema.Field) else None
        if self._schema is not None:
            names = self._schema.field_blobs()
        self._is_scalar = not isinstance(names, (list, tuple))
        self.names = [names] if self._is_scalar else list(names)
        self._values: list[Any] | None = None
        self._fetch_func: Callable[[Any], Any] | None = None

    def set(self, values: Sequence[Any], _fetch_func: Callable[[Any], Any] | None = None) -> None:
        assert len(values) == len(self.names)
        self._values = list(values)
        self._fetch_func = _fetch_func

    def _formed(self, values: list[Any]) -> Any:
        if self._is_scalar:
            return values[0]
        return values if self._schema is None else schema.from_blob_list(self._schema, values)

    def get(self) -> Any:
        """Return the value, the values or the record.

        Raises:
            AssertionError: the task has not run.
        """
        assert self._values is not None, "Output value not set yet."
        return self._formed(self._values)

    def fetch(self) -> Any:
        """Return what the session fetches for the value, the values or the record."""
        assert self._fetch_func is not None, "Cannot fetch value for this output."
        assert self._values is not None, "Output value not set yet."
        return self._formed([self._fetch_func(value) for value in self._values])


class TaskOutputList:
    """The outputs of a task in one list."""

    def __init__(self, outputs: list[TaskOutput] | None = None) -> None:
        self.outputs = outputs or []

    def names(self) -> list[Any]:
        """Return the blobs of all outputs."""
        return [name for output in self.outputs for name in output.names]

    def set_values(
        self, values: Sequence[Any], _fetch_func: Callable[[Any], Any] | None = None
    ) -> None:
        """Set the values of all outputs, in the order of `names`."""
        assert len(values) == len(self.names()), "Wrong number of output values."
        left = list(values)
        for output in self.outputs:
            output.set(left[: len(output.names)], _fetch_func)
            del left[: len(output.names)]
