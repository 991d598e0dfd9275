"""Some tensors as factors, the others to the server: the weights are one process's, whichever
way a tensor takes.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.factors.carrier import FactorCarrier
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeOptions
from ps_server import Client, LocalProtocolError, ServerError
from ps_server.network import Network
from ps_server.protocol.schedule import LinkPriority
from tests.poseidon.exchange.test_exchange_contract import SCENARIOS
from tests.support.cluster import TIMEOUT_S, socket_store
from tests.support.exchange_contract import Make, Scenario, check_exact, reference, train
from tests.support.exchanges import plain_exchange, plain_store
from tests.support.sampling import sample

FIRST, IDLE, LAST = 0, 4, 6  # weights of layers that are used once; layer `idle` gets no gradient


@contextmanager
def hybrid(
    workers: int,
    shards: int,
    *,
    staleness: int = 0,
    by_factors: Collection[int] = (FIRST, IDLE, LAST),
    by_allreduce: Collection[int] = (),
) -> Iterator[Make]:
    """Makes hybrid exchanges on shards that live as long as the block."""
    with socket_store(workers, shards) as connect:

        def make(rank: int, tensors: Sequence[Trained], settings: ExchangeSettings) -> Exchange:
            spec = plain_store(
                tensors,
                settings,
                Membership(
                    network=Network(size=workers),
                    shards=shards,
                    options=ExchangeOptions(staleness=staleness),
                ),
                copies=[*by_factors, *by_allreduce],
            )
            return plain_exchange(connect(rank, spec), tensors, spec, settings, by_allreduce)

        yield make


@contextmanager
def alone(
    tensors: Sequence[Trained], settings: ExchangeSettings, *, staleness: int = 0
) -> Iterator[tuple[Client, Exchange]]:
    """The only worker and its opened exchange, which sends the first tensor as factors."""
    spec = plain_store(
        tensors,
        settings,
        Membership(network=Network(size=1), shards=1, options=ExchangeOptions(staleness=staleness)),
        copies=(0,),
    )
    with socket_store(1, 1) as connect:
        client = connect(0, spec)
        exchange = plain_exchange(client, tensors, spec, settings)
        try:
            exchange.open(None)
            yield client, exchange
        finally:
            exchange.close()


@pytest.mark.parametrize(
    ("name", "workers", "shards"),
    sample([(name, *n) for name in SCENARIOS for n in ((1, 1), (2, 1), (3, 2))], every=2),
)
def test_factors_are_exact_at_staleness_0(name: str, workers: int, shards: int) -> None:
    with hybrid(workers, shards) as make:
        check_exact(make, workers, SCENARIOS[name])


THREE_SCHEMES = {"by_factors": (FIRST,), "by_allreduce": (1, 2, IDLE, LAST)}
"""The others, biases and `again`'s, go to the server."""


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
@pytest.mark.parametrize(
    ("workers", "schemes"),
    [
        (3, THREE_SCHEMES),
        pytest.param(2, {**THREE_SCHEMES, "by_factors": ()}, marks=pytest.mark.thorough),
    ],
)
def test_server_factors_and_allreduce_in_one_job_are_exact(
    workers: int, schemes: dict[str, Any], scenario: Scenario
) -> None:
    with hybrid(workers, 2, **schemes) as make:
        check_exact(make, workers, scenario)


@pytest.mark.parametrize(
    ("staleness", "scenario"),
    [(1, Scenario(iterations=40, clip=0.5, passes=2)), (3, Scenario(iterations=40))],
)
def test_at_staleness_s_all_replicas_settle_on_one_value_near_the_exact_one(
    staleness: int, scenario: Scenario
) -> None:
    with hybrid(2, 2, staleness=staleness) as make:
        ends = train(make, 2, scenario)
    for index in (FIRST, LAST):
        assert np.array_equal(ends[0][index], ends[1][index])
    exact = reference(scenario)
    distance = sum(float(np.abs(a - b).sum()) for a, b in zip(ends[0], exact, strict=True))
    moved = sum(float(np.abs(b).sum()) for b in exact)
    assert distance < 0.6 * moved


def test_closing_does_not_wait_for_a_norm_that_will_never_be_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, outcomes = threading.Event(), []
    total_norm = Client.total_norm

    def noted(client: Client, clock: int) -> float:
        asked.set()
        try:
            return total_norm(client, clock)
        except ServerError as error:
            outcomes.append(type(error))
            raise

    monkeypatch.setattr(Client, "total_norm", noted)
    tensors = [
        Trained(name=name, tensor=nn.Parameter(torch.zeros(2, 3))) for name in ("fc", "other")
    ]
    with alone(tensors, ExchangeSettings(clip=1.0)) as (_, exchange):
        exchange.start(0, 0.5)
        exchange.begin_factors(0, torch.ones(4, 2), torch.ones(4, 3))
        exchange.release(0)  # and the other's gradient never comes
        assert asked.wait(TIMEOUT_S)
    assert outcomes == [LocalProtocolError]


@pytest.mark.parametrize("staleness", [0, 1])
def test_at_staleness_0_pushes_wait_while_factors_leave(
    monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    held = threading.Event()
    free = LinkPriority.free
    monkeypatch.setattr(LinkPriority, "free", lambda link: None if held.is_set() else free(link))
    monkeypatch.setattr("ps_server.pump.POLL_S", 60.0)  # nobody looks unasked
    weight, bias = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2))
    tensors = [Trained(name="fc", tensor=weight), Trained(name="bias", tensor=bias)]
    with alone(tensors, ExchangeSettings(), staleness=staleness) as (client, exchange):
        held.set()
        factors = exchange.carriers[1]
        assert isinstance(factors, FactorCarrier)
        factors.peers.links._out._link.take()
        exchange.start(0, 0.5)
        exchange.begin(1, torch.ones(2))
        exchange.begin_factors(0, torch.ones(4, 2), torch.ones(4, 3))
        exchange.finish()
        exchange.control.all_gather(b"")  # there and back: whatever could leave has left
        assert (client.statistics().tables[1].bytes_out > 0) == (staleness > 0)
        held.clear()
        factors.peers.links._out._link.free()
        exchange.settle()
        assert bias.tolist() == [-0.5, -0.5]
