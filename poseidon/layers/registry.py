"""Type string -> layer class.

Law: a type is registered once, when its module is imported, and never changed after; importing anything of
`poseidon.layers` imports every module that registers one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from poseidon.layers.base import Layer, LayerContext, LayerError
from poseidon.layers.naming import unknown_type
from poseidon.proto.caffe_pb2 import LayerParameter

Class = TypeVar("Class", bound=type[Layer])
_CLASSES: dict[str, type[Layer]] = {}


def register(name: str) -> Callable[[Class], Class]:
    """Class decorator: make the class the layer type `name`.

    Raises:
        ValueError: the type is taken.
    """

    def add(layer: Class) -> Class:
        if name in _CLASSES:
            raise ValueError(f"layer type '{name}' is already registered by {_CLASSES[name].__qualname__}")
        _CLASSES[name] = layer
        return layer

    return add


def known_types() -> frozenset[str]:
    """Return every type that `create` can make."""
    return frozenset(_CLASSES)


def layer_class(name: str) -> type[Layer]:
    """Return the class of a type.

    Raises:
        LayerError: no such type; the text has those of like names.
    """
    if not name:
        raise LayerError("has no type")
    if name not in _CLASSES:
        raise LayerError(unknown_type(name, _CLASSES))
    return _CLASSES[name]


def create(param: LayerParameter, context: LayerContext) -> Layer:
    """Return a new layer, its counts of bottoms and tops checked, not yet set up.

    Raises:
        LayerError: unknown type, or an illegal number of bottoms or tops.
    """
    layer = layer_class(param.type)(param, context)
    layer.check_counts()
    return layer
