"""Steps of an LSTM and a GRU."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.caffe2_operators import Array, assert_gradients, numbers, run

HIDDEN, CELL = numbers(1, 3, 2), numbers(1, 3, 2, seed=1)
LENGTHS, STEP = np.array([1, 2, 3], np.int32), np.array([1], np.int32)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("drop", [0, 1])
@pytest.mark.parametrize("with_lengths", [0, 1])
def test_a_step_of_an_lstm(drop: int, with_lengths: int) -> None:
    gates = numbers(1, 3, 8)
    i, f, o, g = np.split(gates, 4, -1)
    cell = sigmoid(f + 0.5) * CELL + sigmoid(i) * np.tanh(g)
    hidden = sigmoid(o) * np.tanh(cell)
    if with_lengths:
        cell[0, 0], hidden[0, 0] = (0, 0) if drop else (CELL[0, 0], HIDDEN[0, 0])
    inputs = [HIDDEN, CELL, gates, *([LENGTHS] if with_lengths else []), STEP]
    arguments = {"forget_bias": 0.5, "drop_states": drop, "sequence_lengths": with_lengths}
    made = run("LSTMUnit", inputs, 2, **arguments)
    np.testing.assert_allclose(made[0], hidden, rtol=1e-5)
    np.testing.assert_allclose(made[1], cell, rtol=1e-5)
    assert_gradients("LSTMUnit", inputs, [0, 1, 2], 2, (0, 1), **arguments)


@pytest.mark.parametrize("drop", [0, 1])
@pytest.mark.parametrize("with_lengths", [0, 1])
def test_a_step_of_a_gru(drop: int, with_lengths: int) -> None:
    gates = numbers(1, 3, 6)
    _, update, new = np.split(gates, 3, -1)
    hidden = HIDDEN * sigmoid(update) + np.tanh(new) * (1 - sigmoid(update))
    if with_lengths:
        hidden[0, 0] = 0 if drop else HIDDEN[0, 0]
    inputs = [HIDDEN, gates, *([LENGTHS] if with_lengths else []), STEP]
    arguments = {"drop_states": drop, "sequence_lengths": with_lengths}
    np.testing.assert_allclose(run("GRUUnit", inputs, **arguments)[0], hidden, rtol=1e-5)
    assert_gradients("GRUUnit", inputs, [0, 1], **arguments)
