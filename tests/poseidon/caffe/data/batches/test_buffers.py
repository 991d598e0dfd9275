"""Memory comes back when the last tensor on it is gone, not before."""

from __future__ import annotations

import torch

from poseidon.caffe.data.batches.buffers import BufferPool


def test_memory_is_reused_after_the_last_reference() -> None:
    pool = BufferPool((2, 3))
    tensor = torch.from_numpy(pool.take())
    address = tensor.data_ptr()
    del tensor
    assert torch.from_numpy(pool.take()).data_ptr() == address


def test_memory_that_is_seen_is_left_alone() -> None:
    pool = BufferPool((2, 3))
    tensor = torch.from_numpy(pool.take())
    view = tensor.reshape(6)[2:]
    address = tensor.data_ptr()
    view.fill_(7)
    del tensor
    others = [pool.take() for _ in range(3)]
    for other in others:
        assert other.ctypes.data != address
        other.fill(0)
    assert view.tolist() == [7] * 4


def test_memory_held_by_autograd_is_left_alone() -> None:
    pool = BufferPool((2, 3))
    data = torch.from_numpy(pool.take()).fill_(2)
    weight = torch.ones(3, requires_grad=True)
    loss = (data * weight).sum()
    del data
    pool.take().fill(0)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [4, 4, 4]
