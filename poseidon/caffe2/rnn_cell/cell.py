"""The cell of a recurrent network: one step, and the network of steps over a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poseidon.caffe2 import core, recurrent
from poseidon.caffe2.model_helper import ModelHelper


def scoped(blob: Any) -> Any:
    """Return the reference to a blob: a name gets the current scope."""
    return core.ScopedBlobReference(blob) if isinstance(blob, str) else blob


class RNNCell:
    """A cell: one step from an input and states to the next states.

    Subclasses implement `apply_override` and `get_state_names_override`.
    """

    def __init__(self, name: str | None = None, forward_only: bool = False, initializer: Any = None) -> None:
        """Make a cell.

        Args:
            name: the scope of its blobs.
            forward_only: whether it is never differentiated.
            initializer: makes the initial states where none are given.
        """
        self.name = name
        self.recompute_blobs: list[Any] = []
        self.forward_only = forward_only
        self.initializer = initializer

    def scope(self, name: str) -> str:
        """Return a name in the scope of the cell."""
        return name if self.name is None else f"{self.name}/{name}"

    def apply_over_sequence(
        self,
        model: Any,
        inputs: Any,
        seq_lengths: Any = None,
        initial_states: Sequence[Any] | None = None,
        outputs_with_grads: Sequence[int] | None = None,
    ) -> tuple[Any, tuple[Any, ...]]:
        """Add the network of the cell over a sequence.

        Args:
            model: the model.
            inputs: the sequence, shape (T, N, D).
            seq_lengths: the length of each of the N sequences; None: all have T steps.
            initial_states: a blob for each state; None: the initializer makes them.
            outputs_with_grads: the outputs from which gradients come; by default the sequence of the output.

        Returns:
            the sequence of the output, and for each state all values and the last.
        """
        initial_states = self._initial_states(model, initial_states)
        names = self.get_state_names()
        if len(initial_states) != len(names):
            raise Exception(
                f"{len(initial_states)} initial states are given for the {len(names)} states of the cell"
            )
        prepared = self.prepare_input(model, inputs)
        step = ModelHelper(name=self.name, param_model=model)
        input_t, timestep = step.net.AddScopedExternalInputs("input_t", "timestep")
        before = step.net.AddScopedExternalInputs(*[f"{name}_prev" for name in names])
        before = before if isinstance(before, tuple) else (before,)
        after = self._apply(step, input_t, seq_lengths, before, timestep)
        declared = set(step.net.Proto().external_output)
        for state in after:
            if str(state) not in declared:
                step.net.AddExternalOutput(state)
        results = recurrent.recurrent_net(
            net=model.net,
            cell_net=step.net,
            inputs=[(input_t, prepared)],
            initial_cell_inputs=list(zip(before, initial_states, strict=True)),
            links=dict(zip(before, after, strict=True)),
            timestep=timestep,
            scope=self.name,
            forward_only=self.forward_only,
            outputs_with_grads=[2 * self.get_output_state_index()]
            if outputs_with_grads is None
            else outputs_with_grads,
        )
        return results[2 * self.get_output_state_index()], results

    def _initial_states(self, model: Any, given: Sequence[Any] | None) -> Sequence[Any]:
        if given is not None:
            return [scoped(state) for state in given]
        if self.initializer is None:
            raise Exception("Either initial states or initializer have to be set")
        with core.NameScope(self.name or ""):
            states: Sequence[Any] = self.initializer.create_states(model)
            return states

    def apply(
        self, model: Any, input_t: Any, seq_lengths: Any, states: Sequence[Any], timestep: Any
    ) -> tuple[Any, Sequence[Any]]:
        """Add one step; return its output and the next states."""
        after = self._apply(model, self.prepare_input(model, input_t), seq_lengths, states, timestep)
        return after[self.get_output_state_index()], after

    def _apply(
        self,
        model: Any,
        input_t: Any,
        seq_lengths: Any,
        states: Sequence[Any],
        timestep: Any,
        extra_inputs: Sequence[tuple[Any, int]] | None = None,
    ) -> Sequence[Any]:
        """Add one step in the cell's scope; names of inputs are those of the scope around it."""
        arguments: dict[str, Any] = {}
        if extra_inputs is not None:
            arguments["extra_inputs"] = [(scoped(blob), size) for blob, size in extra_inputs]
        given = (
            scoped(input_t),
            scoped(seq_lengths),
            [scoped(s) for s in states],
            scoped(timestep),
        )
        with core.NameScope(self.name or ""):
            return self.apply_override(model, *given, **arguments)

    def apply_override(
        self,
        model: Any,
        input_t: Any,
        seq_lengths: Any,
        states: Sequence[Any],
        timestep: Any,
        extra_inputs: Sequence[tuple[Any, int]] | None = None,
    ) -> Sequence[Any]:
        """Add one step; return the next states.

        Args:
            model: the model of the step.
            input_t: the prepared input, shape (1, N, D).
            seq_lengths: the length of each sequence, or None.
            states: the states before.
            timestep: the number of the step.
            extra_inputs: more inputs, each with its D.
        """
        raise NotImplementedError("Abstract method")

    def prepare_input(self, model: Any, input_blob: Any) -> Any:
        """Add what depends on the input only, for all steps at once; return its result."""
        return input_blob

    def get_output_state_index(self) -> int:
        """Return which state is the output."""
        return 0

    def get_state_names(self) -> list[str]:
        """Return the names of the states in the cell's scope."""
        return [self.scope(name) for name in self.get_state_names_override()]

    def get_state_names_override(self) -> Sequence[str]:
        """Return the names of the states."""
        raise NotImplementedError("Abstract method")

    def get_output_dim(self) -> int:
        """Return the D of the output."""
        raise NotImplementedError("Abstract method")
