"""The store of the process group: its table, and stores of workers in threads."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed

from poseidon.torch.process_group.mesh import Mesh
from poseidon.torch.process_group.store import Request, StoreTable
from tests.poseidon.torch.process_group.test_collectives import meshes, on_all

dist: Any = torch.distributed


@pytest.mark.parametrize(
    ("requests", "answers"),
    [
        ([("set", "a", b"1"), ("get", "a"), ("check", ["a"]), ("check", ["a", "b"])],
         [None, b"1", True, False]),
        ([("add", "n", 2), ("add", "n", -5), ("get", "n")], [2, -3, b"-3"]),
        ([("append", "a", b"x"), ("append", "a", b"y"), ("get", "a")], [None, None, b"xy"]),
        ([("compare_set", "a", b"x", b"y"), ("check", ["a"])], [b"x", False]),
        ([("compare_set", "a", b"", b"y"), ("compare_set", "a", b"x", b"z"),
          ("compare_set", "a", b"y", b"z")], [b"y", b"y", b"z"]),
        ([("set", "a", b""), ("delete", "a"), ("delete", "a"), ("keys", "")],
         [None, True, False, []]),
        ([("push", "q", b"1"), ("push", "q", b"2"), ("length", "q"), ("pop", "q", True),
          ("pop", "q", False), ("pop", "q", False)], [None, None, 2, b"1", b"2", None]),
        # answered by a later request, the earlier one first
        ([("get", "a"), ("wait", ["a", "b"]), ("set", "a", b"1"), ("set", "b", b"")],
         [None, b"1", None, None]),
        ([("pop", "q", True), ("pop", "q", True), ("push", "q", b"1"), ("push", "q", b"2")],
         [None, b"1", None, b"2"]),
    ],
)  # fmt: skip
def test_answers_come_in_their_order(requests: list[Request], answers: list[object]) -> None:
    table, found = StoreTable(), list[object]()
    for request in requests:
        table.ask(request, found.append)
    assert found == answers


@pytest.mark.parametrize(
    "request_",
    [(), ("set", "a"), ("get", 3), ("nosuch", "a"), ("set", "a", "b"), ("wait", ["a", ["b"]])],
)
def test_what_is_no_request_is_refused(request_: Request) -> None:
    with pytest.raises(ValueError, match="not a request"):
        StoreTable().ask(request_, print)


def test_a_counter_has_64_bits() -> None:
    table = StoreTable()
    table.ask(("add", "n", 2**63 - 1), print)
    with pytest.raises(ValueError, match="64 bits"):
        table.ask(("add", "n", 1), print)


def test_all_workers_have_the_same_values() -> None:
    def run(mesh: Mesh) -> None:
        store, other = mesh.store.new(), mesh.store.new()
        store.set_timeout(timedelta(seconds=20))
        store.set(f"key{mesh.rank}", str(mesh.rank))
        prefixed = dist.PrefixStore("p", store)  # C++, which calls the store's methods
        prefixed.set(f"key{mesh.rank}", "of C++")
        for rank in range(mesh.size):
            assert store.get(f"key{rank}") == str(rank).encode()
            assert prefixed.get(f"key{rank}") == b"of C++"
        store.wait(["key0", "p/key1"])
        assert not other.check(["key0"])
        with pytest.raises(dist.DistStoreError, match=r"wait timeout after 0\.01 s, keys"):
            store.wait(["no"], timedelta(seconds=0.01))
        with pytest.raises(dist.QueueEmptyError):
            other.queue_pop("q", block=False)
        mesh.flush()  # worker 0, which has the values, waits for the others
        mesh.close()

    with meshes(3) as made:
        on_all(made, run)
