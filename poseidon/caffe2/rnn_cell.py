"""Recurrent layers: LSTM and its forms, with attention, over sequences of shape (T, N, D)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from poseidon.caffe2 import workspace
from poseidon.caffe2.attention import AttentionType
from poseidon.caffe2.rnn.attention_cells import (
    AttentionCell,
    LSTMWithAttentionCell,
    MILSTMWithAttentionCell,
)
from poseidon.caffe2.rnn.cell import (
    BasicRNNCell,
    LayerNormLSTMCell,
    LayerNormMILSTMCell,
    LSTMCell,
    LSTMInitializer,
    MILSTMCell,
    RNNCell,
)
from poseidon.caffe2.rnn.composite_cells import (
    DropoutCell,
    MultiRNNCell,
    MultiRNNCellInitializer,
    UnrolledCell,
)

__all__ = [
    "LSTM",
    "MILSTM",
    "_LSTM",
    "AttentionCell",
    "AttentionType",
    "BasicRNN",
    "BasicRNNCell",
    "DropoutCell",
    "GetLSTMParamNames",
    "InitFromLSTMParams",
    "LSTMCell",
    "LSTMInitializer",
    "LSTMWithAttention",
    "LSTMWithAttentionCell",
    "LayerNormLSTM",
    "LayerNormLSTMCell",
    "LayerNormMILSTM",
    "LayerNormMILSTMCell",
    "MILSTMCell",
    "MILSTMWithAttention",
    "MILSTMWithAttentionCell",
    "MultiRNNCell",
    "MultiRNNCellInitializer",
    "RNNCell",
    "UnrolledCell",
    "layered_LSTM",
]


def _LSTM(
    cell_class: Any,
    model: Any,
    input_blob: Any,
    seq_lengths: Any,
    initial_states: Sequence[Any] | None,
    dim_in: int,
    dim_out: Any,
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
    """Add a recurrent network of one layer or several to a model.

    Args:
        cell_class: `LSTMCell`, or a cell with the same arguments.
        model: the model.
        input_blob: the sequence, of shape (T, N, D).
        seq_lengths: the length of each sequence, or None.
        initial_states: the first states of all layers, or None: they are parameters.
        dim_in: D.
        dim_out: the number of units; a list has one number for each layer.
        scope: the scope of its blobs.
        outputs_with_grads: which of the last layer's (h_all, h_last, c_all, c_last) get gradients.
        return_params: whether the names of the parameters are returned too, as the last value.
        memory_optimization: whether the gradient makes the gates of each step again.
        forget_bias: what is added to the forget gate.
        forward_only: whether there is no gradient.
        drop_states: whether states behind the end of a sequence are zero.
        return_last_layer_only: whether the outputs of the other layers are left out.
        static_rnn_unroll_size: T, where the steps are to be operators of the net itself.
        cell_kwargs: further arguments of the cells.

    Returns:
        for each state the values of all steps and the last one.
    """
    sizes = list(dim_out) if isinstance(dim_out, (list, tuple)) else [dim_out]
    cells = [
        cell_class(
            input_size=before,
            hidden_size=size,
            forget_bias=forget_bias,
            memory_optimization=memory_optimization,
            name=scope if len(sizes) == 1 else None,
            forward_only=forward_only,
            drop_states=drop_states,
            **cell_kwargs,
        )
        for before, size in zip([dim_in, *sizes], sizes, strict=False)
    ]
    cell = (
        cells[0] if len(cells) == 1 else MultiRNNCell(cells, name=scope, forward_only=forward_only)
    )
    if static_rnn_unroll_size is not None:
        cell = UnrolledCell(cell, static_rnn_unroll_size)
    below = 2 * sum(len(each.get_state_names()) for each in cells[:-1])
    _, result = cell.apply_over_sequence(
        model=model,
        inputs=input_blob,
        seq_lengths=seq_lengths,
        initial_states=initial_states,
        outputs_with_grads=[below + index for index in outputs_with_grads],
    )
    made = list(result[below:] if return_last_layer_only else result)
    if return_params:
        made.append({"input": cell.get_input_params(), "recurrent": cell.get_recurrent_params()})
    return tuple(made)


LSTM = functools.partial(_LSTM, LSTMCell)
BasicRNN = functools.partial(_LSTM, BasicRNNCell)
MILSTM = functools.partial(_LSTM, MILSTMCell)
LayerNormLSTM = functools.partial(_LSTM, LayerNormLSTMCell)
LayerNormMILSTM = functools.partial(_LSTM, LayerNormMILSTMCell)


def layered_LSTM(
    model: Any,
    input_blob: Any,
    seq_lengths: Any,
    initial_states: Sequence[Any],
    dim_in: int,
    dim_out: Sequence[int],
    scope: str,
    outputs_with_grads: Sequence[int] = (0,),
    create_lstm: Any = LSTM,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """Add layers as consecutive recurrent networks; return the outputs of the last.

    `create_lstm` makes a layer; the other arguments are as for `LSTM`.
    """
    blob, size, made = input_blob, dim_in, ()
    for index, units in enumerate(dim_out):
        last = index == len(dim_out) - 1
        made = create_lstm(
            model,
            blob,
            seq_lengths,
            initial_states[2 * index : 2 * index + 2],
            size,
            units,
            scope=f"{scope}_layer_{index}",
            outputs_with_grads=outputs_with_grads if last else (0,),
            **kwargs,
        )
        blob, size = made[0], units
    return made


def GetLSTMParamNames() -> dict[str, list[str]]:
    """Return the names of the parts of an LSTM's weights and biases, as they lie there."""
    gates = ("input_gate", "forget_gate", "output_gate", "cell")
    return {"weights": [f"{gate}_w" for gate in gates], "biases": [f"{gate}_b" for gate in gates]}


def InitFromLSTMParams(lstm_pblobs: dict[str, Any], param_values: dict[str, Any]) -> None:
    """Set the parameters of an LSTM.

    Args:
        lstm_pblobs: what `LSTM` returns for `return_params`.
        param_values: for `input` and `recurrent` the arrays by the names of `GetLSTMParamNames`.
    """
    for kind, values in param_values.items():
        for field, names in GetLSTMParamNames().items():
            blob = lstm_pblobs[kind][field]
            shape = workspace.FetchBlob(blob).shape
            flat = np.concatenate([np.asarray(values[name]).flatten() for name in names])
            workspace.FeedBlob(blob, flat.reshape(shape).astype(np.float32))


def _with_attention(
    cell_class: Any,
    model: Any,
    decoder_inputs: Any,
    decoder_input_lengths: Any,
    initial_decoder_hidden_state: Any,
    initial_decoder_cell_state: Any,
    initial_attention_weighted_encoder_context: Any,
    encoder_output_dim: int,
    encoder_outputs: Any,
    encoder_lengths: Any = None,
    decoder_input_dim: int = 0,
    decoder_state_dim: int = 0,
    scope: str | None = None,
    attention_type: Any = AttentionType.Regular,
    outputs_with_grads: Sequence[int] = (0, 4),
    weighted_encoder_outputs: Any = None,
    lstm_memory_optimization: bool = False,
    attention_memory_optimization: bool = False,
    forget_bias: float = 0.0,
    forward_only: bool = False,
) -> Any:
    """Add a decoder that attends to an encoder (arXiv 1409.0473; context of arXiv 1508.04025).

    Args:
        cell_class: the cell.
        model: the model.
        decoder_inputs, decoder_input_lengths: the sequence (T, N, D), and its lengths or None.
        initial_decoder_hidden_state, initial_decoder_cell_state: the first states.
        initial_attention_weighted_encoder_context: the first context.
        encoder_output_dim, encoder_outputs, encoder_lengths: outputs (L, N, E), lengths or None.
        decoder_input_dim, decoder_state_dim: numbers of units.
        scope: the scope of its blobs.
        attention_type: one of `AttentionType`.
        outputs_with_grads: which outputs get gradients: of (h_all, h_last, c_all, c_last,
            context_all, context_last).
        weighted_encoder_outputs: the outputs behind the attention's layer, where these exist.
        lstm_memory_optimization, attention_memory_optimization: what the gradient makes again.
        forget_bias, forward_only: see `LSTM`.

    Returns:
        for each state the values of all steps and the last one.
    """
    cell = cell_class(
        encoder_output_dim=encoder_output_dim,
        encoder_outputs=encoder_outputs,
        encoder_lengths=encoder_lengths,
        decoder_input_dim=decoder_input_dim,
        decoder_state_dim=decoder_state_dim,
        name=scope,
        attention_type=attention_type,
        weighted_encoder_outputs=weighted_encoder_outputs,
        forget_bias=forget_bias,
        lstm_memory_optimization=lstm_memory_optimization,
        attention_memory_optimization=attention_memory_optimization,
        forward_only=forward_only,
    )
    states = [
        initial_decoder_hidden_state,
        initial_decoder_cell_state,
        initial_attention_weighted_encoder_context,
    ]
    if attention_type == AttentionType.SoftCoverage:
        states.append(cell.build_initial_coverage(model))
    _, result = cell.apply_over_sequence(
        model=model,
        inputs=decoder_inputs,
        seq_lengths=decoder_input_lengths,
        initial_states=states,
        outputs_with_grads=outputs_with_grads,
    )
    return result


LSTMWithAttention = functools.partial(_with_attention, LSTMWithAttentionCell)
MILSTMWithAttention = functools.partial(_with_attention, MILSTMWithAttentionCell)
