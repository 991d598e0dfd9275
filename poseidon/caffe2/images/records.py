"""Records of labelled images: Caffe2's TensorProtos and Caffe's Datum.

Law: a record of a different format is an error that names the expected one. (Caffe2 took zeros.)
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from poseidon.caffe.data.datum import Decoding, decode, decode_image, is_datum
from poseidon.caffe2.proto.caffe2_pb2 import TensorProto, TensorProtos
from poseidon.caffe2.runtime.databases import open_database
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.reader import Record
from poseidon.errors import DataError

Array = npt.NDArray[Any]

SINGLE, SPARSE, DENSE, WEIGHTED_SPARSE, SINGLE_WEIGHTED, EMBEDDING = range(6)
"""Caffe2's label types."""
_VALUES = {
    TensorProto.FLOAT: ("float_data", np.float32),
    TensorProto.INT32: ("int32_data", np.int32),
    TensorProto.INT64: ("int64_data", np.int64),
    TensorProto.UINT8: ("int32_data", np.uint8),
}
_IMAGES = "a TensorProtos with an encoded image (STRING) or pixels (BYTE, height x width x channels) and a label"


@dataclass(frozen=True, slots=True)
class Labelled:
    """A decoded record.

    Attributes:
        image: uint8 (H, W, 3) in BGR order, or (H, W).
        label: a scalar, or a vector of `num_labels`; int32 or float32.
        extras: the further outputs, one vector each.
        box: ymin, xmin, height, width of the part that counts; None: not given.
    """

    image: Array
    label: Array
    extras: list[Array] = field(default_factory=list)
    box: tuple[int, int, int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The format of records.

    Attributes:
        datum: Caffe's Datum, not Caffe2's TensorProtos.
        color: decode to three channels, not to one.
        label_type: one of Caffe2's.
        num_labels: the length of labels that are vectors.
        extra_sizes: the lengths of the further outputs.
    """

    datum: bool
    color: bool
    label_type: int
    num_labels: int
    extra_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not SINGLE <= self.label_type <= EMBEDDING:
            raise ValueError(
                f"ImageInput: label_type must be from {SINGLE} to {EMBEDDING}, not "
                f"{self.label_type}"
            )
        if not self.single and self.num_labels < 1:
            raise ValueError(f"ImageInput: label_type={self.label_type} needs num_labels")
        if self.datum and not self.single:
            raise ValueError("ImageInput: a Caffe Datum has a single label: label_type must be 0")
        if self.datum and self.extra_sizes:
            raise ValueError("ImageInput: a Caffe Datum has 2 outputs, image and label")

    @property
    def single(self) -> bool:
        """Whether the label is one number."""
        return self.label_type in (SINGLE, SINGLE_WEIGHTED)

    def decode(self, record: Record, database: str) -> Labelled:
        """Return the content of a record.

        Args:
            record: the record.
            database: its database, for the message.

        Raises:
            RuntimeError: the record has a different format: database, key, the expected one.
        """
        try:
            return self._from_datum(record.value) if self.datum else self._from_protos(record.value)
        except DataError as error:
            expected = "a Caffe Datum with an image (use_caffe_datum=1)" if self.datum else _IMAGES
            raise EnforceNotMet(
                f"the record {record.key.decode(errors='backslashreplace')!r} of the database "
                f"{database}: {error}; expected {expected}"
            ) from error

    def _from_datum(self, value: bytes) -> Labelled:
        try:
            pixels, label = decode(value, Decoding.COLOR if self.color else Decoding.GRAY)
        except DataError as error:
            if _parsed(value):
                raise DataError("it is a TensorProtos: use_caffe_datum=0 reads it") from error
            raise
        if pixels.dtype != np.uint8:
            raise DataError("it has floating-point values, not 8-bit pixels")
        return Labelled(self._channels(_pixels_last(pixels)), np.array(label, np.int32))

    def _from_protos(self, value: bytes) -> Labelled:
        tensors = _parsed(value)
        first_extra = 3 if self.label_type in (WEIGHTED_SPARSE, SINGLE_WEIGHTED) else 2
        expected = first_extra + len(self.extra_sizes)
        if not tensors:
            raise DataError(
                "it is a Caffe Datum: use_caffe_datum=1 reads it"
                if is_datum(value)
                else "it is not a TensorProtos"
            )
        if not expected <= len(tensors) <= expected + 1:
            raise DataError(f"it has {len(tensors)} tensors, not {expected} (one more for a box)")
        extras = [
            _vector(tensor, size, f"tensor {first_extra + place}")
            for place, (tensor, size) in enumerate(
                zip(tensors[first_extra:expected], self.extra_sizes, strict=True)
            )
        ]
        return Labelled(
            image=self._channels(self._image(tensors[0])),
            label=self._label(tensors),
            extras=extras,
            box=_box(tensors[expected]) if len(tensors) > expected else None,
        )

    def _image(self, tensor: TensorProto) -> Array:
        if tensor.data_type == TensorProto.STRING:
            if len(tensor.string_data) != 1:
                raise DataError(f"its image has {len(tensor.string_data)} strings, not one")
            decoding = Decoding.COLOR if self.color else Decoding.GRAY
            return _pixels_last(decode_image(tensor.string_data[0], decoding))
        if tensor.data_type != TensorProto.BYTE:
            kind = TensorProto.DataType.Name(tensor.data_type)
            hint = (
                "; TensorProtosDBInput reads tensors"
                if tensor.data_type == TensorProto.FLOAT
                else ""
            )
            raise DataError(f"its first tensor is of type {kind}{hint}")
        shape = tuple(tensor.dims)
        if (
            len(shape) not in (2, 3)
            or (len(shape) == 3 and shape[2] not in (1, 3))
            or min(shape) < 1
        ):
            raise DataError(f"its image has the dimensions {list(shape)}")
        if len(tensor.byte_data) != int(np.prod(shape)):
            raise DataError(
                f"its image has {len(tensor.byte_data)} bytes, which do not fit {list(shape)}"
            )
        return np.frombuffer(tensor.byte_data, np.uint8).reshape(shape)

    def _channels(self, image: Array) -> Array:
        """Return an image with as many channels as the format has."""
        if image.ndim == 3 and image.shape[2] == 1:
            image = image[:, :, 0]
        if self.color and image.ndim == 2:
            return cv2.cvtColor(image, cv2.COLOR_GRAY2BGR)
        if not self.color and image.ndim == 3:
            return cv2.cvtColor(image, cv2.COLOR_BGR2GRAY)
        return image

    def _label(self, tensors: list[TensorProto]) -> Array:
        if tensors[1].data_type not in (TensorProto.INT32, TensorProto.FLOAT):
            kind = TensorProto.DataType.Name(tensors[1].data_type)
            raise DataError(f"its label is of type {kind}, not INT32 or FLOAT")
        if self.single:
            label: Array = _vector(tensors[1], 1, "the label")[0]
            return np.asarray(label)
        if self.label_type in (DENSE, EMBEDDING):
            return _vector(tensors[1], self.num_labels, "the label")
        classes = _flat(tensors[1])
        places = classes.astype(np.int64)
        if len(places) and not 0 <= places.min() <= places.max() < self.num_labels:
            raise DataError(f"its labels {places.tolist()} are not from 0 to {self.num_labels - 1}")
        weights = np.ones(len(places), classes.dtype)
        if self.label_type == WEIGHTED_SPARSE:
            weights = _vector(tensors[2], len(places), "the weights").astype(np.float32)
        row = np.zeros(self.num_labels, weights.dtype)
        row[places] = weights
        return row


def holds_datums(path: str, db_type: str) -> bool:
    """Return whether a database holds Caffe Datums: `use_caffe_datum` of `ImageInput`.

    Raises:
        RuntimeError: the database cannot be read.
    """
    with closing(open_database(path, db_type)) as cursor:
        value = bytes(cursor.value())
    return not _parsed(value) and is_datum(value)


def encode(image: bytes | Array, label: int) -> bytes:
    """Return a TensorProtos of a label and an image: bytes of a file, uint8 (H, W, C) or (H, W)."""
    message = TensorProtos()
    if isinstance(image, bytes):
        message.protos.add(data_type=TensorProto.STRING, string_data=[image])
    else:
        message.protos.add(data_type=TensorProto.BYTE, dims=image.shape, byte_data=image.tobytes())
    message.protos.add(data_type=TensorProto.INT32, int32_data=[label])
    return message.SerializeToString()


def _parsed(value: bytes) -> list[TensorProto]:
    """Return the tensors of a TensorProtos; none where the bytes do not encode one."""
    try:
        return list(TensorProtos.FromString(value).protos)
    except DecodeError:
        return []


def _pixels_last(image: Array) -> Array:
    """Return an image (C, H, W) as (H, W, C), or (H, W) where it has one channel."""
    if image.shape[0] not in (1, 3):
        raise DataError(f"its image has {image.shape[0]} channels, not 1 or 3")
    return image[0] if image.shape[0] == 1 else np.ascontiguousarray(image.transpose(1, 2, 0))


def _flat(tensor: TensorProto) -> Array:
    found = _VALUES.get(tensor.data_type)
    if found is None:
        raise DataError(f"a tensor is of type {TensorProto.DataType.Name(tensor.data_type)}")
    name, dtype = found
    return np.array(list(getattr(tensor, name)), dtype)


def _vector(tensor: TensorProto, size: int, what: str) -> Array:
    values = _flat(tensor)
    if len(values) != size:
        raise DataError(f"{what} has {len(values)} values, not {size}")
    return values


def _box(tensor: TensorProto) -> tuple[int, int, int, int]:
    if tensor.data_type != TensorProto.INT32 or len(tensor.int32_data) != 4:
        raise DataError("its last tensor is not a bounding box: INT32, ymin, xmin, height, width")
    top, left, height, width = tensor.int32_data
    return top, left, height, width
