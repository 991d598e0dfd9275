"""What tests of recurrent layers are built on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.model_helper import ModelHelper


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + np.exp(-x))


def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent."""
    return 2.0 * sigmoid(2.0 * x) - 1


def _prepare_rnn(
    t: int,
    n: int,
    dim_in: int,
    create_rnn: Any,
    outputs_with_grads: Sequence[int],
    forget_bias: float,
    memory_optim: bool = False,
    forward_only: bool = False,
    drop_states: bool = False,
    T: int | None = None,
    two_d_initial_states: bool | None = None,
    dim_out: Sequence[int] | None = None,
    num_states: int = 2,
    **kwargs: Any,
) -> tuple[Any, Any, list[Any]]:
    """Return the outputs of a recurrent layer, its net, and its inputs: first states, then the
    sequence.

    Args:
        t, n, dim_in: the shape of the sequence.
        create_rnn: e.g. `rnn_cell.LSTM`.
        outputs_with_grads, forget_bias, forward_only, drop_states: see there.
        memory_optim: its `memory_optimization`.
        T: its `static_rnn_unroll_size`.
        two_d_initial_states: whether the first states have two dimensions; by default it is drawn.
        dim_out: the units of the layers; by default one layer of `dim_in`.
        num_states: the states of a layer: hidden state and cell, or the hidden state only.
        kwargs: further arguments of `create_rnn`.
    """
    sizes = [dim_in] if dim_out is None else list(dim_out)
    if two_d_initial_states is None:
        two_d_initial_states = bool(np.random.randint(2))
    model = ModelHelper(name="external")
    states = []
    for layer, size in enumerate(sizes):
        for kind in ("hidden", "cell")[:num_states]:
            state = model.net.AddExternalInput(f"{kind}_init_{layer}")
            shape = (n, size) if two_d_initial_states else (1, n, size)
            workspace.FeedBlob(state, np.random.randn(*shape).astype(np.float32))
            states.append(state)
    with core.NameScope("test_name_scope"):
        input_blob, seq_lengths = model.net.AddScopedExternalInputs("input_blob", "seq_lengths")
        outputs = create_rnn(
            model,
            input_blob,
            seq_lengths,
            states,
            dim_in=dim_in,
            dim_out=sizes,
            scope="external/recurrent",
            outputs_with_grads=outputs_with_grads,
            memory_optimization=memory_optim,
            forget_bias=forget_bias,
            forward_only=forward_only,
            drop_states=drop_states,
            static_rnn_unroll_size=T,
            **kwargs,
        )
    workspace.RunNetOnce(model.param_init_net)
    workspace.FeedBlob(seq_lengths, np.random.randint(1, t + 1, size=(n,)).astype(np.int32))
    return outputs, model.net, [*states, input_blob]
