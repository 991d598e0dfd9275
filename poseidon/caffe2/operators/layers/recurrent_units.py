"""One step of an LSTM and of a GRU, with sequences of different lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.input_shapes import check_count, check_tensor
from poseidon.caffe2.operators.registry import operator


def _valid(rest: tuple[Tensor, ...], sequence_lengths: bool) -> Tensor | bool:
    """Return as a column which sequences are not over at this step: the last input is the step."""
    if not sequence_lengths:
        return True
    lengths, step = rest
    check_count("the number of the step", step, 1)
    return (step.reshape(()) < lengths).reshape(-1, 1)


def _chosen(valid: Tensor | bool, new: Tensor, old: Tensor, drop: bool) -> Tensor:
    """Return `new` for the sequences that are not over, for others `old`, or 0 where states are
    dropped.
    """
    if isinstance(valid, bool):
        return new
    return torch.where(valid, new, 0) if drop else torch.where(valid, new, old)


def _lstm_rule(maker: GradientMaker) -> None:
    inputs = [*maker.forward.input, maker.O(0), maker.O(1), maker.GO(0), maker.GO(1)]
    maker.op("LSTMUnitGradient", inputs, [maker.GI(0), maker.GI(1), maker.GI(2)])


def _lstm_gates(gates: Tensor, forget_bias: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    i, f, o, g = gates.chunk(4, -1)
    return torch.sigmoid(i), torch.sigmoid(f + forget_bias), torch.sigmoid(o), torch.tanh(g)


@operator("LSTMUnit", gradient=_lstm_rule, inputs=(4, 5), shapes="1 N D, 1 N D, 1 N 4D")
def lstm_unit(
    hidden: Tensor,
    cell: Tensor,
    gates: Tensor,
    *rest: Tensor,
    forget_bias: float = 0.0,
    sequence_lengths: bool = True,
    drop_states: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the hidden state and the cell after one step.

    Args:
        hidden, cell: states of shape (1, sequences, D).
        gates: shape (1, sequences, 4 D): input, forget, output, new.
        rest: the lengths of the sequences (with `sequence_lengths`) and the number of the step.
        forget_bias: added to the forget gate.
        sequence_lengths: whether sequences have lengths.
        drop_states: whether the states of a sequence that is over are 0; else they stay.
    """
    i, f, o, g = _lstm_gates(gates, forget_bias)
    valid = _valid(rest, sequence_lengths)
    new = f * cell + i * g
    return (
        _chosen(valid, o * torch.tanh(new), hidden, drop_states),
        _chosen(valid, new, cell, drop_states),
    )


@operator("LSTMUnitGradient", inputs=(8, 9), expected="1 N D, 1 N D, 1 N 4D")
def lstm_unit_gradient(
    hidden: Tensor,
    cell: Tensor,
    gates: Tensor,
    *rest: Tensor,
    forget_bias: float = 0.0,
    sequence_lengths: bool = True,
    drop_states: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden state, cell and gates of `LSTMUnit`."""
    *steps, old, new, dhidden, dnew = rest
    for name, value in (
        ("hidden state", old),
        ("cell", new),
        ("gradient", dhidden),
        ("gradient", dnew),
    ):
        check_tensor(f"the {name} after the step", value, tuple(hidden.shape))
    i, f, o, g = _lstm_gates(gates, forget_bias)
    valid = _valid(tuple(steps), sequence_lengths)
    squashed = torch.tanh(new)
    dcell = dnew + dhidden * o * (1 - squashed * squashed)
    dgates = torch.cat(
        [
            dcell * g * i * (1 - i),
            dcell * cell * f * (1 - f),
            dhidden * squashed * o * (1 - o),
            dcell * i * (1 - g * g),
        ],
        -1,
    )
    nothing = torch.zeros_like(dhidden)
    return (
        _chosen(valid, nothing, dhidden, drop_states),
        _chosen(valid, dcell * f, dnew, drop_states),
        _chosen(valid, dgates, dgates, True),
    )


def _gru_rule(maker: GradientMaker) -> None:
    inputs = [*maker.forward.input, maker.O(0), maker.GO(0)]
    maker.op("GRUUnitGradient", inputs, [maker.GI(0), maker.GI(1)])


@operator("GRUUnit", gradient=_gru_rule, inputs=(3, 4), shapes="1 N D, 1 N 3D")
def gru_unit(
    hidden: Tensor,
    gates: Tensor,
    *rest: Tensor,
    sequence_lengths: bool = True,
    drop_states: bool = False,
) -> Tensor:
    """Return the hidden state after one step.

    Args:
        hidden: shape (1, sequences, D).
        gates: shape (1, sequences, 3 D): reset (used before this operator), update, new state.
        rest: the lengths of the sequences (with `sequence_lengths`) and the number of the step.
        sequence_lengths: whether sequences have lengths.
        drop_states: whether the state of a sequence that is over is 0; else it stays.
    """
    _, update, new = gates.chunk(3, -1)
    update, new = torch.sigmoid(update), torch.tanh(new)
    valid = _valid(rest, sequence_lengths)
    return _chosen(valid, hidden * update + new * (1 - update), hidden, drop_states)


@operator("GRUUnitGradient", inputs=(5, 6), expected="1 N D, 1 N 3D")
def gru_unit_gradient(
    hidden: Tensor,
    gates: Tensor,
    *rest: Tensor,
    sequence_lengths: bool = True,
    drop_states: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden state and gates of `GRUUnit`."""
    *steps, new, dy = rest
    for name, value in (("hidden state", new), ("gradient", dy)):
        check_tensor(f"the {name} after the step", value, tuple(hidden.shape))
    reset, update, new = gates.chunk(3, -1)
    update, new = torch.sigmoid(update), torch.tanh(new)
    valid = _valid(tuple(steps), sequence_lengths)
    dgates = torch.cat(
        [
            torch.zeros_like(reset),
            (hidden - new) * dy * update * (1 - update),
            (1 - new * new) * dy * (1 - update),
        ],
        -1,
    )
    return _chosen(valid, dy * update, dy, drop_states), _chosen(valid, dgates, dgates, True)
