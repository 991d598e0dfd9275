"""A dag net's plan: which operators wait for which, chains of one thread, blobs' last readers.

Operators that wait for other machines are two parts: one starts, one waits for the result and sets
the outputs. All shards start them in the order of the net, whatever their threads do: collectives
of a common world need one order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from google.protobuf import text_format

from poseidon.caffe2.operators import registry
from poseidon.caffe2.proto.caffe2_pb2 import NetDef, OperatorDef

STEP_NETS = ("step_net", "backward_step_net")
"""The arguments of recurrent operators that hold a NetDef, or its text."""


def overwritten(operators: Sequence[OperatorDef]) -> Iterator[tuple[str, int, int]]:
    """Yield name, last user and overwriting operator of each value that is dead in between.

    Left out are values that come from outside the net, and blobs that operators may use unseen:
    blobs of operators on blobs, which may read their outputs, and of nets in arguments.
    """
    hidden = _hidden(operators)
    made: set[str] = set()
    user: dict[str, int] = {}
    for index, operator in enumerate(operators):
        for name in dict.fromkeys(operator.output):
            if name in made and name not in operator.input and name not in hidden:
                yield name, user[name], index
        made.update(operator.output)
        user.update(dict.fromkeys((*operator.input, *operator.output), index))


def _hidden(operators: Sequence[OperatorDef]) -> set[str]:
    names = nested_blobs(operators)
    for operator in operators:
        if registry.is_registered(operator.type) and registry.find(operator.type).blobs:
            names.update((*operator.input, *operator.output))
    return names


def nested_blobs(operators: Iterable[OperatorDef]) -> set[str]:
    """Return the blobs that nets in arguments name and no operator outside shows."""
    names: set[str] = set()
    for operator in operators:
        for argument in operator.arg:
            nets = [*argument.nets, *([argument.n] if argument.HasField("n") else [])]
            if argument.name in STEP_NETS and argument.s:
                nets.append(text_format.Parse(argument.s.decode(), NetDef()))
            for net in nets:
                names.update((*net.external_input, *net.external_output), nested_blobs(net.op))
                names.update(name for inner in net.op for name in (*inner.input, *inner.output))
    return names


def first_reads(operators: Iterable[OperatorDef], known: Iterable[str] = ()) -> list[str]:
    """Return the blobs that operators read before they make them, without known ones."""
    made, reads = set(known), dict[str, None]()
    for op in operators:
        reads.update((name, None) for name in op.input if name not in made)
        made.update(op.output)
    return list(reads)


def made_by(operators: Iterable[OperatorDef]) -> list[str]:
    return list(dict.fromkeys(name for op in operators for name in op.output))


def unread(operators: Iterable[OperatorDef]) -> list[str]:
    """Return the blobs that operators make and do not read afterwards."""
    blobs: dict[str, None] = {}
    for op in operators:
        for name in op.input:
            blobs.pop(name, None)
        blobs.update(dict.fromkeys(op.output))
    return list(blobs)


COLLECTIVES = frozenset(
    {"Allgather", "Allreduce", "Barrier", "Broadcast", "Reduce", "ReduceScatter"}
)
"""Operators that need the same order on all shards; their first input is a common world."""


class Part(Enum):
    """A part of an operator."""

    WHOLE = "whole"
    START = "start"
    END = "end"


Node = tuple[Part, int]
"""A part, and the index of its operator."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Operators that run one after the other.

    Attributes:
        operators: their indices in the net, in order.
        waits_for: the number of chains that must have ended before.
        releases: the chains that wait for this one, by their index.
        part: START and END are chains of one operator. The chain END waits until its operator has
            been started; nothing releases it.
    """

    operators: tuple[int, ...]
    waits_for: int
    releases: tuple[int, ...]
    part: Part = Part.WHOLE


def dependencies(
    operators: Sequence[OperatorDef], starting: Collection[int] = ()
) -> list[set[int]]:
    """Return each operator's predecessors: makers of what it reads, readers of what it writes.

    Control inputs between operators that are started are left out: they start in order anyway.

    Args:
        operators: of a net.
        starting: the indices of those that are started, and waited for later.
    """
    writer: dict[str, int] = {}
    readers: defaultdict[str, list[int]] = defaultdict(list)
    before: list[set[int]] = []
    for index, operator in enumerate(operators):
        needed: set[int] = set()
        reads = (*operator.input, *operator.control_input)
        for number, name in enumerate(reads):
            control = number >= len(operator.input)
            if name in writer and not (control and index in starting and writer[name] in starting):
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


def nodes(operators: Sequence[OperatorDef], starting: Collection[int] = ()) -> list[Node]:
    """Return the parts of a net in an order in which they can run one after the other.

    Operators that are started, and follow each other, are all started before the first is
    waited for, unless one uses what a different one makes.
    """
    found: list[Node] = []
    group: list[int] = []  # started, not waited for

    def end() -> None:
        found.extend((Part.END, member) for member in group)
        group.clear()

    for index, operator in enumerate(operators):
        if index not in starting:
            end()
            found.append((Part.WHOLE, index))
            continue
        if any(_collide(operators[member], operator) for member in group):
            end()
        found.append((Part.START, index))
        group.append(index)
    end()
    return found


def _collide(earlier: OperatorDef, later: OperatorDef) -> bool:
    """Return whether an operator uses what an earlier one makes, or makes what it uses."""
    used = {*later.input, *later.output}
    return not (used.isdisjoint(earlier.output) and set(later.output).isdisjoint(earlier.input))


def chains(operators: Sequence[OperatorDef], starting: Collection[int] = ()) -> list[Chain]:
    """Return a net's chains: an operator joins the one it waits for, if both have no other.

    Operators that another chain releases start a chain. Chains are in the order of their first
    operators: running them one after the other is right too.

    Args:
        operators: of a net.
        starting: the indices of those that are started, and waited for later.
    """
    parts = nodes(operators, starting)
    before = _reduced(_between(operators, parts, starting))
    after: list[list[int]] = [[] for _ in parts]
    for place, needed in enumerate(before):
        for earlier in needed:
            after[earlier].append(place)
    chain_of: dict[int, int] = {}
    members: list[list[int]] = []
    for place, needed in enumerate(before):
        (single,) = needed if len(needed) == 1 else (None,)
        whole = single is not None and parts[place][0] is parts[single][0] is Part.WHOLE
        if single is not None and whole and len(after[single]) == 1:
            chain_of[place] = chain_of[single]
            members[chain_of[single]].append(place)
        else:
            chain_of[place] = len(members)
            members.append([place])
    waits: list[set[int]] = [
        {chain_of[earlier] for place in chain for earlier in before[place]} - {number}
        for number, chain in enumerate(members)
    ]
    releases: list[list[int]] = [[] for _ in members]
    for number, needed in enumerate(waits):
        if parts[members[number][0]][0] is not Part.END:
            for earlier in needed:
                releases[earlier].append(number)
    return [
        Chain(
            tuple(parts[place][1] for place in chain),
            len(waits[number]),
            tuple(releases[number]),
            parts[chain[0]][0],
        )
        for number, chain in enumerate(members)
    ]


def _between(
    operators: Sequence[OperatorDef], parts: Sequence[Node], starting: Collection[int]
) -> list[set[int]]:
    """Return for each part of a net the places of those that must run before."""
    needed = dependencies(operators, starting)
    done = {index: place for place, (part, index) in enumerate(parts) if part is not Part.START}
    before: list[set[int]] = []
    started: dict[int, int] = {}
    last_of_world: dict[str, int] = {}  # the last collective that is not started
    for place, (part, index) in enumerate(parts):
        if part is Part.END:
            before.append({started[index]})
            continue
        wanted = {done[earlier] for earlier in needed[index]}
        if operators[index].type in COLLECTIVES:
            world = operators[index].input[0]
            wanted.update(list(started.values())[-1:])
            if part is Part.START:  # it may go through any of the worlds
                wanted.update(last_of_world.values())
                started[index] = place
            else:
                wanted.update([last_of_world[world]] if world in last_of_world else [])
                last_of_world[world] = place
        before.append(wanted)
    return before


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
