"""Virtual workers: the tree of sums is the same for every number of processes."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest

from ps_server.errors import SpecError
from ps_server.protocol.virtual_workers import Node, TreeSum, VirtualWorkers, largest_nodes


def plus(left: str, right: str, node: Node) -> str:
    return f"({left}+{right})"


def text_of_tree(count: int) -> str:
    tree = TreeSum(count, plus)
    for v in range(count):
        tree.put(Node(v, v + 1), str(v))
    return tree.parts[Node(0, count)]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, "0"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
        (12, "((((0+1)+(2+3))+((4+5)+(6+7)))+((8+9)+(10+11)))"),
    ],
)
def test_the_left_half_has_the_largest_power_of_two(count: int, expected: str) -> None:
    assert text_of_tree(count) == expected


@pytest.mark.parametrize("count", range(1, 18))
def test_the_tree_is_the_same_for_every_number_of_processes_and_order_of_arrival(
    count: int,
) -> None:
    draw = random.Random(count)
    for processes in range(1, count + 1):
        cuts = sorted(draw.sample(range(1, count), processes - 1))
        workers = VirtualWorkers((0, *cuts, count))
        sent = []
        for process in range(processes):
            tree = TreeSum(count, plus)
            for v in workers.of(process):
                tree.put(Node(v, v + 1), str(v))
            assert tuple(sorted(tree.parts)) == workers.nodes(process)
            sent += tree.parts.items()
        draw.shuffle(sent)
        whole = TreeSum(count, plus)
        for node, part in sent:
            last = whole.put(node, part)
        assert last == Node(0, count)
        assert whole.parts == {last: text_of_tree(count)}


@pytest.mark.parametrize("count", [7, 12, 16, 100])
def test_a_process_sends_few_sums(count: int) -> None:
    for start, stop in itertools.combinations(range(count + 1), 2):
        assert len(largest_nodes(count, start, stop)) <= max(1, 2 * np.ceil(np.log2(count)))


def test_processes_of_a_power_of_two_send_one_sum() -> None:
    workers = VirtualWorkers.spread(16, [1.0] * 4)
    assert [workers.nodes(process) for process in range(4)] == [
        ((0, 4),), ((4, 8),), ((8, 12),), ((12, 16),)
    ]  # fmt: skip


def test_each_virtual_worker_may_be_sent_by_itself() -> None:
    assert VirtualWorkers((0, 3, 4)).nodes(0, leaves=True) == ((0, 1), (1, 2), (2, 3))


def test_bits_do_not_depend_on_where_the_leaves_are() -> None:
    draw = np.random.default_rng(5)
    leaves = draw.standard_normal((7, 1000)).astype(np.float32)
    results = set()
    for bounds in [(0, 7), (0, 3, 7), (0, 1, 2, 6, 7), tuple(range(8))]:
        workers = VirtualWorkers(bounds)
        whole = TreeSum[np.ndarray](7, lambda a, b, _: a + b)
        for process in reversed(range(workers.processes)):
            tree = TreeSum[np.ndarray](7, lambda a, b, _: a + b)
            for v in workers.of(process):
                tree.put(Node(v, v + 1), leaves[v])
            for node, part in tree.parts.items():
                whole.put(node, part)
        results.add(whole.parts[Node(0, 7)].tobytes())
    assert len(results) == 1


@pytest.mark.parametrize(
    ("count", "speeds", "numbers"),
    [
        (12, [1, 1, 1, 1], [3, 3, 3, 3]),
        (12, [1, 0.5], [8, 4]),
        (7, [1, 1, 1], [3, 2, 2]),
        (5, [1, 0.01], [4, 1]),
        (3, [1, 1, 1], [1, 1, 1]),
    ],
)
def test_processes_get_numbers_by_their_speed(
    count: int, speeds: list[float], numbers: list[int]
) -> None:
    workers = VirtualWorkers.spread(count, speeds)
    assert [len(workers.of(process)) for process in range(len(speeds))] == numbers
    longest = max(Fraction(n) / Fraction(s) for n, s in zip(numbers, speeds, strict=True))
    assert longest >= Fraction(count) / sum(map(Fraction, speeds))


def test_processes_know_their_virtual_workers() -> None:
    workers = VirtualWorkers((0, 3, 4))
    assert (workers.count, workers.processes, workers.is_one_each) == (4, 2, False)
    assert [list(workers.of(process)) for process in range(2)] == [[0, 1, 2], [3]]
    assert VirtualWorkers.one_each(3).is_one_each


@pytest.mark.parametrize("bounds", [(), (0,), (1, 2), (0, 2, 2), (0, 3, 2)])
def test_bounds_give_each_process_at_least_one(bounds: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match="expected"):
        VirtualWorkers(bounds)


def test_more_processes_than_virtual_workers_are_refused() -> None:
    with pytest.raises(SpecError, match="2 virtual workers for 3 processes; expected at least one"):
        VirtualWorkers.spread(2, [1, 1, 1])
