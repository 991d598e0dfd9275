"""Recurrent layers: RNN, LSTM, and LSTMUnit, one step of an LSTM.

Law: the state at the end of a forward pass is the initial state of the next one (Donahue et al.,
2014). A stream whose cont is 0 at a step resets its state there. No gradient flows into an earlier
pass, nor through the states that `expose_hidden` returns. A layer keeps nothing else between
passes; snapshots do not contain it, as in Caffe.

Shape letters: T timesteps, N streams, D inputs, S static inputs, H num_output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from poseidon.caffe.layers.base import (
    BlobSpec,
    Layer,
    Shape,
    check_count,
    check_positive,
    check_shape,
    times,
)
from poseidon.caffe.layers.registry import register


class LSTMStep(torch.autograd.Function):
    """c' = f c + i g, h' = o tanh(c'), from the gates' inputs; f is 0 where cont is 0.

    The gradient is Caffe's: df = f (1 - f), with cont inside f, which is exact for a cont of 0 or
    1.
    """

    @staticmethod
    def forward(ctx: Any, c_NH: Tensor, gates_NG: Tensor, cont_N: Tensor) -> tuple[Tensor, Tensor]:
        i, f, o, g = gates_NG.chunk(4, -1)
        i, f, o, g = i.sigmoid(), f.sigmoid(), o.sigmoid(), g.tanh()
        f.mul_(cont_N.unsqueeze(-1))
        after = (f * c_NH).addcmul_(i, g)
        squashed = after.tanh()
        ctx.save_for_backward(i, f, o, g, c_NH, squashed)
        return after, o * squashed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dc_NH: Tensor, dh_NH: Tensor) -> tuple[Tensor | None, ...]:
        i, f, o, g, c_NH, squashed = ctx.saved_tensors
        dc_NH = dc_NH + dh_NH * o * (1 - squashed.square())
        gates = (
            dc_NH * g * i * (1 - i),
            dc_NH * c_NH * f * (1 - f),
            dh_NH * squashed * o * (1 - o),
            dc_NH * i * (1 - g.square()),
        )
        return dc_NH * f, torch.cat(gates, -1), None


def lstm_step(c: Tensor, gates: Tensor, cont: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cell state and the output after one step."""
    after, output = LSTMStep.apply(c, gates, cont)  # type: ignore[no-untyped-call]
    return after, output


@register("LSTMUnit")
class LSTMUnit(Layer):
    """One step of an LSTM: c' = f c + i g, h' = o tanh(c').

    Bottoms: cell c, 1 x N x H; the inputs of the gates i, f, o (sigmoid) and g (tanh) side by side,
    1 x N x 4H; cont, 1 x N, 0 where a sequence begins and c is reset. Tops: c' and h', 1 x N x H.
    No fields. cont has no gradient.
    """

    BOTTOMS = (3, 3)
    TOPS = (2, 2)

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        cell = bottoms[0]
        check_shape("bottom 0", cell, "1xNxH", "one step of N streams")
        _, streams, units = cell
        check_shape("bottom 1", bottoms[1], f"1x{streams}x{4 * units}")
        check_shape("bottom 2", bottoms[2], f"1x{streams}")
        return [cell, cell]

    def forward(self, cell: Tensor, gates: Tensor, cont: Tensor) -> tuple[Tensor, Tensor]:
        return lstm_step(cell, gates, cont)


class Recurrent(Layer):
    """The base class of RNN and LSTM: bottoms, tops and the state between passes.

    A subclass sets the number of states, declares its blobs and computes a pass.
    """

    STATES: ClassVar[int]
    BOTTOMS = (2, None)
    TOPS = (1, None)
    _state: tuple[Tensor, ...] = ()

    def check_counts(self) -> None:
        exposed = self._exposed()
        check_count("bottom", len(self.param.bottom), 2 + exposed, 3 + exposed)
        check_count("top", len(self.param.top), 1 + exposed, 1 + exposed)

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self.units, exposed = self.param.recurrent_param.num_output, self._exposed()
        check_positive(self.param.recurrent_param, "num_output")
        x, cont = bottoms[:2]
        check_shape("bottom 0", x, "TxNxD...", "timesteps, streams, inputs")
        check_shape("bottom 1 (cont)", cont, times(x[:2]))
        self.has_static = len(bottoms) > 2 + exposed
        static = bottoms[2] if self.has_static else None
        if static is not None:
            check_shape("bottom 2", static, f"{x[1]}xS...", "streams, static inputs")
        state = (1, x[1], self.units)
        for index in range(len(bottoms) - exposed, len(bottoms)):
            check_shape(f"bottom {index} (a hidden state)", bottoms[index], times(state))
        self.declare(
            *self.specs(math.prod(x[2:]), None if static is None else math.prod(static[1:]))
        )
        return [(*x[:2], self.units), *[state] * exposed]

    def specs(self, inputs: int, static: int | None) -> list[BlobSpec]:
        """Return the blobs, in the order of Caffe's unrolled net."""
        raise NotImplementedError

    def run(self, x_TNG: Tensor, cont_TN: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute all timesteps.

        Args:
            x_TNG: the inputs' part of the hidden units' or gates' arguments.
            cont_TN: 0 where a sequence begins.
            state: the initial states, N x H each.

        Returns:
            the outputs T x N x H, then the final states, N x H each.
        """
        raise NotImplementedError

    def forward(self, *bottoms: Tensor) -> Tensor | tuple[Tensor, ...]:
        x, cont = bottoms[:2]
        from_x = functional.linear(x.flatten(2), self.weight_x, self.bias_x)
        if self.has_static:
            from_x = from_x + functional.linear(bottoms[2].flatten(1), self.weight_static)
        exposed = self._exposed()
        initial = (
            [state[0].detach() for state in bottoms[len(bottoms) - exposed :]] if exposed else []
        )
        top, *state = self.run(from_x, cont.detach(), initial or self._kept_state(from_x))
        after = tuple(one.detach() for one in state)
        if exposed:
            return (top, *(one.unsqueeze(0) for one in after))
        self._state = after
        return top

    def saved_state(self) -> tuple[Tensor, ...]:
        return self._state

    def restore_state(self, state: Sequence[Tensor]) -> None:
        self._state = tuple(state)

    def _exposed(self) -> int:
        return self.STATES if self.param.recurrent_param.expose_hidden else 0

    def _kept_state(self, from_x: Tensor) -> tuple[Tensor, ...]:
        """Return the states of the previous pass; zeros if there is none or the number of
        streams has changed.
        """
        shape = (from_x.shape[1], self.units)
        if self._state and self._state[0].shape == shape and self._state[0].dtype == from_x.dtype:
            return self._state
        return (from_x.new_zeros(shape),) * self.STATES

    def _spec(self, name: str, *shape: int) -> BlobSpec:
        param = self.param.recurrent_param
        return BlobSpec(
            name=name,
            shape=shape,
            filler=param.bias_filler if len(shape) == 1 else param.weight_filler,
        )

    weight_x: nn.Parameter
    bias_x: nn.Parameter
    weight_static: nn.Parameter


@register("RNN")
class RNN(Recurrent):
    """h_t = tanh(W_hh cont_t h_(t-1) + W_xh x_t + W_xs s + b_h); y_t = tanh(W_ho h_t + b_o).

    Bottoms: x, T x N x D...; cont, T x N; optionally s, N x S...; with expose_hidden h_0, 1 x N x
    H. Tops: y, T x N x H; with expose_hidden h_T, 1 x N x H.

    Fields (recurrent_param): num_output H, weight_filler, bias_filler, expose_hidden. `debug_info`
    has no effect.

    Blobs: W_xh H x D; b_h H; W_xs H x S, with a static input; W_hh H x H; W_ho H x H; b_o H.
    """

    STATES: ClassVar[int] = 1
    weight_h: nn.Parameter
    weight_o: nn.Parameter
    bias_o: nn.Parameter

    def specs(self, inputs: int, static: int | None) -> list[BlobSpec]:
        units = self.units
        return [
            self._spec("weight_x", units, inputs),
            self._spec("bias_x", units),
            *([self._spec("weight_static", units, static)] if static is not None else []),
            self._spec("weight_h", units, units),
            self._spec("weight_o", units, units),
            self._spec("bias_o", units),
        ]

    def run(self, x_TNG: Tensor, cont_TN: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        h_NH, outputs = state[0], []
        for x_NH, cont_N in zip(x_TNG, cont_TN, strict=True):
            h_NH = (x_NH + functional.linear(h_NH * cont_N.unsqueeze(1), self.weight_h)).tanh()
            outputs.append(h_NH)
        return functional.linear(torch.stack(outputs), self.weight_o, self.bias_o).tanh(), h_NH


@register("LSTM")
class LSTM(Recurrent):
    """(i, f, o, g)_t = W_hc cont_t h_(t-1) + W_xc x_t + W_xs s + b_c; c_t = cont_t sig(f)
    c_(t-1) + sig(i) tanh(g); h_t = sig(o) tanh(c_t). Hochreiter and Schmidhuber, 1997; Zaremba
    and Sutskever, 2014.

    Bottoms: x, T x N x D...; cont, T x N; optionally s, N x S...; with expose_hidden h_0 and c_0, 1
    x N x H. Tops: h, T x N x H; with expose_hidden h_T and c_T, 1 x N x H.

    Fields (recurrent_param): num_output H, weight_filler, bias_filler, expose_hidden. `debug_info`
    has no effect.

    Blobs: W_xc 4H x D; b_c 4H; W_xs 4H x S, with a static input; W_hc 4H x H.
    """

    STATES: ClassVar[int] = 2
    weight_h: nn.Parameter

    def specs(self, inputs: int, static: int | None) -> list[BlobSpec]:
        gates = 4 * self.units
        return [
            self._spec("weight_x", gates, inputs),
            self._spec("bias_x", gates),
            *([self._spec("weight_static", gates, static)] if static is not None else []),
            self._spec("weight_h", gates, self.units),
        ]

    def run(self, x_TNG: Tensor, cont_TN: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (h_NH, c_NH), outputs = state, []
        for x_NG, cont_N in zip(x_TNG, cont_TN, strict=True):
            gates_NG = x_NG + functional.linear(h_NH * cont_N.unsqueeze(1), self.weight_h)
            c_NH, h_NH = lstm_step(c_NH, gates_NG, cont_N)
            outputs.append(h_NH)
        return torch.stack(outputs), h_NH, c_NH
