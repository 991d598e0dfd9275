"""Who holds the others up is named once, with how much and since when, and again when it is
over.
"""

from __future__ import annotations

import pytest

from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.supervision.stragglers import Stragglers, excess_s

WORKERS = [ProcessName(role=Role.WORKER, index=i, client=i, host=f"node{i}") for i in range(3)]
ITERATION_S = 0.4


class Job:
    """Synchronous workers: the slowest sets the pace, the others wait for it."""

    def __init__(self, turns: tuple[int, ...] = (1, 1, 1)) -> None:
        self.stragglers = Stragglers()
        self._turns = turns
        self.now = 50.0
        self.said: list[tuple[float, str]] = []
        self._iteration = 0.0
        self._waited = dict.fromkeys(WORKERS, 0.0)

    def go(self, seconds: float, own_s: list[float]) -> None:
        """Let time pass; `own_s` of each worker an iteration."""
        pace_s = max(own_s)
        for _ in range(round(seconds / 2)):
            self.now += 2
            self._iteration += 2 / pace_s
            for name, own, turns in zip(WORKERS, own_s, self._turns, strict=False):
                self._waited[name] += 2 * (1 - own / pace_s)
                self.stragglers.progress(name, int(self._iteration), turns)
                sentence = self.stragglers.waited(name, self._waited[name], self.now)
                if sentence is not None:
                    self.said.append((self.now - 50, sentence))


def test_workers_alike_are_not_named() -> None:
    job = Job()
    job.go(300, [0.40, 0.42, 0.45])
    assert job.said == []


def test_a_straggler_is_named_once_and_its_end_too() -> None:
    job = Job()
    job.go(60, [0.4, 0.4, 0.4])
    job.go(120, [0.4, 0.4, 0.8])
    ((at_s, sentence),) = job.said
    assert 60 + 28 <= at_s <= 60 + 60
    assert sentence.startswith("worker 2 (client 2, node2) slows the others down: for ")
    assert "s an iteration, 2.0 times as long as the others" in sentence
    job.go(60, [0.4, 0.4, 0.4])
    assert [text for _, text in job.said[1:]] == [
        "worker 2 (client 2, node2) is as fast as the others again"
    ]


@pytest.mark.parametrize("own_s", [[0.4, 0.4, 0.55], [0.004, 0.004, 0.012], [0.4]])
def test_what_holds_nobody_up_is_not_named(own_s: list[float]) -> None:
    job = Job()
    job.go(200, own_s)
    assert job.said == []


@pytest.mark.parametrize(
    ("turns", "own_s", "named"),
    [
        ((3, 2, 2), [0.6, 0.4, 0.4], False),  # has more to compute
        ((2, 2, 1), [0.4, 0.4, 0.4], False),  # is slow, and has less to compute
        ((3, 2, 2), [0.9, 0.4, 0.4], True),
    ],
)
def test_a_worker_with_more_virtual_workers_holds_nobody_up(
    turns: tuple[int, ...], own_s: list[float], named: bool
) -> None:
    job = Job(turns)
    job.go(200, own_s)
    assert bool(job.said) == named


@pytest.mark.parametrize(
    ("own_s", "others_s", "iteration_s", "excess"),
    [
        (0.3, [0.1, 0.1, 0.2], 0.3, 0.2),
        (0.3, [0.1], 0.31, 0.2),
        (0.14, [0.1, 0.1], 0.14, 0.0),  # less than 1.5 times the others
        (0.009, [0.001], 0.009, 0.0),  # less than 10 ms
        (0.09, [0.03, 0.03], 1.0, 0.0),  # all wait for something else, the network for example
        (0.295, [0.072], 1.3, 0.0),
        (0.3, [], 0.3, 0.0),
    ],
)
def test_the_excess_of_a_straggler(
    own_s: float, others_s: list[float], iteration_s: float, excess: float
) -> None:
    assert excess_s(own_s, others_s, iteration_s) == pytest.approx(excess)


def test_a_hiccup_is_not_named() -> None:
    job = Job()
    for _ in range(5):
        job.go(20, [0.4, 0.4, 0.4])
        job.go(10, [0.4, 0.4, 1.2])
    assert job.said == []


def test_after_a_new_start_all_begins_anew() -> None:
    job = Job()
    job.go(20, [0.4, 0.4, 0.9])
    job.stragglers.forget()
    job.go(20, [0.4, 0.4, 0.9])
    assert job.said == []
