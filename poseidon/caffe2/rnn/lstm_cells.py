"""Simple cells: BasicRNN, LSTM, LSTM with layer normalization, and the
multiplicative forms of these (arXiv 1606.06630).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poseidon.caffe2 import brew
from poseidon.caffe2.modeling.initializers import Initializer
from poseidon.caffe2.rnn.cell import Extra, LSTMInitializer, RNNCell


class _Gated(RNNCell):
    """A cell with gates, whose part of the input is prepared for all steps at once."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        forget_bias: float,
        memory_optimization: bool,
        drop_states: bool = False,
        initializer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Set up a cell.

        Args:
            input_size, hidden_size: numbers of units.
            forget_bias: what is added to the forget gate.
            memory_optimization: whether the gates are not kept for the gradient, but made again.
            drop_states: whether states behind the end of a sequence are zero; else they stay.
            initializer: of the first states.
            kwargs: see `RNNCell`.
        """
        super().__init__(initializer=initializer, **kwargs)
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.forget_bias = float(forget_bias)
        self.memory_optimization = memory_optimization
        self.drop_states = drop_states
        self.gates_size = 4 * hidden_size

    def get_output_dim(self) -> int:
        return self.hidden_size

    def prepare_input(self, model: Any, input_blob: Any) -> Any:
        """See `RNNCell`: the input's part of the gates."""
        return self._fc(model, input_blob, self.scope("i2h"), self.input_size, self.gates_size)

    def _fc(self, model: Any, blob: Any, name: str, size_in: int, size_out: int) -> Any:
        return brew.fc(model, blob, name, dim_in=size_in, dim_out=size_out, axis=2)

    def get_input_params(self) -> dict[str, str]:
        return {"weights": f"{self.scope('i2h')}_w", "biases": f"{self.scope('i2h')}_b"}

    def get_recurrent_params(self) -> dict[str, str]:
        return {"weights": f"{self.scope('gates_t')}_w", "biases": f"{self.scope('gates_t')}_b"}


class BasicRNNCell(_Gated):
    """A fully-connected layer and an activation: `relu` or `tanh`."""

    def __init__(self, *args: Any, activation: str | None = None, **kwargs: Any) -> None:
        """Set up a cell; see `_Gated`.

        Raises:
            RuntimeError: the activation is another one.
        """
        super().__init__(*args, **kwargs)
        if activation not in ("relu", "tanh"):
            raise RuntimeError(f"BasicRNNCell with unknown activation function ({activation})")
        self.activation = activation
        self.gates_size = self.hidden_size

    def get_state_names_override(self) -> Sequence[str]:
        return ["hidden_t"]

    def apply_override(
        self,
        model: Any,
        input_t: Any,
        seq_lengths: Any,
        states: Sequence[Any],
        timestep: Any,
        extra_inputs: Extra = None,
    ) -> Any:
        (before,) = states
        gates = self._fc(model, before, "gates_t", self.hidden_size, self.hidden_size)
        brew.sum(model, [gates, input_t], gates)
        kind = "Tanh" if self.activation == "tanh" else "Relu"
        # The gradient of the masks reads this value: the state after them is another blob.
        hidden = getattr(model.net, kind)(
            gates, "hidden_t" if seq_lengths is None else "hidden_t_active"
        )
        if seq_lengths is None:
            return (hidden,)
        step = model.net.CopyFromCPUInput(timestep, "timestep_gpu")

        def masked(blob: Any, test: str, name: str) -> Any:
            holds = getattr(model.net, test)([seq_lengths, step], f"{name}_b", broadcast=1)
            factor = model.net.Cast(holds, name, to="float")
            model.net.StopGradient(factor, factor)  # a cast of booleans has no gradient
            return model.net.Mul([blob, factor], f"hidden_{name}", broadcast=1, axis=1)

        valid = masked(hidden, "GT", "valid")
        if self.drop_states:
            return (valid,)
        return (model.net.Add([valid, masked(before, "LE", "invalid")], "hidden_t"),)


class LSTMCell(_Gated):
    """Long short-term memory."""

    norm = False

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        forget_bias: float,
        memory_optimization: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(input_size, hidden_size, forget_bias, memory_optimization, **kwargs)
        self.initializer = self.initializer or LSTMInitializer(hidden_size)

    def get_state_names_override(self) -> Sequence[str]:
        return ["hidden_t", "cell_t"]

    def apply_override(
        self,
        model: Any,
        input_t: Any,
        seq_lengths: Any,
        states: Sequence[Any],
        timestep: Any,
        extra_inputs: Extra = None,
    ) -> Any:
        hidden, cell = states
        gates = self._gates(model, input_t, hidden, extra_inputs)
        if self.norm:
            gates, _, _ = brew.layer_norm(
                model, gates, "gates_t_norm", dim_in=self.gates_size, axis=-1
            )
        lengths = [] if seq_lengths is None else [seq_lengths]
        made = model.net.LSTMUnit(
            [hidden, cell, gates, *lengths, timestep],
            ["hidden_state", "cell_state"],
            forget_bias=self.forget_bias,
            drop_states=self.drop_states,
            sequence_lengths=seq_lengths is not None,
        )
        model.net.AddExternalOutputs(*made)
        if self.memory_optimization and not self.norm:
            self.recompute_blobs = [gates]
        return made

    def _recurrent_part(self, model: Any, hidden: Any, extra: Extra, name: str) -> Any:
        """Return the part of the gates of the hidden state and of further inputs."""
        blob, size = hidden, self.hidden_size
        if extra:
            blobs, sizes = zip(*extra, strict=True)
            blob = brew.concat(model, [hidden, *blobs], "gates_concatenated_input_t", axis=2)
            size += sum(sizes)
        return self._fc(model, blob, name, size, self.gates_size)

    def _gates(self, model: Any, input_t: Any, hidden: Any, extra: Extra) -> Any:
        gates = self._recurrent_part(model, hidden, extra, "gates_t")
        return brew.sum(model, [gates, input_t], gates)


class LayerNormLSTMCell(LSTMCell):
    """An LSTM whose gates are normalized."""

    norm = True


class MILSTMCell(LSTMCell):
    """An LSTM whose gates have the product of both parts too: alpha x h + beta1 h + beta2 x + b."""

    def _gates(self, model: Any, input_t: Any, hidden: Any, extra: Extra) -> Any:
        part = self._recurrent_part(model, hidden, extra, "prev_t")
        alpha, beta_h, beta_i, b = (
            model.create_param(
                name, shape=[self.gates_size], initializer=Initializer("ConstantFill", value=value)
            )
            for name, value in (("alpha", 1.0), ("beta1", 1.0), ("beta2", 1.0), ("b", 0.0))
        )
        factor = model.net.ElementwiseLinear(
            [input_t, alpha, beta_h], "alpha_by_input_t_plus_beta_h", axis=2
        )
        product = model.net.Mul([factor, part], "alpha_by_input_t_plus_beta_h_by_prev_t")
        rest = model.net.ElementwiseLinear([input_t, beta_i, b], "beta_i_by_input_t_plus_b", axis=2)
        return brew.sum(model, [product, rest], "gates_t")

    def get_recurrent_params(self) -> dict[str, str]:
        return {"weights": f"{self.scope('prev_t')}_w", "biases": f"{self.scope('prev_t')}_b"}


class LayerNormMILSTMCell(MILSTMCell):
    """A multiplicative LSTM whose gates are normalized."""

    norm = True
