"""Dictionaries: indexes, which number keys from 1 in order, and maps of integers."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import NO_GRADIENT, operator
from poseidon.caffe2.proto.caffe2_pb2 import BlobProto, TensorProto, TensorProtos
from poseidon.caffe2.runtime.values import READERS, TORCH_OF, from_proto, serialize, strings_of

MOST = 2**31 - 1
"""The largest number of keys of an index, where none is given."""


class Index:
    """The numbers of keys: 1 for the first, 0 for one that is absent and cannot be added.

    Attributes:
        dtype: torch's type of the keys, None for strings.
        limit: the largest number of keys, and 1 for the missing ones.
        frozen: whether no key can be added.
    """

    def __init__(self, dtype: torch.dtype | None, limit: int) -> None:
        self.dtype = dtype
        self.limit = limit
        self.frozen = False
        self.numbers: dict[Any, int] = {}
        self._lock = threading.Lock()

    def get(self, keys: list[Any]) -> list[int]:
        """Return the numbers of keys; new keys are added unless the index is frozen.

        Raises:
            ValueError: the index is full.
        """
        with self._lock:
            if self.frozen:
                return [self.numbers.get(key, 0) for key in keys]
            return [self.numbers.setdefault(self._admitted(k), len(self.numbers) + 1) for k in keys]

    def load(self, keys: list[Any]) -> bool:
        """Make these the first keys; return whether the index was empty and none comes twice.

        Raises:
            ValueError: they are too many.
        """
        with self._lock:
            if self.numbers or len(set(keys)) != len(keys):
                return False
            for key in keys:
                self.numbers[self._admitted(key)] = len(self.numbers) + 1
            return True

    def _admitted(self, key: Any) -> Any:
        if key not in self.numbers and len(self.numbers) + 1 >= self.limit:
            raise ValueError(f"the index is full: it has {self.limit - 1} keys")
        return key


def _register_create(name: str, dtype: torch.dtype | None) -> None:
    """Register what makes an index of keys of a type, None for strings."""

    @operator(name, gradient=NO_GRADIENT)
    def create(*, max_elements: int = MOST) -> Index:
        return Index(dtype, max_elements)


_register_create("IntIndexCreate", torch.int32)
_register_create("LongIndexCreate", torch.int64)
_register_create("StringIndexCreate", None)


def _keys(index: Index, keys: Any) -> list[Any]:
    found = keys.dtype if isinstance(keys, Tensor) else None
    if found != index.dtype:
        raise ValueError(f"the index has {index.dtype or 'string'} keys, not {found or 'string'}")
    values: list[Any] = keys.reshape(-1).tolist()
    return values


@operator("IndexGet")
def index_get(index: Index, keys: Any) -> Tensor:
    """Return the number of each key, int64; 0 for those that a frozen index does not have."""
    return torch.tensor(index.get(_keys(index, keys)), dtype=torch.int64).reshape(keys.shape)


@operator("IndexLoad", outputs=(0, 1))
def index_load(index: Index, keys: Any, *, skip_first_entry: bool = False) -> tuple[Index, ...]:
    """Fill an empty index with keys.

    Raises:
        ValueError: it is not empty, or a key comes twice.
    """
    if not index.load(_keys(index, keys)[int(skip_first_entry) :]):
        raise ValueError("IndexLoad needs an empty index and keys that differ")
    return (index,)


@operator("IndexFreeze", outputs=(0, 1))
def index_freeze(index: Index) -> tuple[Index, ...]:
    """Let the index take no more keys."""
    index.frozen = True
    return (index,)


@operator("IndexStore")
def index_store(index: Index) -> Any:
    """Return all keys in the order of their numbers."""
    keys = list(index.numbers)
    if index.dtype is not None:
        return torch.tensor(keys, dtype=index.dtype)
    return strings_of(keys)


@operator("IndexSize")
def index_size(index: Index) -> Tensor:
    """Return the number of keys and 1 for the missing ones, an int64 scalar."""
    return torch.tensor(len(index.numbers) + 1)


class Map:
    """A map of integers to integers.

    Attributes:
        types: torch's types of keys and values.
        pairs: the map.
    """

    def __init__(self, types: tuple[torch.dtype, torch.dtype], pairs: dict[int, int]) -> None:
        self.types = types
        self.pairs = pairs

    def blob_type(self) -> str:
        """Return Caffe2's name of the type, which saved maps have."""
        return _map_type(self.types)

    def fill_message(self, message: BlobProto) -> None:
        """Put keys and values into a message, as saved maps have them: two tensors."""
        tensors = [
            saved.tensor for part in map_to_key_value(self) for saved in serialize("", part, -1)
        ]
        message.content = TensorProtos(protos=tensors).SerializeToString()


def _map_type(types: tuple[torch.dtype, torch.dtype]) -> str:
    key, value = ("int64_t" if dtype == torch.int64 else "int32_t" for dtype in types)
    return f"(std::unordered_map<{key}, {value}>)"


def _read_map(message: BlobProto) -> Map:
    keys, values = (from_proto(x) for x in TensorProtos.FromString(message.content).protos)
    made: Map = key_value_to_map(keys, values)
    return made


for _key in (torch.int32, torch.int64):
    for _value in (torch.int32, torch.int64):
        READERS[_map_type((_key, _value))] = _read_map


@operator("CreateMap")
def create_map(*, key_dtype: int = TensorProto.INT32, value_dtype: int = TensorProto.INT32) -> Map:
    """Return an empty map; keys and values are int32 or int64.

    Raises:
        ValueError: they are neither.
    """
    types = TORCH_OF[key_dtype], TORCH_OF[value_dtype]
    if not set(types) <= {torch.int32, torch.int64}:
        raise ValueError(f"a map has int32 or int64, not {types}")
    return Map(types, {})


@operator("KeyValueToMap")
def key_value_to_map(keys: Tensor, values: Tensor) -> Map:
    """Return the map of keys to values.

    Raises:
        ValueError: their numbers differ.
    """
    if keys.shape != values.shape:
        raise ValueError(f"{keys.numel()} keys are given for {values.numel()} values")
    pairs = zip(keys.reshape(-1).tolist(), values.reshape(-1).tolist(), strict=True)
    return Map((keys.dtype, values.dtype), dict(pairs))


@operator("MapToKeyValue")
def map_to_key_value(given: Map) -> tuple[Tensor, Tensor]:
    keys, values = list(given.pairs), list(given.pairs.values())
    return torch.tensor(keys, dtype=given.types[0]), torch.tensor(values, dtype=given.types[1])
