"""Classifier: pictures in, scores out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.proto.caffe_pb2 import TEST
from poseidon.pycaffe.io import Transformer, oversample, resize_image
from poseidon.pycaffe.net import Net

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """What a net wants its pictures to be; see `Transformer`."""

    mean: Array | None
    input_scale: float | None
    raw_scale: float | None
    channel_swap: Sequence[int] | None


def transformer_of(shapes: Mapping[str, Sequence[int]], wants: Wants) -> Transformer:
    """Return a transformer of the first input: axes transposed, and the rest as wanted."""
    transformer = Transformer(shapes)
    name = next(iter(shapes))
    transformer.set_transpose(name, (2, 0, 1))
    if wants.mean is not None:
        transformer.set_mean(name, wants.mean)
    if wants.input_scale is not None:
        transformer.set_input_scale(name, wants.input_scale)
    if wants.raw_scale is not None:
        transformer.set_raw_scale(name, wants.raw_scale)
    if wants.channel_swap is not None:
        transformer.set_channel_swap(name, wants.channel_swap)
    return transformer


class Classifier(Net):
    """A net that classifies pictures by centre crop, or by corners, centre and mirrors.

    Args:
        model_file: the definition, with one input.
        pretrained_file: its weights.
        image_dims: (height, width) to which pictures are resized before they are cropped; None: the input's.
        mean: see `Transformer.set_mean`; so the others.
        input_scale: multiplies after the mean.
        raw_scale: multiplies before the mean.
        channel_swap: order of channels.
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
        name = self.inputs[0]
        wants = Wants(mean=mean, input_scale=input_scale, raw_scale=raw_scale, channel_swap=channel_swap)
        self.transformer = transformer_of({name: self.blobs[name].shape}, wants)
        self.crop_dims = np.array(self.blobs[name].shape[2:])
        self.image_dims = self.crop_dims if image_dims is None else np.array(image_dims)

    def predict(self, inputs: Sequence[Array], oversample: bool = True) -> Array:
        """Return the scores of pictures (H, W, K), N x classes.

        Args:
            inputs: the pictures, of any sizes.
            oversample: average over ten crops; else the centre crop alone.
        """
        resized = np.stack([resize_image(picture, self.image_dims.tolist()) for picture in inputs])
        crops = self._ten_crops(resized) if oversample else self._centres(resized)
        name = self.inputs[0]
        given = np.stack([self.transformer.preprocess(name, crop) for crop in crops])
        scores = self.forward_all(None, **{name: given})[self.outputs[0]]
        return scores.reshape(len(inputs), 10, -1).mean(axis=1) if oversample else scores

    def _ten_crops(self, pictures: Array) -> Array:
        return oversample(pictures, self.crop_dims.tolist())

    def _centres(self, pictures: Array) -> Array:
        top, left = (self.image_dims / 2.0 - self.crop_dims / 2.0).astype(int)
        height, width = self.crop_dims
        return pictures[:, top : top + height, left : left + width]
