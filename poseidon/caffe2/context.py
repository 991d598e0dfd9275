"""Contexts: objects that are the current one of their kind in a `with` block, by thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any


class _Open(threading.local):
    """The open contexts of a thread, by kind."""

    def __init__(self) -> None:
        self.stacks: dict[type, list[Any]] = {}


_open = _Open()


class Managed(ContextDecorator):
    """A kind of context: a subclass of this one; classes that inherit from it are of its kind.

    As a decorator, an instance is the context of each call of the function.
    """

    _kind: type

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "_kind") and cls.__dict__.get("_is_kind", True):
            cls._kind = cls

    @classmethod
    def _stack(cls) -> list[Any]:
        return _open.stacks.setdefault(cls._kind, [])

    @classmethod
    def current(cls, value: Any = None, required: bool = True) -> Any:
        """Return a value if one is given, else the innermost context of this kind.

        Raises:
            AssertionError: the value is of a different kind, or a required context is missing.
        """
        if value is not None:
            assert isinstance(value, cls._kind), (
                f"Wrong context type. Expected: {cls.__name__}, got {type(value).__name__}."
            )
            return value
        stack = cls._stack()
        if not stack:
            cls._make_default(stack)
        assert stack or not required, f"Context {cls.__name__} is required but none is active."
        return stack[-1] if stack else None

    @classmethod
    def _make_default(cls, stack: list[Any]) -> None:
        """Leave the stack empty: there is no default."""

    def __enter__(self) -> Any:
        self._stack().append(self)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        stack = self._stack()
        # An error at the end of an inner block leaves that open.
        assert self in stack and (kind is not None or stack[-1] is self), (
            f"Context {type(self).__name__} is left in the wrong order."
        )
        del stack[len(stack) - 1 - stack[::-1].index(self) :]


class DefaultManaged(Managed):
    """A kind of context that has a default: an instance that is made where none is open."""

    _is_kind = False

    @classmethod
    def _make_default(cls, stack: list[Any]) -> None:
        stack.append(cls._kind())


def define_context(
    arg_name: str | None = None, allow_default: bool = False
) -> Callable[[type], type]:
    """Return a decorator that makes a class a kind of context: the older form of `Managed`."""

    def decorate(cls: type) -> type:
        made = type(cls.__name__, (cls, DefaultManaged if allow_default else Managed), {})
        made.__module__, made.__qualname__ = cls.__module__, cls.__qualname__
        made.__doc__ = cls.__doc__
        return made

    return decorate
