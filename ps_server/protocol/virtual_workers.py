"""Virtual workers: which process computes for which, and the tree in which their gradients are
added.

All that a result depends on belongs to the V virtual workers of a job: records, random streams, and
the order of each sum. Processes compute for one or several of them, one after another.

Law: the sum over virtual workers is one fixed binary tree. A node is a range of virtual workers. A
leaf is one of them, the root all; the left half of a node has the largest power of two that is
less than its number. A node's sum is the left half's plus the right half's. So a process that
computes for a range sends one sum for each largest node within it, whoever receives these finishes
the tree, and the bits are the same for every number of processes.

    V = 7:  ((0 + 1) + (2 + 3)) + ((4 + 5) + 6)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

from ps_server.errors import SpecError

T = TypeVar("T")


class Node(NamedTuple):
    """A node of the tree: virtual workers `start` to `stop` (exclusive)."""

    start: int
    stop: int

    @property
    def middle(self) -> int:
        """The first virtual worker of the right half of a node that is not a leaf."""
        return self.start + (1 << (self.stop - self.start - 1).bit_length() - 1)


@dataclass(frozen=True, slots=True)
class VirtualWorkers:
    """The virtual workers of a job, and the processes that compute for them.

    Args:
        bounds: process p computes for virtual workers `bounds[p]` to `bounds[p + 1]` (exclusive),
            one or more; from 0 to their number.
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.bounds) < 2 or self.bounds[0] != 0:
            raise SpecError(f"the bounds of virtual workers are {self.bounds}; expected 0, ..., V")
        if any(start >= stop for start, stop in pairwise(self.bounds)):
            raise SpecError(
                f"the bounds of virtual workers are {self.bounds}; expected one or more for each "
                "process"
            )

    @classmethod
    @cache
    def one_each(cls, processes: int) -> VirtualWorkers:
        """Return one virtual worker for each process."""
        return cls(tuple(range(processes + 1)))

    @classmethod
    def spread(cls, count: int, speeds: Sequence[float]) -> VirtualWorkers:
        """Divide `count` virtual workers among processes with these relative speeds, > 0.

        Each process has at least one. The largest time of a process (its number divided by its
        speed) is as small as possible; among equal ones earlier processes have more.

        Raises:
            SpecError: there are more processes than virtual workers.
        """
        if count < len(speeds):
            raise SpecError(
                f"there are {count} virtual workers for {len(speeds)} processes; expected at least "
                "one each"
            )
        numbers = [1] * len(speeds)
        for _ in range(count - len(speeds)):
            times = [(n + 1) / speed for n, speed in zip(numbers, speeds, strict=True)]
            numbers[times.index(min(times))] += 1
        bounds = [0]
        for number in numbers:
            bounds.append(bounds[-1] + number)
        return cls(tuple(bounds))

    @property
    def count(self) -> int:
        """V, the number of virtual workers."""
        return self.bounds[-1]

    @property
    def processes(self) -> int:
        """The number of processes."""
        return len(self.bounds) - 1

    @property
    def is_one_each(self) -> bool:
        """Whether each process computes for one."""
        return self.count == self.processes

    def of(self, process: int) -> range:
        """Return the virtual workers of a process."""
        return range(self.bounds[process], self.bounds[process + 1])

    def nodes(self, process: int, *, leaves: bool = False) -> tuple[Node, ...]:
        """Return the nodes whose sums a process sends, from left to right.

        Args:
            process: the process.
            leaves: whether the gradient of each virtual worker is sent by itself.
        """
        own = self.of(process)
        if leaves:
            return tuple(Node(v, v + 1) for v in own)
        return largest_nodes(self.count, own.start, own.stop)


@cache
def largest_nodes(count: int, start: int, stop: int) -> tuple[Node, ...]:
    """Return the largest nodes of the tree of `count` leaves within a range, from left to right."""
    found: list[Node] = []
    open_nodes = [Node(0, count)]
    while open_nodes:
        node = open_nodes.pop()
        if node.stop <= start or stop <= node.start:
            continue
        if start <= node.start and node.stop <= stop:
            found.append(node)
        else:
            open_nodes += [Node(node.middle, node.stop), Node(node.start, node.middle)]
    return tuple(found)


@cache
def _halves(count: int) -> dict[Node, tuple[Node, Node]]:
    """Return for each node but the root its sibling and its parent."""
    found: dict[Node, tuple[Node, Node]] = {}
    open_nodes = [Node(0, count)]
    while open_nodes:
        node = open_nodes.pop()
        if node.stop - node.start > 1:
            left, right = Node(node.start, node.middle), Node(node.middle, node.stop)
            found[left], found[right] = (right, node), (left, node)
            open_nodes += [left, right]
    return found


def _add_in_place(left: Any, right: Any, _: Node) -> Any:
    return left.add_(right)


class TreeSum(Generic[T]):
    """Adds what belongs to the nodes of a tree, as far as they have come.

    Args:
        count: the leaves of the tree.
        add: returns the sum of the left half and the right half of a node; it may write to either.
            By default tensors are added in the memory of the left half.

    Attributes:
        parts: the sums that wait for their sibling, by node; the whole sum once it is there.
    """

    __slots__ = ("_add", "_halves", "parts")

    def __init__(self, count: int, add: Callable[[T, T, Node], T] = _add_in_place) -> None:
        self._halves = _halves(count)
        self._add = add
        self.parts: dict[Node, T] = {}

    def put(self, node: Node, part: T) -> Node:
        """Add the sum of a node, and those above it whose halves have come.

        Return the uppermost.
        """
        while node in self._halves:
            sibling, parent = self._halves[node]
            if sibling not in self.parts:
                break
            other = self.parts.pop(sibling)
            left, right = (part, other) if node < sibling else (other, part)
            node, part = parent, self._add(left, right, parent)
        self.parts[node] = part
        return node

    def release(self, node: Node, part: T, nodes: Collection[Node]) -> T | None:
        """Add as `put` does. Take and return the uppermost sum if it is of one of these nodes."""
        node = self.put(node, part)
        return self.parts.pop(node) if node in nodes else None
