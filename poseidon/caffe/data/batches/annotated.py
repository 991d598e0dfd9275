"""Batches of annotated images: read, decoded, sampled and transformed together with their objects.

Law: a batch is a pure function of its number (and of database, share, transform and seed).

Source: annotated_data_layer.cpp of SSD's branch of Caffe (Liu et al., 2016).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from poseidon.caffe.data.annotated import AnnotatedImage, decode_annotated, object_rows
from poseidon.caffe.data.augment.augmentation import Augmentation
from poseidon.caffe.data.augment.boxes import Box, Object, projected
from poseidon.caffe.data.augment.samplers import WindowSampler
from poseidon.caffe.data.batches.draws import draw
from poseidon.caffe.data.batches.numbered import BatchPlan
from poseidon.caffe.data.batches.reader import RecordMaker, Stored
from poseidon.caffe.data.batches.transform import LANES, SEED_LANES, generator, pixels_of, planes
from poseidon.caffe.data.databases.cursor import Cursor
from poseidon.caffe.proto.caffe_pb2 import TransformationParameter
from poseidon.errors import DataError

Floats = npt.NDArray[np.float32]
Draws = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedPlan(BatchPlan):
    """The batches to read.

    Attributes:
        sampler: the batch samplers.
        boxes: records have boxes even if they have no annotation type.
    """

    sampler: WindowSampler
    boxes: bool = False


class _Item(NamedTuple):
    """A transformed image with its label and objects."""

    data: Floats
    label: int
    objects: list[Object] | None


class AnnotatedMaker(RecordMaker):
    """A `Maker` of batches of a database of AnnotatedDatum records: images (N, C, h, w) and
    objects (1, 1, G, 8), or labels (N).

    Raises:
        DataError: the first record is damaged or cannot be transformed.

    Attributes:
        has_boxes: the second tensor holds objects, not labels.
        objects: the number of objects of the first record, at least 1.
    """

    def __init__(self, cursor: Cursor, plan: AnnotatedPlan) -> None:
        super().__init__(cursor, plan)
        self._plan = plan
        self._augmentation = plan.transform.augmentation or Augmentation(TransformationParameter())
        first = self._decode(self._stored(0))
        self.has_boxes = first.objects is not None or plan.boxes
        self.objects = max(1, len(first.objects or ()))
        self.shape = (plan.batch_size, *plan.transform.output_shape(first.image.shape))

    def tensors(self, number: int) -> tuple[Tensor, Tensor]:
        numbers, job_numbers = self._numbers(number)
        draws = draw(self._plan.seed, job_numbers, LANES + SEED_LANES)
        stored = [self._stored(record) for record in numbers]
        items = self._decoders.map(self._item, stored, draws)
        self._require_one_shape(stored, items)
        data = torch.from_numpy(np.stack([item.data for item in items]))
        if self.has_boxes:
            return data, torch.from_numpy(object_rows([item.objects or [] for item in items]))
        return data, torch.tensor([float(item.label) for item in items])

    def _decode(self, stored: Stored) -> AnnotatedImage:
        with self._located(stored):
            return decode_annotated(stored.content, self._plan.transform.decoding)

    def _item(self, stored: Stored, choice: Draws) -> _Item:
        found = self._decode(stored)
        if self.has_boxes and found.objects is None and not self._plan.boxes:
            raise DataError(
                f"{self._location(stored)} has no annotation type, but the first record has one"
            )
        with self._located(stored):
            return self._transformed(found, choice)

    def _transformed(self, found: AnnotatedImage, choice: Draws) -> _Item:
        """Distort, expand, sample, resize, crop and mirror an image with its objects."""
        transform, steps, random = self._plan.transform, self._augmentation, generator(choice)
        transform.output_shape(found.image.shape)
        image, objects = steps.before(pixels_of(found.image), found.objects or (), random)
        window = self._plan.sampler.choose(objects, random)
        if window is not None:
            image = cropped(image, window)
            objects = projected(objects, window, steps.emission)
        size = image.shape[:2]
        pixels = planes(steps.after(image, random))
        # The steps are done: what follows sees the image as it is now.
        data = np.empty(transform.cropped_shape(pixels.shape), np.float32)
        placement = transform.place(pixels, choice, data)
        placed = steps.placed(objects, size, placement.window, mirrored=placement.mirrored)
        return _Item(data, found.label, placed if found.objects is not None else None)

    def _require_one_shape(self, stored: list[Stored], items: list[_Item]) -> None:
        first = items[0].data.shape
        for record, item in zip(stored, items, strict=True):
            if item.data.shape != first:
                found, expected = (
                    " x ".join(map(str, shape)) for shape in (item.data.shape, first)
                )
                raise DataError(
                    f"{self._location(record)} is {found} (channels x height x width), but the "
                    f"first record of its batch is {expected}; set crop_size or resize_param in "
                    "transform_param, or batch_size: 1"
                )


def cropped(image: npt.NDArray[Any], window: Box) -> npt.NDArray[Any]:
    """Return the pixels (H, W, ...) in a window, at least one."""
    height, width = image.shape[:2]
    box = window.clipped()
    left, top = min(int(box.xmin * width), width - 1), min(int(box.ymin * height), height - 1)
    wide = max(1, int((box.xmax - box.xmin) * width))
    high = max(1, int((box.ymax - box.ymin) * height))
    return image[top : top + high, left : left + wide]
