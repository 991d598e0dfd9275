"""Attention of a decoder's step to an encoder's outputs: weights, and their weighted sum.

Shapes: L is the length of the encoder's outputs, N the batch, E their size. Each function returns
the context (1, N, E), the weights (N, L, 1) and the blobs that the gradient can make again.
"""

from __future__ import annotations

from typing import Any

from poseidon.caffe2 import brew

Attention = tuple[Any, Any, list[Any]]


class AttentionType:
    """The ways to compare the decoder's state with the encoder's outputs."""

    Regular, Recurrent, Dot, SoftCoverage = range(4)


def _scoped(scope: Any, name: str) -> str:
    return f"{scope}/{name}"


def _context(model: Any, outputs_transposed: Any, size: int, weights: Any, scope: Any) -> Any:
    """Return the sum of the encoder's outputs by weights."""
    name = _scoped(scope, "attention_weighted_encoder_context")
    context = model.net.BatchMatMul([outputs_transposed, weights], name)
    made, _ = model.net.Reshape(context, [context, f"{name}_old_shape"], shape=[1, -1, size])
    return made


def _weights(model: Any, logits: Any, scope: Any, encoder_lengths: Any) -> Any:
    """Return the softmax of the logits over the encoder's outputs up to each sequence's end."""
    if encoder_lengths is not None:
        logits = model.net.SequenceMask(
            [logits, encoder_lengths], ["masked_attention_logits"], mode="sequence"
        )
    return brew.softmax(
        model, logits, _scoped(scope, "attention_weights_3d"), engine="CUDNN", axis=1
    )


def _logits_of_sum(model: Any, summed: Any, size: int, scope: Any) -> Any:
    """Return v tanh(sum): logits of shape (N, L, 1)."""
    active = model.net.Tanh(summed, summed)
    name = _scoped(scope, "attention_logits")
    logits = brew.fc(model, active, name, dim_in=size, dim_out=1, axis=2, freeze_bias=True)
    return brew.transpose(model, logits, f"{name}_transposed", axes=[1, 0, 2])


def _projected(model: Any, blob: Any, size_in: int, size_out: int, scope: Any, name: str) -> Any:
    made = brew.fc(model, blob, _scoped(scope, name), dim_in=size_in, dim_out=size_out, axis=2)
    return model.net.Squeeze(made, made, dims=[0])


def _of_decoder(model: Any, state: Any, state_size: int, size: int, scope: Any) -> Any:
    return _projected(model, state, state_size, size, scope, "weighted_decoder_hidden_state")


def _attend(
    model: Any, summed: Any, size: int, outputs_transposed: Any, scope: Any, encoder_lengths: Any
) -> Attention:
    logits = _logits_of_sum(model, summed, size, scope)
    weights = _weights(model, logits, scope, encoder_lengths)
    return _context(model, outputs_transposed, size, weights, scope), weights, [summed]


def apply_recurrent_attention(
    model: Any,
    encoder_output_dim: int,
    encoder_outputs_transposed: Any,
    weighted_encoder_outputs: Any,
    decoder_hidden_state_t: Any,
    decoder_hidden_state_dim: int,
    attention_weighted_encoder_context_t_prev: Any,
    scope: Any,
    encoder_lengths: Any = None,
) -> Attention:
    """Attend by the decoder's state and the context before (arXiv 1601.03317, section 4.1)."""
    size = encoder_output_dim
    context, name = attention_weighted_encoder_context_t_prev, "weighted_prev_attention_context"
    before = _projected(model, context, size, size, scope, name)
    state = _of_decoder(model, decoder_hidden_state_t, decoder_hidden_state_dim, size, scope)
    both = model.net.Add([before, state], _scoped(scope, "decoder_hidden_encoder_outputs_sum_tmp"))
    name = _scoped(scope, "decoder_hidden_encoder_outputs_sum")
    summed = model.net.Add([weighted_encoder_outputs, both], name, broadcast=1)
    return _attend(model, summed, size, encoder_outputs_transposed, scope, encoder_lengths)


def apply_regular_attention(
    model: Any,
    encoder_output_dim: int,
    encoder_outputs_transposed: Any,
    weighted_encoder_outputs: Any,
    decoder_hidden_state_t: Any,
    decoder_hidden_state_dim: int,
    scope: Any,
    encoder_lengths: Any = None,
) -> Attention:
    """Attend by the decoder's state (arXiv 1409.0473)."""
    size = encoder_output_dim
    state = _of_decoder(model, decoder_hidden_state_t, decoder_hidden_state_dim, size, scope)
    name = _scoped(scope, "decoder_hidden_encoder_outputs_sum")
    summed = model.net.Add([weighted_encoder_outputs, state], name, broadcast=1)
    return _attend(model, summed, size, encoder_outputs_transposed, scope, encoder_lengths)


def apply_dot_attention(
    model: Any,
    encoder_output_dim: int,
    encoder_outputs_transposed: Any,
    decoder_hidden_state_t: Any,
    decoder_hidden_state_dim: int,
    scope: Any,
    encoder_lengths: Any = None,
) -> Attention:
    """Attend by the product of the decoder's state (projected if sizes differ) and each output."""
    size, state = encoder_output_dim, decoder_hidden_state_t
    if decoder_hidden_state_dim != size:
        name = _scoped(scope, "weighted_decoder_hidden_state")
        state = brew.fc(model, state, name, dim_in=decoder_hidden_state_dim, dim_out=size, axis=2)
    column = model.net.Squeeze(
        state, _scoped(scope, "squeezed_weighted_decoder_hidden_state"), dims=[0]
    )
    column = model.net.ExpandDims(column, column, dims=[2])
    logits = model.net.BatchMatMul(
        [encoder_outputs_transposed, column], _scoped(scope, "attention_logits"), trans_a=1
    )
    weights = _weights(model, logits, scope, encoder_lengths)
    return _context(model, encoder_outputs_transposed, size, weights, scope), weights, []


def apply_soft_coverage_attention(
    model: Any,
    encoder_output_dim: int,
    encoder_outputs_transposed: Any,
    weighted_encoder_outputs: Any,
    decoder_hidden_state_t: Any,
    decoder_hidden_state_dim: int,
    scope: Any,
    encoder_lengths: Any,
    coverage_t_prev: Any,
    coverage_weights: Any,
) -> tuple[Any, Any, list[Any], Any]:
    """Attend by the decoder's state and the sum of all earlier weights (arXiv 1601.04811).

    The coverage after the step, of shape (1, N, L), is a fourth value.
    """
    size = encoder_output_dim
    state = _of_decoder(model, decoder_hidden_state_t, decoder_hidden_state_dim, size, scope)
    name = _scoped(scope, "decoder_hidden_encoder_outputs_sum")
    both = model.net.Add([weighted_encoder_outputs, state], f"{name}_tmp", broadcast=1)
    flat = model.net.Squeeze(coverage_t_prev, _scoped(scope, "coverage_t_prev_2d"), dims=[0])
    turned = brew.transpose(model, flat, _scoped(scope, "coverage_t_prev_transposed"))
    scaled = model.net.Mul(
        [coverage_weights, turned], _scoped(scope, "scaled_coverage_weights"), broadcast=1, axis=0
    )
    summed = model.net.Add([both, scaled], name)
    context, weights, again = _attend(
        model, summed, size, encoder_outputs_transposed, scope, encoder_lengths
    )
    added = model.net.Squeeze(weights, _scoped(scope, "attention_weights_2d"), dims=[2])
    coverage = model.net.Add([coverage_t_prev, added], _scoped(scope, "coverage_t"), broadcast=1)
    return context, weights, again, coverage
