"""Embed: a learned vector for each whole number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from poseidon.layers.base import BlobSpec, Layer, LayerError, Shape
from poseidon.layers.common.rearrange import check_range
from poseidon.layers.registry import register


@register("Embed")
class Embed(Layer):
    """y = W_x + b: an InnerProduct of one-hot vectors, without making them.

    Bottom: whole numbers in 0 .. input_dim - 1, of any shape; they have no gradient. Top: the same axes, then
    num_output.

    Fields (embed_param): num_output, input_dim, bias_term, weight_filler, bias_filler.

    Blobs: weight input_dim x num_output; bias num_output unless bias_term is false.
    """

    TOPS_MAY_BE_OVERWRITTEN: ClassVar[bool] = True
    weight: nn.Parameter
    bias: nn.Parameter | None

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param = self.param.embed_param
        for name in ("num_output", "input_dim"):
            if getattr(param, name) < 1:
                raise LayerError(f"missing {name}, expected at least 1")
        self.allow_absent("bias")
        self.declare(
            BlobSpec(name="weight", shape=(param.input_dim, param.num_output), filler=param.weight_filler),
            *(
                [BlobSpec(name="bias", shape=(param.num_output,), filler=param.bias_filler)]
                if param.bias_term
                else []
            ),
        )
        return [(*bottoms[0], param.num_output)]

    def forward(self, bottom: Tensor) -> Tensor:
        index = bottom.detach().long()
        check_range(index, self.weight.shape[0])
        top = functional.embedding(index, self.weight)
        return top if self.bias is None else top + self.bias
