"""Each update rule against its formula, worked out in float64 by hand, over several steps."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from ps_server.protocol.settings import Regularization, Rule, RuleKind
from ps_server.rules import change, clip_factor, history_count, plain_sum, sum_of_squares, update

Floats = np.ndarray
M, M2, EPS, RMS = 0.9, 0.99, 1e-3, 0.98


def sgd(g: Floats, h: list[Floats], r: float, t: int) -> Floats:
    h[0] = M * h[0] + r * g
    return -h[0]


def nesterov(g: Floats, h: list[Floats], r: float, t: int) -> Floats:
    old, h[0] = h[0], M * h[0] + r * g
    return -((1 + M) * h[0] - M * old)


def adagrad(g: Floats, h: list[Floats], r: float, t: int) -> Floats:
    h[0] = h[0] + g**2
    return -r * g / (np.sqrt(h[0]) + EPS)


def rmsprop(g: Floats, h: list[Floats], r: float, t: int) -> Floats:
    h[0] = RMS * h[0] + (1 - RMS) * g**2
    return -r * g / (np.sqrt(h[0]) + EPS)


def adadelta(g: Floats, h: list[Floats], r: float, t: int) -> Floats:
    h[0] = M * h[0] + (1 - M) * g**2
    u = g * np.sqrt((h[1] + EPS) / (h[0] + EPS))
    h[1] = M * h[1] + (1 - M) * u**2
    return -r * u


def adam(g: Floats, h: list[Floats], r: float, t: int) -> Floats:
    h[0] = M * h[0] + (1 - M) * g
    h[1] = M2 * h[1] + (1 - M2) * g**2
    correction = math.sqrt(1 - M2 ** (t + 1)) / (1 - M ** (t + 1))
    return -r * correction * h[0] / (np.sqrt(h[1]) + EPS)


FORMULAS: dict[RuleKind, Callable[[Floats, list[Floats], float, int], Floats]] = {
    RuleKind.SGD: sgd,
    RuleKind.NESTEROV: nesterov,
    RuleKind.ADAGRAD: adagrad,
    RuleKind.RMSPROP: rmsprop,
    RuleKind.ADADELTA: adadelta,
    RuleKind.ADAM: adam,
}


@pytest.mark.parametrize("regularization", Regularization)
@pytest.mark.parametrize("kind", FORMULAS)
def test_rule_follows_its_formula(kind: RuleKind, regularization: Regularization) -> None:
    rule = Rule(
        kind=kind,
        momentum=M,
        momentum2=M2,
        delta=EPS,
        rms_decay=RMS,
        decay=0.05,
        regularization=regularization,
        rate_factor=2.0,
    )
    random = np.random.default_rng(0)
    w = random.standard_normal(7)
    w[0] = 0.0  # sign(0) is 0
    h = [np.zeros(7) for _ in range(history_count(kind))]
    value = torch.from_numpy(w).float()
    history = [torch.zeros(7) for _ in h]
    for step in range(5):
        g = random.standard_normal(7)
        penalty = w if regularization is Regularization.L2 else np.sign(w)
        w = w + FORMULAS[kind](g + 0.05 * penalty, h, 2 * 0.1, step)
        gradient = torch.from_numpy(g).float()
        value += change(rule, gradient, history, value, rate=0.1, step=step)
        np.testing.assert_allclose(value.numpy(), w, rtol=2e-5, atol=1e-6)


def test_a_mean_is_the_gradient_itself_whatever_was_there() -> None:
    value = torch.tensor([1e20, math.nan, math.inf])
    gradient = torch.tensor([1e-20, 2.0, 3.0])
    assert history_count(RuleKind.MEAN) == 0
    update(Rule(kind=RuleKind.MEAN), gradient, [], value, rate=0.5, step=0)
    assert torch.equal(value, gradient)


@pytest.mark.parametrize("kind", FORMULAS)
def test_cutting_a_table_changes_no_bit(kind: RuleKind) -> None:
    generator = torch.Generator().manual_seed(1)
    rule = Rule(kind=kind, momentum=0.9, decay=0.01)

    def run(cuts: list[slice]) -> torch.Tensor:
        generator.manual_seed(1)
        value = torch.randn(1001, generator=generator)
        history = [torch.zeros(1001) for _ in range(history_count(kind))]
        for step in range(3):
            gradient = torch.randn(1001, generator=generator)
            for cut in cuts:
                part = change(
                    rule,
                    gradient[cut].clone(),
                    [h[cut] for h in history],
                    value[cut],
                    rate=0.1,
                    step=step,
                )
                value[cut] += part
        return value

    whole = run([slice(0, 1001)])
    pieces = run([slice(0, 13), slice(13, 700), slice(700, 1001)])
    assert torch.equal(whole, pieces)


def test_sum_of_squares_is_taken_in_double() -> None:
    assert sum_of_squares(torch.full((1_000_000,), 1e-3)) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(
    ("total", "clip", "factor"),
    [(100.0, 5.0, 0.5), (100.0, 10.0, 1.0), (1.0, 5.0, 1.0), (1e9, None, 1.0)],
)
def test_clip_factor(total: float, clip: float | None, factor: float) -> None:
    assert clip_factor(total, clip) == factor


def test_a_plain_sum_has_the_same_bits_on_every_python() -> None:
    """Python's own sum is 4.0 from 3.12 on."""
    assert plain_sum([-1e17, 1.0, 1e17, 3.0]) == 3.0
    assert plain_sum([]) == 0.0


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="no AVX-512 here")
def test_wider_vectors_change_no_bit() -> None:
    """AVX2, and SSE2 in MKL, have the bits of AVX-512, for all rules and for the norm."""
    program = """
import hashlib, numpy as np, torch
from ps_server.protocol.settings import Rule, RuleKind
from ps_server.rules import history_count, sum_of_squares, update
draw = lambda seed: torch.from_numpy(np.random.default_rng(seed).standard_normal(10_003).astype(np.float32))
bits = hashlib.md5()
for kind in RuleKind:
    value, history = draw(0), [torch.zeros(10_003) for _ in range(history_count(kind))]
    for step in range(3):
        update(Rule(kind=kind, momentum=0.9, decay=0.01), draw(step + 1), history, value, rate=0.1, step=step)
    bits.update(b"".join(tensor.numpy().tobytes() for tensor in (value, *history)))
print(bits.hexdigest(), sum_of_squares(draw(9)).hex())
"""
    found = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **instructions},
            capture_output=True,
            text=True,
            timeout=50,
            check=True,
        ).stdout
        for instructions in (
            {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"},
            {"ATEN_CPU_CAPABILITY": "avx512"},
        )
    ]
    assert found[0] == found[1]
