"""Cells of decoders that attend to the outputs of an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poseidon.caffe2 import brew, core, scope
from poseidon.caffe2.attention import (
    AttentionType,
    apply_dot_attention,
    apply_recurrent_attention,
    apply_regular_attention,
    apply_soft_coverage_attention,
)
from poseidon.caffe2.rnn.cell import Extra, LSTMCell, MILSTMCell, RNNCell


class AttentionCell(RNNCell):
    """A cell whose step also gets the context of the step before; the context is one more state.

    With `SoftCoverage` the coverage is a state too, the last one.
    """

    def __init__(
        self,
        encoder_output_dim: int,
        encoder_outputs: Any,
        encoder_lengths: Any,
        decoder_cell: RNNCell,
        decoder_state_dim: int,
        attention_type: int,
        weighted_encoder_outputs: Any,
        attention_memory_optimization: bool,
        **kwargs: Any,
    ) -> None:
        """Set up a cell around the decoder's cell; see `rnn_cell.LSTMWithAttention`."""
        super().__init__(**kwargs)
        assert attention_type in range(4), "the attention type is not a member of AttentionType"
        self.encoder_output_dim = encoder_output_dim
        self.encoder_outputs = encoder_outputs
        self.encoder_lengths = encoder_lengths
        self.decoder_cell = decoder_cell
        self.decoder_state_dim = decoder_state_dim
        self.attention_type = attention_type
        self.weighted_encoder_outputs = weighted_encoder_outputs
        self.attention_memory_optimization = attention_memory_optimization
        self.encoder_outputs_transposed: Any = None
        self.coverage_weights: Any = None
        self.attention_weights_3d: Any = None
        self.hidden_t_intermediate: Any = None
        self._own = 2 if attention_type == AttentionType.SoftCoverage else 1

    def _apply(
        self,
        model: Any,
        input_t: Any,
        seq_lengths: Any,
        states: Sequence[Any],
        timestep: Any,
        extra_inputs: Extra = None,
    ) -> Any:
        assert extra_inputs is None, "an AttentionCell takes no further inputs"
        before, own = list(states[: -self._own]), list(states[-self._own :])
        after = self.decoder_cell._apply(
            model,
            input_t,
            seq_lengths,
            before,
            timestep,
            extra_inputs=[(own[0], self.encoder_output_dim)],
        )
        self.hidden_t_intermediate = self.decoder_cell._prepare_output(model, after)
        context, self.attention_weights_3d, again, *coverage = self._attend(model, own)
        if self.attention_memory_optimization:
            self.recompute_blobs.extend(again)
        made = [*after, context, *coverage]
        index = self.get_output_state_index()
        made[index] = model.net.Copy(made[index], self.scope("hidden_t_external"))
        outside = model.net.external_outputs
        model.net.AddExternalOutputs(*[blob for blob in made if blob not in outside])
        return made

    def _attend(self, model: Any, own: Sequence[Any]) -> Any:
        arguments: dict[str, Any] = {
            "model": model,
            "encoder_output_dim": self.encoder_output_dim,
            "encoder_outputs_transposed": self.encoder_outputs_transposed,
            "decoder_hidden_state_t": self.hidden_t_intermediate,
            "decoder_hidden_state_dim": self.decoder_state_dim,
            "scope": self.name,
            "encoder_lengths": self.encoder_lengths,
        }
        if self.attention_type == AttentionType.Dot:
            return apply_dot_attention(**arguments)
        arguments["weighted_encoder_outputs"] = self.weighted_encoder_outputs
        if self.attention_type == AttentionType.Regular:
            return apply_regular_attention(**arguments)
        if self.attention_type == AttentionType.Recurrent:
            return apply_recurrent_attention(
                attention_weighted_encoder_context_t_prev=own[0], **arguments
            )
        return apply_soft_coverage_attention(
            coverage_t_prev=own[1], coverage_weights=self.coverage_weights, **arguments
        )

    def get_attention_weights(self) -> Any:
        """Return the weights of the last step that was added, of shape (N, L, 1)."""
        return self.attention_weights_3d

    def prepare_input(self, model: Any, input_blob: Any) -> Any:
        """See `RNNCell`; the encoder's outputs are prepared too."""
        if self.encoder_outputs_transposed is None:
            name = self.scope("encoder_outputs_transposed")
            self.encoder_outputs_transposed = brew.transpose(
                model, self.encoder_outputs, name, axes=[1, 2, 0]
            )
        if self.weighted_encoder_outputs is None and self.attention_type != AttentionType.Dot:
            self.weighted_encoder_outputs = self._weighted(model, "weighted_encoder_outputs")
        return self.decoder_cell.prepare_input(model, input_blob)

    def _weighted(self, model: Any, name: str) -> Any:
        size = self.encoder_output_dim
        return brew.fc(
            model, self.encoder_outputs, self.scope(name), dim_in=size, dim_out=size, axis=2
        )

    def build_initial_coverage(self, model: Any) -> Any:
        """Return the first coverage: zeros, as many as the encoder has outputs."""
        assert self.attention_type == AttentionType.SoftCoverage
        self.coverage_weights = self._weighted(model, "coverage_weights")
        length = model.net.Slice(model.net.Shape(self.encoder_outputs), starts=[0], ends=[1])
        device = scope.CurrentDeviceScope()
        if device is not None and core.IsGPUDeviceType(device.device_type):
            length = model.net.CopyGPUToCPU(length, "encoder_length_cpu")
        return model.net.ConstantFill(
            length, self.scope("initial_coverage"), value=0.0, input_as_shape=1
        )

    def get_state_names(self) -> Sequence[str]:
        names = list(self.decoder_cell.get_state_names())
        names[self.get_output_state_index()] = self.scope("hidden_t_external")
        names.append(self.scope("attention_weighted_encoder_context_t"))
        return names + [self.scope("coverage_t")] * (self._own - 1)

    def get_output_dim(self) -> int:
        return self.decoder_state_dim + self.encoder_output_dim

    def get_output_state_index(self) -> int:
        return self.decoder_cell.get_output_state_index()

    def _joined(self, model: Any, hidden: Any, context: Any) -> Any:
        with core.NameScope(self.name or ""):
            return brew.concat(model, [hidden, context], "states_and_context_combination", axis=2)

    def _prepare_output(self, model: Any, states: Sequence[Any]) -> Any:
        return self._joined(model, self.hidden_t_intermediate, states[-self._own])

    def _prepare_output_sequence(self, model: Any, state_outputs: Sequence[Any]) -> Any:
        of_decoder = state_outputs[: -2 * self._own]
        hidden = self.decoder_cell._prepare_output_sequence(model, of_decoder)
        return self._joined(model, hidden, state_outputs[-2 * self._own])


class _Decoder(AttentionCell):
    """An attention cell that makes the decoder's cell itself."""

    decoder_class: type[LSTMCell] = LSTMCell

    def __init__(
        self,
        encoder_output_dim: int,
        encoder_outputs: Any,
        encoder_lengths: Any,
        decoder_input_dim: int,
        decoder_state_dim: int,
        name: str,
        attention_type: int,
        weighted_encoder_outputs: Any,
        forget_bias: float,
        lstm_memory_optimization: bool,
        attention_memory_optimization: bool,
        forward_only: bool = False,
    ) -> None:
        cell = self.decoder_class(
            input_size=decoder_input_dim,
            hidden_size=decoder_state_dim,
            forget_bias=forget_bias,
            memory_optimization=lstm_memory_optimization,
            name=f"{name}/decoder",
        )
        super().__init__(
            encoder_output_dim,
            encoder_outputs,
            encoder_lengths,
            cell,
            decoder_state_dim,
            attention_type,
            weighted_encoder_outputs,
            attention_memory_optimization,
            name=name,
            forward_only=forward_only,
        )


class LSTMWithAttentionCell(_Decoder):
    """An LSTM with attention."""


class MILSTMWithAttentionCell(_Decoder):
    """A multiplicative LSTM with attention."""

    decoder_class = MILSTMCell
