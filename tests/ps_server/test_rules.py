"""Each update rule against its formula, worked out in float64 by hand, over several steps."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ps_server.protocol.settings import NewtonSchulz, Regularization, Rule, RuleKind
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


ROWS, COLUMNS = 24, 10
TORCHS = {
    "sgd": (
        Rule(kind=RuleKind.TORCH_SGD, decay=0.01),
        lambda w, r: torch.optim.SGD(w, lr=r, weight_decay=0.01),
    ),
    "momentum": (
        Rule(kind=RuleKind.TORCH_SGD, momentum=0.9),
        lambda w, r: torch.optim.SGD(w, lr=r, momentum=0.9),
    ),
    "dampening": (
        Rule(kind=RuleKind.TORCH_SGD, momentum=0.9, dampening=0.4, decay=0.01),
        lambda w, r: torch.optim.SGD(w, lr=r, momentum=0.9, dampening=0.4, weight_decay=0.01),
    ),
    "nesterov": (
        Rule(kind=RuleKind.TORCH_SGD, momentum=0.9, nesterov=True, decay=0.01),
        lambda w, r: torch.optim.SGD(w, lr=r, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "adam": (
        Rule(kind=RuleKind.TORCH_ADAM, momentum=0.9, momentum2=0.999, delta=1e-3, decay=0.01),
        lambda w, r: torch.optim.Adam(w, lr=r, eps=1e-3, weight_decay=0.01),
    ),
    "adamw": (
        Rule(kind=RuleKind.ADAMW, momentum=0.8, momentum2=0.99, delta=1e-8, decay=0.1),
        lambda w, r: torch.optim.AdamW(w, lr=r, betas=(0.8, 0.99), weight_decay=0.1),
    ),
    "adagrad": (
        Rule(kind=RuleKind.ADAGRAD, delta=1e-10, decay=0.01),
        lambda w, r: torch.optim.Adagrad(w, lr=r, weight_decay=0.01),
    ),
    "rmsprop": (
        Rule(kind=RuleKind.RMSPROP, rms_decay=0.99, delta=1e-8, decay=0.01),
        lambda w, r: torch.optim.RMSprop(w, lr=r, weight_decay=0.01),
    ),
    "adadelta": (
        Rule(kind=RuleKind.ADADELTA, momentum=0.9, delta=1e-6, decay=0.01),
        lambda w, r: torch.optim.Adadelta(w, lr=r, weight_decay=0.01),
    ),
    "muon": (
        Rule(
            kind=RuleKind.MUON,
            momentum=0.95,
            nesterov=True,
            delta=1e-7,
            decay=0.1,
            matrix=NewtonSchulz(columns=COLUMNS, rate_factor=math.sqrt(ROWS / COLUMNS)),
        ),
        lambda w, r: torch.optim.Muon(w, lr=r),
    ),
    "muon, wide, without Nesterov": (
        Rule(
            kind=RuleKind.MUON,
            momentum=0.9,
            delta=1e-7,
            decay=0.1,
            matrix=NewtonSchulz(columns=ROWS, rate_factor=0.2 * math.sqrt(ROWS), steps=3),
        ),
        lambda w, r: torch.optim.Muon(
            w, lr=r, momentum=0.9, nesterov=False, ns_steps=3, adjust_lr_fn="match_rms_adamw"
        ),
    ),
}


@pytest.mark.parametrize("name", TORCHS)
def test_rules_are_torchs_over_a_thousand_steps(name: str) -> None:
    """At most 1e-6 of the largest value, at rates that change and for a rate factor of a group."""
    rule, make = TORCHS[name]
    columns = COLUMNS if rule.matrix is None else rule.matrix.columns
    expected = torch.nn.Parameter(torch.linspace(-1, 1, ROWS * COLUMNS).view(-1, columns))
    value = expected.detach().clone().view(-1)
    history = [torch.zeros_like(value) for _ in range(history_count(rule.kind))]
    optimizer = make([expected], 0.0)
    random = torch.Generator().manual_seed(7)
    for step in range(1000):
        gradient = torch.randn(value.numel(), generator=random) * (1 + step % 5)
        rate = 0.002 * (1 + math.cos(math.pi * step / 1000)) * (step % 7 != 3)
        optimizer.param_groups[0]["lr"] = rate
        expected.grad = gradient.view(-1, columns).clone()
        optimizer.step()
        update(rule, gradient, history, value, rate=rate, step=step)
    assert value.numpy() == pytest.approx(
        expected.detach().view(-1).numpy(), abs=1e-6 * float(expected.detach().abs().max()), rel=0
    )


def lion(g: Floats, h: list[Floats], r: float, t: int) -> Floats:
    direction = np.sign(M * h[0] + (1 - M) * g)
    h[0] = M2 * h[0] + (1 - M2) * g
    return -r * direction


def test_lion_follows_its_paper() -> None:
    rule = Rule(kind=RuleKind.LION, momentum=M, momentum2=M2, decay=0.05)
    random = np.random.default_rng(3)
    w, h = random.standard_normal(7), [np.zeros(7)]
    value, history = torch.from_numpy(w).float(), [torch.zeros(7)]
    for step in range(20):
        g = random.standard_normal(7)
        w = w * (1 - 0.1 * 0.05) + lion(g, h, 0.1, step)
        update(rule, torch.from_numpy(g).float(), history, value, rate=0.1, step=step)
    np.testing.assert_allclose(value.numpy(), w, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", TORCHS)
def test_a_change_is_what_an_update_adds(name: str) -> None:
    """As workers compute it at staleness above 0."""
    rule, _ = TORCHS[name]
    values = [torch.linspace(-1, 1, ROWS * COLUMNS) for _ in range(2)]
    histories = [
        [torch.zeros(ROWS * COLUMNS) for _ in range(history_count(rule.kind))] for _ in range(2)
    ]
    for step in range(3):
        gradient = torch.linspace(2, -1, ROWS * COLUMNS).roll(step)
        update(rule, gradient.clone(), histories[0], values[0], rate=0.1, step=step)
        moved = change(rule, gradient, histories[1], values[1], rate=0.1, step=step)
        assert moved is gradient
        values[1].add_(moved)
        torch.testing.assert_close(values[1], values[0], rtol=0, atol=1e-6)


ELEMENTWISE = [k for k in RuleKind if k not in (RuleKind.MUON, RuleKind.MEAN)]


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_cutting_a_table_changes_no_bit(kind: RuleKind) -> None:
    generator = torch.Generator().manual_seed(1)
    rule = Rule(kind=kind, momentum=0.9, decay=0.01)

    def run(apply: Callable[..., None], cuts: list[slice]) -> torch.Tensor:
        generator.manual_seed(1)
        value = torch.randn(1001, generator=generator)
        history = [torch.zeros(1001) for _ in range(history_count(kind))]
        for step in range(3):
            gradient = torch.randn(1001, generator=generator)
            for cut in cuts:
                parts = [h[cut] for h in history]
                apply(rule, gradient[cut].clone(), parts, value[cut], rate=0.1, step=step)
        return value

    def add_change(rule: Rule, *tensors: Any, **numbers: Any) -> None:
        tensors[-1].add_(change(rule, *tensors, **numbers))

    for apply in (update, add_change):
        whole = run(apply, [slice(0, 1001)])
        pieces = run(apply, [slice(0, 13), slice(13, 700), slice(700, 1001)])
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
    """AVX2, and SSE2 in MKL, have the bits of AVX-512, for all rules of elements and the norm."""
    program = """
import hashlib, numpy as np, torch
from ps_server.protocol.settings import Rule, RuleKind
from ps_server.rules import history_count, sum_of_squares, update
draw = lambda seed: torch.from_numpy(np.random.default_rng(seed).standard_normal(10_003).astype(np.float32))
bits = hashlib.md5()
for kind in RuleKind:
    if kind is RuleKind.MUON:
        continue
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
