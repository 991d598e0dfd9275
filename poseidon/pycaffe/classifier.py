"""Classifier: a net that returns scores for images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.caffe.proto.caffe_pb2 import TEST
from poseidon.pycaffe.io import Transformer, oversample, resize_image
from poseidon.pycaffe.net import Net

Array = NDArray[Any]


def transformer_of(
    net: Net,
    *,
    mean: Array | None,
    input_scale: float | None,
    raw_scale: float | None,
    channel_swap: Sequence[int] | None,
) -> Transformer:
    """Return a transformer of a net's first input, with transposed axes and this preprocessing."""
    name = net.inputs[0]
    transformer = Transformer({name: net.blobs[name].shape})
    transformer.set_transpose(name, (2, 0, 1))
    if mean is not None:
        transformer.set_mean(name, mean)
    if input_scale is not None:
        transformer.set_input_scale(name, input_scale)
    if raw_scale is not None:
        transformer.set_raw_scale(name, raw_scale)
    if channel_swap is not None:
        transformer.set_channel_swap(name, channel_swap)
    return transformer


class Classifier(Net):
    """A net that classifies images by their center crop, or by ten crops.

    Args:
        model_file: the definition of a net with one input.
        pretrained_file: the weights.
        image_dims: (height, width) to which images are resized before the crop; None: the input's.
        mean, input_scale, raw_scale, channel_swap: see `Transformer`.
    """

    def __init__(
        self,
        model_file: str | os.PathLike[str],
        pretrained_file: str | os.PathLike[str],
        image_dims: Sequence[int] | None = None,
        mean: Array | None = None,
        input_scale: float | None = None,
        raw_scale: float | None = None,
        channel_swap: Sequence[int] | None = None,
    ) -> None:
        super().__init__(model_file, TEST, weights=pretrained_file)
        self.transformer = transformer_of(
            self, mean=mean, input_scale=input_scale, raw_scale=raw_scale, channel_swap=channel_swap
        )
        self.crop_dims = np.array(self.blobs[self.inputs[0]].shape[2:])
        self.image_dims = self.crop_dims if image_dims is None else np.array(image_dims)

    def predict(self, inputs: Sequence[Array], oversample: bool = True) -> Array:
        """Return the scores of images (H, W, K) as an array N x classes.

        Args:
            inputs: the images, of any size.
            oversample: average over ten crops; if False, use the center crop.
        """
        resized = np.stack([resize_image(image, self.image_dims.tolist()) for image in inputs])
        crops = self._ten_crops(resized) if oversample else self._center_crops(resized)
        name = self.inputs[0]
        data = np.stack([self.transformer.preprocess(name, crop) for crop in crops])
        scores = self.forward_all(None, **{name: data})[self.outputs[0]]
        return scores.reshape(len(inputs), 10, -1).mean(axis=1) if oversample else scores

    def _ten_crops(self, images: Array) -> Array:
        return oversample(images, self.crop_dims.tolist())

    def _center_crops(self, images: Array) -> Array:
        top, left = (self.image_dims / 2.0 - self.crop_dims / 2.0).astype(int)
        height, width = self.crop_dims
        return images[:, top : top + height, left : left + width]
