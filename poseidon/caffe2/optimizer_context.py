"""Optimizers chosen for the parameters that are made inside a context."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DEFAULT_OPTIM = "DEFAULT"
"""The name of the optimizer for parameters without one of their tags."""


class _Stack(threading.local):
    """The contexts of a thread, the outermost first."""

    def __init__(self) -> None:
        self.tables: list[dict[str, Any]] = []


_stack = _Stack()


class OptimizerContext:
    """The optimizers of the present contexts by parameter tag."""

    def __init__(self, optimizers: dict[str, Any]) -> None:
        self._optimizers = optimizers

    @staticmethod
    def current() -> OptimizerContext:
        """Return the optimizers of this thread's contexts; the inner ones win."""
        merged: dict[str, Any] = {}
        for table in _stack.tables:
            merged.update(table)
        return OptimizerContext(merged)

    def has_optimizer(self, name: str) -> bool:
        return name in self._optimizers

    def get_optimizer(self, name: str) -> Any:
        """Return the optimizer of a tag.

        Raises:
            AssertionError: it has none.
        """
        assert self.has_optimizer(name), f"{name} optimizer is not provided"
        return self._optimizers[name]


@contextmanager
def UseOptimizer(context: Any) -> Iterator[None]:
    """Give the parameters made inside an optimizer: one for all, or a dict by tag."""
    _stack.tables.append(dict(context) if isinstance(context, dict) else {DEFAULT_OPTIM: context})
    try:
        yield
    finally:
        _stack.tables.pop()
