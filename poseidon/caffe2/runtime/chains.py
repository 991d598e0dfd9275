"""The plan of a dag net: which operators wait for which, and the chains that run on one thread each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.caffe2.proto.caffe2_pb2 import OperatorDef


@dataclass(frozen=True, slots=True)
class Chain:
    """Operators that run one after the other.

    Attributes:
        operators: their indices in the net, in order.
        waits_for: the number of chains that must have ended before.
        releases: the chains that wait for this one, by their index.
    """

    operators: tuple[int, ...]
    waits_for: int
    releases: tuple[int, ...]


def dependencies(operators: Sequence[OperatorDef]) -> list[set[int]]:
    """Return for each operator those that must run before: makers of what it reads, readers of what it writes."""
    writer: dict[str, int] = {}
    readers: defaultdict[str, list[int]] = defaultdict(list)
    before: list[set[int]] = []
    for index, operator in enumerate(operators):
        needed: set[int] = set()
        reads = (*operator.input, *operator.control_input)
        for name in reads:
            if name in writer:
                needed.add(writer[name])
        for name in operator.output:
            needed.update(readers[name])
            if name in writer:
                needed.add(writer[name])
        for name in reads:
            readers[name].append(index)
        for name in operator.output:
            writer[name] = index
            readers[name] = []
        needed.discard(index)
        before.append(needed)
    return before


def chains(operators: Sequence[OperatorDef]) -> list[Chain]:
    """Return the chains of a net: an operator joins the chain of the one that it waits for, where both have no other.

    Operators that another chain releases start a chain. The order is that of the first operators: running the chains one
    after the other is right too.
    """
    before = _reduced(dependencies(operators))
    after: list[list[int]] = [[] for _ in operators]
    for index, needed in enumerate(before):
        for earlier in needed:
            after[earlier].append(index)
    place: dict[int, int] = {}
    members: list[list[int]] = []
    for index, needed in enumerate(before):
        (single,) = needed if len(needed) == 1 else (None,)
        if single is not None and len(after[single]) == 1:
            place[index] = place[single]
            members[place[single]].append(index)
        else:
            place[index] = len(members)
            members.append([index])
    waits: list[set[int]] = [
        {place[earlier] for index in part for earlier in before[index]} - {number}
        for number, part in enumerate(members)
    ]
    releases: list[list[int]] = [[] for _ in members]
    for number, needed in enumerate(waits):
        for earlier in needed:
            releases[earlier].append(number)
    return [
        Chain(tuple(part), len(waits[number]), tuple(releases[number])) for number, part in enumerate(members)
    ]


def _reduced(before: list[set[int]]) -> list[set[int]]:
    """Drop what follows from other dependencies, so that more operators wait for one only."""
    above: list[int] = []
    reduced = []
    for needed in before:
        kept: set[int] = set()
        covered = 0
        for earlier in sorted(needed, reverse=True):
            if not covered >> earlier & 1:
                kept.add(earlier)
                covered |= above[earlier] | 1 << earlier
        above.append(covered)
        reduced.append(kept)
    return reduced
