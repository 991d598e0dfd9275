"""Structures of columns: named parts, and lists of rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from poseidon.caffe2.building.fields import FIELD_SEPARATOR, Field, Scalar, normalized


class Struct(Field):
    """Named parts; `record.a.b` and `record["a:b"]` are the same one.

    It does not change once it is made.
    """

    fields: OrderedDict[str, Field]

    def __init__(self, *fields: tuple[str, Any]) -> None:
        """Describe a structure of (name, part) pairs, which are copied; a colon in a name nests.

        Raises:
            ValueError: two parts have one name and are not both structures.
            TypeError: parts of two structures with one name are not both structures.
        """
        made: OrderedDict[str, Field] = OrderedDict()
        for name, part in fields:
            assert name, "Field names cannot be empty"
            assert name != "lengths", "Struct cannot contain a field named `lengths`."
            head, _, rest = name.partition(FIELD_SEPARATOR)
            value = Struct((rest, part)) if rest else normalized(part)
            known = made.get(head)
            if known is None:
                made[head] = value
            elif isinstance(known, Struct) and isinstance(value, Struct):
                made[head] = known + value
            else:
                raise ValueError(f"Duplicate field name: {head}")
        self.__dict__["fields"] = made
        self._adopt()

    def children(self) -> list[tuple[str, Field]]:
        return list(self.fields.items())

    get_children = children

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name.startswith("__") or name not in fields:
            raise AttributeError(name)
        return fields[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise TypeError("Struct.__setattr__() is disabled after __init__()")
        self.__dict__[name] = value

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            names = list(self.fields)
            return Struct(*[(names[k] if isinstance(k, int) else k, self[k]) for k in item])
        if isinstance(item, int):
            return list(self.fields.values())[item]
        head, _, rest = item.partition(FIELD_SEPARATOR)
        found: Any = self.fields.get(head)
        try:
            if found is not None:
                return found[rest] if rest else found
        except (KeyError, TypeError):
            pass
        raise KeyError(f'field "{item}" not found')

    def get(self, item: str, default_value: Any = None) -> Any:
        """Return a part, or a default where there is none."""
        try:
            return self[item]
        except KeyError:
            return default_value

    def __contains__(self, item: object) -> bool:
        try:
            self[item]
        except KeyError:
            return False
        return True

    def __len__(self) -> int:
        return len(self.fields)

    def __add__(self, other: Any) -> Struct:
        if not isinstance(other, Struct):
            return NotImplemented
        made = OrderedDict(self.children())
        for name, part in other.children():
            known = made.get(name)
            if known is None:
                made[name] = part
            elif isinstance(known, Struct) and isinstance(part, Struct):
                made[name] = known + part
            else:
                raise TypeError(f"Both parts {name} must be a Struct: {type(known)}, {type(part)}")
        return Struct(*made.items())

    def __sub__(self, other: Any) -> Struct:
        if not isinstance(other, Struct):
            return NotImplemented
        made = OrderedDict(self.children())
        for name, part in other.children():
            known = made.pop(name, None)
            if known is None:
                continue
            if type(known) is not type(part):
                raise TypeError(f"The parts {name} have two types: {type(known)}, {type(part)}")
            if isinstance(known, Struct) and len(rest := known - part):
                made[name] = rest
        return Struct(*[(name, made[name]) for name in self.fields if name in made])

    def clone(self, keep_blobs: bool = True) -> Struct:
        return type(self)(*[(name, normalized(part, keep_blobs)) for name, part in self.children()])


class List(Field):
    """Lists of rows: how long each is, and the rows of all.

    The parts of rows that are a structure are attributes; other rows are `value` and `items`.
    """

    lengths: Scalar

    def __init__(self, values: Any, lengths_blob: Any = None) -> None:
        """Describe lists.

        Args:
            values: the rows.
            lengths_blob: the column of their numbers, or its blob.
        """
        assert isinstance(lengths_blob, Scalar) or not isinstance(lengths_blob, Field)
        known = isinstance(lengths_blob, Scalar)
        self.lengths = normalized(lengths_blob) if known else Scalar(np.int32, lengths_blob)
        self._items = normalized(values)
        self._adopt()

    def children(self) -> list[tuple[str, Field]]:
        return [("lengths", self.lengths), ("values", self._items)]

    def __getattr__(self, item: str) -> Any:
        if item.startswith("_"):
            raise AttributeError(item)
        if isinstance(self._items, Struct):
            return (
                self._items
                if item == "items" and item not in self._items
                else getattr(self._items, item)
            )
        if item in ("value", "items", "values"):
            return self._items
        raise AttributeError(f"Field not found in list: {item}.")

    def __getitem__(self, item: str) -> Any:
        head, _, rest = item.partition(FIELD_SEPARATOR)
        found: Any = dict(self.children()).get(head)
        if found is None or (rest and head == "lengths"):
            raise KeyError(f"Field not found in list: {item}.")
        return found[rest] if rest else found

    def clone(self, keep_blobs: bool = True) -> List:
        return type(self)(*[normalized(part, keep_blobs) for part in (self._items, self.lengths)])


class ListWithEvicted(List):
    """Lists with a column more: the values that an LRU hash has dropped."""

    def __init__(self, values: Any, lengths_blob: Any = None, evicted_values: Any = None) -> None:
        """Describe lists; `evicted_values` is the column of dropped values, or its blob."""
        known = isinstance(evicted_values, Scalar)
        self._evicted_values = (
            normalized(evicted_values) if known else Scalar(np.int64, evicted_values)
        )
        super().__init__(values, lengths_blob)

    def children(self) -> list[tuple[str, Field]]:
        return [*super().children(), ("_evicted_values", self._evicted_values)]

    def clone(self, keep_blobs: bool = True) -> ListWithEvicted:
        parts = (self._items, self.lengths, self._evicted_values)
        return type(self)(*[normalized(part, keep_blobs) for part in parts])


def names_of(fields: Sequence[Any], prefix: str) -> list[tuple[str, Any]]:
    """Return parts with the names <prefix>_0, <prefix>_1, ..."""
    return [(f"{prefix}_{index}", part) for index, part in enumerate(fields)]
