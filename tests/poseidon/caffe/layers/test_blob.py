"""Blobs: live arrays, reshaping, sharing, and the two copies of a memory that lies apart from
the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from poseidon.caffe.layers import blob as blob_module
from poseidon.caffe.layers.blob import Blob, BlobMemory, BlobVec
from poseidon.errors import UsageError


@pytest.mark.parametrize(
    ("shape", "four"),
    [
        ((), (1, 1, 1, 1)),
        ((7,), (7, 1, 1, 1)),
        ((2, 3), (2, 3, 1, 1)),
        ((2, 3, 4, 5), (2, 3, 4, 5)),
    ],
)
def test_shapes(shape: tuple[int, ...], four: tuple[int, ...]) -> None:
    blob = Blob(*shape)
    assert blob.shape == blob.data.shape == blob.diff.shape == shape
    assert (blob.num, blob.channels, blob.height, blob.width) == four
    assert blob.count == np.prod(shape)
    assert blob.data.dtype == blob.diff.dtype == np.float32
    assert not blob.data.any() and not blob.diff.any()


def test_five_axes_have_no_names() -> None:
    with pytest.raises(UsageError, match="at most 4 axes"):
        _ = Blob(1, 2, 3, 4, 5).num


@pytest.mark.parametrize("shape", [(2, -1), (2.5, 3), ((2, 3),), ("2",), (float("nan"),), (None,)])
def test_extents_are_whole_numbers(shape: tuple[Any, ...]) -> None:
    blob = Blob(4)
    with pytest.raises(UsageError, match="expected extents, whole numbers of 0 or more"):
        blob.reshape(*shape)
    assert blob.shape == (4,)
    blob.reshape(np.int64(2), 3.0, np.array(1))  # type: ignore[arg-type]
    assert blob.shape == (2, 3, 1)


def test_writing_reaches_torch_and_back() -> None:
    blob = Blob(2, 3)
    blob.data[...] = np.arange(6).reshape(2, 3)
    blob.diff[0] = 1
    assert blob.read_data().tolist() == [[0, 1, 2], [3, 4, 5]]
    blob.write_data().mul_(2)
    assert blob.data[1, 2] == 10 and blob.read_diff().sum() == 3


def test_memory_stays_unless_it_is_too_small() -> None:
    blob = Blob(2, 6)
    held = blob.data
    held[...] = 1
    blob.reshape(3, 2)
    assert np.shares_memory(held, blob.data) and blob.data.sum() == 6
    blob.reshape(2, 6)
    assert blob.data.sum() == 12
    blob.reshape(5, 5)
    assert not np.shares_memory(held, blob.data) and not blob.data.any()
    assert held.sum() == 12


def test_sharing_and_binding() -> None:
    one, two = Blob(2, 3), Blob(6)
    two.share_data(one)
    two.share_diff(one)
    one.data[...], two.diff[...] = 3, 4
    assert (two.data == 3).all() and (one.diff == 4).all()
    tensor = torch.zeros(4, requires_grad=True)
    one.bind(tensor)
    one.data[...] = 9
    assert one.shape == (4,) and tensor.tolist() == [9] * 4
    assert (two.data == 3).all()


def test_learnable_blobs_are_added_by_extents() -> None:
    blobs = BlobVec()
    blobs.add_blob(2, 3)
    blobs.add_blob()
    assert [blob.shape for blob in blobs] == [(2, 3), ()]
    with pytest.raises(UsageError, match="shape"):
        blobs.add_blob(shape=(2, 3))


def test_the_newer_copy_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_module, "needs_host_copy", lambda _: True)
    device = torch.zeros(3)
    memory = BlobMemory(device)
    memory.host()[0] = 1
    assert device.tolist() == [0, 0, 0]  # not asked for yet
    assert memory.read().tolist() == [1, 0, 0]
    memory.write()[1] = 2
    assert memory.host().tolist() == [1, 2, 0]
    memory.host()[2] = 3
    assert memory.write() is device and device.tolist() == [1, 2, 3]
