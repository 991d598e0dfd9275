"""Messages of the workers of a host: small pieces share them, and each piece still has its value."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.host import carrier
from poseidon.exchange.host.pieces import LEAST_ELEMENTS, MOST_PIECES
from poseidon.exchange.options import ExchangeKind
from poseidon.exchange.peers import Peers
from ps_server import PeerLost, ServerError
from tests.support.machines import machines
from tests.support.threads import on_threads

TENSORS, WORKERS, ITERATIONS = 5 * MOST_PIECES, 2, 3


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many messages of each kind the workers of hosts have sent."""
    counts: Counter[str] = Counter()
    send = Peers.send

    def noted(peers: Peers, to: Any, kind: str, *numbers: int, **payload: Any) -> None:
        counts[kind] += 1
        send(peers, to, kind, *numbers, **payload)

    monkeypatch.setattr(Peers, "send", noted)
    return counts


def test_small_pieces_share_messages(sent: Counter[str]) -> None:
    def run(rank: int) -> list[torch.Tensor]:
        own = [Trained(name=f"w{i}", tensor=torch.zeros(1 + i % 7)) for i in range(TENSORS)]
        exchange = make(rank, own, ExchangeSettings())
        try:
            exchange.open(None)
            sent.clear()
            for iteration in range(ITERATIONS):
                exchange.start(iteration, 1.0)
                for index in reversed(range(TENSORS)):
                    exchange.wait(index)
                    gradient = torch.full_like(own[index].tensor, float(index + rank))
                    exchange.begin(index, gradient)
                exchange.finish()
            for index in range(TENSORS):
                exchange.wait(index)
        finally:
            exchange.close()
        return [trained.tensor for trained in own]

    with machines(ExchangeKind.SERVER, (WORKERS,), shards=0) as make:
        found = on_threads(WORKERS, run)
    for values in found:
        for index, value in enumerate(values):
            assert torch.equal(value, torch.full_like(value, -ITERATIONS * (index + 0.5)))
    of_plane = -(-TENSORS // WORKERS // MOST_PIECES) + 1
    for kind in ("Parts", "Values"):
        assert 0 < sent[kind] <= ITERATIONS * WORKERS * of_plane


def test_a_worker_whose_neighbour_has_left_does_not_leave_by_itself() -> None:
    def run(rank: int) -> str:
        own = [Trained(name="w", tensor=torch.zeros(LEAST_ELEMENTS * 2))]
        exchange = make(rank, own, ExchangeSettings())
        try:
            exchange.open(None)
            for iteration in range(2 if rank == 1 else 4):
                exchange.start(iteration, 1.0)
                exchange.wait(0)
                exchange.begin(0, torch.ones_like(own[0].tensor))
                exchange.finish()
        except ServerError as error:
            return str(error)
        finally:
            exchange.close()
        return ""

    with machines(ExchangeKind.ALLREDUCE, (2, 2)) as make:
        first, _, other, neighbour = on_threads(4, run)
    assert first == "worker 1, on this machine, has left before the end"
    assert "worker 0 has left" not in other + neighbour


def test_an_owner_of_nothing_finishes_no_iteration_that_its_worker_has_only_begun(
    sent: Counter[str],
) -> None:
    def run(rank: int) -> torch.Tensor:
        own = [Trained(name="w", tensor=torch.zeros(3))]
        exchange = make(rank, own, ExchangeSettings(clip=1.0))
        try:
            exchange.open(None)
            exchange.start(0, 1.0)
            exchange.wait(0)
            exchange.begin(0, torch.tensor([3.0, 0.0, 4.0]))
            exchange.finish()
            exchange.start(1, 1.0)  # as the forward pass of an evaluation does
            exchange.wait(0)
        finally:
            exchange.close()
        return own[0].tensor

    with machines(ExchangeKind.ALLREDUCE, (2, 2)) as make:
        found = on_threads(4, run)
    for value in found:
        torch.testing.assert_close(value, torch.tensor([-0.6, 0.0, -0.8]))
    assert sent["Squares"] == 2  # of one iteration, to the owner on each host


def test_the_exchange_between_hosts_ends_where_the_workers_of_a_host_do_not_exchange(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def share(*_: Any) -> None:
        raise PeerLost("worker 1 has gone")

    ended: list[str] = []
    close = Exchange.close

    def noted(exchange: Exchange) -> None:
        close(exchange)
        ended.append(threading.current_thread().name)

    monkeypatch.setattr(carrier, "HostMemory", share)
    monkeypatch.setattr(Exchange, "close", noted)

    def run(rank: int) -> str:
        with pytest.raises(PeerLost, match="worker 1 has gone"):
            make(rank, [Trained(name="w", tensor=torch.zeros(3))], ExchangeSettings())
        return threading.current_thread().name

    with machines(ExchangeKind.ALLREDUCE, (2, 2)) as make:
        assert sorted(on_threads(4, run)) == sorted(ended)


@pytest.mark.parametrize("kind", ExchangeKind)
@pytest.mark.parametrize("hosts", [(2,), (1, 1), (2, 1)])
def test_an_exchange_without_tensors_makes_iterations(
    kind: ExchangeKind, hosts: tuple[int, ...]
) -> None:
    """A module of DistributedDataParallel may have parameters of float64 alone."""

    def run(rank: int) -> None:
        exchange = make(rank, [], ExchangeSettings())
        try:
            exchange.open(None)
            for iteration in range(2):
                exchange.start(iteration, 1.0)
                exchange.finish()
            exchange.settle()
        finally:
            exchange.close()

    with machines(kind, hosts) as make:
        on_threads(sum(hosts), run)
