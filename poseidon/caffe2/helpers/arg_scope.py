"""Default arguments of helpers inside a context."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Scope(threading.local):
    """The default arguments of a thread by helper."""

    def __init__(self) -> None:
        self.arguments: dict[str, dict[str, Any]] = {}


_scope = _Scope()


def get_current_scope() -> dict[str, dict[str, Any]]:
    """Return the default arguments of each helper."""
    return _scope.arguments


@contextmanager
def scoped(names: list[str], arguments: dict[str, Any]) -> Iterator[None]:
    """Give helpers default arguments; the defaults of an inner context win."""
    outer = _scope.arguments
    _scope.arguments = {**outer, **{name: {**outer.get(name, {}), **arguments} for name in names}}
    try:
        yield
    finally:
        _scope.arguments = outer
