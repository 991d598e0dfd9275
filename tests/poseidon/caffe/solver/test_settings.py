"""A solver definition, checked."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from poseidon.caffe.proto.caffe_pb2 import SolverParameter
from poseidon.caffe.proto.definition import SolverDefinition
from poseidon.caffe.solver.settings import oddities, solver_settings
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
    assert (found.iter_size, found.clip, found.average_loss) == (1, None, 1)
    assert found.random_seed is None
    assert found.snapshot_after_train
    assert found.test_initialization


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
