"""Which blobs share memory, from the operators between which they live, and the saving.

An assignment is a list of (name, `LiveRange`): blobs that live one after the other, and share.
"""

from __future__ import annotations

import copy
import enum
import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.runtime.values import TORCH_OF

log = logging.getLogger("memonger")


class LiveRange(NamedTuple):
    """The first maker of a blob, its last reader, and its bytes; None is unknown."""

    defined: int | None = None
    used: int | None = None
    size: float | None = None


class AssignmentAlgorithm(enum.Enum):
    """How assignments are found: blob after blob, or by a search for the least memory."""

    GREEDY = 0
    DYNAMIC_PROGRAMMING = 1


Named = tuple[str, LiveRange]
Assignments = list[list[Named]]

_MOST_STATES = 500
"""States that the search keeps: with fewer open ones it is exact."""


def compute_ranges(
    linearized_ops: Iterable[Any], blob_sizes: Mapping[str, float] | None = None
) -> dict[str, LiveRange]:
    """Return the range of each blob of operators in order.

    Args:
        linearized_ops: the operators.
        blob_sizes: bytes by name, for all blobs.
    """
    if not blob_sizes:
        log.warning("Provide blob sizes to get more accurate assignments.")
    ranges: dict[str, LiveRange] = {}
    for index, op in enumerate(linearized_ops):
        for name in op.input:
            found = ranges.get(name, LiveRange())
            ranges[name] = found._replace(used=index, size=blob_sizes[name] if blob_sizes else None)
        for name in op.output:
            found = ranges.get(name, LiveRange())
            defined = index if found.defined is None else found.defined
            ranges[name] = found._replace(
                defined=defined, size=blob_sizes[name] if blob_sizes else None
            )
    return ranges


def is_compatible(
    candidate_range: LiveRange, assignment: Sequence[Named], static_blobs: Collection[str]
) -> bool:
    """Return whether a blob lives behind the last one of an assignment."""
    name, last = assignment[-1]
    if name in static_blobs or None in (candidate_range.defined, last.defined, last.used):
        return False
    return candidate_range.defined > last.used  # type: ignore[operator]


def compute_blob_assignments(assignments: Iterable[Sequence[Named]]) -> dict[str, str]:
    """Return the new name of each blob that shares: the name of the last blob in its assignment."""
    return {
        name: assignment[-1][0]
        for assignment in assignments
        if len(assignment) > 1
        for name, _ in assignment
    }


def _largest(assignment: Sequence[Named]) -> float:
    return max((range_.size or 0 for _, range_ in assignment), default=0)


def get_memory_usage(assignments: Iterable[Sequence[Named]]) -> float:
    """Return the bytes that assignments need: the largest blob of each."""
    return sum(_largest(assignment) for assignment in assignments)


def compute_assignments_greedy(
    ranges_sorted: Iterable[Named], init_assignments: Assignments | None = None
) -> Assignments:
    """Return assignments: each blob joins the one of the nearest size.

    Args:
        ranges_sorted: blobs in the order of their last use.
        init_assignments: where to begin; their blobs are left out.
    """
    assignments = init_assignments or []
    assigned = {name for assignment in assignments for name, _ in assignment}
    for name, range_ in ranges_sorted:
        if name in assigned:
            continue
        size = range_.size or 0
        free = [assignment for assignment in assignments if is_compatible(range_, assignment, ())]
        if free:
            min(free, key=lambda found: abs(_largest(found) - size)).append((name, range_))
        else:
            assignments.append([(name, range_)])
    return assignments


class _State(NamedTuple):
    """Assignments so far: (last use, size) of each, and how they came about."""

    bytes: float
    ends: tuple[tuple[int | None, float], ...]
    members: tuple[tuple[Named, ...], ...]


def compute_assignments_dp(
    ranges_sorted: Sequence[Named],
    init_assignment: Assignments | None,
    counter: list[int] | None = None,
) -> Assignments:
    """Return the assignments of least memory.

    The search goes over the blobs in order and keeps, of all ways to the same last uses and sizes,
    one. Where there are too many it drops those that need most.

    Args:
        ranges_sorted: blobs in the order of their last use.
        init_assignment: where to begin.
        counter: accepted; Caffe2 counted its calls there.
    """
    begin = tuple(tuple(assignment) for assignment in init_assignment or [])
    ends = tuple((assignment[-1][1].used, _largest(assignment)) for assignment in begin)
    states = [_State(sum(size for _, size in ends), ends, begin)]
    for named in ranges_sorted:
        following: dict[tuple[Any, ...], _State] = {}
        for state in states:
            for made in _with(state, named):
                key = tuple(sorted(made.ends, key=repr))
                if key not in following:
                    following[key] = made
        states = sorted(following.values(), key=lambda state: (state.bytes, len(state.ends)))[
            :_MOST_STATES
        ]
    return [list(assignment) for assignment in states[0].members]


def _with(state: _State, named: Named) -> Iterable[_State]:
    """Yield what a blob can do: join an assignment, of several alike the first, or begin one."""
    _, range_ = named
    size = range_.size or 0
    tried = set()
    for index, (end, members) in enumerate(zip(state.ends, state.members, strict=True)):
        if end in tried or not is_compatible(range_, members, ()):
            continue
        tried.add(end)
        larger = max(end[1], size)
        yield _State(
            state.bytes + larger - end[1],
            (*state.ends[:index], (range_.used, larger), *state.ends[index + 1 :]),
            (*state.members[:index], (*members, named), *state.members[index + 1 :]),
        )
    yield _State(state.bytes + size, (*state.ends, (range_.used, size)), (*state.members, (named,)))


def get_updated_ranges(ranges: Sequence[Named], max_live: int | None = None) -> list[Named]:
    """Return ranges without None: not made is -1, not read is the end, a size is 1."""
    if max_live is None:
        max_live = max((range_.used for _, range_ in ranges if range_.used), default=0) + 1
    return [
        (
            name,
            LiveRange(
                -1 if range_.defined is None else range_.defined,
                max_live if range_.used is None else range_.used,
                1 if range_.size is None else range_.size,
            ),
        )
        for name, range_ in ranges
    ]


def compute_assignments(
    ranges: Mapping[str, LiveRange], static_blobs: Collection[str], algo: AssignmentAlgorithm
) -> Assignments:
    """Return the assignments of all blobs; static ones are alone.

    Args:
        ranges: by name.
        static_blobs: blobs that do not share.
        algo: how the assignments are found.
    """
    by_last_use = sorted(ranges.items(), key=lambda item: (item[1].used is None, item[1].used or 0))
    known = get_updated_ranges(by_last_use)
    sharable = [named for named in known if named[0] not in static_blobs]
    log.info("Total sharable blobs %d", len(sharable))
    search = (
        compute_assignments_greedy if algo is AssignmentAlgorithm.GREEDY else compute_assignments_dp
    )
    return search(sharable, []) + [[named] for named in known if named[0] in static_blobs]


def verify_assignments(assignments: Iterable[Sequence[Named]]) -> None:
    """Raise AssertionError when two blobs of an assignment live at the same time."""
    for assignment in assignments:
        for (first, before), (second, behind) in itertools.pairwise(assignment):
            assert (
                before.used is not None
                and behind.defined is not None
                and before.used < behind.defined
            ), f"{second} is made before {first} is used for the last time"


class Statistics(NamedTuple):
    """Bytes of all blobs, and of the largest blob of each assignment."""

    baseline_nbytes: int
    optimized_nbytes: int


def blob_nbytes(blob: Any) -> int:
    """Return the bytes of a blob of the workspace; 0, with a warning, for any other value."""
    try:
        return int(workspace.FetchBlob(blob).nbytes)
    except (AttributeError, RuntimeError):
        log.warning("Error when fetching blob %s", blob)
        return 0


def compute_statistics(assignments: Iterable[Sequence[tuple[str, Any]]]) -> Statistics:
    """Return the bytes with and without sharing, of the blobs that the workspace has."""
    sizes = [[blob_nbytes(name) for name, _ in assignment] for assignment in assignments]
    return Statistics(sum(map(sum, sizes)), sum(max(part) for part in sizes))


def collect_blob_sizes(net: Any) -> dict[str, int]:
    """Return the bytes of all blobs of a NetDef, by name; it must have run."""
    return {name: blob_nbytes(name) for op in net.op for name in (*op.input, *op.output)}


def estimate_memory_usage(
    protos: Iterable[Any],
    shapes: Mapping[str, Sequence[int]],
    types: Mapping[str, int],
    devicescope: Any,
) -> tuple[int, int, dict[str, int]]:
    """Return bytes that nets allocate on a device: total, peak, and by type of operator.

    Operators count in their order. A name in `Free` or `Alias` is free from then on; others stay.

    Args:
        protos: NetDefs, in the order in which they run.
        shapes, types: the blobs', of `InferShapesAndTypes`; others count as 0, with a warning.
        devicescope: the device; operators of others do not count.
    """

    def size(name: str) -> int:
        if name not in shapes or name not in types:
            log.warning("Unknown blob encountered: %s", name)
            return 0
        return math.prod(shapes[name]) * int(TORCH_OF[types[name]].itemsize)

    total = now = most = 0
    live: set[str] = set()
    by_type: defaultdict[str, int] = defaultdict(int)
    for proto in protos:
        for op in proto.op:
            if op.type in ("Free", "Alias"):
                freed = live.intersection(op.output)
                now -= sum(map(size, freed))
                live -= freed
            elif core.device_option_equal(op.device_option, devicescope):
                for name in dict.fromkeys(op.output):
                    if name not in live:
                        live.add(name)
                        total, now = total + size(name), now + size(name)
                        by_type[op.type] += size(name)
                        most = max(most, now)
    return total, most, by_type


def release_blobs_when_used(
    netproto: Any,
    dont_free_blobs: Collection[str],
    selector_fun: Callable[[str], bool] | None = None,
) -> Any:
    """Return a NetDef with a `Free` behind the last reader of each blob that it makes.

    External outputs, blobs that nothing reads and blobs with an alias stay.

    Args:
        netproto: the NetDef; it stays as it is.
        dont_free_blobs: blobs that stay too.
        selector_fun: returns whether a blob of a name may be freed; by default all may.
    """
    netproto = copy.deepcopy(netproto)
    read: set[str] = set()
    kept = {*map(str, dont_free_blobs), *netproto.external_output}
    candidates: set[str] = set()
    for op in netproto.op:
        if op.type == "Alias":
            kept.add(op.input[0])
            continue
        read.update(op.input)
        candidates.update(
            name
            for name in op.output
            if name not in read and (selector_fun is None or selector_fun(name))
        )
    free = candidates.intersection(read) - kept
    behind: list[Any] = []
    for op in reversed(netproto.op):
        for name in op.input:
            if name in free:
                free.remove(name)
                behind.append(core.CreateOperator("Free", [name], [name]))
        behind.append(op)
    operators = [copy.deepcopy(op) for op in reversed(behind)]
    del netproto.op[:]
    netproto.op.extend(operators)
    return netproto
