"""The objects that a script has given to `Group.keep` and `Group.keep_own`, as leaves of the group's
state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from poseidon.engine.leaf import Found, Leaf, Scope, on_host
from poseidon.engine.state_tree import StateTree
from poseidon.errors import SnapshotError, UsageError, counted
from poseidon.torch.divided_states import divided, shared_leaf


class Kept(Protocol):
    """An object with a state: a scheduler, a GradScaler, a running average."""

    def state_dict(self) -> Any:
        """Return the state, of types that `torch.load(weights_only=True)` reads."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state."""


class KeptLeaves:
    """The objects that a script keeps with its group.

    Args:
        has_shards: whether its module is divided, so that states may be.
    """

    def __init__(self, tree: StateTree, *, has_shards: bool = False) -> None:
        self._tree = tree
        self._has_shards = has_shards
        self._shared: dict[str, Kept] = {}
        self._own: dict[str, Kept] = {}

    def keep(self, objects: Mapping[str, Kept], *, own: bool = False) -> None:
        """Save and load these objects too.

        Args:
            own: each worker's states; otherwise rank 0's count for all.

        Raises:
            UsageError: one has no state, or its name is taken.
        """
        for name, kept in objects.items():
            if name in self._shared or name in self._own:
                raise UsageError(f"keep() already has the name '{name}'")
            if not (hasattr(kept, "state_dict") and hasattr(kept, "load_state_dict")):
                raise UsageError(
                    f"keep() was given a {type(kept).__name__} as '{name}'; expected something "
                    "with state_dict() and load_state_dict()"
                )
        (self._own if own else self._shared).update(objects)

    def leaves(self) -> list[Leaf]:
        shared = shared_leaf(
            "kept",
            lambda: _states(self._shared),
            is_divided=self._has_shards,
            write=lambda found: _load(self._shared, found.shared, "keep", self._parts),
        )
        own = Leaf(
            name="kept",
            scope=Scope.VIRTUAL,
            read=lambda: [on_host(_states(self._own)) for _ in self._tree.own],
            write=lambda found: _load(self._own, (found.mine or [{}])[0] or {}, "keep_own"),
            resize=self._resize,
        )
        return [shared, own]

    def _parts(self, state: Any, kept: Kept) -> Any:
        return divided(state, kept.state_dict()) if self._has_shards else state

    def _resize(self, found: Found) -> dict[str, Any]:
        if names := found.each[0]:
            raise SnapshotError(
                f"{found.source.name} was saved by {counted(len(found.each), 'worker')}, but this "
                f"job has {self._tree.count}: the states of {', '.join(sorted(names))} belong to "
                "each worker (keep_own), so the number of workers must be the same"
            )
        return {}


def _states(objects: Mapping[str, Kept]) -> dict[str, Any]:
    return {name: kept.state_dict() for name, kept in objects.items()}


def _load(
    objects: Mapping[str, Kept],
    states: Mapping[str, Any],
    call: str,
    take: Callable[[Any, Kept], Any] = lambda state, _: state,
) -> None:
    """Load the states of kept objects.

    Args:
        take: returns what an object loads, from its state in the checkpoint.
    """
    if states.keys() != objects.keys():
        names = [", ".join(sorted(part)) or "nothing" for part in (states, objects)]
        raise SnapshotError(
            f"the checkpoint keeps {names[0]}; this script has handed {names[1]} to {call}()"
        )
    for name, kept in objects.items():
        try:
            kept.load_state_dict(take(states[name], kept))
        except (ValueError, RuntimeError, KeyError, TypeError) as error:
            raise SnapshotError(
                f"'{name}' does not accept its state of the checkpoint: {in_a_line(error)}"
            ) from error


def in_a_line(error: BaseException) -> str:
    """Return the text of an error as one line, which may be cut off."""
    return " ".join(str(error).split())[:300]
