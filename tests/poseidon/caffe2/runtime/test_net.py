"""Nets whose operators wait for other machines: the order of what is started, failures, and the
bits of sums.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from poseidon.caffe2 import core
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.proto.caffe2_pb2 import NetDef, OperatorDef
from poseidon.caffe2.runtime.dag import MOST_THREADS
from poseidon.caffe2.runtime.net import computing_threads
from poseidon.caffe2.runtime.workspace import Workspace
from poseidon.caffe2.shards import buckets
from poseidon.caffe2.shards.store_handler import CollectiveError

KINDS = ["simple", "dag"]


def total(*names: str, **arguments: Any) -> OperatorDef:
    return core.CreateOperator(
        "Allreduce", ["world", *names], list(names), engine="GLOO", **arguments
    )


def net(kind: str, *operators: OperatorDef) -> NetDef:
    definition = NetDef(name="sums", type=kind, num_workers=3)
    definition.op.extend(operators)
    return definition


class World:
    """A world of two shards that notes what is started and waited for.

    Args:
        fails: whether the sum of 1 fails.
        least_started: how many sums are started before the first one ends.
    """

    size = 2

    def __init__(self, fails: bool = False, least_started: int = 0) -> None:
        self.all_started = threading.Event()
        self.least_started = least_started
        self.calls: list[str] = []
        self.owned: list[bool] = []
        self.fails = fails

    def joins(self, other: World) -> bool:
        return self is other

    def start_all_reduce(
        self, tensors: tuple[torch.Tensor, ...], owned: bool = False
    ) -> Callable[[], list[torch.Tensor]]:
        self.owned.append(owned)
        value = tensors[0].flatten().tolist()
        self.calls.append(f"start {value}")
        if sum(call.startswith("start") for call in self.calls) >= self.least_started:
            self.all_started.set()

        def wait() -> list[torch.Tensor]:
            assert self.all_started.wait(60)
            self.calls.append(f"wait {value}")
            if self.fails and 1 in value:
                raise CollectiveError("shard 0 could not sum")
            return [tensor * 10 for tensor in tensors]

        return wait


def workspace_of(world: Any, names: str) -> Workspace:
    own = Workspace()
    own.create("world").value = world
    for index, name in enumerate(names):
        own.create(name).value = torch.tensor(float(index))
    return own


@pytest.mark.parametrize("kind", KINDS)
def test_no_result_is_needed_before_all_are_started(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    world = World(least_started=3)
    own = workspace_of(world, "abc")
    own.run_once(
        net(kind, total("a"), total("b"), total("c"), core.CreateOperator("Copy", "b", "y"))
    )
    assert [call for call in world.calls if call.startswith("start")] == [
        f"start [{i}.0]" for i in range(3)
    ]
    assert sum(call.startswith("wait") for call in world.calls) == 3
    assert [float(own.get(name).value) for name in "abcy"] == [0, 10, 20, 10]


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_tensor_is_summed_in_place_where_no_other_blob_shares_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    world = World()
    own = workspace_of(world, "abcd")
    own.create("e").value = own.get("b").value.view(1)
    other = core.CreateOperator("Allreduce", ["world", "c"], ["f"], engine="GLOO")
    own.run_once(net(kind, total("a"), total("b"), other, total("d")))
    assert world.owned == [True, False, False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_small_sums_that_follow_each_other_are_one_message(kind: str) -> None:
    world = World()
    own = workspace_of(world, "abcd")
    double = core.CreateOperator("Scale", "c", "c", scale=2.0)
    own.run_once(
        net(kind, double, total("a"), total("b"), total("c"), total("a"), double, total("d"))
    )
    assert [call for call in world.calls if call.startswith("start")] == [
        "start [0.0, 1.0, 4.0]",
        "start [0.0]",
        "start [3.0]",
    ]
    assert [float(own.get(name).value) for name in "abcd"] == [0, 10, 80, 30]


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_is_its_sentence_and_what_needs_the_sum_does_not_run(kind: str) -> None:
    own = workspace_of(World(fails=True), "abc")
    with pytest.raises(CollectiveError, match=r"^shard 0 could not sum$"):
        own.run_once(net(kind, total("a"), total("b"), core.CreateOperator("Copy", "b", "y")))
    assert float(own.get("b").value) == 1
    assert own.get("y").value is None


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_blob_is_named_with_its_operator(kind: str) -> None:
    own = workspace_of(World(), "ac")
    own.create("b")
    with pytest.raises(
        RuntimeError, match=r'(?s)b is empty: no operator has given it a value.*input: "b"'
    ):
        own.run_once(net(kind, total("a"), total("b"), total("c")))


def test_a_net_of_an_unknown_type_is_refused() -> None:
    sentence = r"^net sums has the unknown type 'dags'; expected one of async_dag, async_polling, .*, simple_"
    with pytest.raises(RuntimeError, match=sentence):
        Workspace().create_net(net("dags"))


@pytest.mark.parametrize("kind", [*KINDS, ""])
def test_wrong_shapes_are_named_with_their_net_operator_and_blobs(kind: str) -> None:
    own = Workspace()
    for name, shape in {"x": (2, 3), "w": (5, 4), "b": (5,)}.items():
        own.create(name).value = torch.ones(shape)
    operators = [
        core.CreateOperator("Relu", "x", "x"),
        core.CreateOperator("FC", ["x", "w", "b"], "y"),
    ]
    with pytest.raises(RuntimeError, match=r"^\[enforce fail at FC\] ") as caught:
        own.run_once(net(kind, *operators))
    line = str(caught.value).splitlines()[0]
    assert line.endswith("; operator 1 of net sums, FC, has the inputs x (2, 3), w (5, 4), b (5,)")
    with pytest.raises(RuntimeError, match=r"; this operator, FC, has the inputs x \(2, 3\)"):
        own.run_operator(operators[1])


def test_a_long_list_of_shapes_is_cut() -> None:
    own = Workspace()
    names = [f"x{index}" for index in range(10)]
    for index, name in enumerate(names):
        own.create(name).value = torch.ones(index + 1, index + 1)
    with pytest.raises(RuntimeError, match=r"inputs x0 \(1, 1\), .* x7 \(8, 8\), and 2 more\n"):
        own.run_operator(core.CreateOperator("Sum", names, "y"))


def test_an_operator_with_a_status_blob_runs_as_a_whole() -> None:
    own = workspace_of(World(), "ab")
    own.create_net(net("dag", total("a"), total("b", status_blob="status")))
    assert list(own.nets["sums"].starts) == [0]


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([(caffe2_pb2.CPU, 0)], 1),
        ([(caffe2_pb2.CPU, 0), (caffe2_pb2.CPU, 1), (caffe2_pb2.CPU, 0)], 2),
        (
            [(caffe2_pb2.CPU, 0), (caffe2_pb2.CUDA, 0)],
            MOST_THREADS if torch.cuda.is_available() else 1,
        ),
    ],
)
def test_a_thread_of_each_replica_on_the_cpu_computes(
    devices: list[tuple[int, int]], expected: int
) -> None:
    operators = [
        core.CreateOperator("Relu", "x", "y", device_option=core.DeviceOption(kind, number))
        for kind, number in devices
    ]
    assert computing_threads(operators) == expected


def test_sums_have_the_same_bits_in_each_type_of_net(tmp_path: Path) -> None:
    names = [f"g{i}" for i in range(12)]

    def run(rank: int, kind: str) -> list[torch.Tensor]:
        own = Workspace()
        make = core.CreateOperator(
            "FileStoreHandlerCreate", [], ["store"], path=str(tmp_path), prefix=kind
        )
        own.run_operator(make)
        worlds = ["world", "other"]
        for world in worlds:
            arguments = {"size": 3, "rank": rank, "engine": "GLOO", "name": world}
            own.run_operator(
                core.CreateOperator("CreateCommonWorld", ["store"], [world], **arguments)
            )
        generator = torch.Generator().manual_seed(rank)
        for index, name in enumerate(names):
            own.create(name).value = torch.randn(1 + 9973 * index, generator=generator)
        order = names if rank else names[::-1]  # threads make them in a different order
        copies = [core.CreateOperator("Copy", name, name) for name in order]
        sums = [
            core.CreateOperator("Allreduce", [worlds[index % 2], name], [name], engine="GLOO")
            for index, name in enumerate(names)
        ]
        own.run_once(net(kind, *copies, *sums))
        return [own.get(name).value for name in names]

    results = []
    for kind in KINDS:
        with ThreadPoolExecutor(3) as pool:
            results += list(pool.map(run, range(3), [kind] * 3))
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))
