"""Detector: a net's scores for windows of pictures, as R-CNN takes them.

Source: Girshick et al., Rich feature hierarchies, 2014: each window is warped to the net's input, with some context
around it that is filled with the mean where it lies outside the picture.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.errors import UsageError
from poseidon.proto.caffe_pb2 import TEST
from poseidon.pycaffe.classifier import Wants, transformer_of
from poseidon.pycaffe.io import load_image, resize_image
from poseidon.pycaffe.net import Net

Array = NDArray[Any]
Window = Sequence[float] | Array
SELECTIVE_SEARCH = "selective_search_ijcv_with_python"


class Detector(Net):
    """A net that scores windows.

    Args:
        model_file: the definition, with one square input.
        pretrained_file: its weights.
        mean: see `Transformer.set_mean`; so the others.
        input_scale: multiplies after the mean.
        raw_scale: multiplies before the mean.
        channel_swap: order of channels.
        context_pad: pixels of context on each side of a warped window; None: none.
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
        name = self.inputs[0]
        wants = Wants(mean=mean, input_scale=input_scale, raw_scale=raw_scale, channel_swap=channel_swap)
        self.transformer = transformer_of({name: self.blobs[name].shape}, wants)
        self.configure_crop(context_pad)

    def configure_crop(self, context_pad: int | None) -> None:
        """Say how much context a window gets, and with what it is filled outside the picture."""
        name = self.inputs[0]
        channels, height, width = self.blobs[name].shape[1:]
        self.crop_dims = np.array([height, width, channels])
        self.context_pad = context_pad
        filling = np.zeros((channels, height, width), np.float32)
        if name in self.transformer.mean:
            filling += self.transformer.mean[name]
        if name in self.transformer.channel_swap:
            filling = filling[np.argsort(self.transformer.channel_swap[name])]
        self.crop_mean = filling.transpose(1, 2, 0) / self.transformer.raw_scale.get(name, 1.0)

    def detect_windows(self, images_windows: Iterable[tuple[str, Iterable[Window]]]) -> list[dict[str, Any]]:
        """Score windows.

        Args:
            images_windows: a picture's file, and its windows (top, left, bottom, right) in pixels; for each picture.

        Returns:
            for each window a dictionary of `window`, `prediction` and `filename`.

        Raises:
            DataError: a picture is missing or broken.
        """
        named = [(filename, window) for filename, windows in _listed(images_windows) for window in windows]
        if not named:
            return []
        name = self.inputs[0]
        crops, pictures = [], {filename: load_image(filename) for filename in dict(named)}
        for filename, window in named:
            crops.append(self.transformer.preprocess(name, self.crop(pictures[filename], window)))
        scores = self.forward_all(None, **{name: np.stack(crops)})[self.outputs[0]]
        return [
            {"window": window, "prediction": score, "filename": filename}
            for (filename, window), score in zip(named, scores, strict=True)
        ]

    def detect_selective_search(self, image_fnames: Iterable[str]) -> list[dict[str, Any]]:
        """Score the windows that selective search proposes.

        Raises:
            UsageError: the package that does the search is not installed.
        """
        try:
            search: Any = importlib.import_module(SELECTIVE_SEARCH)
        except ImportError as error:
            raise UsageError(
                f"selective search needs the package {SELECTIVE_SEARCH} (and MATLAB), which is not installed; "
                "give windows of your own to detect_windows"
            ) from error
        names = [os.path.abspath(name) for name in image_fnames]
        windows = search.get_windows(names, cmd="selective_search_rcnn")
        return self.detect_windows(list(zip(names, windows, strict=True)))

    def crop(self, im: Array, window: Window) -> Array:
        """Return a window of a picture, with its context if there is to be any.

        Raises:
            UsageError: the window lies outside the picture.
        """
        box = np.asarray(window, dtype=np.float64)
        top, left, bottom, right = box.astype(int)
        if not (0 <= top < bottom <= im.shape[0] and 0 <= left < right <= im.shape[1]):
            raise UsageError(
                f"window {box.tolist()} does not lie in a picture of {im.shape[0]} x {im.shape[1]}"
            )
        if not self.context_pad:
            return im[top:bottom, left:right]
        return self._with_context(im, box, self.context_pad)

    def _with_context(self, im: Array, window: Array, pad: int) -> Array:
        """Return the window grown so that after warping `pad` pixels on each side are context."""
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


def _listed(images_windows: Iterable[tuple[str, Iterable[Window]]]) -> list[tuple[str, list[Window]]]:
    return [(filename, list(windows)) for filename, windows in images_windows]
