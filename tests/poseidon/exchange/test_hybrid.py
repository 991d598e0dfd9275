"""Some tensors as factors, the others to the server: the weights are one process's, whichever way a tensor takes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from poseidon.exchange.base import Exchange, ExchangeSettings, Trained
from poseidon.exchange.hybrid import HybridExchange
from poseidon.exchange.ps import store_spec
from ps_server import Rule, RuleKind
from tests.poseidon.exchange.test_contract import SCENARIOS
from tests.support.cluster import TIMEOUT_S, TOKEN, socket_store
from tests.support.exchange_contract import Make, Scenario, check_exact, reference, train

FIRST, IDLE, LAST = 0, 4, 6  # weights of layers that are used once; layer `idle` gets no gradient


@contextmanager
def hybrid(
    workers: int, shards: int, *, staleness: int = 0, by_factors: Collection[int] = (FIRST, IDLE, LAST)
) -> Iterator[Make]:
    """Makes hybrid exchanges on shards that live as long as the block."""
    with socket_store(workers, shards) as connect:

        def make(rank: int, tensors: Sequence[Trained], settings: ExchangeSettings) -> Exchange:
            spec = store_spec(
                tensors, settings, workers=workers, shards=shards, staleness=staleness, by_factors=by_factors
            )
            return HybridExchange(
                connect(rank, spec),
                tensors,
                spec,
                settings,
                listen="tcp://127.0.0.1:0",
                token=TOKEN,
                timeout_s=TIMEOUT_S,
            )

        yield make


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
@pytest.mark.parametrize(("workers", "shards"), [(1, 1), (2, 1), (3, 2)])
def test_factors_are_exact_at_staleness_0(workers: int, shards: int, scenario: Scenario) -> None:
    with hybrid(workers, shards) as make:
        check_exact(make, workers, scenario)


def test_two_runs_have_the_same_bits() -> None:
    scenario = Scenario(rule=Rule(kind=RuleKind.ADAM, momentum=0.9), clip=0.2)
    runs = []
    for _ in range(2):
        with hybrid(3, 1) as make:
            runs.append(train(make, 3, scenario))
    for a, b in zip(runs[0][0], runs[1][0], strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("scenario", [Scenario(iterations=40), Scenario(iterations=40, clip=0.5, passes=2)])
@pytest.mark.parametrize("staleness", [1, 3])
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
    assert distance < 0.3 * moved
