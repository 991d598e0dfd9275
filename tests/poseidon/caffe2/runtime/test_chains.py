"""The plan of a dag net, and its running on threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.runtime.chains import Part, chains, dependencies, nodes, overwritten
from poseidon.caffe2.runtime.dag import ChainRun, lending
from poseidon.caffe2.workspace.current import current


def reused(kind: str = "simple") -> core.Net:
    """`s` is made by operator 0, read by 1, and made again by 2."""
    net = core.Net("reused")
    net.Proto().type, net.Proto().num_workers = kind, 2
    net.Copy("data", "s")
    net.Copy("s", "a")
    net.Copy("a", "s")
    net.Copy("s", "s")
    return net


def test_what_is_overwritten() -> None:
    assert list(overwritten(reused().Proto().op)) == [("s", 1, 2)]
    outside = core.Net("outside")
    outside.Copy("s", "a")
    outside.Copy("a", "s")
    assert list(overwritten(outside.Proto().op)) == []


def test_blobs_that_operators_may_read_unseen() -> None:
    net = reused()
    net.Python(lambda inputs, outputs: None)([], ["s"])
    assert list(overwritten(net.Proto().op)) == []
    inner, other = core.Net("inner"), reused()
    inner.Copy("s", "t")
    other.Proto().op.add(type="If", input=["c"]).arg.add(name="then_net").n.CopyFrom(inner.Proto())
    assert list(overwritten(other.Proto().op)) == []


@pytest.mark.parametrize("kind", ["simple", "dag"])
def test_a_dead_value_is_freed(kind: str) -> None:
    workspace.FeedBlob("data", np.float32([1, 2]))
    reusing = reused(kind)
    workspace.CreateNet(reusing)
    net = current().nets[reusing.Name()]
    blob = current().get("s")
    empty = []
    for step in net.steps:
        step()
        empty.append(blob.value is None)
    assert empty == ([False, True, False, False] if kind == "simple" else [False] * 4)
    workspace.RunNet(reusing, 3)
    assert workspace.FetchBlob("s").tolist() == [1, 2]


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
    branches = [relu(*pair) for pair in ("ab", "bc", "bd")]
    diamond = chains([*branches, core.CreateOperator("Sum", ["c", "d"], "e")])
    assert [chain.operators for chain in diamond] == [(0,), (1,), (2,), (3,)]
    assert [chain.waits_for for chain in diamond] == [0, 1, 1, 2]
    assert diamond[0].releases == (1, 2)
    (line,) = chains([relu("a", "b"), relu("b", "c"), relu("c", "d")])
    assert line.operators == (0, 1, 2)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd")), max_size=12),
    st.integers(1, 4),
)
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


def total(*names: str, kind: str = "Allreduce", **arguments: object) -> object:
    return core.CreateOperator(kind, ["world", *names], list(names), engine="GLOO", **arguments)


@pytest.mark.parametrize(
    ("operators", "expected"),
    [
        ([total("a"), total("b"), relu("c", "c")], "S0 S1 E0 E1 2"),
        ([total("a"), relu("c", "c"), total("b")], "S0 E0 1 S2 E2"),
        ([total("a"), total("a"), total("b")], "S0 E0 S1 S2 E1 E2"),
        ([total("a"), total("b", control_input=["a"])], "S0 S1 E0 E1"),
    ],
)
def test_operators_that_follow_each_other_are_all_started_first(
    operators: list[object], expected: str
) -> None:
    starting = {index for index, one in enumerate(operators) if one.type == "Allreduce"}  # type: ignore[attr-defined]
    letters = {Part.START: "S", Part.END: "E", Part.WHOLE: ""}
    assert " ".join(f"{letters[p]}{i}" for p, i in nodes(operators, starting)) == expected


def test_starts_have_the_order_of_the_net_and_their_ends_are_waited_for() -> None:
    operators = [
        relu("x", "a"),
        relu("x", "b"),
        total("a"),
        total("b", control_input=["a"]),
        relu("a", "c"),
    ]
    plan = chains(operators, {2, 3})
    assert [(chain.part.name, chain.operators) for chain in plan] == [
        *[
            ("WHOLE", (0,)),
            ("WHOLE", (1,)),
            ("START", (2,)),
            ("START", (3,)),
            ("END", (2,)),
            ("END", (3,)),
        ],
        ("WHOLE", (4,)),
    ]
    assert [chain.waits_for for chain in plan] == [0, 0, 1, 2, 1, 1, 1]
    assert [chain.releases for chain in plan] == [(2,), (3,), (3,), (), (6,), (), ()]


def test_collectives_of_one_world_that_are_not_started_keep_the_order_too() -> None:
    operators = [
        total("a"),
        total("b", kind="Reduce"),
        total("c"),
        total("d", kind="Reduce"),
        relu("e", "e"),
    ]
    before = {
        chain.operators[0]: chain
        for chain in chains(operators, {0, 2})
        if chain.part is not Part.END
    }
    assert [before[index].waits_for for index in range(5)] == [0, 1, 1, 1, 0]
    operators = [
        core.CreateOperator(kind, [world, name], name)
        for kind, world, name in [
            ("Reduce", "v", "a"),
            ("Reduce", "w", "b"),
            ("Allreduce", "w", "c"),
        ]
    ]
    plan = chains(operators, {2})
    assert [chain.waits_for for chain in plan] == [0, 0, 2, 1]


class Sums:
    """Sums that can be waited for once the last one is started."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.calls: list[str] = []
        self.started: list[int] = []

    def start(self, index: int) -> list[int]:
        self.calls.append(f"S{index}")
        self.started.append(index)
        return self.started if index == self.last else []

    def end(self, index: int) -> None:
        self.calls.append(f"E{index}")


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_thread_computes_where_it_can_and_waits_last(threads: int) -> None:
    parts = ["xa", "a", "xb", "b", "ac", "xd"]
    operators = [relu(*part) if len(part) == 2 else total(part) for part in parts]
    sums = Sums(last=3)
    ChainRun(chains(operators, {1, 3}), lambda index: sums.calls.append(str(index)), sums, 1)(
        threads
    )
    assert sums.calls[:4] == ["0", "S1", "2", "S3"]
    if threads == 1:
        assert sums.calls[4:] == ["5", "E1", "4", "E3"]
    assert sorted(sums.calls) == ["0", "2", "4", "5", "E1", "E3", "S1", "S3"]
    assert sums.calls.index("4") > sums.calls.index("E1")


def test_a_limited_number_of_threads_computes_and_one_that_waits_is_not_counted() -> None:
    computing, most = 0, 0
    lock, both = threading.Lock(), threading.Barrier(2, timeout=20)

    def run(index: int) -> None:
        nonlocal computing, most
        with lock:
            computing += 1
            most = max(most, computing)
        with lock:
            computing -= 1
        if index > 20:  # these two need each other
            with lending():
                both.wait()

    operators = [relu("x", f"y{index}") for index in range(23)]
    ChainRun(chains(operators), run, None, 1)(8)
    assert most == 1


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
