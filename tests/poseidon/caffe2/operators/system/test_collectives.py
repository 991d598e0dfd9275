"""Collective operators of one shard and of three, and those between the devices of one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.proto.caffe2_pb2 import NetDef
from poseidon.caffe2.runtime.workspace import Workspace
from poseidon.caffe2.shards.store_handler import CollectiveError
from tests.support.caffe2_operators import call

SHARDS = 3
LIMIT_S = 30.0


def operator(kind: str, inputs: list[str], outputs: list[str], **arguments: Any) -> Any:
    return core.CreateOperator(kind, inputs, outputs, engine="GLOO", **arguments)


def net(*operators: Any) -> NetDef:
    definition = NetDef(name="shards")
    definition.op.extend(operators)
    return definition


def on_shards(folder: Path, *operators: Any, **blobs: Any) -> list[Workspace]:
    """Run operators on three shards, each a thread with a workspace of its own; `x` is the
    shard's number + 1.
    """

    def run(shard: int) -> Workspace:
        own = Workspace()
        own.create("x").value = torch.full((2, 2), shard + 1.0)
        for name, value in blobs.items():
            own.create(name).value = torch.tensor(value)
        own.run_operator(
            operator("FileStoreHandlerCreate", [], ["store"], path=str(folder), prefix="run")
        )
        own.run_operator(
            operator("CreateCommonWorld", ["store"], ["world"], size=SHARDS, rank=shard)
        )
        own.run_once(net(*operators))
        return own

    with ThreadPoolExecutor(SHARDS) as pool:
        return list(pool.map(run, range(SHARDS)))


def twice(*rows: int) -> list[Any]:
    return [[row] * 2 for row in rows]


# The operators, the output that counts, and what each shard has there.
CASES: dict[str, tuple[list[Any], str, list[Any]]] = {
    "Allreduce": ([operator("Allreduce", ["world", "x"], ["x"])], "x", [twice(6, 6)] * 3),
    "Broadcast": ([operator("Broadcast", ["world", "x"], ["x"], root=2)], "x", [twice(3, 3)] * 3),
    "Reduce": (
        *([operator("Reduce", ["world", "x"], ["y"], root=1)], "y"),
        [twice(1, 1), twice(6, 6), twice(3, 3)],
    ),
    "Allgather": (
        *([operator("Allgather", ["world", "x"], ["y"])], "y"),
        [twice(1, 1, 2, 2, 3, 3)] * 3,
    ),
    "ReduceScatter": (
        *([operator("ReduceScatter", ["world", "x", "counts"], ["x"])], "x"),
        [[6], [6, 6], [6]],
    ),
    "CloneCommonWorld": (
        [
            operator("CloneCommonWorld", ["world"], ["other"]),
            operator("Barrier", ["other"], []),
            operator("Allreduce", ["other", "x", "x"], ["a", "b"]),
        ],
        *("b", [twice(12, 12)] * 3),
    ),
    "CreateCommonWorld of one that exists": (
        [
            operator("CreateCommonWorld", ["store", "world"], ["other"], size=3, rank=0),
            operator("Allreduce", ["other", "x"], ["x"]),
        ],
        *("x", [twice(6, 6)] * 3),
    ),
    "DestroyCommonWorld": (
        *([operator("DestroyCommonWorld", ["world"], ["world"])], "x"),
        [twice(i, i) for i in (1, 2, 3)],
    ),
    "StoreAdd": (
        [operator("StoreAdd", ["store"], ["n"], blob_name="n", add_value=0)],
        *("n", [[0]] * 3),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_operators_of_three_shards(name: str, tmp_path: Path) -> None:
    operators, output, expected = CASES[name]
    shards = on_shards(tmp_path, *operators, counts=[1, 2, 1])
    results = [own.get(output).value.tolist() for own in shards]
    assert results == expected


def test_a_tensor_is_sent(tmp_path: Path) -> None:
    store = operator("FileStoreHandlerCreate", [], ["store"], path=str(tmp_path))

    def run(shard: int) -> Any:
        own = Workspace()
        own.create("x").value = torch.full((2,), float(shard))
        own.create("tag").value = torch.tensor([7])
        own.create("other").value = torch.tensor([1 - shard])
        own.run_operator(store)
        own.run_operator(operator("CreateCommonWorld", ["store"], ["world"], size=2, rank=shard))
        if shard == 0:
            own.run_operator(operator("SendTensor", ["world", "x"], [], dst=1, tag=3))
            own.run_operator(
                operator("ReceiveTensor", ["world", "x", "other", "tag"], ["y", "src", "t"])
            )
        else:
            own.run_operator(
                operator("ReceiveTensor", ["world", "x"], ["y", "src", "t"], src=0, tag=3)
            )
            own.run_operator(operator("SendTensor", ["world", "x", "other", "tag"], []))
        return [own.get(name).value.tolist() for name in ("y", "src", "t")]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [[[1, 1], [1], [7]], [[0, 0], [0], [3]]]


def test_blobs_in_a_store(tmp_path: Path) -> None:
    workspace.RunOperatorOnce(
        operator("FileStoreHandlerCreate", [], ["store"], path=str(tmp_path), prefix="1")
    )
    workspace.FeedBlob("x", np.arange(3, dtype=np.float32))
    workspace.FeedBlob("text", b"some\x00bytes")
    workspace.RunOperatorOnce(operator("StoreSet", ["store", "x"], [], blob_name="array"))
    workspace.RunOperatorOnce(operator("StoreSet", ["store", "text"], []))
    workspace.FeedBlob("names", np.array([b"array", b"text"], dtype=object))
    workspace.RunOperatorOnce(operator("StoreWait", ["store", "names"], []))
    workspace.RunOperatorOnce(operator("StoreWait", ["store"], [], blob_names=["array"]))
    workspace.RunOperatorOnce(operator("StoreGet", ["store"], ["y"], blob_name="array"))
    workspace.RunOperatorOnce(operator("StoreGet", ["store"], ["text"]))
    assert workspace.FetchBlob("y").tolist() == [0, 1, 2]
    assert workspace.FetchBlob("text") == b"some\x00bytes"
    for expected in (2, 4):
        workspace.RunOperatorOnce(
            operator("StoreAdd", ["store"], ["n"], blob_name="n", add_value=2)
        )
        assert workspace.FetchBlob("n").tolist() == [expected]
    with pytest.raises(CollectiveError, match=r"^key 'blob/text' was set"):
        workspace.RunOperatorOnce(operator("StoreSet", ["store", "text"], []))


def test_what_cannot_be_reached_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CollectiveError, match=r"^Redis at 127.0.0.1:1 cannot be reached"):
        workspace.RunOperatorOnce(
            operator("RedisStoreHandlerCreate", [], ["store"], host="127.0.0.1", port=1)
        )
    with pytest.raises(CollectiveError, match=r"^the rendezvous' folder .*none"):
        workspace.RunOperatorOnce(
            operator("FileStoreHandlerCreate", [], ["store"], path=str(tmp_path / "none"))
        )


def test_a_failure_goes_to_the_status_blob(tmp_path: Path) -> None:
    workspace.RunOperatorOnce(
        operator("FileStoreHandlerCreate", [], ["store"], path=str(tmp_path), prefix="1")
    )
    create = operator(
        "CreateCommonWorld",
        ["store"],
        ["world"],
        size=2,
        rank=0,
        timeout_ms=50,
        status_blob="status",
    )
    workspace.RunOperatorOnce(create)
    assert workspace.FetchBlob("status").startswith(
        b"shard 1 of run '1' did not come within 0.05 s"
    )


def test_devices_of_one_process() -> None:
    for name, value in (("a", [1, 2]), ("b", [10, 20])):
        workspace.FeedBlob(name, np.array(value, np.float32))
    inputs = ["a", "b"]
    for kind, outputs, expected in (
        ("NCCLAllreduce", ["c", "d"], [[11, 22], [11, 22]]),
        ("NCCLBroadcast", ["c", "d"], [[10, 20], [10, 20]]),
        ("NCCLReduce", ["c"], [[11, 22]]),
        ("NCCLAllGather", ["c", "d"], [[[1, 2], [10, 20]]] * 2),
        ("NCCLReduceScatter", ["c", "d"], [11, 22]),
    ):
        arguments = {"root": 1} if kind in ("NCCLBroadcast", "NCCLReduce") else {}
        call(kind, inputs, outputs, **arguments)
        assert [workspace.FetchBlob(name).tolist() for name in outputs] == expected, kind
