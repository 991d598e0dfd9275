"""The plan of a dag net, and its running on threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.runtime.chains import chains, dependencies
from poseidon.caffe2.runtime.dag import ChainRun


def relu(x: str, y: str) -> object:
    return core.CreateOperator("Relu", x, y)


@pytest.mark.parametrize(
    ("operators", "expected"),
    [
        ([("a", "b"), ("b", "c")], [set(), {0}]),
        ([("a", "b"), ("a", "c"), ("c", "a")], [set(), set(), {0, 1}]),
        ([("a", "b"), ("c", "b")], [set(), {0}]),
        ([("a", "a"), ("a", "b"), ("a", "a")], [set(), {0}, {0, 1}]),
    ],
)
def test_dependencies(operators: list[tuple[str, str]], expected: list[set[int]]) -> None:
    assert dependencies([relu(*names) for names in operators]) == expected


def test_a_diamond_is_four_chains_and_a_line_is_one() -> None:
    diamond = chains(
        [relu("a", "b"), relu("b", "c"), relu("b", "d"), core.CreateOperator("Sum", ["c", "d"], "e")]
    )
    assert [chain.operators for chain in diamond] == [(0,), (1,), (2,), (3,)]
    assert [chain.waits_for for chain in diamond] == [0, 1, 1, 2]
    assert diamond[0].releases == (1, 2)
    (line,) = chains([relu("a", "b"), relu("b", "c"), relu("c", "d")])
    assert line.operators == (0, 1, 2)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd")), max_size=12), st.integers(1, 4))
def test_every_operator_runs_once_and_behind_what_it_needs(
    names: list[tuple[str, str]], threads: int
) -> None:
    operators = [relu(*pair) for pair in names]
    ran: list[int] = []
    lock = threading.Lock()

    def run(index: int) -> None:
        with lock:
            ran.append(index)

    ChainRun(chains(operators), run)(threads)
    assert sorted(ran) == list(range(len(operators)))
    place = {index: order for order, index in enumerate(ran)}
    for index, needed in enumerate(dependencies(operators)):
        assert all(place[earlier] < place[index] for earlier in needed)


def test_two_chains_run_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=20)
    ChainRun(chains([relu("a", "b"), relu("c", "d")]), lambda index: both.wait() and None)(2)


def test_all_chains_that_one_releases_run_at_the_same_time() -> None:
    together = threading.Barrier(4, timeout=20)

    def run(index: int) -> None:
        if index in (1, 2, 3, 4):
            together.wait()

    operators = [relu("a", "b"), *(relu("b", name) for name in "cdef")]
    for _ in range(20):
        ChainRun(chains(operators), run)(4)


def test_the_first_error_ends_the_run() -> None:
    def run(index: int) -> None:
        if index == 1:
            raise RuntimeError("the second")

    with pytest.raises(RuntimeError, match="the second"):
        ChainRun(chains([relu("a", "b"), relu("b", "c"), relu("c", "d")]), run)(2)


def test_a_dag_net_gives_what_a_simple_net_gives() -> None:
    results = []
    for kind in ("simple", "dag"):
        workspace.ResetWorkspace()
        workspace.FeedBlob("x", np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3))
        net = core.Net("branches")
        net.Proto().type, net.Proto().num_workers = kind, 3
        parts = [net.Scale("x", f"s{index}", scale=float(index)) for index in range(8)]
        net.Sum([net.Tanh(part) for part in parts], "y")
        net.AddGradientOperators(["y"])
        workspace.CreateNet(net)
        workspace.RunNet(net, 20)
        results.append((workspace.FetchBlob("y"), workspace.FetchBlob("x_grad")))
    workspace.ResetWorkspace()
    for simple, dag in zip(*results, strict=True):
        np.testing.assert_array_equal(simple, dag)
