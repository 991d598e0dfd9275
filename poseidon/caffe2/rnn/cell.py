"""Cells: one step of a recurrent network, applied once or over a sequence; and the LSTM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from poseidon.caffe2 import brew, core, recurrent, utils
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
            Exception: there are neither first states nor an initializer, or too many or too few.
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
        befores = [f"{name}_prev" for name in names]
        before = core.output_to_list(step.net.AddScopedExternalInputs(*befores))
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
        more = [(rectified(blob), size) for blob, size in extra_inputs] if extra_inputs else None
        before = [rectified(state) for state in states]
        blob, lengths, step = map(rectified, (input_t, seq_lengths, timestep))
        with core.NameScope(self.name or ""):
            return self.apply_override(model, blob, lengths, before, step, more)

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
        """Add what depends on the input only, for one or all steps; return the result."""
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
        """Return the output of all steps; states come as pairs of all values and the last."""
        return state_outputs[2 * self.get_output_state_index()]


class _Gated(RNNCell):
    """A cell with gates, whose part of the input is prepared for all steps at once."""

    default_initializer: Any = None
    """A class that makes the first states of so many hidden units."""
    made: Sequence[str] = ("hidden_state", "cell_state")
    """The blobs of the states after a step; sequences of states have their names too."""

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
        if initializer is None and self.default_initializer is not None:
            initializer = self.default_initializer(hidden_size)
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

    def _unit(
        self, operator: Callable[..., Any], inputs: list[Any], seq_lengths: Any, timestep: Any
    ) -> tuple[Any, ...]:
        """Add the operator that makes the states after a step from those before and the gates."""
        made = operator(
            [*inputs, *([] if seq_lengths is None else [seq_lengths]), timestep],
            list(self.made),
            forget_bias=self.forget_bias,
            drop_states=self.drop_states,
            sequence_lengths=seq_lengths is not None,
        )
        states = tuple(core.output_to_list(made))
        states[0].Net().AddExternalOutputs(*states)
        return states

    def get_input_params(self) -> dict[str, str]:
        return {"weights": f"{self.scope('i2h')}_w", "biases": f"{self.scope('i2h')}_b"}

    def get_recurrent_params(self) -> dict[str, str]:
        return {"weights": f"{self.scope('gates_t')}_w", "biases": f"{self.scope('gates_t')}_b"}


class BasicRNNCell(_Gated):
    """A fully-connected layer and an activation: `relu` or `tanh`."""

    def __init__(self, *args: Any, activation: str | None = None, **kwargs: Any) -> None:
        """Set up a cell; see `_Gated`.

        Raises:
            RuntimeError: any other activation.
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
        name = "hidden_t" if seq_lengths is None else "hidden_t_active"
        hidden = getattr(model.net, kind)(gates, name)
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
    default_initializer = LSTMInitializer

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
        made = self._unit(model.net.LSTMUnit, [hidden, cell, gates], seq_lengths, timestep)
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
    made = ("hidden_t", "cell_t")


class MILSTMCell(LSTMCell):
    """An LSTM whose gates have the product of both parts too: alpha x h + beta1 h + beta2 x + b."""

    made = ("hidden_t_intermediate", "cell_t")

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
