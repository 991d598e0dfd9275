"""Mean images, in Caffe's mean files (one binary BlobProto of 1 x C x H x W).

Law: the mean is exact, because pixels are summed as integers and divided once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from poseidon.base.durable import write_whole
from poseidon.base.foreign_files import read_definition
from poseidon.base.paths import own_command
from poseidon.caffe.data.cursor import Cursor, records
from poseidon.caffe.data.datum import decode
from poseidon.caffe.data.staging import Report, silent
from poseidon.caffe.proto.caffe_pb2 import BlobProto
from poseidon.errors import DataError


def read_mean(path: Path) -> npt.NDArray[np.float32]:
    """Read the mean (C, H, W) from a mean file.

    Raises:
        DataError: the file is missing, or is not a BlobProto of one image.
    """
    try:
        blob = BlobProto.FromString(read_definition(path))
    except OSError as error:
        raise DataError(
            f"the mean file {path} cannot be read: {error.strerror}; `{own_command()} "
            "compute_image_mean` makes one"
        ) from error
    except DecodeError as error:
        raise DataError(f"the mean file {path} is not a binary BlobProto") from error
    shape = tuple(blob.shape.dim) or (blob.num, blob.channels, blob.height, blob.width)
    values = np.array(blob.double_data if blob.double_data else blob.data, np.float32)
    if (
        len(shape) not in (3, 4)
        or (len(shape) == 4 and shape[0] != 1)
        or min(shape) < 1
        or values.size != math.prod(shape)
    ):
        raise DataError(
            f"the mean file {path} has shape {shape} and {values.size} values: expected 1 x C x H "
            "x W"
        )
    return values.reshape(shape[-3:])


def mean_blob(mean: npt.NDArray[np.float32]) -> bytes:
    """Serialize a mean (C, H, W) for a mean file, with the legacy shape fields that every
    version of Caffe reads.
    """
    channels, height, width = mean.shape
    blob = BlobProto(num=1, channels=channels, height=height, width=width)
    blob.data.extend(mean.ravel().tolist())
    return blob.SerializeToString()


def write_mean(path: Path, mean: npt.NDArray[np.float32]) -> None:
    """Write a mean (C, H, W) to a mean file atomically. Its folder is made if it does not exist.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, mean_blob(mean))
    except OSError as error:
        raise DataError(f"the mean file {path} cannot be written: {error.strerror}") from error


def compute_mean(cursor: Cursor, *, report: Report = silent) -> npt.NDArray[np.float32]:
    """Compute the mean (C, H, W) of all records of a database, which must have one shape.

    Args:
        report: called with the number of records read, for a progress bar.

    Raises:
        DataError: a record is damaged or has a different shape. The text names its key and the
            database.
    """
    total: npt.NDArray[Any] | None = None
    count, length = 0, len(cursor)
    for key, array in _arrays(cursor):
        if total is None:
            total = np.zeros(array.shape, np.int64 if array.dtype == np.uint8 else np.float64)
        if array.shape != total.shape:
            raise DataError(
                f"{cursor.path}: the record with key '{key}' has shape {array.shape}, the first "
                f"one {total.shape}: a mean needs records of one shape"
            )
        total += array
        count += 1
        report("adding up", count, length)
    assert total is not None, "a cursor's database is not empty"
    return (total / count).astype(np.float32)


def _arrays(cursor: Cursor) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    for key, value in records(cursor):
        name = key.decode(errors="backslashreplace")
        try:
            yield name, decode(value)[0]
        except DataError as error:
            raise DataError(f"{cursor.path}: record with key '{name}': {error}") from error
