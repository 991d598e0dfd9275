"""Cells of cells: several layers, dropout, and steps that are unrolled into the net."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from poseidon.caffe2 import brew, core
from poseidon.caffe2.modeling.parameter_sharing import ParameterSharing
from poseidon.caffe2.proto import DEVICE_NUMBERS
from poseidon.caffe2.rnn.cell import Extra, RNNCell, rectified


class DropoutCell(RNNCell):
    """Applies dropout to a cell's output, not to the state that goes to the next step."""

    def __init__(
        self,
        internal_cell: RNNCell,
        dropout_ratio: float | None = None,
        use_cudnn: bool = False,
        *,
        is_test: bool,
        **kwargs: Any,
    ) -> None:
        """Wrap a cell; `is_test` must be given."""
        super().__init__(**kwargs)
        self.internal_cell = internal_cell
        self.dropout_ratio = dropout_ratio
        self.is_test = is_test
        self.use_cudnn = use_cudnn
        self.initializer = self.initializer or internal_cell.initializer
        self.mask = 0

    def prepare_input(self, model: Any, input_blob: Any) -> Any:
        return self.internal_cell.prepare_input(model, input_blob)

    def get_output_state_index(self) -> int:
        return self.internal_cell.get_output_state_index()

    def get_state_names(self) -> Sequence[str]:
        return self.internal_cell.get_state_names()

    def get_output_dim(self) -> int:
        return self.internal_cell.get_output_dim()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        return self.internal_cell._apply(*args, **kwargs)

    def _prepare_output(self, model: Any, states: Sequence[Any]) -> Any:
        return self._apply_dropout(model, self.internal_cell._prepare_output(model, states))

    def _prepare_output_sequence(self, model: Any, state_outputs: Sequence[Any]) -> Any:
        return self._apply_dropout(
            model, self.internal_cell._prepare_output_sequence(model, state_outputs)
        )

    def _apply_dropout(self, model: Any, output: Any) -> Any:
        if not self.dropout_ratio or self.forward_only:
            return output
        with core.NameScope(self.name or ""):
            name = f"{output}_with_dropout_mask{self.mask}"
            self.mask += 1
            how = {"is_test": self.is_test, "use_cudnn": self.use_cudnn}
            return brew.dropout(model, output, name, ratio=float(self.dropout_ratio), **how)


class MultiRNNCellInitializer:
    """Makes the first states of all layers."""

    def __init__(self, cells: Sequence[RNNCell]) -> None:
        self.cells = cells

    def create_states(self, model: Any) -> list[Any]:
        """Return the first states of the layers in order.

        Raises:
            Exception: a layer has no initializer.
        """
        states: list[Any] = []
        for index, cell in enumerate(self.cells):
            if cell.initializer is None:
                raise Exception("Either initial states or initializer have to be set")
            with core.NameScope(f"layer_{index}"), core.NameScope(cell.name or ""):
                states.extend(cell.initializer.create_states(model))
        return states


class MultiRNNCell(RNNCell):
    """Layers: the output of each cell is the input of the next one."""

    def __init__(
        self,
        cells: Sequence[RNNCell],
        residual_output_layers: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Stack cells.

        Args:
            cells: from the input to the output.
            residual_output_layers: layers whose input is added to their output; not layer 0.
            kwargs: see `RNNCell`.
        """
        super().__init__(**kwargs)
        self.cells = cells
        self.residual_output_layers = list(residual_output_layers or [])
        self.output_connected_layers: list[int] = []
        for index in range(len(cells) - 1):
            if index + 1 in self.residual_output_layers:
                self.output_connected_layers.append(index)
            else:
                self.output_connected_layers = []
        self.output_connected_layers.append(len(cells) - 1)
        places = [0, *itertools.accumulate(len(cell.get_state_names()) for cell in cells)]
        self.output_indices = [
            places[index] + cells[index].get_output_state_index()
            for index in self.output_connected_layers
        ]
        self.state_names = [
            f"{self.name}/layer_{index}/{name}"
            for index, cell in enumerate(cells)
            for name in cell.get_state_names()
        ]
        self.initializer = MultiRNNCellInitializer(cells)

    def prepare_input(self, model: Any, input_blob: Any) -> Any:
        """See `RNNCell`: the first layer prepares it."""
        blob = rectified(input_blob)
        with core.NameScope(self.name or ""):
            return self.cells[0].prepare_input(model, blob)

    def _split(self, states: Sequence[Any], each: int = 1) -> list[Sequence[Any]]:
        parts, place = [], 0
        for cell in self.cells:
            count = each * len(cell.get_state_names())
            parts.append(states[place : place + count])
            place += count
        assert place == len(states)
        return parts

    def apply_override(
        self,
        model: Any,
        input_t: Any,
        seq_lengths: Any,
        states: Sequence[Any],
        timestep: Any,
        extra_inputs: Extra = None,
    ) -> Any:
        after: list[Any] = []
        blob = input_t
        for index, (cell, own) in enumerate(zip(self.cells, self._split(states), strict=True)):
            with core.NameScope(f"layer_{index}"):
                prepared = cell.prepare_input(model, blob) if index else blob
                more = None if index else extra_inputs
                made = cell._apply(model, prepared, seq_lengths, own, timestep, more)
                after.extend(made)
                if index == len(self.cells) - 1:
                    break
                output = cell._prepare_output(model, made)
                if index and index in self.residual_output_layers:
                    output = brew.sum(model, [output, blob], self.scope(f"residual_output_{index}"))
                blob = output
        return after

    def get_state_names(self) -> Sequence[str]:
        return self.state_names

    def get_output_state_index(self) -> int:
        below = sum(len(cell.get_state_names()) for cell in self.cells[:-1])
        return below + self.cells[-1].get_output_state_index()

    def get_output_dim(self) -> int:
        return self.cells[-1].get_output_dim()

    def get_input_params(self) -> list[Any]:
        return [cell.get_input_params() for cell in self.cells]  # type: ignore[attr-defined]

    def get_recurrent_params(self) -> list[Any]:
        return [cell.get_recurrent_params() for cell in self.cells]  # type: ignore[attr-defined]

    def _sum(self, model: Any, outputs: list[Any], name: str) -> Any:
        return brew.sum(model, outputs, self.scope(name)) if len(outputs) > 1 else outputs[0]

    def _prepare_output(self, model: Any, states: Sequence[Any]) -> Any:
        parts = self._split(states)
        outputs = [
            self.cells[i]._prepare_output(model, parts[i]) for i in self.output_connected_layers
        ]
        return self._sum(model, outputs, "residual_output")

    def _prepare_output_sequence(self, model: Any, state_outputs: Sequence[Any]) -> Any:
        parts = self._split(state_outputs, 2)
        outputs = [
            self.cells[i]._prepare_output_sequence(model, parts[i])
            for i in self.output_connected_layers
        ]
        return self._sum(model, outputs, "residual_output_sequence")


class UnrolledCell(RNNCell):
    """A cell whose steps are operators of the net itself: a fixed number of them."""

    def __init__(self, cell: RNNCell, T: int) -> None:
        super().__init__(cell.name, cell.forward_only, cell.initializer)
        self.cell = cell
        self.T = T

    def get_input_params(self) -> Any:
        return self.cell.get_input_params()  # type: ignore[attr-defined]

    def get_recurrent_params(self) -> Any:
        return self.cell.get_recurrent_params()  # type: ignore[attr-defined]

    def apply_over_sequence(
        self,
        model: Any,
        inputs: Any,
        seq_lengths: Any = None,
        initial_states: Sequence[Any] | None = None,
        outputs_with_grads: Sequence[int] | None = None,
    ) -> tuple[Any, Any]:
        """See `RNNCell`; outputs that get no gradient have a gradient of zero.

        Raises:
            Exception: no first states are given.
        """
        prepared = self.cell.prepare_input(model, inputs)
        names = [f"{prepared}_timestep_{step}" for step in range(self.T)]
        parts = core.output_to_list(model.net.Split(prepared, names, axis=0))
        if initial_states is None:
            raise Exception("An unrolled cell needs initial_states")
        states: Sequence[Any] = [rectified(state) for state in initial_states]
        lengths = rectified(seq_lengths)
        steps = []
        for step, part in enumerate(parts):
            scope = f"timestep_{step}"
            with ParameterSharing({scope: ""}), core.NameScope(scope):
                number = model.param_init_net.ConstantFill(
                    [],
                    "timestep",
                    value=step,
                    shape=[1],
                    dtype=core.DataType.INT32,
                    device_option=core.DeviceOption(DEVICE_NUMBERS["CPU"]),
                )
                states = self.cell._apply(model, part, lengths, states, number)
            steps.append(states)
        outputs: list[Any] = []
        for values in zip(*steps, strict=True):
            name = str(values[0]).replace("timestep_0/", "", 1)
            names = [f"{name}_concat", f"{name}_concat_info"]
            every, _ = model.net.Concat(list(values), names, axis=0)
            outputs += [every, values[-1]]
        wanted = (
            [2 * self.cell.get_output_state_index()]
            if outputs_with_grads is None
            else outputs_with_grads
        )
        for index, output in enumerate(outputs):
            if index not in wanted:
                model.net.ZeroGradient(output, [])
        return self.cell._prepare_output_sequence(model, outputs), tuple(outputs)
