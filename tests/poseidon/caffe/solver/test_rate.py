"""Each rate policy against its formula, and what a wrong one says."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from google.protobuf import text_format

from poseidon.caffe.proto.caffe_pb2 import SolverParameter
from poseidon.caffe.proto.definition import SolverDefinition
from poseidon.caffe.solver.rate import POLICIES, current_step, rate_oddities, rate_policy
from poseidon.errors import DefinitionError


def solver(text: str) -> SolverDefinition:
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
    rate = rate_policy(solver(f"base_lr: 0.1 {text}"))
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
    assert rate_policy(solver("base_lr: 0.1 " + text))(iteration) == pytest.approx(
        expected, nan_ok=True
    )


def test_equal_stepvalues_count_one_iteration_after_another_as_in_caffe() -> None:
    steps = solver(
        "lr_policy: 'multistep' stepvalue: 3 stepvalue: 3 stepvalue: 4 base_lr: 1 gamma: 2"
    )
    assert [rate_policy(steps)(t) for t in range(2, 8)] == [1, 2, 4, 8, 8, 8]
    assert [current_step(steps.param, t + 1) for t in range(2, 8)] == [0, 1, 2, 3, 3, 3]


def test_sigmoid_does_not_overflow_late_or_early() -> None:
    rate = rate_policy(solver("base_lr: 1 lr_policy: 'sigmoid' gamma: -10 stepsize: 500"))
    assert rate(0) == 1
    assert rate(10**6) == 0


MISTAKES = {
    "unknown": ("base_lr: 1 lr_policy: 'stepp'", "unknown policy 'stepp'; did you mean 'step'?"),
    "nothing near": ("base_lr: 1 lr_policy: 'zzz'", "expected one of fixed, step"),
    "no policy": ("base_lr: 1", "unknown policy ''"),
    "no stepsize": ("base_lr: 1 lr_policy: 'step' gamma: 1", "'step' needs stepsize"),
    "stepsize 0": (
        "base_lr: 1 lr_policy: 'step' gamma: 1 stepsize: 0",
        "expected a positive number, found 0",
    ),
}


@pytest.mark.parametrize(("text", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(DefinitionError, match=r"solver\.prototxt") as caught:
        rate_policy(solver(text))
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
        (
            "base_lr: 1 gamma: 0.5 lr_policy: 'multistep' stepvalue: 4 stepvalue: 2 stepvalue: 9",
            [1, 1, 1, 1, 0.5, 0.25, 0.25, 0.25, 0.25, 0.125],
            "the stepvalues do not ascend",
        ),
        ("base_lr: 1 lr_policy: 'fixed' stepvalue: 4 stepvalue: 2", [1, 1], ""),
    ],
)
def test_what_caffe_takes_is_taken_with_a_warning(
    text: str, rates: list[float], oddity: str
) -> None:
    rate = rate_policy(solver(text))
    assert [rate(t) for t in range(len(rates))] == rates
    found = rate_oddities(solver(text).param)
    assert len(found) == bool(oddity) and oddity in "".join(found)
