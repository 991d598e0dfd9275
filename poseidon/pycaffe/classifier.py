"""Nets that return scores: Classifier, for images, and Detector, for windows of images, as in R-CNN.

Source of the detector: Girshick et al., Rich feature hierarchies, 2014: each window is warped to the net's
input, with some context around it. Context outside the image is filled with the mean.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.caffe.proto.caffe_pb2 import TEST
from poseidon.errors import UsageError
from poseidon.pycaffe.io import Transformer, WrongShape, load_image, oversample, resize_image
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
        if self.image_dims.shape != (2,) or (self.image_dims < self.crop_dims).any():
            height, width = self.crop_dims
            raise UsageError(
                f"image_dims is {image_dims}, expected (height, width), at least the net's input, "
                f"({height}, {width})"
            )

    def predict(self, inputs: Sequence[Array], oversample: bool = True) -> Array:
        """Return the scores of images (H, W, K) as an array N x classes.

        Args:
            inputs: the images, of any size.
            oversample: average over ten crops; if False, use the center crop.

        Raises:
            ValueError: there is no image, or one that is not an array (H, W, K).
        """
        if not len(inputs) or any(np.ndim(image) != 3 for image in inputs):
            raise WrongShape("expected a list of images (H, W, K), as load_image returns them")
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


Window = Sequence[float] | Array
SELECTIVE_SEARCH = "selective_search_ijcv_with_python"


class Detector(Net):
    """A net that scores windows.

    Args:
        model_file: the definition of a net with one square input.
        pretrained_file: the weights.
        mean, input_scale, raw_scale, channel_swap: see `Transformer`.
        context_pad: the pixels of context on each side of a warped window; None: 0.
    """

    def __init__(
        self,
        model_file: str | os.PathLike[str],
        pretrained_file: str | os.PathLike[str],
        mean: Array | None = None,
        input_scale: float | None = None,
        raw_scale: float | None = None,
        channel_swap: Sequence[int] | None = None,
        context_pad: int | None = None,
    ) -> None:
        super().__init__(model_file, TEST, weights=pretrained_file)
        self.transformer = transformer_of(
            self, mean=mean, input_scale=input_scale, raw_scale=raw_scale, channel_swap=channel_swap
        )
        self.configure_crop(context_pad)

    def configure_crop(self, context_pad: int | None) -> None:
        """Set the context of a window, and compute the mean that fills it outside the image."""
        name = self.inputs[0]
        channels, height, width = self.blobs[name].shape[1:]
        self.crop_dims = np.array([height, width, channels])
        self.context_pad = context_pad
        mean = np.zeros((channels, height, width), np.float32)
        if name in self.transformer.mean:
            mean += self.transformer.mean[name]
        if name in self.transformer.channel_swap:
            mean = mean[np.argsort(self.transformer.channel_swap[name])]
        self.crop_mean = mean.transpose(1, 2, 0) / (self.transformer.raw_scale.get(name) or 1.0)

    def detect_windows(
        self, images_windows: Iterable[tuple[str, Iterable[Window]]]
    ) -> list[dict[str, Any]]:
        """Score windows.

        Args:
            images_windows: pairs of an image file and its windows (top, left, bottom, right) in
                pixels.

        Returns:
            a dictionary of `window`, `prediction` and `filename` for each window.

        Raises:
            DataError: an image is missing or damaged.
        """
        named = [(filename, window) for filename, windows in images_windows for window in windows]
        if not named:
            return []
        name = self.inputs[0]
        crops, images = [], {filename: load_image(filename) for filename in dict(named)}
        for filename, window in named:
            crops.append(self.transformer.preprocess(name, self.crop(images[filename], window)))
        scores = self.forward_all(None, **{name: np.stack(crops)})[self.outputs[0]]
        return [
            {"window": window, "prediction": score, "filename": filename}
            for (filename, window), score in zip(named, scores, strict=True)
        ]

    def detect_selective_search(self, image_fnames: Iterable[str]) -> list[dict[str, Any]]:
        """Score the windows that selective search proposes.

        Raises:
            UsageError: the package for selective search is not installed.
        """
        try:
            search: Any = importlib.import_module(SELECTIVE_SEARCH)
        except ImportError as error:
            raise UsageError(
                f"selective search needs the package {SELECTIVE_SEARCH} (and MATLAB), which is not "
                "installed; pass your own windows to detect_windows"
            ) from error
        names = [os.path.abspath(name) for name in image_fnames]
        windows = search.get_windows(names, cmd="selective_search_rcnn")
        return self.detect_windows(list(zip(names, windows, strict=True)))

    def crop(self, im: Array, window: Window) -> Array:
        """Crop a window of an image, with its context if any.

        Raises:
            UsageError: the window is outside the image.
        """
        box = np.asarray(window, dtype=np.float64)
        top, left, bottom, right = box.astype(int)
        if not (0 <= top < bottom <= im.shape[0] and 0 <= left < right <= im.shape[1]):
            raise UsageError(
                f"window {box.tolist()} is outside the image of {im.shape[0]} x {im.shape[1]}"
            )
        if not self.context_pad:
            return im[top:bottom, left:right]
        return self._with_context(im, box, self.context_pad)

    def _with_context(self, im: Array, window: Array, pad: int) -> Array:
        """Crop and warp a window enlarged so that `pad` pixels on each side of the result are
        context.
        """
        size = int(self.crop_dims[0])
        half = (window[2:] - window[:2] + 1) / 2.0
        grown = size / (size - 2.0 * pad) * half
        center = window[:2] + half
        box = np.round(np.concatenate([center - grown, center + grown]))
        scale = size / (box[2:] - box[:2] + 1)
        first = np.round(np.maximum(0, -box[:2]) * scale).astype(int)
        box = np.clip(box, 0, np.tile(im.shape[:2], 2)).astype(int)
        inside = np.round((box[2:] - box[:2] + 1) * scale).astype(int)
        rows, columns = np.minimum(inside, size - first)
        crop = np.array(self.crop_mean, dtype=np.float32)
        part = resize_image(im[box[0] : box[2], box[1] : box[3]], (rows, columns))
        crop[first[0] : first[0] + rows, first[1] : first[1] + columns] = part
        return crop
