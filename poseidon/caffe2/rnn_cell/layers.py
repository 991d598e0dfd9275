"""Cells made of cells: several layers, and steps that are operators of the net itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poseidon.caffe2 import brew, core
from poseidon.caffe2.modeling.parameter_sharing import ParameterSharing
from poseidon.caffe2.proto import DEVICE_NUMBERS
from poseidon.caffe2.rnn_cell.cell import RNNCell, scoped


class MultiRNNCell(RNNCell):
    """Cells one above the other: the output of each is the input of the next."""

    def __init__(
        self, cells: Sequence[RNNCell], residual_output_layers: Sequence[int] | None = None, **kwargs: Any
    ) -> None:
        """Make a cell of cells.

        Args:
            cells: the lowest first, with names of their own.
            residual_output_layers: the layers whose input is added to their output.
            kwargs: see `RNNCell`.
        """
        super().__init__(**kwargs)
        self.cells = list(cells)
        self.residual_output_layers = list(residual_output_layers or ())
        self.state_names = [name for cell in self.cells for name in cell.get_state_names()]
        if len(set(self.state_names)) < len(self.state_names):
            raise ValueError(f"Cells have states of the same name: {self.state_names}")

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
        after: list[Any] = []
        layer_input = input_t
        for index, cell in enumerate(self.cells):
            own = states[len(after) : len(after) + len(cell.get_state_names())]
            prepared = cell.prepare_input(model, layer_input) if index else layer_input
            made = cell._apply(
                model, prepared, seq_lengths, own, timestep, extra_inputs=None if index else extra_inputs
            )
            output = made[cell.get_output_state_index()]
            if index and index in self.residual_output_layers:
                output = brew.sum(model, [output, layer_input], self.scope(f"residual_output_{index}"))
            after.extend(made)
            layer_input = output
        return after

    def prepare_input(self, model: Any, input_blob: Any) -> Any:
        """See `RNNCell`."""
        return self.cells[0].prepare_input(model, input_blob)

    def get_output_state_index(self) -> int:
        """See `RNNCell`."""
        below = sum(len(cell.get_state_names()) for cell in self.cells[:-1])
        return below + self.cells[-1].get_output_state_index()

    def get_state_names(self) -> list[str]:
        """See `RNNCell`."""
        return self.state_names

    def get_output_dim(self) -> int:
        """See `RNNCell`."""
        return self.cells[-1].get_output_dim()


class UnrolledCell(RNNCell):
    """A cell whose T steps are operators of the net itself: no inner net runs."""

    def __init__(self, cell: RNNCell, T: int) -> None:
        self.T = T
        self.cell = cell

    def apply_over_sequence(
        self,
        model: Any,
        inputs: Any,
        seq_lengths: Any = None,
        initial_states: Sequence[Any] | None = None,
        outputs_with_grads: Sequence[int] | None = None,
    ) -> tuple[Any, tuple[Any, ...]]:
        """See `RNNCell`."""
        prepared, seq_lengths = self.cell.prepare_input(model, inputs), scoped(seq_lengths)
        parts = model.net.Split([prepared], [f"{prepared}_timestep_{t}" for t in range(self.T)], axis=0)
        parts = parts if isinstance(parts, (list, tuple)) else [parts]
        states: Sequence[Any] = self.cell._initial_states(model, initial_states)
        cpu = core.DeviceOption(DEVICE_NUMBERS["CPU"])
        steps = []
        for t, part in enumerate(parts):
            step_scope = f"timestep_{t}"
            with ParameterSharing({step_scope: ""}), core.NameScope(step_scope):
                clock = model.param_init_net.ConstantFill(
                    [], "timestep", value=t, shape=[1], dtype=core.DataType.INT32, device_option=cpu
                )
                states = self.cell._apply(model, part, seq_lengths, states, clock)
            steps.append(states)
        results = []
        for number, last in enumerate(states):
            name = str(steps[0][number]).replace("timestep_0/", "")
            joined = [step[number] for step in steps]
            results += [model.net.Concat(joined, [f"{name}_concat", f"{name}_concat_info"], axis=0)[0], last]
        for index, result in enumerate(results):
            if outputs_with_grads is not None and index not in outputs_with_grads:
                model.net.ZeroGradient(result, [])
        return results[2 * self.cell.get_output_state_index()], tuple(results)
