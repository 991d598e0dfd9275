"""A solver definition, checked."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from google.protobuf import text_format

from poseidon.caffe.proto.caffe_pb2 import SolverParameter
from poseidon.caffe.proto.definition import SolverDefinition
from poseidon.caffe.solver.settings import (
    POLICIES,
    current_step,
    oddities,
    rate_oddities,
    rate_policy,
    solver_settings,
)
from poseidon.errors import DefinitionError
from ps_server import Regularization, RuleKind

BASE = "base_lr: 0.1 lr_policy: 'fixed' max_iter: 10 "


def solver(text: str) -> SolverDefinition:
    return SolverDefinition(
        param=text_format.Parse(text, SolverParameter()), source="solver.prototxt", folder=Path()
    )


def test_defaults_are_caffes() -> None:
    found = solver_settings(solver(BASE))
    assert found.base_rule.kind is RuleKind.SGD
    assert found.base_rule.regularization is Regularization.L2
    assert (found.iter_size, found.clip, found.param.average_loss) == (1, None, 1)
    assert found.random_seed is None
    assert found.param.snapshot_after_train
    assert found.param.test_initialization


def test_multipliers_go_into_the_rule() -> None:
    rule = solver_settings(solver(BASE + "weight_decay: 0.5 momentum: 0.9 type: 'Nesterov'")).rule(
        2.0, 0.25
    )
    assert (rule.kind, rule.decay, rule.rate_factor) == (RuleKind.NESTEROV, 0.125, 2.0)
    assert rule.momentum == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("old", "kind"), [("NESTEROV", RuleKind.NESTEROV), ("ADAGRAD", RuleKind.ADAGRAD)]
)
def test_the_old_enum_is_understood(old: str, kind: RuleKind) -> None:
    assert solver_settings(solver(BASE + f"solver_type: {old}")).base_rule.kind is kind


def test_clipping_is_off_unless_positive() -> None:
    assert solver_settings(solver(BASE + "clip_gradients: -1")).clip is None
    assert solver_settings(solver(BASE + "clip_gradients: 35")).clip == 35


@pytest.mark.parametrize(
    ("text", "name", "value", "oddity"),
    [
        ("base_lr: 1 lr_policy: 'fixed'", "max_iter", 0, "max_iter is missing; as in Caffe"),
        ("base_lr: 1 lr_policy: 'fixed' max_iter: -5", "max_iter", 0, "max_iter is -5"),
        (BASE + "display: -20", "display", 20, "display is -20; as in Caffe, it acts as 20"),
        (BASE + "snapshot: -1", "snapshot", 1, "snapshot is -1"),
        (BASE + "regularization_type: 'L3'", "iter_size", 1, "regularization_type is 'L3'"),
        (BASE + "test_interval: 5", "test_interval", 5, "test_iter is missing; as in Caffe"),
        (BASE, "max_iter", 10, ""),
    ],
)
def test_what_caffe_takes_is_taken_with_a_warning(
    text: str, name: str, value: int, oddity: str
) -> None:
    assert getattr(solver_settings(solver(text)), name) == value
    found = oddities(solver(text))
    assert len(found) == bool(oddity) and oddity in "".join(found)
    assert ("max_iter" in "".join(oddities(solver(text), endless=True))) is False


MISTAKES = {
    "iter_size 0": (BASE + "iter_size: 0", "iter_size: expected 1 or more, found 0"),
    "unknown type": (BASE + "type: 'Adan'", "unknown solver type 'Adan'; did you mean 'Adam'?"),
    "momentum": (BASE + "momentum: 1.5", "momentum is 1.5; expected 0 <= momentum < 1"),
    "AdaGrad with momentum": (BASE + "type: 'AdaGrad' momentum: 0.9", "AdaGrad has no momentum"),
    "RMSProp with momentum": (BASE + "type: 'RMSProp' momentum: 0.9", "RMSProp has no momentum"),
    "regularization": (
        BASE + "weight_decay: 1 regularization_type: 'L3'",
        "expected 'L1' or 'L2', found 'L3'",
    ),
    "eval_type": (
        BASE + "eval_type: 'detect'",
        "eval_type: is 'detect', expected classification, detection",
    ),
    "ap_version": (
        BASE + "ap_version: '12point'",
        "ap_version: is '12point', expected 11point, MaxIntegral, Integral",
    ),
}


@pytest.mark.parametrize(("text", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        solver_settings(solver(text))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["base_lr", "momentum", "weight_decay", "clip_gradients"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_are_finite(name: str, value: str) -> None:
    text = f"lr_policy: 'fixed' max_iter: 10 {name}: {value} " + (
        "" if name == "base_lr" else "base_lr: 1"
    )
    with pytest.raises(DefinitionError, match=f"{name}: expected a finite number, found {value}"):
        solver_settings(solver(text))


def rate_solver(text: str) -> SolverDefinition:
    param = text_format.Parse(text, SolverParameter())
    return SolverDefinition(param=param, source="solver.prototxt", folder=Path())


CASES = {
    "fixed": ("lr_policy: 'fixed'", [0.1, 0.1, 0.1, 0.1]),
    "step": ("lr_policy: 'step' gamma: 0.5 stepsize: 3", [0.1, 0.1, 0.05, 0.1 * 0.5**3]),
    "exp": ("lr_policy: 'exp' gamma: 0.9", [0.1 * 0.9**t for t in (0, 2, 3, 10)]),
    "inv": (
        "lr_policy: 'inv' gamma: 0.1 power: 0.75",
        [0.1 * (1 + 0.1 * t) ** -0.75 for t in (0, 2, 3, 10)],
    ),
    "multistep": (
        "lr_policy: 'multistep' gamma: 0.1 stepvalue: 3 stepvalue: 9",
        [0.1, 0.1, 0.01, 0.001],
    ),
    "poly": (
        "lr_policy: 'poly' power: 2 max_iter: 20",
        [0.1 * (1 - t / 20) ** 2 for t in (0, 2, 3, 10)],
    ),
    "sigmoid": (
        "lr_policy: 'sigmoid' gamma: 0.5 stepsize: 4",
        [0.1 / (1 + math.exp(-0.5 * (t - 4))) for t in (0, 2, 3, 10)],
    ),
}


def test_every_policy_has_a_case() -> None:
    assert CASES.keys() == POLICIES.keys()


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES.keys())
def test_policy_follows_its_formula(text: str, expected: list[float]) -> None:
    rate = rate_policy(rate_solver(f"base_lr: 0.1 {text}"))
    assert [rate(t) for t in (0, 2, 3, 10)] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("text", "iteration", "expected"),
    (
        ("lr_policy: 'exp' gamma: 10", 10**6, math.inf),
        ("lr_policy: 'exp' gamma: 10", 60, math.inf),
        ("lr_policy: 'exp' gamma: -10", 10**6 + 1, -math.inf),
        ("lr_policy: 'poly' power: -1 max_iter: 5", 5, math.inf),
        ("lr_policy: 'inv' gamma: -1 power: 0.5", 3, math.nan),
        ("lr_policy: 'poly' max_iter: 5", 4, 0.1),  # no power
        ("lr_policy: 'poly' max_iter: 0 power: 1", 0, math.nan),
    ),
)
def test_what_no_number_holds_is_as_in_c(text: str, iteration: int, expected: float) -> None:
    assert rate_policy(rate_solver("base_lr: 0.1 " + text))(iteration) == pytest.approx(
        expected, nan_ok=True
    )


def test_equal_stepvalues_count_one_iteration_after_another_as_in_caffe() -> None:
    steps = rate_solver(
        "lr_policy: 'multistep' stepvalue: 3 stepvalue: 3 stepvalue: 4 base_lr: 1 gamma: 2"
    )
    assert [rate_policy(steps)(t) for t in range(2, 8)] == [1, 2, 4, 8, 8, 8]
    assert [current_step(steps.param, t + 1) for t in range(2, 8)] == [0, 1, 2, 3, 3, 3]


def test_sigmoid_does_not_overflow_late_or_early() -> None:
    rate = rate_policy(rate_solver("base_lr: 1 lr_policy: 'sigmoid' gamma: -10 stepsize: 500"))
    assert rate(0) == 1
    assert rate(10**6) == 0


RATE_MISTAKES = {
    "unknown": ("base_lr: 1 lr_policy: 'stepp'", "unknown policy 'stepp'; did you mean 'step'?"),
    "nothing near": ("base_lr: 1 lr_policy: 'zzz'", "known: exp, fixed, inv"),
    "no policy": ("base_lr: 1", "missing policy; known: exp, fixed, "),
    "no stepsize": ("base_lr: 1 lr_policy: 'step' gamma: 1", "'step' needs stepsize"),
    "stepsize 0": (
        "base_lr: 1 lr_policy: 'step' gamma: 1 stepsize: 0",
        "expected a positive number, found 0",
    ),
}


@pytest.mark.parametrize(("text", "message"), RATE_MISTAKES.values(), ids=RATE_MISTAKES.keys())
def test_mistakes_of_the_rate_are_named(text: str, message: str) -> None:
    with pytest.raises(DefinitionError, match=r"solver\.prototxt") as caught:
        rate_policy(rate_solver(text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "iterations", "expected"),
    [
        ("lr_policy: 'step' stepsize: 5", 0, 0),
        ("lr_policy: 'step' stepsize: 5", 5, 0),  # the last rate is iteration 4's
        ("lr_policy: 'step' stepsize: 5", 6, 1),
        ("lr_policy: 'step' stepsize: 5", 23, 4),
        ("lr_policy: 'multistep' stepvalue: 3 stepvalue: 9", 3, 0),
        ("lr_policy: 'multistep' stepvalue: 3 stepvalue: 9", 4, 1),
        ("lr_policy: 'multistep' stepvalue: 3 stepvalue: 9", 30, 2),
        ("lr_policy: 'fixed' stepsize: 5 stepvalue: 3", 30, 0),
    ],
)
def test_the_step_of_a_solverstate_is_that_of_the_last_rate(
    text: str, iterations: int, expected: int
) -> None:
    assert current_step(text_format.Parse(text, SolverParameter()), iterations) == expected


@pytest.mark.parametrize(
    ("text", "rates", "oddity"),
    [
        ("lr_policy: 'fixed'", [0, 0, 0], "base_lr is missing"),
        ("base_lr: 1 lr_policy: 'exp'", [1, 0, 0], "gamma is missing"),
        ("base_lr: 1 lr_policy: 'inv' power: 1", [1, 1, 1], "gamma is missing"),
        ("base_lr: 1 lr_policy: 'poly' max_iter: 2", [1, 1], "power is missing"),
        ("base_lr: 1 lr_policy: 'multistep' gamma: 0.1", [1, 1], "stepvalue is missing"),
        (
            "base_lr: 1 gamma: 0.5 lr_policy: 'multistep' stepvalue: 4 stepvalue: 2 stepvalue: 9",
            [1, 1, 1, 1, 0.5, 0.25, 0.25, 0.25, 0.25, 0.125],
            "the stepvalues do not ascend",
        ),
        ("base_lr: 1 lr_policy: 'fixed' stepvalue: 4 stepvalue: 2", [1, 1], ""),
    ],
)
def test_odd_rates_of_caffe_are_taken_with_a_warning(
    text: str, rates: list[float], oddity: str
) -> None:
    rate = rate_policy(rate_solver(text))
    assert [rate(t) for t in range(len(rates))] == rates
    found = rate_oddities(rate_solver(text).param)
    assert len(found) == bool(oddity) and oddity in "".join(found)
