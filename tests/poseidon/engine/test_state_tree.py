"""The tree of a job's state."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from poseidon.engine.leaf import Found, Leaf, LeafStage, Scope, StateSource, first
from poseidon.engine.state_tree import StateTree
from poseidon.exchange.broadcast import Gather
from poseidon.exchange.membership import Membership
from ps_server.network import Network
from ps_server.protocol.virtual_workers import VirtualWorkers
from tests.poseidon.engine.test_kept_state import Meeting
from tests.support.threads import failures_on_threads

SOURCE = StateSource(name="a test")


class Process:
    """One process with two virtual workers; all of its leaves are here."""

    def __init__(self, rank: int, processes: int = 2) -> None:
        self.log: list[str] = []
        self.values: dict[str, Any] = {"shared": f"shared {rank}", "root": {"of": rank}}
        self.own = range(2 * rank, 2 * rank + 2)
        self.tree = StateTree(
            Membership(
                network=Network(rank=rank, size=processes),
                virtual_workers=VirtualWorkers.spread(2 * processes, [1.0] * processes),
            )
        )
        self.tree.add(
            [
                self.leaf("each", Scope.VIRTUAL, LeafStage.RANDOM),
                self.leaf("first", Scope.VIRTUAL, LeafStage.OWN),
                self.leaf("shared", Scope.SHARED, LeafStage.MODULE),
                self.leaf("root", Scope.ROOT, LeafStage.UPDATE),
            ]
        )

    def leaf(self, name: str, scope: Scope, stage: LeafStage) -> Leaf:
        def write(found: Found) -> None:
            self.log.append(name)
            self.values[name] = found.mine if scope is Scope.VIRTUAL else found.shared

        def read() -> Any:
            if scope is Scope.VIRTUAL:
                return [f"{name} of {number}" for number in self.own]
            return self.values[name]

        keeps = {"resize": first} if name == "first" else {}
        return Leaf(name=name, scope=scope, stage=stage, read=read, write=write, **keeps)


def alone(payload: bytes) -> Sequence[bytes]:
    return [payload]


def gathering(workers: int) -> list[Gather]:
    """Return what gathers the payloads of workers that are threads."""
    parts: list[dict[int, bytes]] = []
    barrier = threading.Barrier(workers, timeout=20)

    def of(rank: int) -> Gather:
        def gather(payload: bytes) -> Sequence[bytes]:
            counts[rank] += 1
            with lock:
                if len(parts) < counts[rank]:
                    parts.append({})
            found = parts[counts[rank] - 1]
            found[rank] = payload
            barrier.wait()
            return [found[other] for other in range(workers)]

        return gather

    counts, lock = [0] * workers, threading.Lock()
    return [of(rank) for rank in range(workers)]


def test_what_is_read_is_written_in_the_order_of_stages() -> None:
    process = Process(0, processes=1)
    state = process.tree.read(alone, keeps=True)
    assert state == {
        "workers": 2,
        "shared": "shared 0",
        "root": {"of": 0},
        "own": [{"each": f"each of {n}", "first": f"first of {n}"} for n in range(2)],
    }
    process.tree.write(state, SOURCE, lambda: process.log.append("opens"))
    assert process.log == ["shared", "first", "root", "opens", "each"]
    assert process.values["each"] == ["each of 0", "each of 1"]


def test_others_keep_nothing_and_write_their_own() -> None:
    states: list[dict[str, Any]] = [{}, {}]
    processes = [Process(0), Process(1)]
    gathers = gathering(2)

    def run(rank: int) -> None:
        states[rank] = processes[rank].tree.read(gathers[rank], keeps=rank == 0)

    assert not failures_on_threads(2, run)
    assert states[1] == {}
    assert [one["each"] for one in states[0]["own"]] == [f"each of {n}" for n in range(4)]
    assert states[0]["root"] == {"of": 0}
    processes[1].tree.write(states[0], SOURCE, lambda: None)
    assert processes[1].values["first"] == ["first of 2", "first of 3"]
    assert processes[1].values["root"] == {"of": 0}


def test_another_number_of_virtual_workers() -> None:
    state = Process(0, processes=1).tree.read(alone, keeps=True)
    more = Process(1)
    told: list[object] = []
    more.tree.write(state, SOURCE, lambda: None, lambda *resized: told.append(resized))
    assert told == [(state, SOURCE)]
    assert more.values["each"] == []
    assert more.values["first"] == ["first of 0"] * 2


def test_two_leaves_of_one_name_are_united() -> None:
    tree = StateTree(Membership())
    found: list[Any] = []
    for scope, value in ((Scope.SHARED, {"a": 1}), (Scope.ROOT, {"b": 2})):
        tree.add(
            [
                Leaf(
                    name="masters",
                    scope=scope,
                    read=lambda value=value: value,  # type: ignore[misc]
                    write=lambda one: found.append(one.shared),
                )
            ]
        )
    tree.write(tree.read(alone, keeps=True), SOURCE, lambda: None)
    assert found == [{"a": 1, "b": 2}] * 2


def test_a_check_comes_before_anything_is_written() -> None:
    def refuse(found: Found) -> None:
        raise ValueError(found.source.name)

    process = Process(0, processes=1)
    process.tree.add([Leaf(name="how", scope=Scope.SHARED, read=str, check=refuse)])
    state = process.tree.read(alone, keeps=True)
    with pytest.raises(ValueError, match="a test"):
        process.tree.check(state, SOURCE)
    assert not process.log


def test_a_copy_in_memory_starts_all_workers() -> None:
    """What the exchange brings is written before it opens: on rank 0 the whole, and elsewhere what
    a worker has kept itself.
    """
    meeting = Meeting(2)
    processes = [Process(0), Process(1)]
    for rank, process in enumerate(processes):

        def write(found: Found, process: Process = process) -> None:
            process.log.append("held")
            process.values["held"] = [found.shared, found.each]

        own = [{f"held of {process.own[0]}": rank}, {}]
        leaf = Leaf(
            name="held",
            scope=Scope.VIRTUAL,
            stage=LeafStage.EXCHANGE,
            read=lambda own=own: own,  # type: ignore[misc]
            write=write,
        )
        process.tree.add([leaf])
    copies = [
        process.tree.copy(meeting.control(rank), keeps=rank == 0, note=b"", before=None)
        for rank, process in enumerate(processes)
    ]
    for copy in copies:
        copy.spread(1)
    kept = [copy.result() for copy in copies]
    assert [one.is_whole for one in kept] == [True, False]
    states = [kept[0].whole(), kept[1].part(1)]

    def run(rank: int) -> None:
        process = processes[rank]
        opens = lambda: process.log.append("opens")  # noqa: E731
        process.tree.write(states[rank], SOURCE, opens, gather=gathers[rank])

    gathers = gathering(2)
    assert not failures_on_threads(2, run)
    for process in processes:
        assert process.log == ["shared", "first", "held", "root", "opens", "each"]
        assert process.values["each"] == [f"each of {number}" for number in process.own]
    assert [process.values["shared"] for process in processes] == ["shared 0", None]
    held = [{"held of 0": 0}, {}, {"held of 2": 1}, {}]
    assert processes[0].values["held"] == [None, held]
    assert processes[1].values["held"] == [None, [None, None, *held[2:]]]
