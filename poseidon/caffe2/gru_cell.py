"""Gated recurrent units."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from poseidon.caffe2.rnn.cell import Extra, _Gated
from poseidon.caffe2.rnn_cell import _LSTM


class GRUCell(_Gated):
    """A gated recurrent unit; `forget_bias` has no effect, and there is one state.

    The reset gate acts on the hidden state before the output gate; the rest is `GRUUnit`.
    """

    linear_before_reset = False
    made = ("hidden_t",)

    def __init__(self, *args: Any, linear_before_reset: bool = False, **kwargs: Any) -> None:
        """Set up a cell; see `_Gated`.

        Args:
            linear_before_reset: whether the reset gate acts behind the output gate's layer.
            args, kwargs: see `_Gated`.
        """
        super().__init__(*args, **kwargs)
        self.gates_size = 3 * self.hidden_size
        self.linear_before_reset = linear_before_reset

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
        (hidden,) = states
        net, size = model.net, self.hidden_size
        names = ["input_t_reset", "input_t_update", "input_t_output"]
        of_reset, of_update, of_output = net.Split([input_t], names, axis=2)
        reset = self._fc(model, hidden, "reset_gate_t", size, size)
        update = self._fc(model, hidden, "update_gate_t", size, size)
        reset = net.Sum([reset, of_reset], "reset_gate_t")
        opened = net.Sigmoid(reset, "reset_gate_t_sigmoid")
        if self.linear_before_reset:
            output = self._fc(model, hidden, "output_gate_t", size, size)
            output = net.Mul([opened, output], "output_gate_t_mul")
            output = net.Sum([output, of_output], "output_gate_t_summed")
        else:
            modified = net.Mul([opened, hidden], "modified_hidden_t_prev")
            output = self._fc(model, modified, "output_gate_t", size, size)
            output = net.Sum([output, of_output], "output_gate_t")
        update = net.Sum([update, of_update], "update_gate_t")
        gates, _ = net.Concat([reset, update, output], ["gates_t", "_gates_t_concat_dims"], axis=2)
        return self._unit(net.GRUUnit, [hidden, gates], seq_lengths, timestep)


GRU = functools.partial(_LSTM, GRUCell)
"""Add layers of gated recurrent units; see `rnn_cell.LSTM`."""
