"""Batches of windows of images, for R-CNN (Girshick et al., 2014).

Law: a batch is a pure function of its number (and of file, share, sampling and seed). Its first
items are background windows, the rest foreground. Each is drawn with the seed and the item's number
in the job, so that workers draw differently.

Source: caffe's WindowDataLayer.

Images with the boxes of their objects, one image a batch, from a window file.

Law: a batch is a pure function of its number (and of file, share and seed). A box is x1, y1, x2, y2
in pixels of the resized image, both corners inside, and its class. Source: py-faster-rcnn's
RoIDataLayer: the shorter side becomes `scale` unless the longer one would exceed `longest`;
channels in BGR order, mean subtracted, mirrored at random.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum, auto

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from poseidon.base.foreign_files import read_definition
from poseidon.caffe.data.batches.images import LARGEST_IMAGE, decoded, read_image
from poseidon.caffe.data.batches.lists import ImageWindow, RecordOrder, WindowFile
from poseidon.caffe.data.batches.numbered import Maker, Share
from poseidon.caffe.data.batches.prefetch import BufferPool, draw
from poseidon.errors import DataError

Floats = npt.NDArray[np.float32]
CHANNELS = 3
LANES = 2  # random numbers for each item: the window, and whether to mirror it


class CropMode(Enum):
    """The region of the image that is warped to an item."""

    WARP = auto()
    """The window."""
    SQUARE = auto()
    """The smallest square around the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The parameters of window sampling.

    Attributes:
        batch_size: N.
        crop: height and width of every item.
        foreground: the number of foreground windows in a batch.
        context_pad: the pixels of context on each side of the window in the item.
        mirror: mirror half of the items.
        scale: factor on every value, after the mean.
        mean: (C, H, W) with H, W >= crop, or (C, 1, 1); None: no mean.
        cache: keep the bytes of the image files in memory.
    """

    batch_size: int
    crop: int
    foreground: int
    context_pad: int
    mode: CropMode
    mirror: bool
    scale: float
    mean: Floats | None
    cache: bool
    share: Share
    seed: int


class WindowMaker(Maker):
    """A `Maker` of batches of windows: items (N, C, crop, crop) and labels (N).

    Raises:
        DataError: the file has no windows of a kind that is needed.
    """

    def __init__(self, file: WindowFile, sampling: Sampling) -> None:
        super().__init__(sampling.share, sampling.batch_size)
        self._file = file
        self._sampling = sampling
        self.shape = (sampling.batch_size, CHANNELS, sampling.crop, sampling.crop)
        for kind, windows, wanted in (
            ("foreground", file.foreground, sampling.foreground),
            ("background", file.background, sampling.batch_size - sampling.foreground),
        ):
            if wanted and not windows:
                raise DataError(f"the window file {file.source} has no {kind} windows")
        self._cached: dict[int, bytes] = {}
        self._buffers = BufferPool(self.shape)

    def __len__(self) -> int:
        """Return the number of windows: as many items are an epoch."""
        return len(self._file.foreground) + len(self._file.background)

    def tensors(self, number: int) -> tuple[Tensor, Tensor]:
        sampling, size = self._sampling, self._sampling.batch_size
        draws = draw(sampling.seed, sampling.share.job_records(number * size, size), LANES)
        data = self._buffers.take()
        labels = np.empty(size, np.float32)
        for index, (which, side) in enumerate(draws.tolist()):
            is_background = index < size - sampling.foreground
            windows = self._file.background if is_background else self._file.foreground
            window = windows[which % len(windows)]
            labels[index] = window.label
            cut(
                self._image(window.image),
                window,
                sampling,
                sampling.mirror and side % 2 == 1,
                data[index],
            )
        return torch.from_numpy(data), torch.from_numpy(labels)

    def close(self) -> None:
        """Free the cached files."""
        self._cached.clear()

    def _image(self, index: int) -> npt.NDArray[np.uint8]:
        path = self._file.images[index]
        content = self._cached.get(index)
        try:
            if content is None:
                content = read_definition(path, most_bytes=LARGEST_IMAGE)
        except OSError as error:
            raise DataError(
                f"{self._file.source}: cannot read the image {path}: {error.strerror}"
            ) from error
        if self._sampling.cache:
            self._cached[index] = content
        try:
            pixels: npt.NDArray[np.uint8] = decoded(content, path, color=True)
        except DataError as error:
            raise DataError(f"{self._file.source}: {error}") from error
        return pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlacement:
    """A region of an image, and its position in the item.

    Attributes:
        corners: x1, y1, x2, y2 in the image, inclusive.
        size: width and height in the item.
        offset: column and row of the first pixel in the item.
    """

    corners: tuple[int, int, int, int]
    size: tuple[int, int]
    offset: tuple[int, int]


def place_window(
    corners: tuple[int, int, int, int],
    image: tuple[int, int],
    sampling: Sampling,
    *,
    mirrored: bool,
) -> WindowPlacement:
    """Compute the region of a window with its context, and its position in the item.
    Halves round away from zero, as in Caffe.

    Args:
        image: height and width of the image.
        mirrored: mirror the padding too.
    """
    crop = sampling.crop
    if not sampling.context_pad and sampling.mode is CropMode.WARP:
        return WindowPlacement(corners=corners, size=(crop, crop), offset=(0, 0))
    x1, y1, x2, y2 = _expanded(corners, sampling)
    wide, high = x2 - x1 + 1, y2 - y1 + 1
    before = (max(0, -x1), max(0, -y1))
    after = (max(0, x2 - image[1] + 1), max(0, y2 - image[0] + 1))
    x1, y1, x2, y2 = x1 + before[0], y1 + before[1], x2 - after[0], y2 - after[1]
    scale_x, scale_y = crop / wide, crop / high
    left = _round((after[0] if mirrored else before[0]) * scale_x)
    top = _round(before[1] * scale_y)
    size = (
        min(_round((x2 - x1 + 1) * scale_x), crop - left),
        min(_round((y2 - y1 + 1) * scale_y), crop - top),
    )
    return WindowPlacement(corners=(x1, y1, x2, y2), size=size, offset=(left, top))


def _expanded(corners: tuple[int, int, int, int], sampling: Sampling) -> tuple[int, int, int, int]:
    """Return the region with context_pad pixels of context on each side after the warp."""
    x1, y1, x2, y2 = corners
    scale = sampling.crop / (sampling.crop - 2 * sampling.context_pad)
    half_w, half_h = (x2 - x1 + 1) / 2, (y2 - y1 + 1) / 2
    center_x, center_y = x1 + half_w, y1 + half_h
    if sampling.mode is CropMode.SQUARE:
        half_w = half_h = max(half_w, half_h)
    return (
        _round(center_x - half_w * scale),
        _round(center_y - half_h * scale),
        _round(center_x + half_w * scale),
        _round(center_y + half_h * scale),
    )


def cut(
    image: npt.NDArray[np.uint8],
    window: ImageWindow,
    sampling: Sampling,
    mirrored: bool,
    out: Floats,
) -> None:
    """Write a window to its item: crop, warp, mirror, subtract the mean, scale.

    The rest of the item is zero.

    Raises:
        DataError: the window is outside its image.
    """
    placement = place_window(window.corners, image.shape[:2], sampling, mirrored=mirrored)
    (x1, y1, x2, y2), (wide, high), (left, top) = (
        placement.corners,
        placement.size,
        placement.offset,
    )
    if (
        not (0 <= x1 <= x2 < image.shape[1] and 0 <= y1 <= y2 < image.shape[0])
        or min(wide, high) < 1
    ):
        raise DataError(
            f"window {window.corners} is outside its image of {image.shape[1]} x {image.shape[0]} "
            "(width x height)"
        )
    warped = cv2.resize(
        image[y1 : y2 + 1, x1 : x2 + 1], (wide, high), interpolation=cv2.INTER_LINEAR
    )
    pixels = warped[:, ::-1] if mirrored else warped
    out.fill(0)
    target = out[:, top : top + high, left : left + wide]
    np.copyto(target, pixels.transpose(2, 0, 1))
    mean = sampling.mean
    if mean is not None and mean.shape[1] > 1:
        spare = (mean.shape[2] - sampling.crop) // 2
        mean = mean[:, spare + top : spare + top + high, spare + left : spare + left + wide]
    if mean is not None:
        target -= mean
    target *= np.float32(sampling.scale)


def _round(value: float) -> int:
    """Round halves away from zero, as C's round."""
    return math.floor(value + 0.5) if value >= 0 else -math.floor(-value + 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectPlan:
    """The batches to read.

    Attributes:
        scale: the shorter side of the resized image; 0: no resizing.
        longest: the limit of its longer side.
        mean: subtracted from each channel, (3, 1, 1); None: nothing.
        factor: multiplies the differences.
        mirror: mirror half of the images.
        shuffle: read each epoch in a different order.
    """

    share: Share
    seed: int
    scale: int
    longest: int
    mean: Floats | None
    factor: float
    mirror: bool
    shuffle: bool


class ObjectMaker(Maker):
    """A `Maker` of batches of one image: data (1, 3, H, W), im_info (1, 3) and boxes (G, 5).

    Images without objects are left out.

    Raises:
        DataError: no image has an object, or the first image cannot be read.

    Attributes:
        objects: the number of objects of the first image.
    """

    def __init__(self, file: WindowFile, plan: ObjectPlan) -> None:
        super().__init__(plan.share, 1)
        self._file, self._plan = file, plan
        boxes: dict[int, list[ImageWindow]] = defaultdict(list)
        for window in file.foreground:
            boxes[window.image].append(window)
        self._images = sorted(boxes)
        self._boxes = boxes
        if not self._images:
            raise DataError(
                f"the window file {file.source} has no objects: windows with an overlap of 1"
            )
        self._order = RecordOrder([len(self._images)], shuffle=plan.shuffle, seed=plan.seed)
        first = self.tensors(0)
        self.shape = tuple(first[0].shape)
        self.objects = len(first[2])

    def __len__(self) -> int:
        return len(self._images)

    def tensors(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        plan = self._plan
        image = self._images[self._order.record(plan.share.record(number))]
        pixels = read_image(self._file.images[image], color=True)
        scale = self._scale(pixels.shape[1], pixels.shape[2])
        if scale != 1:
            resized = cv2.resize(pixels.transpose(1, 2, 0), None, fx=scale, fy=scale)
            pixels = np.ascontiguousarray(resized.transpose(2, 0, 1))
        data = pixels.astype(np.float32)
        boxes = np.array(
            [(*window.corners, window.label) for window in self._boxes[image]], np.float32
        )
        boxes[:, :4] *= np.float32(scale)
        job_record = plan.share.job_records(number, 1)
        if plan.mirror and draw(plan.seed, job_record, 1)[0, 0] % 2:
            data = np.ascontiguousarray(data[..., ::-1])
            boxes[:, [0, 2]] = data.shape[2] - 1 - boxes[:, [2, 0]]
        if plan.mean is not None:
            data -= plan.mean
        data *= np.float32(plan.factor)
        info = np.array([[data.shape[1], data.shape[2], scale]], np.float32)
        return torch.from_numpy(data[np.newaxis]), torch.from_numpy(info), torch.from_numpy(boxes)

    def _scale(self, high: int, wide: int) -> float:
        """Return the factor of both sides of an image."""
        if not self._plan.scale:
            return 1.0
        return min(self._plan.scale / min(high, wide), self._plan.longest / max(high, wide))
