"""InnerProduct, the fully-connected layer, and Embed, its form for one-hot vectors.

Shape letters: B the axes before `axis`, M the product of the other extents, N num_output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from poseidon.caffe.layers.base import (
    BlobSpec,
    Layer,
    Shape,
    canonical_axis,
    check_positive,
    optional_bias,
)
from poseidon.caffe.layers.rearrange import to_indices
from poseidon.caffe.layers.registry import register


@register("InnerProduct")
class InnerProduct(Layer):
    """y = x W^T + b, with x the bottom flattened from `axis` on.

    Bottom: B x M. Top: B x N.

    Fields (inner_product_param): num_output, bias_term, axis, transpose, weight_filler,
    bias_filler.

    Blobs: weight N x M (M x N with `transpose`); bias N unless bias_term is false.
    """

    takes_any_form = True
    TOPS_MAY_BE_OVERWRITTEN = True
    weight: nn.Parameter
    bias: nn.Parameter | None

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.inner_product_param, bottoms[0]
        check_positive(param, "num_output")
        self.axis = canonical_axis(param.axis, shape)
        self.transpose = param.transpose
        inputs, outputs = math.prod(shape[self.axis :]), param.num_output
        self.offers_factors = self.axis == 1 and not self.transpose
        self.allow_absent("bias")
        weight = (inputs, outputs) if self.transpose else (outputs, inputs)
        self.declare(
            BlobSpec(name="weight", shape=weight, filler=param.weight_filler),
            *optional_bias(param),
        )
        return [(*shape[: self.axis], outputs)]

    def forward(self, bottom: Tensor) -> Tensor:
        weight = self.weight.t() if self.transpose else self.weight
        return functional.linear(bottom.flatten(self.axis), weight, self.bias)


@register("Embed")
class Embed(Layer):
    """y = W_x + b: an InnerProduct of one-hot vectors, given as indices.

    Bottom: integers in 0 .. input_dim - 1, of any shape; they have no gradient. Top: the same axes,
    then num_output.

    Fields (embed_param): num_output, input_dim, bias_term, weight_filler, bias_filler.

    Blobs: weight input_dim x num_output; bias num_output unless bias_term is false.
    """

    TOPS_MAY_BE_OVERWRITTEN = True
    weight: nn.Parameter
    bias: nn.Parameter | None

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param = self.param.embed_param
        check_positive(param, "num_output", "input_dim")
        self.allow_absent("bias")
        self.declare(
            BlobSpec(
                name="weight",
                shape=(param.input_dim, param.num_output),
                filler=param.weight_filler,
                looked_up=True,
            ),
            *optional_bias(param),
        )
        return [(*bottoms[0], param.num_output)]

    def forward(self, bottom: Tensor) -> Tensor:
        top = functional.embedding(to_indices(bottom, self.weight.shape[0]), self.weight)
        return top if self.bias is None else top + self.bias
