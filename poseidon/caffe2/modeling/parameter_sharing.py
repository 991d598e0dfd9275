"""Parameters shared between name scopes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from poseidon.caffe2 import scope


class ParameterSharingContext:
    """The present table of shared scopes: parameters of a scope take the names of another one."""

    def __init__(self) -> None:
        self._tables: list[dict[str, str]] = []

    def _resolve(self, name: str) -> str:
        table: dict[str, str] = {}
        for one in self._tables:
            table.update(one)
        while True:
            shared = max((p for p in table if name.startswith(p)), key=len, default=None)
            if shared is None:
                return name
            name = table[shared] + name[len(shared) :]

    def get_parameter_name(self, name: str) -> str:
        """Return the full name of a parameter that is made in the current scope."""
        return self._resolve(scope.CurrentNameScope()) + name

    def add_scope_overrides(self, shared_scopes: dict[str, str]) -> None:
        """Add a table: from each scope to the one whose parameters it uses; both end with "/"."""
        self._tables.append(shared_scopes)

    def pop(self) -> None:
        """Take the last table away."""
        self._tables.pop()


parameter_sharing_context = ParameterSharingContext()


@contextmanager
def ParameterSharing(shared_scopes: dict[str, str]) -> Iterator[None]:
    """Share parameters inside this context.

    Args:
        shared_scopes: from a scope to the scope whose parameters it uses, relative to the current
            scope; "" is the current scope itself.

    Raises:
        AssertionError: a scope would be replaced by one inside it.
    """
    assert isinstance(shared_scopes, dict)
    here = scope.CurrentNameScope()
    table = {}
    for source, target in shared_scopes.items():
        assert not target.startswith(source), (
            f"Illegal override for parameter sharing. {source} is prefix of {target}"
        )
        key = f"{here}{source}/".replace("//", "/")
        assert key not in table, f"scope {key} is given twice"
        table[key] = f"{here}{target}/" if target else here
    parameter_sharing_context.add_scope_overrides(table)
    try:
        yield
    finally:
        parameter_sharing_context.pop()
