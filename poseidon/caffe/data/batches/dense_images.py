"""Batches of images with a label for each pixel, from a list whose lines are the
paths of an image and of its label image.

The law of `poseidon.caffe.data.batches.images` holds. A label image has one channel, whose values are the
labels. It is resized by the nearest neighbour, and scaled, cropped and mirrored like its image.

Source: SegNet's DenseImageDataLayer, which refuses crop_size and mirror; DeepLab's
ImageSegDataLayer, which resizes label images by bilinear interpolation, and TransformImgAndSeg for
scale_factors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from torch import Tensor

from poseidon.caffe.data.batches.images import Bytes, ImagePlan, ListMaker, read_image
from poseidon.caffe.data.batches.lists import read_label, read_list_lines
from poseidon.caffe.data.batches.prefetch import draw
from poseidon.caffe.data.batches.transform import LANES, Draws, planes
from poseidon.errors import DataError


class LabelKind(Enum):
    """What a line of the list has beside its image: the value is an example."""

    PIXELS = "1.png 1_label.png"
    WHOLE = "1.png 7"
    NONE = "1.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Where the labels of pixels come from.

    Attributes:
        kind: a label image (PIXELS), one label for all pixels of an image (WHOLE), or none: all
            pixels are `ignored`.
        ignored: the label of pixels without one.
        pads: extend images that are smaller than the crop, below and on the right, by the mean and
            by `ignored`.
    """

    kind: LabelKind = LabelKind.PIXELS
    ignored: int = 255
    pads: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Random factors of the sizes of images and of their labels.

    Attributes:
        factors: one of them is drawn for each image; none: sizes stay.

    Raises:
        DataError: a factor is not positive and finite.
    """

    factors: tuple[float, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for factor in self.factors:
            if not 0 < factor < math.inf:
                raise DataError(f"scale_factors has {factor:g}, expected positive numbers")

    def drawn(self, numbers: Draws) -> list[np.float32]:
        """Return the factor of each record, by its number in the job."""
        if not self.factors:
            return [np.float32(1)] * len(numbers)
        # The crop and the mirror draw from the lanes below.
        chosen = draw(self.seed, numbers, LANES + 1)[:, LANES] % len(self.factors)
        return [np.float32(self.factors[index]) for index in chosen.tolist()]


def scaled(image: Any, factor: np.float32, *, interpolation: int) -> Any:
    """Return an image (C, H, W) whose height and width are multiplied by a factor.

    The products are truncated, in float32, as by DeepLab's Caffe.
    """
    if factor == 1:
        return image
    high, wide = (max(1, int(np.float32(extent) * factor)) for extent in image.shape[1:])
    return planes(cv2.resize(image.transpose(1, 2, 0), (wide, high), interpolation=interpolation))


class ImagePair(NamedTuple):
    """A line of a list: the path of an image, and of its label image, or its label, or nothing."""

    number: int
    image: str
    label: str


def read_pairs(
    source: Path, root: str, *, kind: LabelKind = LabelKind.PIXELS, most: int | None = None
) -> list[ImagePair]:
    """Read the lines of a list file.

    Args:
        source: the file; a line is a path, and as `kind` says a second path or a label. Paths have
            no spaces.
        root: the prefix of each path (`root_folder`).
        kind: what a line has beside its image. With NONE, more words are ignored.
        most: the maximum number of lines to read; None: all.

    Raises:
        DataError: the file cannot be read, is empty, or has a line of a different form.
    """
    pairs: list[ImagePair] = []
    for number, line in read_list_lines(source)[:most]:
        words = line.split()
        if kind is LabelKind.NONE:
            pairs.append(ImagePair(number, root + words[0], ""))
            continue
        wrong = kind is LabelKind.WHOLE and read_label(words[-1], f"{source}:{number}") is None
        if len(words) != 2 or wrong:
            second = "of its label image" if kind is LabelKind.PIXELS else "its label"
            raise DataError(
                f"{source}:{number}: '{line[:80].strip()}' is not the path of an image and "
                f"{second}, such as: {kind.value}"
            )
        pairs.append(
            ImagePair(
                number, root + words[0], root + words[1] if kind is LabelKind.PIXELS else words[1]
            )
        )
    return pairs


def read_labels(path: Path, size: tuple[int, int] | None) -> Bytes:
    """Read a label image as (1, H, W).

    Raises:
        DataError: the file is missing, damaged or of an unknown format. The text names it.
    """
    labels = read_image(path, color=False)
    if size is not None and labels.shape[1:] != size:
        labels = cv2.resize(labels[0], (size[1], size[0]), interpolation=cv2.INTER_NEAREST)[
            np.newaxis
        ]
    return labels


class DenseImageMaker(ListMaker[ImagePair]):
    """A `Maker` of batches of a list's images and label images: images (N, C, h, w), labels
    (N, 1, h, w), extents (N, 1, 1, 2).

    Extents are height and width of a scaled image before it is extended, at most h and w.

    Args:
        source: the list file, already this client's part.
        scaling: the random factors of their sizes.

    Raises:
        DataError: the first image or its label image cannot be read or transformed, or rand_skip
            exceeds the list.
    """

    def __init__(
        self,
        source: Path,
        pairs: list[ImagePair],
        plan: ImagePlan,
        labels: Labels,
        scaling: Scaling,
    ) -> None:
        super().__init__(source, pairs, plan)
        self._labels, self._scaling = labels, scaling
        first = self._first_line()
        (factor,) = scaling.drawn(np.array([plan.share.client]))
        self.shape = (plan.batch_size, *self._output_shape(self._read(first, factor)[0], first))

    def tensors(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        plan = self._plan
        pairs, records = self._batch(number)
        draws, factors = plan.transform.draws(plan.seed, records), self._scaling.drawn(records)
        read = self._decoders.map(self._read, pairs, factors)
        shape = self._output_shape(read[0][0], pairs[0])
        data = np.empty((len(pairs), *shape), np.float32)
        labels = np.empty((len(pairs), 1, *shape[1:]), np.float32)
        extents = np.empty((len(pairs), 1, 1, 2), np.float32)
        for index, (pair, (image, label), choice) in enumerate(
            zip(pairs, read, draws, strict=True)
        ):
            if self._output_shape(image, pair) != shape:
                raise DataError(
                    f"{self._location(pair)}: an image of a different size in a batch; "
                    "set crop_size, new_height and new_width, or batch_size: 1"
                )
            extents[index] = np.minimum(image.shape[1:], shape[1:])
            if self._labels.pads:
                image = plan.transform.extended(image)
                label = plan.transform.extended(label, value=self._labels.ignored)
            plan.transform.one(image, choice, data[index])
            labels[index] = plan.transform.placed(label, choice)
        return torch.from_numpy(data), torch.from_numpy(labels), torch.from_numpy(extents)

    def _read(self, pair: ImagePair, factor: np.float32) -> tuple[Bytes, Any]:
        """Return an image and its labels, scaled."""
        image, labels = self._as_stored(pair)
        return (
            scaled(image, factor, interpolation=cv2.INTER_LINEAR),
            scaled(labels, factor, interpolation=cv2.INTER_NEAREST),
        )

    def _as_stored(self, pair: ImagePair) -> tuple[Bytes, Any]:
        with self._located(pair):
            image = read_image(Path(pair.image), color=self._plan.color, size=self._plan.size)
            if self._labels.kind is not LabelKind.PIXELS:
                whole = self._labels.kind is LabelKind.WHOLE
                label = int(pair.label) if whole else self._labels.ignored
                return image, np.full((1, *image.shape[1:]), label, np.float32)
            labels = read_labels(Path(pair.label), self._plan.size)
            if labels.shape[1:] != image.shape[1:]:
                raise DataError(
                    f"the image is {image.shape[1]}x{image.shape[2]} and its label image "
                    f"{labels.shape[1]}x{labels.shape[2]}, expected one size"
                )
        return image, labels

    def _output_shape(self, image: Bytes, pair: ImagePair) -> tuple[int, int, int]:
        transform = self._plan.transform
        with self._located(pair):
            shape = transform.extended_shape(image.shape) if self._labels.pads else image.shape
            return transform.output_shape(shape)
