"""Sharing by an order of the operators: the graph of readers, its orders, the renamed net."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from google.protobuf import text_format

from poseidon.caffe2.core.gradient_sums import rename
from poseidon.caffe2.memonger.assignments import (
    AssignmentAlgorithm,
    Assignments,
    compute_assignments,
    compute_blob_assignments,
    compute_ranges,
)
from poseidon.caffe2.operators import registry
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.runtime.chains import STEP_NETS
from poseidon.caffe2.runtime.errors import operator_error

log = logging.getLogger("memonger")

_IN_PLACE = {
    "AtomicIter": ((1, 0),),
    "IndexFreeze": ((0, 0),),
    "Iter": ((0, 0),),
    "MomentumSGDUpdate": ((0, 0), (1, 1), (3, 2)),
    "ScatterAssign": ((0, 0),),
    "ScatterWeightedSum": ((0, 0),),
    "SparseMomentumSGDUpdate": ((0, 0), (1, 1), (3, 2)),
    "SpatialBN": ((3, 1), (4, 2)),
}
"""The (input, output) that must be one blob, by the type of the operator."""


def apply_assignments(net: Any, blob_assignments: Mapping[str, str]) -> None:
    """Rename the blobs of the operators of a NetDef, in place; nets inside recurrent operators too.

    Args:
        net: the NetDef.
        blob_assignments: new names by old ones.
    """

    def canonical(blob: str) -> str:
        return blob_assignments.get(blob, blob)

    for op in net.op:
        if op.type.startswith("RecurrentNetwork"):
            apply_recurrent_blob_assignments(op, blob_assignments, canonical)
        rename(op.input, blob_assignments)
        rename(op.output, blob_assignments)


def apply_recurrent_blob_assignments(
    op: Any, blob_assignments: Mapping[str, str], canonical_name: Callable[[str], str]
) -> None:
    """Rename blobs in a recurrent operator's step nets, with the new names as arguments."""
    for argument in op.arg:
        if argument.name not in STEP_NETS:
            continue
        step = caffe2_pb2.NetDef()
        if argument.HasField("n"):
            step = argument.n
        else:
            text_format.Parse(argument.s.decode(), step)
        apply_assignments(step, blob_assignments)
        for blobs in (step.external_input, step.external_output):
            blobs[:] = map(canonical_name, blobs)
        if not argument.HasField("n"):
            argument.s = str(step).encode()
    for name in dict.fromkeys([*op.input, *op.output]):
        if canonical_name(name) != name:
            op.arg.add(name=f"{name}.rename", s=canonical_name(name).encode())


def check_operators(net: Any) -> None:
    """Raise RuntimeError when an operator of a NetDef is used in a way that its schema forbids."""
    for index, op in enumerate(net.op):
        try:
            if registry.is_registered(op.type):
                registry.find(op.type).check(op)
        except ValueError as error:
            raise operator_error(str(error), op, net.name, index) from error
        for read, made in _IN_PLACE.get(op.type, ()):
            if made < len(op.output) and (
                read >= len(op.input) or op.input[read] != op.output[made]
            ):
                reason = (
                    f"{op.type}: output {made}, {op.output[made]}, must be the blob of input {read}"
                )
                raise operator_error(reason, op, net.name, index)


def verify_inplace_blobs(net_a: Any, net_b: Any) -> bool:
    """Return whether the operators of two NetDefs work in place at the same inputs and outputs."""

    def in_place(op: Any) -> list[tuple[int, int]]:
        made = list(op.output)
        return [(index, made.index(name)) for index, name in enumerate(op.input) if name in made]

    return all(
        a.type == b.type and in_place(a) == in_place(b)
        for a, b in zip(net_a.op, net_b.op, strict=False)
    )


def verify_graph_equality(net_a: Any, net_b: Any) -> bool:
    """Return whether two NetDefs are equal but for the names of blobs."""
    if len(net_a.op) != len(net_b.op):
        return False
    for a, b in zip(net_a.op, net_b.op, strict=True):
        if (a.type, a.device_option, a.engine) != (b.type, b.device_option, b.engine):
            return False
    parents_a, parents_b = _parents(net_a), _parents(net_b)
    for index, (a, b) in enumerate(zip(parents_a, parents_b, strict=True)):
        if a != b:
            log.debug("Operator %d, %s, reads %s and %s", index, net_a.op[index].type, a, b)
            return False
    return True


def _parents(net: Any) -> list[list[int]]:
    """Return for each operator those that made its inputs, in the order of the inputs."""
    maker: dict[str, int] = {}
    parents = []
    for index, op in enumerate(net.op):
        parents.append([maker[name] for name in op.input if name in maker])
        maker.update(dict.fromkeys(op.output, index))
    return parents


class Graph:
    """Operators by index, with an edge from each to those that read what it makes.

    Attributes:
        nodes: `{"op": operator}` by index.
    """

    def __init__(self) -> None:
        self.nodes: dict[int, dict[str, Any]] = {}
        self._edges: dict[int, dict[int, set[str]]] = {}

    def add_node(self, index: int, op: Any) -> None:
        self.nodes[index] = {"op": op}
        self._edges[index] = {}

    def add_edge(self, maker: int, reader: int, deps: set[str]) -> None:
        """Add an edge for the blobs that pass along it."""
        self._edges[maker][reader] = deps

    def edges(self) -> list[tuple[int, int]]:
        """Return all edges, ordered by maker and reader."""
        return [(maker, reader) for maker in self.nodes for reader in sorted(self._edges[maker])]

    def deps(self, maker: int, reader: int) -> set[str]:
        """Return the blobs that pass along an edge."""
        return self._edges[maker][reader]

    def successors(self, index: int) -> list[int]:
        """Return the readers of an operator's outputs."""
        return sorted(self._edges[index])

    def predecessors(self, index: int) -> list[int]:
        """Return the makers of an operator's inputs."""
        return [maker for maker in self.nodes if index in self._edges[maker]]

    def __iter__(self) -> Iterator[int]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)


def compute_interference_graph(ops: Sequence[Any]) -> Graph:
    """Return the operators' graph: an edge to each later one that reads one's outputs."""
    graph = Graph()
    readers: dict[str, list[int]] = {}
    for index, op in enumerate(ops):
        graph.add_node(index, op)
        for name in dict.fromkeys(op.input):
            readers.setdefault(name, []).append(index)
    for index, op in enumerate(ops):
        made = set(op.output)
        for reader in sorted(
            {later for name in made for later in readers.get(name, []) if later > index}
        ):
            graph.add_edge(index, reader, made.intersection(ops[reader].input))
    return graph


def topological_sort_traversal(g: Graph) -> list[int]:
    """Return an order of the operators: of those that can run, the one that became so last."""
    waits = dict.fromkeys(g, 0)
    for _, reader in g.edges():
        waits[reader] += 1
    ready = [index for index in g if not waits[index]]
    order = []
    while ready:
        order.append(ready.pop())
        for reader in g.successors(order[-1]):
            waits[reader] -= 1
            if not waits[reader]:
                ready.append(reader)
    return order


def topological_sort_traversal_longest_path(g: Graph) -> list[int]:
    """Return an order in which the longest paths begin first, so that blobs live shorter."""
    length: dict[int, int] = {}
    sources = set(g)
    for index in reversed(list(g)):
        length[index] = max((length[reader] + 1 for reader in g.successors(index)), default=0)
        sources.difference_update(g.successors(index))
    behind: list[int] = []
    done: set[int] = set()
    for source in sorted(sources, key=lambda index: (length[index], -index)):
        stack = [(source, iter(g.successors(source)))]
        while stack:
            index, readers = stack[-1]
            reader = next((later for later in readers if later not in done), None)
            if reader is not None:
                stack.append((reader, iter(g.successors(reader))))
                continue
            stack.pop()
            if index not in done:
                done.add(index)
                behind.append(index)
    return behind[::-1]


class Optimization(NamedTuple):
    """A net whose blobs share names, its assignments, and the new names by old ones."""

    net: Any
    assignments: Assignments
    blob_assignments: dict[str, str]


def optimize_interference(
    net: Any,
    static_blobs: Collection[str],
    ordering_function: Callable[[Graph], Iterable[int]] = topological_sort_traversal,
    blob_sizes: Mapping[str, float] | None = None,
    algo: AssignmentAlgorithm = AssignmentAlgorithm.GREEDY,
) -> Optimization:
    """Order the operators of a net, and let blobs share names that live one after the other.

    Args:
        net: a NetDef; it stays as it is.
        static_blobs: blobs that keep their names: inputs, parameters and what is fetched.
        ordering_function: the order, e.g. `topological_sort_traversal_longest_path`.
        blob_sizes: bytes by name, for all blobs; see `collect_blob_sizes`.
        algo: how the blobs that share are found.
    """
    net = copy.deepcopy(net)
    ordered = [net.op[index] for index in ordering_function(compute_interference_graph(net.op))]
    ordered = [copy.deepcopy(op) for op in ordered]
    del net.op[:]
    net.op.extend(ordered)
    static = {str(blob) for blob in static_blobs}
    assignments = compute_assignments(compute_ranges(ordered, blob_sizes), static, algo)
    blob_assignments = compute_blob_assignments(assignments)
    apply_assignments(net, blob_assignments)
    return Optimization(net, assignments, blob_assignments)
