"""Two machines of two workers by every exchange: one process's weights, and the same bits in
every run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from poseidon.exchange.build import build_exchange
from poseidon.exchange.exchange import Connect
from poseidon.exchange.host.carrier import HostCarrier
from poseidon.exchange.options import ExchangeKind, ExchangeOptions, Scheme
from ps_server import RuleKind
from tests.poseidon.exchange.test_exchange_exactness import (
    CLIPS,
    KINDS,
    PASSES,
    RULES,
    SHARDS,
    Case,
    largest_difference,
    reference,
    schemes_of,
    train,
)
from tests.support.cluster import job_addresses
from tests.support.machines import member_on
from tests.support.sampling import sample
from tests.support.threads import on_threads

MACHINES = 2
LOCAL = 2


def run(
    kind: ExchangeKind, case: Case, folder: str, schemes: Sequence[Scheme] = ()
) -> tuple[list[list[np.ndarray]], list[Scheme]]:
    """A job with its workers as threads; their final weights, by rank, and their common plan."""

    def worker(rank: int, connect: Connect) -> tuple[list[np.ndarray], list[Scheme]]:
        member = member_on(
            rank, [LOCAL] * MACHINES, folder, shards=SHARDS, options=ExchangeOptions(kind=kind)
        )
        end, built = train(
            rank,
            MACHINES * LOCAL,
            case,
            lambda t, s: build_exchange(t, s, member, connect, schemes=schemes),
        )
        assert [type(c) for c in built.exchange.carriers] == [HostCarrier]
        return end, schemes_of(built)

    with job_addresses(kind, MACHINES * LOCAL, SHARDS) as connect:
        ends = on_threads(MACHINES * LOCAL, lambda rank: worker(rank, connect.of(rank)))
    assert all(plan == ends[0][1] for _, plan in ends)
    return [weights for weights, _ in ends], ends[0][1]


@pytest.mark.parametrize(
    ("kind", "rule", "passes", "clip"),
    sample([*itertools.product(KINDS, RULES, PASSES, CLIPS)], every=13),
)
def test_the_weights_are_those_of_one_process_and_of_a_second_run(
    kind: ExchangeKind, rule: RuleKind, passes: int, clip: float | None
) -> None:
    case = Case(rule, passes, clip)
    with TemporaryDirectory(prefix="p") as folder:
        ends, schemes = run(kind, case, folder)
    with TemporaryDirectory(prefix="p") as folder:
        again, _ = run(kind, case, folder, schemes)
    for end in (*ends[1:], *again):
        assert all(np.array_equal(a, b) for a, b in zip(ends[0], end, strict=True))
    difference = largest_difference(ends[0], reference(case))
    print(f"largest difference {difference:.1e}")
    assert difference <= 1e-5
