"""Cells with parameters: the plain one, and long short-term memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poseidon.caffe2 import brew
from poseidon.caffe2.modeling.initializers import Initializer
from poseidon.caffe2.rnn_cell.cell import RNNCell


class LSTMInitializer:
    """Initial states of an LSTM: parameters that start at 0."""

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size

    def create_states(self, model: Any) -> list[Any]:
        """Add the initial states to a model."""
        names = ("initial_hidden_state", "initial_cell_state")
        zeros = Initializer(operator_name="ConstantFill", value=0.0)
        return [model.create_param(param_name=n, initializer=zeros, shape=[self.hidden_size]) for n in names]


class BasicRNNCell(RNNCell):
    """h' = f(W_h h + W_i x + b), with f tanh or relu."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        forget_bias: float = 0.0,
        memory_optimization: bool = False,
        drop_states: bool = False,
        initializer: Any = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Make a cell.

        Args:
            input_size, hidden_size: D of the input and of the state.
            forget_bias, memory_optimization: kept for Caffe2's scripts.
            drop_states: whether the state of a sequence that is over is 0; else it stays.
            initializer: see `RNNCell`.
            activation: `tanh` or `relu`.
            kwargs: see `RNNCell`.
        """
        super().__init__(initializer=initializer, **kwargs)
        self.drop_states, self.input_size, self.hidden_size = drop_states, input_size, hidden_size
        if activation not in ("relu", "tanh"):
            raise RuntimeError(f"BasicRNNCell with unknown activation function ({activation})")
        self.activation = activation

    def apply_override(
        self,
        model: Any,
        input_t: Any,
        seq_lengths: Any,
        states: Sequence[Any],
        timestep: Any,
        extra_inputs: Sequence[tuple[Any, int]] | None = None,
    ) -> Sequence[Any]:
        """See `RNNCell`."""
        size = self.hidden_size
        gates = brew.fc(model, states[0], "gates_t", dim_in=size, dim_out=size, axis=2)
        brew.sum(model, [gates, input_t], gates)
        kind = model.net.Tanh if self.activation == "tanh" else model.net.Relu
        hidden = kind(gates, "hidden_t")
        if seq_lengths is None:
            return (hidden,)
        clock = model.net.CopyFromCPUInput(timestep, "timestep_gpu")
        kept = [
            model.net.Cast(compare([seq_lengths, clock], f"{name}_b", broadcast=1), name, to="float")
            for compare, name in ((model.net.GT, "valid"), (model.net.LE, "invalid"))
        ]
        new = model.net.Mul([hidden, kept[0]], "hidden_valid", broadcast=1, axis=1)
        if self.drop_states:
            return (new,)
        old = model.net.Mul([states[0], kept[1]], "hidden_invalid", broadcast=1, axis=1)
        return (model.net.Add([new, old], hidden),)

    def prepare_input(self, model: Any, input_blob: Any) -> Any:
        """See `RNNCell`."""
        name = self.scope("i2h")
        return brew.fc(model, input_blob, name, dim_in=self.input_size, dim_out=self.hidden_size, axis=2)

    def get_state_names_override(self) -> Sequence[str]:
        """See `RNNCell`."""
        return ("hidden_t",)

    def get_output_dim(self) -> int:
        """See `RNNCell`."""
        return self.hidden_size


class LSTMCell(RNNCell):
    """Long short-term memory (Hochreiter and Schmidhuber, 1997); the gates are in the order input, forget, output, new."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        forget_bias: float = 0.0,
        memory_optimization: bool = False,
        drop_states: bool = False,
        initializer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Make a cell.

        Args:
            input_size, hidden_size: D of the input and of the states.
            forget_bias: added to the forget gate.
            memory_optimization: kept for Caffe2's scripts.
            drop_states: whether the states of a sequence that is over are 0; else they stay.
            initializer: see `RNNCell`; by default `LSTMInitializer`.
            kwargs: see `RNNCell`.
        """
        super().__init__(initializer=initializer or LSTMInitializer(hidden_size), **kwargs)
        self.input_size, self.hidden_size = input_size, hidden_size
        self.forget_bias, self.drop_states = float(forget_bias), drop_states
        self.memory_optimization = memory_optimization
        self.gates_size = 4 * hidden_size

    def apply_override(
        self,
        model: Any,
        input_t: Any,
        seq_lengths: Any,
        states: Sequence[Any],
        timestep: Any,
        extra_inputs: Sequence[tuple[Any, int]] | None = None,
    ) -> Sequence[Any]:
        """See `RNNCell`."""
        source, size = states[0], self.hidden_size
        if extra_inputs is not None:
            blobs, sizes = zip(*extra_inputs, strict=True)
            source = brew.concat(model, [source, *blobs], "gates_concatenated_input_t", axis=2)
            size += sum(sizes)
        gates = brew.fc(model, source, "gates_t", dim_in=size, dim_out=self.gates_size, axis=2)
        brew.sum(model, [gates, input_t], gates)
        lengths = [] if seq_lengths is None else [seq_lengths]
        hidden, cell = model.net.LSTMUnit(
            [*states, gates, *lengths, timestep],
            ["hidden_state", "cell_state"],
            forget_bias=self.forget_bias,
            drop_states=self.drop_states,
            sequence_lengths=seq_lengths is not None,
        )
        model.net.AddExternalOutputs(hidden, cell)
        return hidden, cell

    def get_input_params(self) -> dict[str, str]:
        """Return the names of weight and bias of the input."""
        return {"weights": self.scope("i2h") + "_w", "biases": self.scope("i2h") + "_b"}

    def get_recurrent_params(self) -> dict[str, str]:
        """Return the names of weight and bias of the states."""
        return {"weights": self.scope("gates_t") + "_w", "biases": self.scope("gates_t") + "_b"}

    def prepare_input(self, model: Any, input_blob: Any) -> Any:
        """See `RNNCell`."""
        name = self.scope("i2h")
        return brew.fc(model, input_blob, name, dim_in=self.input_size, dim_out=self.gates_size, axis=2)

    def get_state_names_override(self) -> Sequence[str]:
        """See `RNNCell`."""
        return ("hidden_t", "cell_t")

    def get_output_dim(self) -> int:
        """See `RNNCell`."""
        return self.hidden_size
