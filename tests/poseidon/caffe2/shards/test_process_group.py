"""Groups of processes that sum and broadcast; here of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from poseidon.caffe2.shards.process_group import Backend, ProcessGroup, Rendezvous, torch_errors
from ps_server import PeerLost
from ps_server.network import Network
from tests.support.threads import on_threads


def groups(size: int, body: Callable[[ProcessGroup, int], None]) -> None:
    """Run `body(group, rank)` on a thread for every member."""
    address: list[str] = []
    opened = threading.Event()

    def run(rank: int) -> None:
        settings = Network(rank=rank, size=size, host="127.0.0.1", timeout_s=20.0)
        if rank == 0:
            rendezvous = Rendezvous(settings)
            address.append(rendezvous.address)
            opened.set()
        else:
            opened.wait()
            rendezvous = Rendezvous(settings, address[0])
        body(ProcessGroup(rendezvous, "test", settings), rank)

    on_threads(size, run)


def test_operations_are_those_of_arithmetic() -> None:
    def body(group: ProcessGroup, rank: int) -> None:
        first, second = torch.full((3,), rank + 1.0), torch.full((2,), rank + 2.0)
        waits = [group.sum(first), group.sum(second)]
        for wait in waits:
            wait()
        assert (first.tolist(), second.tolist()) == ([6.0] * 3, [9.0] * 2)
        group.broadcast(third := torch.full((2,), rank + 5.0))()
        assert third.tolist() == [5.0] * 2
        group.reduce(fourth := torch.full((2,), rank + 1.0))()
        assert rank or fourth.tolist() == [6.0] * 2

    groups(3, body)


def test_what_torch_says_becomes_one_sentence() -> None:
    with (
        pytest.raises(PeerLost, match=r"^could not sum with the other workers: Timed out$"),
        torch_errors("sum"),
    ):
        raise RuntimeError("[/some/file.cc:78] Timed out\nand a trace")
    with (
        pytest.raises(
            PeerLost,
            match=r"^could not sum with the other workers: Read error: Connection reset by peer$",
        ),
        torch_errors("sum"),
    ):
        raise RuntimeError(
            "Read error: Connection reset by peer. This is typically caused by a bug. Good luck!"
        )


def test_a_rendezvous_that_is_not_there_is_one_sentence() -> None:
    settings = Network(rank=1, size=2, host="127.0.0.1", timeout_s=0.2)
    with pytest.raises(PeerLost, match=r"^could not reach the rendezvous with the other workers: "):
        Rendezvous(settings, "tcp://127.0.0.1:1")


def test_the_backend_follows_the_device() -> None:
    assert Backend.of(torch.device("cpu")) is Backend.GLOO
    assert Backend.of(torch.device("cuda:1")) is Backend.NCCL


def test_copies_come_from_any_rank_to_all_or_one() -> None:
    def body(group: ProcessGroup, rank: int) -> None:
        group.broadcast(copied := torch.full((2,), float(rank)), 2)()
        assert copied.tolist() == [2.0] * 2
        whole = torch.zeros((3, 2))
        whole[rank] = rank + 1.0
        group.all_gather(whole, rank)()
        assert whole[:, 1].tolist() == [1.0, 2.0, 3.0]
        if rank == 1:
            group.send(whole, 2, 5)()
        elif rank == 2:
            group.receive(received := torch.zeros((3, 2)), 1, 5)()
            assert received.tolist() == whole.tolist()

    groups(3, body)


def test_a_wait_ends_with_what_its_watch_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poseidon.caffe2.shards.process_group.WATCH_S", 0.01)
    ended = threading.Event()

    def body(group: ProcessGroup, rank: int) -> None:
        def watch() -> None:
            raise PeerLost("another shard has failed")

        group._watch = watch
        if rank == 0:
            with pytest.raises(PeerLost, match=r"^another shard has failed$"):
                group.sum(torch.ones(2))()
            ended.set()
        else:
            assert ended.wait(20)

    groups(2, body)
