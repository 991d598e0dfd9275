"""The optimum that the shares claim to be, against every other."""

from __future__ import annotations

from fractions import Fraction

import pytest

from poseidon.cluster.shares import best_shares

MIXED = [(n, k) for n in range(2, 12) for k in range(1, n)]


def links(n: int, k: int, b: int, worker: Fraction, server: Fraction) -> tuple[Fraction, Fraction, Fraction]:
    """Models that cross the link of a machine that does both, that works, and that serves; counted flow by flow."""
    total = b * worker + k * server
    w, s = worker / total, server / total
    both = 2 * (1 - w) + 2 * w * (
        n - 1
    )  # the worker to all other shards, and the shards to all other workers
    return both, Fraction(2), 2 * n * s


@pytest.mark.parametrize(("n", "k"), MIXED)
def test_every_link_carries_the_same(n: int, k: int) -> None:
    worker, server = best_shares(n, k)
    both, _, serving = links(n, k, n, Fraction(worker), Fraction(server))
    assert both == serving == Fraction(4 * n * (n - 1), n * n + k * n - 2 * k)


@pytest.mark.parametrize(("n", "k"), [(n, k) for n, k in MIXED if n > 2])
def test_no_other_shares_are_better(n: int, k: int) -> None:
    shares = best_shares(n, k)
    best = max(links(n, k, n, *map(Fraction, shares)))
    others = [(worker, server) for worker in range(40) for server in range(40) if worker + server]
    assert all(
        max(links(n, k, n, Fraction(worker), Fraction(server))) > best
        for worker, server in others
        if Fraction(worker) * shares[1] != Fraction(server) * shares[0]
    )


@pytest.mark.parametrize(("n", "k", "b"), [(5, 2, 3), (8, 1, 4), (8, 7, 1), (3, 1, 1)])
def test_some_working_machines_may_have_no_shards(n: int, k: int, b: int) -> None:
    worker, server = best_shares(n, k, sharing=b)
    both, alone, serving = links(n, k, b, Fraction(worker), Fraction(server))
    assert both == serving > alone
    for other in (Fraction(99, 100), Fraction(101, 100)):
        assert max(links(n, k, b, worker * other, Fraction(server))) > both


@pytest.mark.parametrize(
    ("n", "k", "b", "expected"),
    [
        (4, 0, None, (1, 0)),
        (4, 2, None, (1, 3)),
        (4, 4, None, (0, 1)),
        (4, 9, None, (0, 1)),
        (1, 1, None, (0, 1)),
        (4, 1, 0, (0, 1)),
        (4, 0, 2, (1, 0)),
        (4, 0, 0, (0, 0)),
    ],
)
def test_the_ends(n: int, k: int, b: int | None, expected: tuple[int, int]) -> None:
    assert best_shares(n, k, sharing=b) == expected
