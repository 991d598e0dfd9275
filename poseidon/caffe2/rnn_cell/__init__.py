"""Cells of recurrent networks, and networks of them over sequences of shape (T, N, D)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from poseidon.caffe2 import workspace
from poseidon.caffe2.rnn_cell.cell import RNNCell
from poseidon.caffe2.rnn_cell.cells import BasicRNNCell, LSTMCell, LSTMInitializer
from poseidon.caffe2.rnn_cell.layers import MultiRNNCell, UnrolledCell

__all__ = [
    "LSTM",
    "BasicRNN",
    "BasicRNNCell",
    "GetLSTMParamNames",
    "InitFromLSTMParams",
    "LSTMCell",
    "LSTMInitializer",
    "MultiRNNCell",
    "RNNCell",
    "UnrolledCell",
]

WEIGHTS = ("input_gate_w", "forget_gate_w", "output_gate_w", "cell_w")
BIASES = ("input_gate_b", "forget_gate_b", "output_gate_b", "cell_b")


def _network(
    cells: Sequence[RNNCell],
    scope: str | None,
    model: Any,
    input_blob: Any,
    seq_lengths: Any,
    initial_states: Sequence[Any] | None,
    outputs_with_grads: Sequence[int],
    forward_only: bool,
    return_last_layer_only: bool,
    static_rnn_unroll_size: int | None,
) -> tuple[Any, ...]:
    """Add the network of cells, and return the results of its last layer, or of all."""
    below = sum(2 * len(cell.get_state_names()) for cell in cells[:-1])
    cell = cells[0] if len(cells) == 1 else MultiRNNCell(cells, name=scope, forward_only=forward_only)
    if static_rnn_unroll_size is not None:
        cell = UnrolledCell(cell, static_rnn_unroll_size)
    _, results = cell.apply_over_sequence(
        model=model,
        inputs=input_blob,
        seq_lengths=seq_lengths,
        initial_states=initial_states,
        outputs_with_grads=[below + index for index in outputs_with_grads],
    )
    return tuple(results[below:]) if return_last_layer_only else tuple(results)


def LSTM(
    model: Any,
    input_blob: Any,
    seq_lengths: Any,
    initial_states: Sequence[Any] | None,
    dim_in: int,
    dim_out: int | Sequence[int],
    scope: str | None = None,
    outputs_with_grads: Sequence[int] = (0,),
    return_params: bool = False,
    memory_optimization: bool = False,
    forget_bias: float = 0.0,
    forward_only: bool = False,
    drop_states: bool = False,
    return_last_layer_only: bool = True,
    static_rnn_unroll_size: int | None = None,
    **cell_kwargs: Any,
) -> tuple[Any, ...]:
    """Add an LSTM over a sequence.

    Args:
        model: the model.
        input_blob: the sequence, shape (T, N, dim_in).
        seq_lengths: the length of each of the N sequences, or None.
        initial_states: hidden state and cell of each layer, or None.
        dim_in: of the input.
        dim_out: of the states; a list makes one layer for each entry.
        scope: of the blobs.
        outputs_with_grads: the results of the last layer from which gradients come.
        return_params: whether the names of the parameters are a result too.
        memory_optimization: kept for Caffe2's scripts.
        forget_bias: added to the forget gate.
        forward_only: whether it is never differentiated.
        drop_states: whether the states of a sequence that is over are 0; else they stay.
        return_last_layer_only: whether the results are those of the last layer, or of all.
        static_rnn_unroll_size: T, where the steps are to be operators of the net itself.
        cell_kwargs: see `LSTMCell`.

    Returns:
        for hidden state and cell all values, (T, N, D), and the last, (1, N, D).
    """
    sizes = [dim_out] if isinstance(dim_out, int) else list(dim_out)
    cells = [
        LSTMCell(
            input_size=dim_in if index == 0 else sizes[index - 1],
            hidden_size=size,
            forget_bias=forget_bias,
            memory_optimization=memory_optimization,
            drop_states=drop_states,
            name=scope if len(sizes) == 1 else f"{scope}/layer_{index}",
            forward_only=forward_only,
            **cell_kwargs,
        )
        for index, size in enumerate(sizes)
    ]
    results = _network(
        cells, scope, model, input_blob, seq_lengths, initial_states, outputs_with_grads, forward_only,
        return_last_layer_only, static_rnn_unroll_size,
    )  # fmt: skip
    if return_params:
        return (
            *results,
            {"input": cells[0].get_input_params(), "recurrent": cells[0].get_recurrent_params()},
        )
    return results


def BasicRNN(
    model: Any,
    input_blob: Any,
    seq_lengths: Any,
    initial_states: Sequence[Any] | None,
    dim_in: int,
    dim_out: int | Sequence[int],
    scope: str | None = None,
    outputs_with_grads: Sequence[int] = (0,),
    return_params: bool = False,
    memory_optimization: bool = False,
    forget_bias: float = 0.0,
    forward_only: bool = False,
    drop_states: bool = False,
    return_last_layer_only: bool = True,
    static_rnn_unroll_size: int | None = None,
    **cell_kwargs: Any,
) -> tuple[Any, ...]:
    """Add cells h' = f(W_h h + W_i x + b) over a sequence; see `LSTM`. `activation` is `tanh` or `relu`."""
    assert not return_params, "return_params is not supported for BasicRNN"
    sizes = [dim_out] if isinstance(dim_out, int) else list(dim_out)
    cells = [
        BasicRNNCell(
            input_size=dim_in if index == 0 else sizes[index - 1],
            hidden_size=size,
            drop_states=drop_states,
            name=scope if len(sizes) == 1 else f"{scope}/layer_{index}",
            forward_only=forward_only,
            **cell_kwargs,
        )
        for index, size in enumerate(sizes)
    ]
    return _network(
        cells, scope, model, input_blob, seq_lengths, initial_states, outputs_with_grads, forward_only,
        return_last_layer_only, static_rnn_unroll_size,
    )  # fmt: skip


def GetLSTMParamNames() -> dict[str, list[str]]:
    """Return the names of the weights and biases of an LSTM's gates, in the order of its parameters."""
    return {"weights": list(WEIGHTS), "biases": list(BIASES)}


def InitFromLSTMParams(
    lstm_pblobs: Mapping[str, Mapping[str, Any]], param_values: Mapping[str, Mapping[str, np.ndarray]]
) -> None:
    """Set the parameters of an LSTM from arrays by gate.

    Args:
        lstm_pblobs: what `LSTM` returns with `return_params`.
        param_values: for `input` and `recurrent` the arrays by the names of `GetLSTMParamNames`.
    """
    for kind, arrays in param_values.items():
        for group, names in GetLSTMParamNames().items():
            blob = str(lstm_pblobs[kind][group])
            shape = workspace.FetchBlob(blob).shape
            joined = np.concatenate([arrays[name].flatten() for name in names])
            workspace.FeedBlob(blob, joined.reshape(shape).astype(np.float32))
