"""Steps for conditions and loops: how often their parts run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from poseidon.caffe2 import control, core, workspace

N = 4


class Nets:
    """A counter, nets that count by one and by two, and conditions."""

    def __init__(self) -> None:
        self.init = core.Net("init")
        self.counter = self.init.CreateCounter([], init_count=0)
        self.n, self.zero = (
            self.init.ConstantFill([], shape=[], value=value, dtype=core.DataType.INT64)
            for value in (N, 0)
        )
        self.seen = self.init.ConstantFill([], "seen", shape=[], value=0, dtype=core.DataType.INT64)
        self.one, self.two = (self._count(times) for times in (1, 2))
        self.idle = core.Net("idle")
        self.idle.ConstantFill([], shape=[1])
        self.less, self.enough = (self._condition(kind, self.seen, self.n) for kind in ("LT", "GE"))
        self.true = self._condition("LT", self.zero, self.n)
        self.false = self._condition("GT", self.zero, self.n)

    def _count(self, times: int) -> core.Net:
        net = core.Net(f"count_{times}")
        for _ in range(times):
            net.CountUp([self.counter])
        net.RetrieveCount([self.counter], self.seen)
        return net

    def _condition(self, kind: str, a: Any, b: Any) -> core.Net:
        net = core.Net(kind)
        net.AddExternalOutput(getattr(net, kind)([a, b]))
        return net

    def run(self, step: Any) -> int:
        plan = core.Plan("plan")
        plan.AddStep(control.Do("init", self.init))
        plan.AddStep(step)
        workspace.RunPlan(plan)
        return int(workspace.FetchBlob("seen"))


@pytest.fixture
def nets() -> Iterator[Nets]:
    yield Nets()
    workspace.ResetWorkspace()


@pytest.mark.parametrize("form", ["net", "nets", "step", "mixed"])
@pytest.mark.parametrize("loop", ["For", "While", "Until", "DoWhile", "DoUntil"])
def test_loops(nets: Nets, loop: str, form: str) -> None:
    step = control.Do("count", nets.one)
    parts = {
        "net": nets.one,
        "nets": [nets.one, nets.idle],
        "step": step,
        "mixed": [step, nets.idle],
    }
    made = {
        "For": lambda: control.For("f", parts[form], N),
        "While": lambda: control.While("w", nets.less, parts[form]),
        "Until": lambda: control.Until("u", nets.enough, parts[form]),
        "DoWhile": lambda: control.DoWhile("dw", nets.less, parts[form]),
        "DoUntil": lambda: control.DoUntil("du", nets.enough, parts[form]),
    }[loop]()
    assert nets.run(made) == N
    assert nets.run(made) == N


@pytest.mark.parametrize("truth", [True, False])
@pytest.mark.parametrize("kind", ["If", "IfNot"])
@pytest.mark.parametrize("by_blob", [True, False])
@pytest.mark.parametrize("otherwise", [True, False])
def test_conditions(nets: Nets, truth: bool, kind: str, by_blob: bool, otherwise: bool) -> None:
    net = nets.true if truth else nets.false
    condition: Any = net.Proto().external_output[-1] if by_blob else net
    parts = [nets.one, nets.two] if otherwise else [nets.one]
    step = getattr(control, kind)("c", condition, *parts)
    if by_blob:
        step = control.Do("both", control.Do("condition", net), step)
    expected = 1 if truth == (kind == "If") else 2 * otherwise
    assert nets.run(step) == expected
    assert nets.run(step) == expected


@pytest.mark.parametrize(("kind", "expected"), [("Switch", 2), ("SwitchNot", 1)])
def test_switches(nets: Nets, kind: str, expected: int) -> None:
    step = getattr(control, kind)("s", (nets.false, nets.one), (nets.true, nets.two))
    assert nets.run(step) == expected


def test_a_condition_is_tested_once_for_both_branches(nets: Nets) -> None:
    """The first branch changes what the condition reads."""
    step = control.If("c", nets.less, [nets.two, nets.two], nets.one)
    assert nets.run(step) == 4


@pytest.mark.parametrize(("relation", "expected"), [("Or", True), ("And", False)])
def test_conditions_are_related(nets: Nets, relation: str, expected: bool) -> None:
    both = [nets.true, nets.false]
    combined = control.CombineConditions("c", both, relation)
    merged = control.MergeConditionNets("m", both, relation)
    assert combined is not None
    nets.run(control.Do("all", *both, combined, merged))
    for net in (combined, merged):
        assert workspace.FetchBlob(net.Proto().external_output[-1]) == expected


def test_nets_that_set_booleans(nets: Nets) -> None:
    net = control.BoolNet([("a", True), ("b", False)])
    nets.run(control.DoParallel("p", net, nets.idle))
    assert workspace.FetchBlobs(["a", "b"]) == [True, False]
    assert control.CombineConditions("c", [], "Or") is None
    assert control.MergeConditionNets("m", [nets.true], "Or") is nets.true


def test_missing_nets_and_outputs_are_refused(nets: Nets) -> None:
    with pytest.raises(ValueError, match="no net and no step"):
        control.Do("d")
    with pytest.raises(ValueError, match="must be a list"):
        control.CombineConditions("c", nets.true, "Or")
    with pytest.raises(AssertionError, match="at least one external output"):
        control.While("w", nets.idle, nets.one)
