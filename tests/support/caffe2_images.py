"""Databases of small pictures in Caffe2's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.proto.caffe2_pb2 import TensorProto, TensorProtos
from poseidon.caffe2.runtime.databases import write_records


def picture(number: int, height: int = 12, width: int = 16, channels: int = 3) -> np.ndarray:
    """Return pixels (H, W, C), or (H, W) for one channel, that depend on the number only."""
    shape = (height, width) if channels == 1 else (height, width, channels)
    return np.random.default_rng(number).integers(0, 256, shape, np.uint8)


def protos(image: Any, label: Any = 0, *extras: Any) -> bytes:
    """Return a record: encoded where the image is bytes, else its pixels."""
    message = TensorProtos()
    if isinstance(image, bytes):
        message.protos.add(data_type=TensorProto.STRING, string_data=[image])
    else:
        message.protos.add(data_type=TensorProto.BYTE, dims=image.shape, byte_data=image.tobytes())
    for value in (label, *extras):
        values = np.atleast_1d(value)
        if values.dtype.kind == "f":
            message.protos.add(data_type=TensorProto.FLOAT, float_data=values.tolist())
        else:
            message.protos.add(data_type=TensorProto.INT32, int32_data=values.tolist())
    return message.SerializeToString()


def encoded(image: np.ndarray) -> bytes:
    """Return the PNG file of an image."""
    return bytes(cv2.imencode(".png", image)[1])


def database(path: Path, records: list[bytes], db_type: str = "minidb") -> str:
    """Write a database of these values, with numbers as keys; return its path."""
    write_records(str(path), db_type, ((b"%03d" % i, record) for i, record in enumerate(records)))
    return str(path)


def reader(path: str, db_type: str = "minidb", **arguments: Any) -> str:
    """Make the blob `reader` in the current workspace."""
    workspace.RunOperatorOnce(
        core.CreateOperator("CreateDB", [], ["reader"], db=path, db_type=db_type, **arguments)
    )
    return "reader"


def image_input(outputs: int = 2, **arguments: Any) -> list[np.ndarray]:
    """Run ImageInput once on the blob `reader`; return what it gave."""
    names = [f"out_{number}" for number in range(outputs)]
    options = {"batch_size": 2, "scale": 12, "crop": 8, "is_test": 1, **arguments}
    workspace.RunOperatorOnce(core.CreateOperator("ImageInput", ["reader"], names, **options))
    return [workspace.FetchBlob(name) for name in names]
