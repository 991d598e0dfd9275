"""Images with the boxes of their objects, one image a batch, from a window file.

Law: a batch is a pure function of its number (and of file, share and seed). A box is x1, y1, x2, y2
in pixels of the resized image, both corners inside, and its class. Source: py-faster-rcnn's
RoIDataLayer: the shorter side becomes `scale` unless the longer one would exceed `longest`;
channels in BGR order, mean subtracted, mirrored at random.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from poseidon.caffe.data.batches.draws import draw
from poseidon.caffe.data.batches.images import read_image
from poseidon.caffe.data.batches.lists import RecordOrder
from poseidon.caffe.data.batches.numbered import Maker
from poseidon.caffe.data.batches.partition import Share
from poseidon.caffe.data.batches.window_file import ImageWindow, WindowFile
from poseidon.errors import DataError

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectPlan:
    """The batches to read.

    Attributes:
        share: the images of this worker.
        seed: the seed of the job.
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
