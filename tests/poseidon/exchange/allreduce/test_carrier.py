"""All-reduce: one process's weights, the same bits on every replica and in every run, one
sentence when a peer has gone.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from poseidon.exchange.allreduce.carrier import AllReduceCarrier
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.hooks import Hooks
from poseidon.exchange.job_control import LinksControl
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind
from poseidon.exchange.peers import Peers
from ps_server import PeerLost, Rule, RuleKind, SpecError
from ps_server.network import Network
from tests.poseidon.exchange.test_exchange_contract import SCENARIOS
from tests.poseidon.exchange.test_exchange_statistics import (
    SETTINGS,
    Counting,
    body,
    expected,
    tensors_of,
)
from tests.support.cluster import job_addresses
from tests.support.exchange_contract import Make, Scenario, check_exact, reference, train
from tests.support.sampling import sample
from tests.support.threads import on_threads


@contextmanager
def allreduce(workers: int, *, bucket_bytes: int = 100) -> Iterator[Make]:
    """Makes all-reduce exchanges whose buckets cut tensors."""
    with job_addresses(ExchangeKind.ALLREDUCE, workers, 0) as connect:

        def make(rank: int, tensors: Sequence[Trained], settings: ExchangeSettings) -> Exchange:
            network = Network(rank=rank, size=workers, host="127.0.0.1", timeout_s=20.0)
            peers = Peers(network)
            control = LinksControl(peers)
            carrier = AllReduceCarrier(
                dict(enumerate(tensors)),
                settings,
                member=Membership(network=network),
                peers=peers,
                control=control,
                bucket_bytes=bucket_bytes,
            )
            peers.links.connect(connect.of(rank)(peers.links.address))
            return Exchange([carrier], control, settings)

        yield make


@pytest.mark.parametrize(
    ("name", "workers"), sample([*itertools.product(SCENARIOS, (1, 2, 3))], every=2)
)
def test_it_is_exact(name: str, workers: int) -> None:
    with allreduce(workers) as make:
        check_exact(make, workers, SCENARIOS[name])


@pytest.mark.parametrize("bucket_bytes", [1, 300, 10**6])
def test_it_is_exact_however_tensors_are_packed(bucket_bytes: int) -> None:
    with allreduce(2, bucket_bytes=bucket_bytes) as make:
        check_exact(make, 2, Scenario(clip=0.1))


def test_one_replica_has_the_bits_of_no_exchange() -> None:
    scenario = Scenario(rule=Rule(kind=RuleKind.ADAM, momentum=0.9, decay=0.01))
    with allreduce(1) as make:
        (end,) = train(make, 1, scenario)
    for a, b in zip(end, reference(scenario), strict=True):
        assert np.array_equal(a, b)


def together(workers: int, run: Callable[[Make, int], None]) -> None:
    """Run `run(make, rank)` for every replica; the first failure is raised."""
    with allreduce(workers) as make:
        on_threads(workers, lambda rank: run(make, rank))


@pytest.mark.parametrize(("workers", "passes"), [(1, 1), (3, 2)])
def test_statistics_take_the_mean(workers: int, passes: int) -> None:
    ends: dict[int, np.ndarray] = {}

    def run(make: Make, rank: int) -> None:
        net = Counting()
        tensors = tensors_of(net)
        exchange = make(rank, tensors, SETTINGS)
        body(exchange, net, tensors, rank, passes)
        ends[rank] = net.seen.numpy().copy()
        exchange.close()

    together(workers, run)
    for end in ends.values():
        assert np.array_equal(end, ends[0])
        np.testing.assert_allclose(end, expected(workers, passes), rtol=1e-6)


def one_tensor() -> list[Trained]:
    rule = Rule(kind=RuleKind.SGD, momentum=0.5)
    return [Trained(name="w", tensor=nn.Parameter(torch.zeros(2, 3)), rule=rule)]


def step(exchange: Exchange, iteration: int, gradient: torch.Tensor) -> None:
    exchange.start(iteration, 1.0)
    exchange.wait(0)
    exchange.begin(0, gradient)
    exchange.finish()


def test_a_resumed_run_goes_on_from_the_history_of_rank_0_and_counts_what_it_moves() -> None:
    def run(make: Make, rank: int) -> None:
        tensors = one_tensor()
        exchange = make(rank, tensors, ExchangeSettings(start_clock=7))
        exchange.open([[np.full((2, 3), 4.0, np.float32)]] if rank == 0 else None)
        step(exchange, 7, torch.full((2, 3), float(rank)))
        exchange.settle()
        # h = 0.5 * 4 + mean(0, 1); w = 0 - h
        assert torch.equal(tensors[0].tensor.detach(), torch.full((2, 3), -2.5))
        assert np.array_equal(exchange.state.histories()[0][0], np.full((2, 3), 2.5, np.float32))
        traffic = exchange.traffic()[0]
        assert traffic.bytes_out == traffic.bytes_in == 24  # 2 (W - 1) / W of the tensor
        exchange.close()

    together(2, run)


def test_the_mean_itself_can_be_asked_for() -> None:
    def run(make: Make, rank: int) -> None:
        tensors = [
            Trained(name="w", tensor=nn.Parameter(torch.ones(2, 3)), rule=Rule(kind=RuleKind.MEAN))
        ]
        exchange = make(rank, tensors, ExchangeSettings())
        exchange.open(None)
        step(exchange, 0, torch.full((2, 3), float(rank)))
        exchange.settle()
        assert torch.equal(tensors[0].tensor, torch.full((2, 3), 0.5))
        exchange.close()

    together(2, run)


@pytest.mark.parametrize("shape", [(3, 2), (4, 4)])
def test_other_tensors_on_a_worker_are_one_sentence(shape: tuple[int, ...]) -> None:
    def run(make: Make, rank: int) -> None:
        tensors = one_tensor() if rank != 1 else [Trained(name="other", tensor=torch.zeros(shape))]
        exchange = make(rank, tensors, ExchangeSettings())
        with pytest.raises(SpecError, match=r"^the tensors of worker 1 \(1\) differ from worker"):
            exchange.open(None)
        exchange.close()

    together(3, run)


def test_a_worker_whose_connections_end_is_named() -> None:
    gone = threading.Event()

    def run(make: Make, rank: int) -> None:
        exchange = make(rank, one_tensor(), ExchangeSettings())
        exchange.open(None)
        (carrier,) = exchange.carriers
        assert isinstance(carrier, AllReduceCarrier)
        if rank == 1:
            links = carrier._peers.links
            links.fail(PeerLost("it is killed"))  # it says nothing when it leaves
            links._monitor.closed = True
            links._thread.join()
            links.release()
            gone.set()
        else:
            gone.wait()
            step(exchange, 0, torch.zeros(2, 3))
            with pytest.raises(PeerLost, match=r"^worker 0 lost the connection to .* \(worker"):
                exchange.settle()
        exchange.close()

    together(2, run)


def test_buckets_leave_while_the_backward_pass_goes_on() -> None:
    left: list[str] = []

    def run(make: Make, rank: int) -> None:
        net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 2))
        tensors = [Trained(name=n, tensor=p) for n, p in net.named_parameters()]
        exchange = make(rank, tensors, ExchangeSettings())
        (carrier,) = exchange.carriers
        assert isinstance(carrier, AllReduceCarrier)
        exchange.open(None)
        launch = carrier._sums._launch
        if rank == 0:

            def note(bucket: int, node: int) -> None:
                left.append("bucket")
                launch(bucket, node)

            carrier._sums._launch = note  # type: ignore[method-assign]
            net[0].weight.register_hook(lambda _: left.append("backward of the first layer"))
        hooks = Hooks([net], tensors, exchange)
        exchange.start(0, 0.1)
        hooks.start()
        net(torch.randn(3, 5)).sum().backward()
        hooks.finish()
        exchange.finish()
        exchange.settle()
        hooks.close()
        exchange.close()

    together(2, run)
    assert left.index("bucket") < left.index("backward of the first layer")
