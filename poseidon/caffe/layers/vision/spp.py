"""SPP: spatial pyramid pooling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from poseidon.caffe.layers.base import Layer, LayerError, Shape, check_image, check_positive, times
from poseidon.caffe.layers.registry import register
from poseidon.caffe.layers.vision.pooling import Pooling
from poseidon.caffe.proto.caffe_pb2 import LayerParameter, PoolingParameter, SPPParameter

POOLS = {
    SPPParameter.MAX: PoolingParameter.MAX,
    SPPParameter.AVE: PoolingParameter.AVE,
    SPPParameter.STOCHASTIC: PoolingParameter.STOCHASTIC,
}


@register("SPP")
class SPP(Layer):
    """Pooling in 2^l x 2^l windows at each level l of a pyramid, concatenated (He et al., 2014).

    Bottom: N x C x H x W. Top: N x C (4^pyramid_height - 1)/3, the flattened levels in order; with
    one level N x C x 1 x 1, as in Caffe.

    Fields (spp_param): pyramid_height, pool. `engine` has no effect.
    """

    IS_RANDOM = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.spp_param, bottoms[0]
        check_image(shape)
        check_positive(param, "pyramid_height")
        self.levels = [self._level(level, shape) for level in range(param.pyramid_height)]
        if len(self.levels) == 1:
            return [(*shape[:2], 1, 1)]
        bins = sum(4**level for level in range(param.pyramid_height))
        return [(shape[0], shape[1] * bins)]

    def _level(self, level: int, shape: Shape) -> Pooling:
        """Return the Pooling layer of one level, with windows and padding for its number of
        bins.
        """
        bins = 2**level
        kernel = [-(-extent // bins) for extent in shape[2:]]
        pad = [(k * bins - extent + 1) // 2 for k, extent in zip(kernel, shape[2:], strict=True)]
        param = PoolingParameter(pool=POOLS[self.param.spp_param.pool])
        param.kernel_h, param.kernel_w = kernel
        param.stride_h, param.stride_w = kernel
        param.pad_h, param.pad_w = pad
        pooling = Pooling(
            LayerParameter(type="Pooling", top=["pooled"], pooling_param=param), self.context
        )
        try:
            pooled = pooling.setup([shape])[0]
        except LayerError as error:
            raise LayerError(f"pyramid level {level} of {bins}x{bins} windows: {error}") from error
        if pooled[2:] != (bins, bins):
            raise LayerError(
                f"pyramid level {level} has {times(pooled[2:])} windows of a {times(shape[2:])} "
                f"image, expected {bins}x{bins}"
            )
        return pooling

    def forward(self, bottom: Tensor) -> Tensor:
        pooled = []
        for level in self.levels:
            level.generator = self.generator
            pooled.append(level(bottom))
        return (
            pooled[0] if len(pooled) == 1 else torch.cat([level.flatten(1) for level in pooled], 1)
        )
