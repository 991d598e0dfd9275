"""The formulas, beside numbers worked out by hand and beside the cost rule's own."""

from __future__ import annotations

import pytest

from benchmarks.testbed.formulas import expected, plan_of
from benchmarks.testbed.shapes import layers_of
from benchmarks.testbed.worker_settings import DdpSettings, PoseidonSettings, TrainingSettings
from poseidon.observe.plan.shapes import LayerShape, elements

LAYERS = (
    LayerShape(name="conv", tensors=((10, 10, 3, 3), (10,)), work=1),  # 910
    LayerShape(name="fc", tensors=((1000, 500), (1000,)), work=1, fully_connected=True),  # 501 000
)
TRAINING = TrainingSettings(layers=LAYERS, batch=8, compute_s=0.0)
MODEL = 4 * (910 + 501_000)


def test_one_process_moves_nothing() -> None:
    assert expected(TRAINING, PoseidonSettings(), 1).busiest == 0
    assert expected(TRAINING, DdpSettings(), 1).busiest == 0


@pytest.mark.parametrize("how", [DdpSettings(), PoseidonSettings(exchange="ps")])
def test_the_server_moves_what_a_ring_moves(how: DdpSettings | PoseidonSettings) -> None:
    assert expected(TRAINING, how, 4).worker == pytest.approx(2 * MODEL * 3 / 4)


def test_a_hook_sends_less_round_the_ring() -> None:
    fc, conv = 1000 + 500, 10 + 90  # n + m of the two weights
    vectors = 10 + 1000
    for hook, payload in (
        ("fp16", MODEL / 2),
        ("powersgd:1", 4 * (fc + conv + vectors)),
        ("powersgd:4", 4 * (4 * fc + 4 * conv + vectors)),
        ("powersgd:8", 4 * (8 * fc + 900 + vectors)),  # 8 x 100 elements are not half of 900
        ("post-local:8", MODEL / 8),
    ):
        assert expected(TRAINING, DdpSettings(hook=hook), 4).worker == pytest.approx(
            2 * payload * 3 / 4
        )


@pytest.mark.parametrize("exchange", ["svb", "hybrid"])
def test_factors_move_rows(exchange: str) -> None:
    served = 4 * (910 + 1000)
    factors = 4 * 8 * 3 * (1000 + 500)
    assert expected(TRAINING, PoseidonSettings(exchange=exchange), 4).worker == pytest.approx(
        2 * served * 3 / 4 + factors
    )


def test_hosts_that_only_serve_halve_a_workers_bytes() -> None:
    links = expected(TRAINING, PoseidonSettings(exchange="ps", servers=4), 4)
    assert (links.worker, links.server) == (MODEL, MODEL)
    assert expected(TRAINING, PoseidonSettings(exchange="ps", servers=2), 4).busiest == 2 * MODEL


@pytest.mark.parametrize("exchange", ["ps", "svb", "hybrid"])
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_the_plan_of_the_job_comes_to_the_same(exchange: str, workers: int) -> None:
    """The cost rule counts both directions, and rounds up for each tensor."""
    training = TrainingSettings(layers=layers_of("alexnet"), batch=32, compute_s=0.0)
    how = PoseidonSettings(exchange=exchange)
    assert expected(training, how, workers).busiest == pytest.approx(
        plan_of(training, how, workers).bytes / 2, rel=1e-4
    )
    assert elements(training.layers) == 60_965_224


def test_codecs_and_local_steps_divide_the_bytes() -> None:
    plain = expected(TRAINING, PoseidonSettings(exchange="ps"), 4).busiest
    rounds = expected(TRAINING, PoseidonSettings.parse("ps+H8"), 4).busiest
    assert rounds == pytest.approx(plain / 8)
    # no factors travel
    assert expected(TRAINING, PoseidonSettings.parse("hybrid+H8"), 4).busiest == rounds
    assert (
        plain / 4 < expected(TRAINING, PoseidonSettings.parse("ps+int8"), 4).busiest < plain / 3.8
    )
    assert expected(TRAINING, PoseidonSettings.parse("ps+float16"), 4).busiest == pytest.approx(
        plain / 2
    )
