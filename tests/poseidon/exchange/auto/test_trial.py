"""Jobs of `--exchange=auto`: workers on sockets measure, make one plan, and train as the plan
says.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from poseidon.errors import UsageError
from poseidon.exchange import build
from poseidon.exchange.auto import trial
from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.build import build_exchange
from poseidon.exchange.exchange import Built
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions, Scheme
from ps_server import Client, Rule, Server, Shard, ZmqServerTransport
from ps_server.keys import JobKeys
from ps_server.network import Network
from tests.poseidon.exchange.auto.test_rates import FAST
from tests.support.cluster import TIMEOUT_S, TOKEN, job_addresses, serving
from tests.support.simulated_device import simulated_devices
from tests.support.threads import on_threads

WORKERS, SHARDS = 3, 2
CHEAP_PRODUCTS = replace(FAST, product_s_per_flop=1e-15, link_s_per_byte=1e-12, allreduce_s=0.0)


@pytest.fixture(autouse=True)
def small_nets_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "WORTH_MEASURING", 0)


def tensors() -> list[Trained]:
    shapes = {"conv": (64, 64, 3, 3), "fc": (64, 512), "fc.bias": (64,), "mean": (64,)}
    return [
        Trained(
            name=name,
            tensor=nn.Parameter(torch.full(shape, 0.5)),
            rule=Rule(momentum=0.9),
            factor_rows=4 if name == "fc" else 0,
            statistics=name == "mean",
        )
        for name, shape in shapes.items()
    ]


def member(rank: int, **options: Any) -> Membership:
    return Membership(
        network=Network(rank=rank, size=WORKERS, token=TOKEN, timeout_s=TIMEOUT_S),
        shards=SHARDS,
        options=ExchangeOptions(kind=ExchangeKind.AUTO, **options),
    )


def train(own: Sequence[Trained], built: Built, rank: int) -> list[np.ndarray]:
    exchange = built.exchange
    exchange.open(None)
    for iteration in range(3):
        exchange.start(iteration, 0.1)
        for index in range(len(own)):
            exchange.wait(index)
        for index in (2, 1, 0):
            rows, shape = torch.full((4, 1), float(rank)), own[index].tensor.shape
            if index in exchange.by_factors:
                exchange.begin_factors(
                    index, rows * torch.ones(4, shape[0]), torch.ones(4, shape[1])
                )
                exchange.release(index)
            else:
                exchange.begin(index, torch.full(shape, 4.0 * rank))
        own[3].tensor.data += rank
        exchange.finish()
    exchange.settle()
    return [trained.tensor.detach().numpy().copy() for trained in own]


def run(
    members: Sequence[Membership], addresses: Any, schemes: Sequence[Scheme] = ()
) -> tuple[Any, list[Built]]:
    """Build and train on all workers. Their final values by rank, and what was built."""

    def worker(one: Membership) -> tuple[list[np.ndarray], Built]:
        own = tensors()
        built = build_exchange(own, ExchangeSettings(clip=2.0), one, addresses, schemes=schemes)
        try:
            return train(own, built, one.network.rank), built
        finally:
            built.exchange.close()

    with ThreadPoolExecutor(len(members)) as pool:
        ends = [future.result() for future in [pool.submit(worker, one) for one in members]]
    return [values for values, _ in ends], [built for _, built in ends]


def reference() -> list[np.ndarray]:
    """One process with the mean gradients."""
    own = tensors()
    alone = Membership(options=ExchangeOptions(kind=ExchangeKind.LOCAL))
    values = train(own, build_exchange(own, ExchangeSettings(clip=2.0), alone, list), 1)
    return [*values[:3], np.full(64, 3.5, np.float32)]


def check_values(ends: Sequence[Sequence[np.ndarray]]) -> None:
    for end in ends:
        for mine, first, exact in zip(end, ends[0], reference(), strict=True):
            assert np.array_equal(mine, first)
            np.testing.assert_allclose(mine, exact, atol=1e-6)


def test_a_plan_with_all_schemes_has_the_weights_of_one_process_and_the_same_bits_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was chosen by a measurement is chosen again without one from the schemes of the first
    run.
    """
    monkeypatch.setattr(build, "measure", lambda *given: trial.measure(*given) and CHEAP_PRODUCTS)
    with job_addresses(ExchangeKind.AUTO, WORKERS, SHARDS) as connect:
        ends, built = run([member(rank) for rank in range(WORKERS)], connect)
    schemes = [choice.scheme for choice in built[0].plan.choices]
    assert [scheme.value for scheme in schemes] == ["allreduce", "svb", "ps", "allreduce"]
    check_values(ends)
    monkeypatch.setattr(build, "measure", None)
    with job_addresses(ExchangeKind.AUTO, WORKERS, SHARDS) as connect:
        again, rebuilt = run([member(rank) for rank in range(WORKERS)], connect, schemes)
    assert rebuilt[0].plan.choices == built[0].plan.choices
    measured = (
        "; measured: server 1.0 ms + bytes at 250 MB/s, all-reduce 0.0 ms + bytes at 400 MB/s"
    )
    assert measured in built[0].plan.summary()
    assert rebuilt[0].plan.summary().endswith("; the plan of an earlier run")
    assert rebuilt[0].recorded
    for mine, before in zip(again[0], ends[0], strict=True):
        assert np.array_equal(mine, before)


def test_a_job_that_encrypts_measures_and_sums_with_its_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The shards and the workers admit no other."""
    monkeypatch.setattr(build, "measure", lambda *given: trial.measure(*given) and CHEAP_PRODUCTS)
    keys = JobKeys.new(workers=WORKERS, shards=SHARDS)
    members = [
        replace(each, network=replace(each.network, keys=keys.of_worker(rank)))
        for rank, each in enumerate(member(rank) for rank in range(WORKERS))
    ]
    servers = [
        Server(Shard(i, WORKERS, TOKEN), ZmqServerTransport("tcp://127.0.0.1:0", keys.of_shard(i)))
        for i in range(SHARDS)
    ]
    with serving(servers):
        addresses = [server.address for server in servers]
        ends, built = run(members, lambda own: addresses)
    assert built[0].plan.of(Scheme.ALLREDUCE)
    assert all(one.plan == built[0].plan and one.store == built[0].store for one in built)
    check_values(ends)


def test_a_small_net_takes_its_plan_from_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is recorded all the same: a resumed run needs no other case."""
    monkeypatch.undo()
    monkeypatch.setattr(build, "measure", None)
    with job_addresses(ExchangeKind.AUTO, WORKERS, SHARDS) as connect:
        ends, built = run([member(rank) for rank in range(WORKERS)], connect)
    assert [choice.scheme.value for choice in built[0].plan.choices] == ["ps", "svb", "ps", "ps"]
    assert built[0].recorded
    check_values(ends)


@pytest.mark.parametrize(
    ("schemes", "message"),
    [
        ([Scheme.SERVER] * 3, "has 3 tensors, but this job has 4"),
        ([Scheme.FACTORS, *[Scheme.SERVER] * 3], "sends 'conv' as factors"),
    ],
)
def test_a_plan_that_the_job_cannot_use_is_refused(schemes: list[Scheme], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_exchange(tensors(), ExchangeSettings(), member(0), list, schemes=schemes)


def test_a_measurement_sends_no_more_than_the_net_has() -> None:
    def net(elements: int) -> list[Trained]:
        return [Trained(name="a", tensor=torch.empty(elements), rule=Rule())]

    assert trial.trial_sizes(net(10**8)) == [2**16, *[2**20] * 5]
    assert trial.trial_sizes(net(2 * 10**6)) == [2**16, *[400_000] * 5]


def test_the_processors_are_busy_only_while_a_job_on_cpus_measures() -> None:
    def loads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "poseidon-load"]

    with trial.computing(torch.device("cpu")):
        assert loads()
    assert not loads()
    with trial.computing(torch.device("cuda")):
        assert not loads()


@pytest.mark.parametrize(
    ("options", "measures"), [({}, True), ({"staleness": 2}, False), ({"local_steps": 4}, False)]
)
def test_a_measurement_needs_staleness_0(options: dict[str, Any], measures: bool) -> None:
    assert member(0, **options).chooses is measures
    assert not replace(member(0), network=Network()).chooses
    assert not replace(member(0), shards=0).chooses


def test_the_server_is_measured_with_the_copies_of_the_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As all-reduce is."""
    copied: list[int] = []
    served = trial._served

    @contextlib.contextmanager
    def noted(client: Client, own: Sequence[Trained], job: Membership) -> Iterator[Any]:
        device = devices[client.rank]
        with served(client, own, job) as exchange:

            def counted(tables: range) -> None:
                before = device.bytes.copy()
                exchange(tables)
                if tables == trial.LARGE:
                    copied.extend(device.bytes[way] - before[way] for way in ("out", "in"))

            yield counted

    def run(rank: int) -> None:
        weight = torch.zeros(2**20, device=devices[rank].torch)
        own = [Trained(name="w", tensor=weight, rule=Rule())]
        client = Client(connect.of(rank)(""), job(rank).network, trial.trial_store(own, job(rank)))
        try:
            trial.measure(client, own, job(rank))
        finally:
            client.close()
        sizes.update(trial.trial_sizes(own)[trial.LARGE.start : trial.LARGE.stop])

    def job(rank: int) -> Membership:
        return Membership(
            network=Network(rank=rank, size=2, token=TOKEN, timeout_s=TIMEOUT_S),
            shards=1,
            options=ExchangeOptions(kind=ExchangeKind.AUTO),
        )

    monkeypatch.setattr(trial, "_served", noted)
    sizes: set[int] = set()
    with simulated_devices(2, 0) as devices, job_addresses(ExchangeKind.AUTO, 2, 1) as connect:
        on_threads(2, run)
    (size,) = sizes
    assert set(copied) == {4 * size}
