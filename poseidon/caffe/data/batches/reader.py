"""Batches of a database's records, images with their objects too: read, decoded and transformed.

Law: a batch is a pure function of its number (and of database, share, transform and seed), so that
a resumed job can recompute any batch. The error for a damaged record names its key and its
database. All batches have one shape; a batch of one record that is not cropped has the record's, as
in Caffe (DataLayer::load_batch).

Source of images with objects: annotated_data_layer.cpp of SSD's branch of Caffe (Liu et al., 2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from poseidon.caffe.data.augmentation import Augmentation
from poseidon.caffe.data.batches.numbered import BatchPlan, M, Maker
from poseidon.caffe.data.batches.prefetch import BufferPool, DecoderPool, draw, skipped_records
from poseidon.caffe.data.batches.transform import LANES, SEED_LANES, generator, pixels_of, planes
from poseidon.caffe.data.boxes import Box, Object, WindowSampler, projected
from poseidon.caffe.data.cursor import Cursor, open_cursor
from poseidon.caffe.data.datum import (
    AnnotatedImage,
    Decoding,
    RawLayout,
    decode,
    decode_annotated,
    object_rows,
)
from poseidon.caffe.proto.caffe_pb2 import TransformationParameter
from poseidon.errors import DataError
from poseidon.exchange.device import device_of

Floats = npt.NDArray[np.float32]
Record = bytes | memoryview

# Labels of raw records are cached by their encoded bytes, up to this many different ones.
KNOWN_TAILS = 100_000
# Bytes of a raw record from which on its copy is worth a thread.
WORTH_A_THREAD = 16 * 1024


class Stored(NamedTuple):
    """A record of a database, with its number and its key."""

    content: Record
    position: int
    key: bytes


class RecordMaker(Maker):
    """The base class of makers of batches from a cursor, which they own and close."""

    def __init__(self, cursor: Cursor, plan: BatchPlan) -> None:
        super().__init__(plan.share, plan.batch_size)
        self._cursor = cursor
        self._skipped = skipped_records(plan.seed, plan.rand_skip)
        self._decoders = DecoderPool()

    def __len__(self) -> int:
        return len(self._cursor)

    def close(self) -> None:
        """Close the cursor and stop the decoding threads. No `tensors` may be running."""
        self._decoders.close()
        self._cursor.close()

    def _numbers(self, number: int) -> tuple[list[int], npt.NDArray[np.int64]]:
        """Return the stream records of a batch, and the numbers of these records in the job."""
        first = number * self._batch_size
        numbers = (self._share.records(first, self._batch_size) + self._skipped).tolist()
        return numbers, self._share.job_records(first, self._batch_size)

    def _stored(self, number: int) -> Stored:
        self._cursor.seek(number)
        return Stored(self._cursor.value(), self._cursor.position, self._cursor.key())

    def _location(self, stored: Stored) -> str:
        key = stored.key.decode(errors="backslashreplace")
        return f"{self._cursor.path}: record {stored.position} (key '{key}')"

    @contextmanager
    def _located(self, stored: Stored) -> Iterator[None]:
        """Add the database and the key to the errors of a record."""
        try:
            yield
        except DataError as error:
            raise DataError(f"{self._location(stored)}: {error}") from error


def open_maker(source: Path, backend: int, make: Callable[[Cursor], M]) -> M:
    """Return what `make` makes of a cursor on a database.

    Args:
        source: the folder of the database or of this client's part of it (see
            `partition.source_for`).
        backend: a `Backend`, or its number in DataParameter.DB.
        make: returns a maker that owns the cursor.

    Raises:
        DataError: the database cannot be read, or `make` raises it.
    """
    cursor = open_cursor(source, backend)
    try:
        return make(cursor)
    except BaseException:
        cursor.close()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class DatumPlan(BatchPlan):
    """The batches to read of a database of Datum records.

    Attributes:
        label: False if labels are not needed; they are then an empty tensor.
        force_color: decode encoded images to three channels, as DataParameter.force_encoded_color.
    """

    label: bool = True
    force_color: bool = False

    @property
    def decoding(self) -> Decoding:
        """The decoding of encoded images."""
        return Decoding.COLOR if self.force_color else self.transform.decoding

    @property
    def has_one_shape(self) -> bool:
        """True if all batches have one shape; a record of a different shape is then an error."""
        return self.batch_size > 1 or self.transform.has_fixed_size


class DatumMaker(RecordMaker):
    """A `Maker` of batches of a database of Datum records: data (N, C, h, w) and labels (N).

    Raises:
        DataError: the first record is damaged or cannot be transformed.
    """

    def __init__(self, cursor: Cursor, plan: DatumPlan) -> None:
        super().__init__(cursor, plan)
        self.plan = plan
        self._tails: dict[bytes, int | None] = {}
        first = self._stored(0)
        image, _ = self._decode(first)
        self._shape = image.shape
        self.shape = (plan.batch_size, *plan.transform.output_shape(image.shape))
        self._layout = RawLayout.of(first.content)
        self._buffers = BufferPool(self.shape)
        if plan.sends_bytes and plan.has_one_shape and image.dtype == np.uint8:
            self.transform = plan.transform
            self._bytes = BufferPool(self.shape, torch.uint8, device_of(plan.device))

    def tensors(self, number: int) -> tuple[Tensor, ...]:
        plan = self.plan
        numbers, job_numbers = self._numbers(number)
        draws = plan.transform.draws(plan.seed, job_numbers)
        pixels = None if self.transform is None else self._byte_batch(numbers, draws)
        if pixels is not None:
            return pixels
        data = self._buffers.take()
        labels = self._raw_batch(numbers, draws, data) if self._layout is not None else None
        if labels is None and not plan.has_one_shape:
            data, labels = self._single(numbers[0], draws[0])
        if labels is None:
            labels = self._any_batch(numbers, draws, data)
        return torch.from_numpy(data), self._kept(labels)

    def _kept(self, labels: list[int]) -> Tensor:
        return torch.from_numpy(np.array(labels if self.plan.label else [], np.float32))

    def _byte_batch(
        self, numbers: list[int], draws: npt.NDArray[np.int64]
    ) -> tuple[Tensor, ...] | None:
        """Return the cropped pixels of a batch, their places, and the labels; None if a record has
        floats.
        """
        pixels, places = self._bytes.take(), np.zeros((len(numbers), 3), np.int64)
        stored = map(self._stored, numbers)
        is_large = math.prod(self._shape) >= WORTH_A_THREAD
        run = self._decoders.map if is_large else map
        labels: list[int | None] = list(run(self._crop, stored, draws, pixels, places))
        known = [label for label in labels if label is not None]
        if len(known) < len(labels):
            return None
        return torch.from_numpy(pixels), torch.from_numpy(places), self._kept(known)

    def _crop(
        self,
        stored: Stored,
        choice: npt.NDArray[np.int64],
        target: npt.NDArray[np.uint8],
        place: npt.NDArray[np.int64],
    ) -> int | None:
        """Copy the pixels of a record to `target`, and return its label; None if it has floats."""
        layout = self._layout
        label = None if layout is None else self._label(layout, stored.content)
        if layout is not None and label is not None:
            pixels = np.frombuffer(layout.pixels(stored.content), np.uint8)
            image: npt.NDArray[Any] = pixels.reshape(layout.shape)
        else:
            image, label = self._decode(stored)
            self._require_shape(image.shape, stored)
        if image.dtype != np.uint8:
            return None
        place[:] = self.plan.transform.crop_into(image, choice, target)
        return label

    def _raw_batch(
        self, numbers: list[int], draws: npt.NDArray[np.int64], data: Floats
    ) -> list[int] | None:
        """Fill `data` from raw records in the first record's layout.

        Return the labels, or None if a layout differs.
        """
        layout = self._layout
        assert layout is not None
        pixels: list[Record] = []
        labels: list[int] = []
        for number in numbers:
            self._cursor.seek(number)
            record = self._cursor.value()
            label = self._label(layout, record)
            if label is None:
                return None
            labels.append(label)
            pixels.append(layout.pixels(record))
        images = np.frombuffer(b"".join(pixels), np.uint8).reshape(len(numbers), *layout.shape)
        self.plan.transform.batch(images, draws, data)
        return labels

    def _label(self, layout: RawLayout, record: Record) -> int | None:
        if not layout.matches(record):
            return None
        tail = bytes(record[layout.end :])
        if tail in self._tails:
            return self._tails[tail]
        label = layout.label(tail)
        if len(self._tails) < KNOWN_TAILS:
            self._tails[tail] = label
        return label

    def _any_batch(
        self, numbers: list[int], draws: npt.NDArray[np.int64], data: Floats
    ) -> list[int]:
        """Fill `data` from records of any kind, decoded in parallel. Return the labels."""
        return self._decoders.map(self._fill, map(self._stored, numbers), draws, data)

    def _single(self, number: int, choice: npt.NDArray[np.int64]) -> tuple[Floats, list[int]]:
        """Return a batch of one record, which may have any shape."""
        stored = self._stored(number)
        image, label = self._decode(stored)
        data = np.empty((1, *self._output_shape(image.shape, stored)), np.float32)
        self.plan.transform.one(image, choice, data[0])
        return data, [label]

    def _fill(self, stored: Stored, choice: npt.NDArray[np.int64], target: Floats) -> int:
        """Decode a record into `target` and return its label."""
        image, label = self._decode(stored)
        self._require_shape(image.shape, stored)
        self.plan.transform.one(image, choice, target)
        return label

    def _decode(self, stored: Stored) -> tuple[npt.NDArray[Any], int]:
        with self._located(stored):
            return decode(stored.content, self.plan.decoding)

    def _require_shape(self, shape: Sequence[int], stored: Stored) -> None:
        """Raise DataError unless an image has the first one's size after the crop."""
        if shape == self._shape or self._output_shape(shape, stored) == self.shape[1:]:
            return
        channels, first = shape[0], self._shape[0]
        remedy = "set crop_size or resize_param in transform_param, or batch_size: 1"
        if channels != first:
            remedy = (
                "set force_color or force_gray in transform_param, which convert encoded images"
            )
        raise DataError(
            f"{self._location(stored)} is {channels} x {shape[1]} x {shape[2]} (channels x height "
            f"x width), but the first record is {first} x {self._shape[1]} x {self._shape[2]}; "
            f"{remedy}"
        )

    def _output_shape(self, shape: Sequence[int], stored: Stored) -> tuple[int, int, int]:
        with self._located(stored):
            return self.plan.transform.output_shape(shape)


Draws = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedPlan(BatchPlan):
    """The batches to read.

    Attributes:
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
