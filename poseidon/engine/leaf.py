"""What a part of a state declares of itself (`state_tree.py`), and its value as bytes: tensors,
numbers, strings, lists, tuples and dicts, nothing else.

Law: bytes are read with `torch.load(weights_only=True)`, so reading them runs no code.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poseidon.errors import SnapshotError


class Scope(Enum):
    """To whom the value of a leaf belongs."""

    SHARED = "shared"
    """All workers: it is read where the tree is kept."""
    ROOT = "root"
    """Rank 0, which sends it to where the tree is kept; all workers load it."""
    VIRTUAL = "virtual"
    """Each virtual worker."""


class LeafStage(IntEnum):
    """When a leaf is written."""

    MODULE = 0
    """Tensors that all virtual workers share."""
    OWN = 1
    """Tensors that each virtual worker has of its own."""
    EXCHANGE = 2
    """What the exchange is given before it opens again."""
    UPDATE = 3
    """Histories, and the state of optimizers: the exchange opens with them."""
    REST = 4
    """What is written once the exchange is open."""
    RANDOM = 5
    """Random states: whatever else is written may draw numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSource:
    """Where a state comes from.

    Attributes:
        name: for messages.
        is_file: whether it is a file, with others beside it.
        path: of the file, on rank 0; None on others.
    """

    name: str
    is_file: bool = False
    path: Path | None = None


MEMORY = StateSource(name="the memory snapshot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a state has of a leaf.

    Attributes:
        shared: of all workers; None: the state has none.
        each: by virtual worker; empty: as `shared`.
        own: the virtual workers of this process.
    """

    shared: Any
    each: Sequence[Any]
    own: range
    source: StateSource

    @property
    def mine(self) -> list[Any]:
        """Of each virtual worker of this process; empty: the state has none."""
        return [self.each[number] for number in self.own] if self.each else []


def nothing(found: Found) -> None:
    """Write, check or give nothing. See `Leaf`."""


def first(found: Found) -> Any:
    """Give all virtual workers what the first one had. See `Leaf.resize`."""
    return found.each[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A part of a state.

    Attributes:
        read: returns the value; with `VIRTUAL` a list, for each virtual worker of this process. With
            `ROOT` and `VIRTUAL` all workers call it together.
        together: in place of `read`, of tensors of which no worker has the whole: all workers call it
            together, and say whether they keep the value, and whether the state has the parts of a
            plane alone.
        write: takes what a state has.
        check: refuses what does not fit, before anything is written.
        resize: with `VIRTUAL`: returns the value that each of a different number of virtual workers
            begins with; None: none.
        enter: with `VIRTUAL`: puts the value of a virtual worker in place, by its place among those of
            this process; None: nothing has to be.
        copy: begins to copy the value while training continues, on all workers that keep it, for
            `StateTree.copy`; with `VIRTUAL` returns it. It may write to what it has returned before
            (None: nothing). None: `read` does.
        may_miss: whether states of other kinds of jobs, which also fit, have no such leaf.
    """

    name: str
    scope: Scope
    stage: LeafStage = LeafStage.REST
    read: Callable[[], Any]
    together: Callable[[bool, bool], Any] | None = None
    write: Callable[[Found], object] = nothing
    check: Callable[[Found], None] = nothing
    resize: Callable[[Found], Any] = nothing
    enter: Callable[[int], object] | None = None
    copy: Callable[[Any], Any] | None = None
    may_miss: bool = False

    @classmethod
    def shared(
        cls,
        name: str,
        read: Callable[[], Any],
        write: Callable[[Any], object] = lambda _: None,
        *,
        stage: LeafStage = LeafStage.REST,
    ) -> Leaf:
        """Return a leaf of all workers; `write` takes its value."""
        return cls(
            name=name,
            scope=Scope.SHARED,
            stage=stage,
            read=read,
            write=lambda found: write(found.shared),
        )


def packed(value: object) -> bytes:
    """Return a value as the bytes of a file of `torch.save`."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(content: bytes | bytearray, source: str) -> Any:
    """Return the value of such bytes, with all tensors on the CPU.

    Args:
        source: their origin, for messages.

    Raises:
        SnapshotError: they are not such a file, or one that would run code when it is read.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles of other protocols
            return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except MemoryError:
        raise
    except Exception as error:  # torch raises many types for files of something else
        # torch's own sentence advises to load the file without this protection
        raise SnapshotError(
            f"{source} is not a checkpoint of a group; expected a file of group.save(), which "
            "torch.load(weights_only=True) reads"
        ) from error


def on_host(value: Any) -> Any:
    """Return a copy of a value of dicts, lists, tuples and tensors, with all
    tensors on the CPU; others stay as they are.
    """
    return mapped(value, lambda tensor: tensor.detach().cpu().clone())


def mapped(value: Any, change: Callable[[Tensor], object]) -> Any:
    """Return a value of dicts, lists, tuples and tensors with something in place of each tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(part, change) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [mapped(part, change) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value
