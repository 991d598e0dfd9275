"""Assignments of blobs that live one after the other."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, memonger, workspace
from poseidon.caffe2.memonger import LiveRange
from poseidon.caffe2.proto import caffe2_pb2

RANGES = [
    ("b1", LiveRange(1, 3, 10)),
    ("b2", LiveRange(3, 4, 1)),
    ("b3", LiveRange(5, 6, 1)),
    ("b4", LiveRange(5, 7, 10)),
]


def test_each_blob_joins_the_one_of_its_size() -> None:
    found = memonger.compute_assignments_greedy(RANGES, None)
    assert found == [[RANGES[0], RANGES[3]], [RANGES[1], RANGES[2]]]
    assert memonger.get_memory_usage(found) == 11
    shared = {"b1": "b4", "b4": "b4", "b2": "b3", "b3": "b3"}
    assert memonger.compute_blob_assignments(found) == shared


def test_the_search_finds_the_least() -> None:
    assert memonger.get_memory_usage(memonger.compute_assignments_dp(RANGES, None)) == 11
    others = [("b1", LiveRange(1, 2, 10)), ("b2", LiveRange(4, 6, 1)), ("b3", LiveRange(5, 6, 10))]
    assert memonger.get_memory_usage(memonger.compute_assignments_dp(others, [])) == 11


def best(ranges: list[Any]) -> float:
    """The least memory of all partitions into chains."""
    least = float("inf")
    for places in itertools.product(range(len(ranges)), repeat=len(ranges)):
        chains = [
            [r for r, p in zip(ranges, places, strict=True) if p == place] for place in set(places)
        ]
        if all(b[1].defined > a[1].used for chain in chains for a, b in itertools.pairwise(chain)):
            least = min(least, memonger.get_memory_usage(chains))
    return least


def test_the_search_against_all_partitions() -> None:
    random = np.random.RandomState(0)
    for _ in range(8):
        ranges = []
        for index in range(5):
            defined = int(random.randint(0, 8))
            ranges.append(
                (
                    f"b{index}",
                    LiveRange(defined, defined + int(random.randint(4)), int(random.randint(1, 9))),
                )
            )
        ranges.sort(key=lambda named: named[1].used)
        found = memonger.compute_assignments_dp(ranges, [])
        memonger.verify_assignments(found)
        assert sorted(named for chain in found for named in chain) == sorted(ranges)
        assert memonger.get_memory_usage(found) == best(ranges)


def test_ranges_of_a_net() -> None:
    net = core.Net("n")
    net.Copy("a", "b")
    net.Add(["a", "b"], "c")
    net.Relu("c", "c")
    sizes = {"a": 4, "b": 8, "c": 12}
    ranges = memonger.compute_ranges(net.Proto().op, sizes)
    assert ranges == {"a": (None, 1, 4), "b": (0, 1, 8), "c": (1, 2, 12)}
    known = dict(memonger.get_updated_ranges(list(memonger.compute_ranges(net.Proto().op).items())))
    assert known == {"a": (-1, 1, 1), "b": (0, 1, 1), "c": (1, 2, 1)}


def test_static_blobs_are_alone() -> None:
    ranges = {"a": LiveRange(0, 1, 1), "b": LiveRange(2, 3, 1), "c": LiveRange(4, None, 1)}
    for algorithm in memonger.AssignmentAlgorithm:
        found = memonger.compute_assignments(ranges, ["b"], algorithm)
        assert [[name for name, _ in chain] for chain in found] == [["a", "c"], ["b"]]
    assert not memonger.is_compatible(LiveRange(5, 6, 1), [("b", LiveRange(2, 3, 1))], ["b"])


def test_blobs_that_live_at_the_same_time_are_refused() -> None:
    with pytest.raises(AssertionError, match="b2 is made before b1 is used for the last time"):
        memonger.verify_assignments([[RANGES[0], RANGES[1]]])


def test_a_free_follows_the_last_reader() -> None:
    net = core.Net("n")
    for read, made in (("data", "x"), ("x", "y"), ("x", "z"), ("y", "u")):
        net.Copy(read, made)
    net.Alias("u", "u_alias")
    net.AddExternalOutput(net.Add(["z", "u_alias"], "out"))
    freed = memonger.release_blobs_when_used(net.Proto(), {"data"})
    operators = [(op.type, op.output[0]) for op in freed.op]
    assert [name for kind, name in operators if kind == "Free"] == ["x", "y", "z"]
    assert operators.index(("Free", "x")) == operators.index(("Copy", "z")) + 1
    assert not any(op.type == "Free" for op in net.Proto().op)
    some = memonger.release_blobs_when_used(net.Proto(), {"x"}, lambda name: name != "z")
    assert [op.output[0] for op in some.op if op.type == "Free"] == ["y"]
    workspace.ResetWorkspace()
    workspace.FeedBlob("data", np.float32([1, 2]))
    workspace.RunNetOnce(freed)
    assert workspace.FetchBlob("out").tolist() == [2, 4]
    assert memonger.blob_nbytes("out") == 8 and memonger.blob_nbytes("x") == 0


def test_an_estimate() -> None:
    init, net = core.Net("init"), core.Net("n")
    init.ConstantFill([], "w", shape=[10])
    net.Copy("w", "a")
    net.Copy("a", "b")
    net.Free("a", "a")
    net.Copy("b", "b")
    net.Cast("b", "c", to=core.DataType.DOUBLE)
    with core.DeviceScope(core.DeviceOption(caffe2_pb2.CUDA, 0)):  # type: ignore[attr-defined]
        net.Copy("c", "elsewhere")
    shapes = {"w": [10], "a": [10], "b": [10], "c": [5, 2]}
    types = {"w": 1, "a": 1, "b": 1, "c": 13}
    total, most, by_type = memonger.estimate_memory_usage(
        [init.Proto(), net.Proto()], shapes, types, core.DeviceOption(0)
    )
    assert (total, most) == (40 + 40 + 40 + 80, 160)
    assert by_type == {"ConstantFill": 40, "Copy": 80, "Cast": 80}
