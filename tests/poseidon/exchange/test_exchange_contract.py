"""Every exchange gives one process's weights: all rules, clipping, iter_size, any number of
shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from ps_server import Consistency, Regularization, Rule, RuleKind
from ps_server.network import Network
from tests.support.cluster import memory_store, socket_store
from tests.support.exchange_contract import (
    Make,
    Saved,
    Scenario,
    check_exact,
    check_reopen,
    reference,
    train,
)
from tests.support.exchanges import plain_exchange, plain_store
from tests.support.machines import machines
from tests.support.memory_transport import Faults
from tests.support.sampling import sample

# RMSProp divides by the root of its last few gradients: with a small delta it would magnify the
# rounding of a coordinate whose gradient passes through zero.
SCENARIOS = {
    "momentum and decay": Scenario(),
    "Nesterov": Scenario(rule=Rule(kind=RuleKind.NESTEROV, momentum=0.9)),
    "AdaGrad": Scenario(rule=Rule(kind=RuleKind.ADAGRAD, delta=1e-4)),
    "RMSProp": Scenario(rule=Rule(kind=RuleKind.RMSPROP, rms_decay=0.9, delta=1e-2)),
    "AdaDelta": Scenario(rule=Rule(kind=RuleKind.ADADELTA, momentum=0.9, delta=1e-4)),
    "Adam": Scenario(rule=Rule(kind=RuleKind.ADAM, momentum=0.9, delta=1e-4)),
    "L1": Scenario(rule=Rule(decay=0.02, regularization=Regularization.L1)),
    "clipping": Scenario(clip=0.1),
    "iter_size": Scenario(passes=3),
    "clipping and iter_size": Scenario(clip=0.3, passes=2),
}


@contextmanager
def server(
    workers: int,
    shards: int,
    *,
    staleness: int = 0,
    consistency: Consistency = Consistency.SSP_PUSH,
    sockets: bool = False,
    rows: int = 0,
) -> Iterator[Make]:
    """Makes server exchanges on shards that live as long as the block."""
    store = (
        socket_store(workers, shards) if sockets else memory_store(workers, shards, Faults(delay=3))
    )
    with store as connect:

        def make(rank: int, tensors: Sequence[Trained], settings: ExchangeSettings) -> Exchange:
            spec = plain_store(
                tensors,
                settings,
                Membership(
                    network=Network(size=workers),
                    shards=shards,
                    options=ExchangeOptions(
                        staleness=staleness, consistency=consistency, rows=rows
                    ),
                ),
            )
            return plain_exchange(connect(rank, spec), tensors, spec, settings)

        yield make


@pytest.mark.parametrize(
    ("name", "workers", "shards"),
    sample([(name, *n) for name in SCENARIOS for n in ((1, 1), (2, 1), (3, 2), (2, 3))], every=3),
)
def test_the_server_is_exact_at_staleness_0(name: str, workers: int, shards: int) -> None:
    with server(workers, shards, rows=3) as make:
        check_exact(make, workers, SCENARIOS[name])


@pytest.mark.parametrize("consistency", Consistency)
def test_the_server_is_exact_over_sockets(consistency: Consistency) -> None:
    with server(2, 2, sockets=True, consistency=consistency) as make:
        check_exact(make, 2, Scenario(clip=0.1))


@pytest.mark.parametrize("consistency", Consistency)
def test_a_server_is_opened_once_more(consistency: Consistency) -> None:
    """Adam's step count is the clock's; with a limit, norms are sent by iteration."""
    scenario = Scenario(rule=Rule(kind=RuleKind.ADAM, momentum=0.9, delta=1e-4), clip=0.3)
    check_reopen(lambda: server(3, 2, sockets=True, consistency=consistency), 3, scenario)


def test_a_stale_server_is_opened_once_more() -> None:
    """All begin with the values that were saved, and each with its own history."""
    scenario, saved = Scenario(iterations=8), Saved(iterations=4)
    with server(2, 2, staleness=2) as make:
        train(make, 2, scenario, save=saved)
    with server(2, 2, staleness=2) as make:
        ends = train(make, 2, replace(scenario, iterations=4), begin=saved)
    for end in ends:
        for a, b in zip(end, saved.values, strict=True):
            assert np.array_equal(a, b)
    with server(2, 2, staleness=2) as make:
        first, second = train(make, 2, scenario, begin=saved)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert not np.array_equal(saved.histories[0][0][0], saved.histories[1][0][0])


def test_one_worker_on_the_server_has_the_bits_of_no_server() -> None:
    scenario = Scenario(rule=Rule(kind=RuleKind.ADAM, momentum=0.9, decay=0.01))
    with server(1, 2) as make:
        (served,) = train(make, 1, scenario)
    for a, b in zip(served, reference(scenario), strict=True):
        assert np.array_equal(a, b)


def test_two_runs_have_the_same_bits() -> None:
    runs = []
    for _ in range(2):
        with server(3, 2, sockets=True) as make:
            runs.append(train(make, 3, Scenario()))
    for a, b in zip(runs[0][0], runs[1][0], strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("kind", [ExchangeKind.SERVER, ExchangeKind.FACTORS])
def test_at_staleness_s_hosts_of_several_workers_settle_on_one_value(kind: ExchangeKind) -> None:
    """All workers of a host know that its histories are private, also one that owns no such
    tensor.
    """
    with machines(kind, (2, 2), staleness=2) as make:
        first, *others = train(make, 4, Scenario(iterations=6))
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("staleness", "scenario"),
    [(1, Scenario(iterations=40, clip=0.5, passes=2)), (3, Scenario(iterations=40))],
)
def test_at_staleness_s_all_replicas_settle_on_one_value_near_the_exact_one(
    staleness: int, scenario: Scenario
) -> None:
    with server(2, 2, staleness=staleness) as make:
        ends = train(make, 2, scenario)
    for a, b in zip(ends[0], ends[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    exact = reference(scenario)
    distance = sum(float(np.abs(a - b).sum()) for a, b in zip(ends[0], exact, strict=True))
    moved = sum(float(np.abs(b).sum()) for b in exact)
    assert distance < 0.6 * moved
