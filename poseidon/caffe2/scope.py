"""Name scopes and device scopes of the current thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from poseidon.caffe2.proto.caffe2_pb2 import DeviceOption

_NAMESCOPE_SEPARATOR = "/"


class _Scopes(threading.local):
    """The scopes of a thread: the prefix of names and the device of new operators."""

    name = ""
    device: DeviceOption | None = None


_scopes = _Scopes()


def CurrentNameScope() -> str:
    """Return the prefix of names, "" or one that ends with "/"."""
    return _scopes.name


def CurrentDeviceScope() -> DeviceOption | None:
    """Return the device of new operators, None outside every device scope."""
    return _scopes.device


@contextmanager
def NameScope(prefix: str, reset: bool = False) -> Iterator[None]:
    """Put a prefix before the names of blobs.

    Args:
        prefix: "" changes nothing.
        reset: whether it replaces the scopes around it.

    Raises:
        AssertionError: the prefix is not a string, or the scope was changed inside.
    """
    assert isinstance(prefix, str), "NameScope takes in a string as its argument."
    outer = _scopes.name
    prefix = prefix + _NAMESCOPE_SEPARATOR if prefix else ""
    inner = prefix if reset else outer + prefix
    _scopes.name = inner
    try:
        yield
    finally:
        assert inner.endswith(prefix) and _scopes.name == inner, (
            "The namescope variable is changed from outside NameScope() calls."
        )
        _scopes.name = outer


@contextmanager
def DeviceScope(scope: DeviceOption | int | None, node_name: str | None = None) -> Iterator[None]:
    """Place new operators on a device.

    Args:
        scope: the device, or 0 or None for the CPU; node name and extra information of the scope
            around it are kept where it has none.
        node_name: the node, in place of the one in `scope`.

    Raises:
        AssertionError: `scope` is not a device option, or the scope was changed inside.
    """
    inner = DeviceOption()
    if scope:
        assert isinstance(scope, DeviceOption), "DeviceScope takes a caffe2_pb2.DeviceOption"
        inner.CopyFrom(scope)
    outer = _scopes.device
    if node_name:
        inner.node_name = node_name
    if outer is not None:
        if outer.HasField("node_name") and not inner.HasField("node_name"):
            inner.node_name = outer.node_name
        merged = sorted({*outer.extra_info, *inner.extra_info})
        inner.extra_info[:] = merged
    _scopes.device = inner
    try:
        yield
    finally:
        assert _scopes.device == inner, "the device scope was changed inside DeviceScope()"
        _scopes.device = outer


@contextmanager
def EmptyNameScope() -> Iterator[None]:
    """Name blobs without any prefix."""
    outer = _scopes.name
    try:
        _scopes.name = ""
        yield
    finally:
        _scopes.name = outer


@contextmanager
def EmptyDeviceScope() -> Iterator[None]:
    """Place new operators on no device."""
    outer = _scopes.device
    try:
        _scopes.device = None
        yield
    finally:
        _scopes.device = outer
