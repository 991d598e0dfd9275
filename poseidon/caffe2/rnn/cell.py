"""The base of cells: one step of a recurrent network, applied once or over a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poseidon.caffe2 import core, recurrent, utils
from poseidon.caffe2.model_helper import ModelHelper
from poseidon.caffe2.modeling.initializers import Initializer

Extra = Sequence[tuple[Any, int]] | None
"""Further inputs of a step with their sizes, that were not prepared; None for none."""


def rectified(blob: Any) -> Any:
    """Return a reference: a name gets the current scope; None stays.

    Raises:
        TypeError: it is neither.
    """
    if blob is None or isinstance(blob, core.BlobReference):
        return blob
    if isinstance(blob, str):
        return core.ScopedBlobReference(blob)
    raise TypeError(f"A blob is a name or a BlobReference, not {type(blob).__name__}")


class LSTMInitializer:
    """Makes the first states of an LSTM: parameters that begin with zeros."""

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size

    def create_states(self, model: Any) -> list[Any]:
        """Return the parameters of the first hidden state and the first cell."""
        zeros = Initializer(operator_name="ConstantFill", value=0.0)
        names = ("initial_hidden_state", "initial_cell_state")
        return [model.create_param(name, [self.hidden_size], zeros) for name in names]


class RNNCell:
    """A step of a recurrent network. A cell has `apply_override` and `get_state_names_override`.

    Attributes:
        name: the scope of its blobs, None for none.
        recompute_blobs: blobs of a step that its gradient makes again.
        forward_only: whether there is no gradient.
        initializer: makes the first states where none are given.
    """

    def __init__(
        self, name: str | None = None, forward_only: bool = False, initializer: Any = None
    ) -> None:
        self.name = name
        self.recompute_blobs: list[Any] = []
        self.forward_only = forward_only
        self.initializer = initializer

    def scope(self, name: str) -> str:
        """Return a name, preceded by the cell's name."""
        return name if self.name is None else f"{self.name}/{name}"

    def apply_over_sequence(
        self,
        model: Any,
        inputs: Any,
        seq_lengths: Any = None,
        initial_states: Sequence[Any] | None = None,
        outputs_with_grads: Sequence[int] | None = None,
    ) -> tuple[Any, Any]:
        """Add a recurrent network of this cell to a model.

        Args:
            model: the model.
            inputs: the sequence, of shape (T, N, D).
            seq_lengths: the length of each of the N sequences; by default all are T.
            initial_states: the first states; by default the initializer's.
            outputs_with_grads: outputs that get gradients, as indices of the states below; by
                default the cell's own.

        Returns:
            the output of all steps, and for each state its values of all steps and the last one.

        Raises:
            Exception: there are neither first states nor an initializer, or not as many as the cell
                has.
        """
        if initial_states is None:
            if self.initializer is None:
                raise Exception("Either initial states or initializer have to be set")
            with core.NameScope(self.name or ""):
                initial_states = self.initializer.create_states(model)
        prepared = self.prepare_input(model, inputs)
        step = ModelHelper(name=self.name, param_model=model)
        input_t, timestep = step.net.AddScopedExternalInputs("input_t", "timestep")
        names = self.get_state_names()
        utils.raiseIfNotEqual(
            len(initial_states),
            len(names),
            "The number of first states differs from the number of states of the cell",
        )
        before = core.output_to_list(
            step.net.AddScopedExternalInputs(*[f"{name}_prev" for name in names])
        )
        states = self._apply(step, input_t, seq_lengths, before, timestep)
        for state in states:
            if state not in step.net.external_outputs:
                step.net.AddExternalOutput(state)
        if outputs_with_grads is None:
            outputs_with_grads = [self.get_output_state_index() * 2]
        results = recurrent.recurrent_net(
            net=model.net,
            cell_net=step.net,
            inputs=[(input_t, prepared)],
            initial_cell_inputs=list(zip(before, initial_states, strict=True)),
            links=dict(zip(before, states, strict=True)),
            timestep=timestep,
            scope=self.name,
            outputs_with_grads=outputs_with_grads,
            recompute_blobs_on_backward=self.recompute_blobs,
            forward_only=self.forward_only,
        )
        return self._prepare_output_sequence(model, results), results

    def apply(
        self, model: Any, input_t: Any, seq_lengths: Any, states: Sequence[Any], timestep: Any
    ) -> tuple[Any, Any]:
        """Add one step to a model; return its output and the states after it."""
        prepared = self.prepare_input(model, input_t)
        after = self._apply(model, prepared, seq_lengths, states, timestep)
        return self._prepare_output(model, after), after

    def _apply(
        self,
        model: Any,
        input_t: Any,
        seq_lengths: Any,
        states: Sequence[Any],
        timestep: Any,
        extra_inputs: Extra = None,
    ) -> Any:
        """Add a step in the scope of the cell; the blobs given keep the scope outside."""
        given = self._rectified(input_t, seq_lengths, states, timestep, extra_inputs)
        with core.NameScope(self.name or ""):
            return self.apply_override(model, *given)

    def _rectified(
        self, input_t: Any, seq_lengths: Any, states: Sequence[Any], timestep: Any, extra: Extra
    ) -> tuple[Any, ...]:
        more = [(rectified(blob), size) for blob, size in extra] if extra else None
        return (
            rectified(input_t),
            rectified(seq_lengths),
            [rectified(state) for state in states],
            rectified(timestep),
            more,
        )

    def apply_override(
        self,
        model: Any,
        input_t: Any,
        seq_lengths: Any,
        states: Sequence[Any],
        timestep: Any,
        extra_inputs: Extra = None,
    ) -> Any:
        """Add the operators of one step; return the states after it. Each cell has its own.

        Args:
            model: the model.
            input_t: the prepared input, of shape (1, N, D).
            seq_lengths: the length of each sequence, or None.
            states: those before the step.
            timestep: the number of the step.
            extra_inputs: see `Extra`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no apply_override")

    def prepare_input(self, model: Any, input_blob: Any) -> Any:
        """Add what depends on the input only, for one step or for the whole sequence; return the
        result.
        """
        return input_blob

    def get_output_state_index(self) -> int:
        """Return the index of the state that is the output."""
        return 0

    def get_state_names(self) -> Sequence[str]:
        """Return the names of the states in the scope of the cell."""
        return [self.scope(name) for name in self.get_state_names_override()]

    def get_state_names_override(self) -> Sequence[str]:
        """Return the names of the states. Each cell has its own."""
        raise NotImplementedError(f"{type(self).__name__} has no get_state_names_override")

    def get_output_dim(self) -> int:
        """Return the size of the output of a step. Each cell has its own."""
        raise NotImplementedError(f"{type(self).__name__} has no get_output_dim")

    def _prepare_output(self, model: Any, states: Sequence[Any]) -> Any:
        return states[self.get_output_state_index()]

    def _prepare_output_sequence(self, model: Any, state_outputs: Sequence[Any]) -> Any:
        """Return the output of all steps; the states come as pairs of all values and the last
        one.
        """
        return state_outputs[2 * self.get_output_state_index()]
