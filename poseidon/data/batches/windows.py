"""Batches of windows of pictures, which R-CNN (Girshick et al., 2014) learns from.

Law: a batch is a pure function of its number (and of file, share, sampling and seed). Its first items are background windows, the
rest foreground; each is drawn with the seed and the item's number in the job, so that no two workers draw alike.

Source: caffe's WindowDataLayer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from poseidon.data.batches.buffers import BufferPool
from poseidon.data.batches.draws import draw
from poseidon.data.batches.numbered import NumberedReader
from poseidon.data.batches.partition import Share
from poseidon.data.batches.pictures import decoded
from poseidon.data.batches.window_file import Window, WindowFile
from poseidon.errors import DataError

Floats = npt.NDArray[np.float32]
CHANNELS = 3
LANES = 2  # what is drawn for each item: the window, and whether it is mirrored


class CropMode(Enum):
    """What part of the picture a window is cut from."""

    WARP = auto()
    """The window itself, whatever its shape."""
    SQUARE = auto()
    """The smallest square around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How windows become a batch.

    Attributes:
        batch_size: N.
        crop: height and width of every item.
        foreground: how many of a batch are foreground windows.
        context_pad: pixels of context around the window, in the item.
        mode: what is cut out.
        mirror: mirror half of the items.
        scale: factor on every value, after the mean.
        mean: (C, H, W) with H, W >= crop, or (C, 1, 1); None: none.
        cache: keep the picture files' bytes in memory.
        share: which items of the job.
        seed: of the job.
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


class WindowMaker:
    """Makes batches of windows.

    Raises:
        DataError: there are no windows of a kind that is to be sampled.
    """

    def __init__(self, file: WindowFile, sampling: Sampling) -> None:
        self._file = file
        self._sampling = sampling
        for kind, windows, wanted in (
            ("foreground", file.foreground, sampling.foreground),
            ("background", file.background, sampling.batch_size - sampling.foreground),
        ):
            if wanted and not windows:
                raise DataError(f"the window file {file.source} has no {kind} windows")
        self._cached: dict[int, bytes] = {}
        self._buffers = BufferPool(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, C, crop, crop)."""
        sampling = self._sampling
        return (sampling.batch_size, CHANNELS, sampling.crop, sampling.crop)

    def tensors(self, number: int) -> tuple[Tensor, Tensor]:
        """Batch `number` >= 0: items (N, C, crop, crop) and labels (N)."""
        sampling, size = self._sampling, self._sampling.batch_size
        draws = draw(sampling.seed, sampling.share.job_records(number * size, size), LANES)
        data = self._buffers.take()
        labels = np.empty(size, np.float32)
        for place, (which, side) in enumerate(draws.tolist()):
            behind = place < size - sampling.foreground
            windows = self._file.background if behind else self._file.foreground
            window = windows[which % len(windows)]
            labels[place] = window.label
            cut(
                self._picture(window.picture),
                window,
                sampling,
                sampling.mirror and side % 2 == 1,
                data[place],
            )
        return torch.from_numpy(data), torch.from_numpy(labels)

    def fresh_records(self, number: int) -> int:
        """How many items of batch `number` come before as many items as there are windows have been drawn."""
        size = self._sampling.batch_size
        windows = len(self._file.foreground) + len(self._file.background)
        return int((self._sampling.share.records(number * size, size) < windows).sum())

    def close(self) -> None:
        """Let go of the cached files."""
        self._cached.clear()

    def _picture(self, index: int) -> npt.NDArray[np.uint8]:
        path = self._file.pictures[index]
        content = self._cached.get(index)
        try:
            content = path.read_bytes() if content is None else content
        except OSError as error:
            raise DataError(
                f"{self._file.source}: cannot read the picture {path}: {error.strerror}"
            ) from error
        if self._sampling.cache:
            self._cached[index] = content
        try:
            pixels: npt.NDArray[np.uint8] = decoded(content, path, color=True)
        except DataError as error:
            raise DataError(f"{self._file.source}: {error}") from error
        return pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What is cut out of a picture, and where it lies in the item.

    Attributes:
        corners: x1, y1, x2, y2 inside the picture, included.
        size: width and height that it gets.
        offset: column and row of its first pixel in the item.
    """

    corners: tuple[int, int, int, int]
    size: tuple[int, int]
    offset: tuple[int, int]


def place_window(
    corners: tuple[int, int, int, int], picture: tuple[int, int], sampling: Sampling, *, mirrored: bool
) -> Placement:
    """Where a window with its context is cut out, and where it goes; as Caffe rounds, halves away from zero.

    Args:
        corners: of the window.
        picture: height and width.
        sampling: crop, context and mode.
        mirrored: the padding is mirrored too.
    """
    crop = sampling.crop
    if not sampling.context_pad and sampling.mode is CropMode.WARP:
        return Placement(corners=corners, size=(crop, crop), offset=(0, 0))
    x1, y1, x2, y2 = _expanded(corners, sampling)
    wide, high = x2 - x1 + 1, y2 - y1 + 1
    before = (max(0, -x1), max(0, -y1))
    after = (max(0, x2 - picture[1] + 1), max(0, y2 - picture[0] + 1))
    x1, y1, x2, y2 = x1 + before[0], y1 + before[1], x2 - after[0], y2 - after[1]
    scale_x, scale_y = crop / wide, crop / high
    left = _round((after[0] if mirrored else before[0]) * scale_x)
    top = _round(before[1] * scale_y)
    size = (
        min(_round((x2 - x1 + 1) * scale_x), crop - left),
        min(_round((y2 - y1 + 1) * scale_y), crop - top),
    )
    return Placement(corners=(x1, y1, x2, y2), size=size, offset=(left, top))


def _expanded(corners: tuple[int, int, int, int], sampling: Sampling) -> tuple[int, int, int, int]:
    """Return the region that, warped to the item, has just context_pad pixels of context on each side."""
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
    picture: npt.NDArray[np.uint8], window: Window, sampling: Sampling, mirrored: bool, out: Floats
) -> None:
    """Write a window into its item: cut out, warped, mirrored, less the mean, scaled; zeros around it.

    Raises:
        DataError: the window lies outside its picture.
    """
    place = place_window(window.corners, picture.shape[:2], sampling, mirrored=mirrored)
    (x1, y1, x2, y2), (wide, high), (left, top) = place.corners, place.size, place.offset
    if not (0 <= x1 <= x2 < picture.shape[1] and 0 <= y1 <= y2 < picture.shape[0]) or min(wide, high) < 1:
        raise DataError(
            f"window {window.corners} lies outside its picture of {picture.shape[1]} x {picture.shape[0]} (width x height)"
        )
    warped = cv2.resize(picture[y1 : y2 + 1, x1 : x2 + 1], (wide, high), interpolation=cv2.INTER_LINEAR)
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
    """C's round: halves away from zero."""
    return math.floor(value + 0.5) if value >= 0 else -math.floor(-value + 0.5)


class WindowReader(NumberedReader):
    """Draws one worker's windows, batch by batch, for ever: items (N, C, crop, crop) and labels (N).

    Args:
        file: the windows.
        sampling: how they become batches.
    """

    def __init__(self, file: WindowFile, sampling: Sampling) -> None:
        super().__init__(file.source, WindowMaker(file, sampling))
