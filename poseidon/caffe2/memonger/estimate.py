"""The memory of nets: bytes of blobs, estimates from shapes, and operators that free blobs."""

from __future__ import annotations

import copy
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.runtime.data_types import TORCH_OF

log = logging.getLogger("memonger")


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
    """Return bytes that nets allocate on a device: in all, at most at one time, and by the type
    of operator.

    Operators count in their order. A blob that `Free` or `Alias` names is free from then on; others
    stay.

    Args:
        protos: NetDefs, in the order in which they run.
        shapes, types: of the blobs, as `InferShapesAndTypes` gives them; others count as 0, with a
            warning.
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
