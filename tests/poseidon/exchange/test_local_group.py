"""Several workers on a machine: one process's weights, whatever joins the machines; failures are one sentence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from poseidon.exchange.base import Exchange, ExchangeSettings, Trained
from poseidon.exchange.local import LocalExchange
from poseidon.exchange.reduction import Means
from ps_server import Rule, RuleKind
from tests.poseidon.exchange.test_allreduce import allreduce
from tests.poseidon.exchange.test_contract import SCENARIOS, server
from tests.support.exchange_contract import Scenario, check_exact, reference, train
from tests.support.machines import machines


def alone(rank: int, tensors: Sequence[Trained], settings: ExchangeSettings) -> Exchange:
    return LocalExchange(tensors, settings)


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_two_machines_of_two_workers_are_exact(scenario: Scenario) -> None:
    with server(2, 2, rows=3) as inner, machines(inner, 2) as make:
        check_exact(make, 4, scenario)


@pytest.mark.parametrize("means", Means)
@pytest.mark.parametrize("local_workers", [1, 2, 3])
def test_one_machine_without_a_server_is_exact(local_workers: int, means: Means) -> None:
    with machines(alone, local_workers, means=means) as make:
        check_exact(make, local_workers, Scenario(clip=0.3, passes=2))


@pytest.mark.parametrize("means", Means)
def test_machines_that_reduce_among_each_other_are_exact(means: Means) -> None:
    with allreduce(2) as inner, machines(inner, 2, means=means) as make:
        check_exact(make, 4, Scenario(rule=Rule(kind=RuleKind.ADAM, momentum=0.9, delta=1e-4)))


def test_two_runs_have_the_same_bits() -> None:
    runs = []
    for _ in range(2):
        with server(2, 2) as inner, machines(inner, 3) as make:
            runs.append(train(make, 6, Scenario(clip=0.3)))
    for a, b in zip(runs[0][0], runs[1][0], strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("staleness", [1, 2])
def test_with_staleness_all_settle_on_one_value_near_the_exact_one(staleness: int) -> None:
    scenario = Scenario(iterations=40, clip=0.5)
    with server(2, 2, staleness=staleness) as inner, machines(inner, 2) as make:
        ends = train(make, 4, scenario)
    for end in ends[1:]:
        for a, b in zip(ends[0], end, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    exact = reference(scenario)
    distance = sum(float(np.abs(a - b).sum()) for a, b in zip(ends[0], exact, strict=True))
    assert distance < 0.3 * sum(float(np.abs(b).sum()) for b in exact)
