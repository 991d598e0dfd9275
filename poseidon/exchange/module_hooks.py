"""Hooks on a module that its copies do not take along.

Law: `copy.deepcopy` and pickle (`torch.save` of a whole module) give the copy a hook that does nothing. A copy is no part of
the exchange: it shares no memory with what the exchange moves, and neither sockets nor threads can be copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class OfOneModule:
    """A hook, on the module that it was registered on.

    Args:
        hook: what it does there.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Do it."""
        return self._hook(*arguments, **named)

    def __deepcopy__(self, memo: object) -> OfOneModule:
        return idle()

    def __reduce__(self) -> tuple[Callable[[], OfOneModule], tuple[()]]:
        return idle, ()


def idle() -> OfOneModule:
    """A hook that does nothing."""
    return OfOneModule(_nothing)


def _nothing(*_: object, **__: object) -> None:
    pass
