"""Batches of annotated images: read, decoded, sampled and transformed together with their objects.

Law: a batch is a pure function of its number (and of database, share, transform and seed).

Source: annotated_data_layer.cpp of SSD's branch of Caffe (Liu et al., 2016).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from poseidon.data.annotated import AnnotatedImage, decode_annotated, object_rows
from poseidon.data.augment.augmentation import Augmentation
from poseidon.data.augment.boxes import Box, Object, projected
from poseidon.data.augment.samplers import WindowSampler
from poseidon.data.batches.draws import draw, skipped_records
from poseidon.data.batches.numbered import NumberedReader
from poseidon.data.batches.partition import Share
from poseidon.data.batches.prefetch import DecoderPool
from poseidon.data.batches.transform import (
    LANES,
    SEED_LANES,
    Transform,
    generator,
    pixels_of,
    planes,
)
from poseidon.data.databases.cursor import Cursor, open_cursor
from poseidon.errors import DataError
from poseidon.proto.caffe_pb2 import TransformationParameter

Floats = npt.NDArray[np.float32]
Draws = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedPlan:
    """The batches to read.

    Args:
        batch_size: N, the number of records in a batch.
        transform: the steps, crop, mirror, mean, scale.
        sampler: the batch samplers.
        share: the records of this worker.
        seed: the seed of all random choices, the same on all workers of a job.
        rand_skip: start at a random stream record below this; 0: at the first.
        boxes: records have boxes even if they have no annotation type.
    """

    batch_size: int
    transform: Transform
    sampler: WindowSampler
    share: Share
    seed: int
    rand_skip: int = 0
    boxes: bool = False


class _Stored(NamedTuple):
    """A record of the database."""

    content: bytes
    location: str


class _Item(NamedTuple):
    """A transformed image with its label and objects."""

    data: Floats
    label: int
    objects: list[Object] | None


class AnnotatedMaker:
    """A `Maker` of batches from a cursor, which it owns and closes. Not thread-safe.

    Raises:
        DataError: the first record is damaged or cannot be transformed.
    """

    def __init__(self, cursor: Cursor, plan: AnnotatedPlan) -> None:
        self._cursor = cursor
        self._plan = plan
        self._skipped = skipped_records(plan.seed, plan.rand_skip)
        self._augmentation = plan.transform.augmentation or Augmentation(TransformationParameter())
        self._decoders = DecoderPool()
        first = self._decode(self._stored(0))
        self.has_boxes = first.objects is not None or plan.boxes
        self.objects = max(1, len(first.objects or ()))
        self.shape = (plan.batch_size, *plan.transform.output_shape(first.image.shape))

    def tensors(self, number: int) -> tuple[Tensor, Tensor]:
        """Return batch `number` >= 0: images (N, C, h, w) and objects (1, 1, G, 8), or labels
        (N).
        """
        plan = self._plan
        first = number * plan.batch_size
        numbers = (plan.share.records(first, plan.batch_size) + self._skipped).tolist()
        draws = draw(plan.seed, plan.share.job_records(first, plan.batch_size), LANES + SEED_LANES)
        stored = [self._stored(record) for record in numbers]
        items = self._decoders.map(self._item, stored, draws)
        _require_one_shape(stored, items)
        data = torch.from_numpy(np.stack([item.data for item in items]))
        if self.has_boxes:
            return data, torch.from_numpy(object_rows([item.objects or [] for item in items]))
        return data, torch.tensor([float(item.label) for item in items])

    def fresh_records(self, number: int) -> int:
        return self._plan.share.fresh_records(number, self._plan.batch_size, len(self._cursor))

    def close(self) -> None:
        """Close the cursor and stop the decoding threads. No `tensors` may be running."""
        self._decoders.close()
        self._cursor.close()

    def _stored(self, record: int) -> _Stored:
        self._cursor.seek(record)
        key = self._cursor.key().decode(errors="backslashreplace")
        location = f"{self._cursor.path}: record {self._cursor.position} (key '{key}')"
        return _Stored(bytes(self._cursor.value()), location)

    def _decode(self, stored: _Stored) -> AnnotatedImage:
        try:
            return decode_annotated(stored.content, self._plan.transform.decoding)
        except DataError as error:
            raise DataError(f"{stored.location}: {error}") from error

    def _item(self, stored: _Stored, choice: Draws) -> _Item:
        found = self._decode(stored)
        if self.has_boxes and found.objects is None and not self._plan.boxes:
            raise DataError(
                f"{stored.location} has no annotation type, but the first record has one"
            )
        try:
            return self._transformed(found, choice)
        except DataError as error:
            raise DataError(f"{stored.location}: {error}") from error

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


def _require_one_shape(stored: list[_Stored], items: list[_Item]) -> None:
    first = items[0].data.shape
    for record, item in zip(stored, items, strict=True):
        if item.data.shape != first:
            found, expected = (" x ".join(map(str, shape)) for shape in (item.data.shape, first))
            raise DataError(
                f"{record.location} is {found} (channels x height x width), but the first record "
                "of "
                f"its batch is {expected}; set crop_size or resize_param in transform_param, or "
                "batch_size: 1"
            )


def cropped(image: npt.NDArray[Any], window: Box) -> npt.NDArray[Any]:
    """Return the pixels (H, W, ...) in a window, at least one."""
    height, width = image.shape[:2]
    box = window.clipped()
    left, top = min(int(box.xmin * width), width - 1), min(int(box.ymin * height), height - 1)
    wide = max(1, int((box.xmax - box.xmin) * width))
    high = max(1, int((box.ymax - box.ymin) * height))
    return image[top : top + high, left : left + wide]


class AnnotatedReader(NumberedReader):
    """An endless reader of one worker's share of a database of AnnotatedDatum records.

    Args:
        source: the folder of the database or of this client's part of it.
        backend: a `Backend`, or its number in DataParameter.DB.
        plan: the batches to read.
        prefetch: the number of batches to prepare ahead, >= 1.

    Raises:
        DataError: the database cannot be read, or its first record cannot be transformed.

    Attributes:
        has_boxes: the second tensor holds objects, not labels.
        objects: the number of objects of the first record, at least 1.
    """

    def __init__(
        self, source: Path, backend: int, plan: AnnotatedPlan, *, prefetch: int = 4
    ) -> None:
        cursor = open_cursor(source, backend)
        try:
            maker = AnnotatedMaker(cursor, plan)
        except BaseException:
            cursor.close()
            raise
        self.has_boxes, self.objects = maker.has_boxes, maker.objects
        super().__init__(source, maker, prefetch=prefetch)
