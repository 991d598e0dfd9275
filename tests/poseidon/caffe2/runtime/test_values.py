"""Blobs as messages: types, chunks, what cannot be written."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from poseidon.caffe2.proto.caffe2_pb2 import BlobProto, TensorProto
from poseidon.caffe2.runtime.values import deserialize, serialize

VALUES: list[Any] = [
    torch.randn(3, 2),
    torch.randn(2).to(torch.float16),
    torch.randn(2).to(torch.float64),
    torch.tensor([True, False]),
    torch.tensor([-1, 127], dtype=torch.int8),
    torch.tensor([0, 255], dtype=torch.uint8),
    torch.tensor([-7, 7], dtype=torch.int16),
    torch.tensor([0, 65535], dtype=torch.uint16),
    torch.tensor([2**30], dtype=torch.int32),
    torch.tensor([2**40, -3], dtype=torch.int64),
    torch.tensor(2.5),
    torch.zeros(0, 4),
    np.array([[b"a", b""], [b"bc", b"\xff"]], dtype=object),
    b"plain \x00 text",
]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(getattr(value, "dtype", "string")))
def test_what_is_written_is_read(value: Any) -> None:
    (proto,) = serialize("x", value)
    assert proto.name == "x"
    assert equal(deserialize(BlobProto.FromString(proto.SerializeToString())), value)


@pytest.mark.parametrize(
    "value",
    [torch.arange(10), np.array([b"a", b"b", b"c"], dtype=object)],
    ids=["numbers", "strings"],
)
def test_chunks_come_together_in_any_order(value: Any) -> None:
    chunks = list(serialize("x", value, chunk_size=2))
    assert [chunk.tensor.segment.begin for chunk in chunks] == list(range(0, len(value), 2))
    whole = None
    for chunk in reversed(chunks):
        whole = deserialize(chunk, whole)
    assert equal(whole, value)


def test_raw_data_is_read() -> None:
    values = np.array([1.5, -2.0], dtype=np.float32)
    proto = BlobProto(
        tensor=TensorProto(dims=[2], data_type=TensorProto.FLOAT, raw_data=values.tobytes())
    )
    assert deserialize(proto).tolist() == [1.5, -2.0]


def test_an_object_cannot_be_written() -> None:
    with pytest.raises(RuntimeError, match="x of type object cannot be serialized"):
        list(serialize("x", object()))
    with pytest.raises(RuntimeError, match="type DBReader cannot be read"):
        deserialize(BlobProto(name="x", type="DBReader"))


def test_a_mutex_is_saved_without_its_state() -> None:
    mutex = threading.Lock()
    with mutex:
        (proto,) = serialize("m", mutex)
    assert proto.type == "std::unique_ptr<std::mutex>"
    assert not deserialize(proto).locked()
