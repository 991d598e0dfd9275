"""Which tensor lies in which bucket, and when buckets leave."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from poseidon.exchange.allreduce.buckets import Buckets, Waiter, plan_buckets


def test_the_last_tensors_come_first_and_the_first_bucket_is_small() -> None:
    # 4 bytes an element: 400, 40, 400, 4000, 40, 40
    sizes = [100, 10, 100, 1000, 10, 10]
    assert plan_buckets(sizes, bucket_bytes=800, first_bytes=80) == [[5, 4], [3], [2, 1, 0]]


def test_a_tensor_larger_than_a_bucket_has_one_of_its_own_size() -> None:
    assert plan_buckets([1000, 1000], bucket_bytes=8, first_bytes=8) == [[1], [0]]
    assert plan_buckets([], bucket_bytes=8) == []


class Wire:
    """Notes what leaves, and pretends that W equal replicas have summed when it is waited for."""

    def __init__(self, replicas: int) -> None:
        self.left: list[list[float]] = []
        self.replicas = replicas

    def __call__(self, buffer: Tensor, on_done: Callable[[], None]) -> Waiter:
        self.left.append(buffer.tolist())

        def arrive() -> None:
            buffer.mul_(self.replicas)
            on_done()

        return arrive


def three(wire: Wire) -> Buckets:
    return Buckets(
        [(0, 1), (3, 1), (5, 2)],
        replicas=wire.replicas,
        device=torch.device("cpu"),
        launch=wire,
        bucket_bytes=8,
    )


def fill(buckets: Buckets, index: int, value: float) -> None:
    buckets.view(index).fill_(value)
    buckets.filled(index)


def test_buckets_leave_in_their_order_whatever_comes_first() -> None:
    wire = Wire(1)
    buckets = three(wire)
    buckets.start()
    fill(buckets, 0, 1.0)
    fill(buckets, 3, 2.0)
    assert wire.left == []  # the bucket of tensor 5 is the first
    fill(buckets, 5, 3.0)
    assert wire.left == [[3.0, 3.0], [2.0, 1.0]]


def test_what_does_not_come_is_zero_even_if_it_came_before() -> None:
    wire = Wire(2)
    buckets = three(wire)
    for iteration in range(2):
        buckets.start()
        fill(buckets, 5, 4.0)
        fill(buckets, 3, 6.0)
        if iteration == 0:
            fill(buckets, 0, 8.0)
        buckets.fill_missing()
        assert buckets.mean(3).tolist() == [6.0]
        assert buckets.mean(5).tolist() == [4.0, 4.0]
        assert buckets.mean(5).tolist() == [4.0, 4.0]  # divided once
        assert buckets.mean(0).tolist() == [8.0 if iteration == 0 else 0.0]
    assert wire.left[-1] == [6.0, 0.0]


def test_the_buffers_are_the_same_in_every_iteration() -> None:
    buckets = three(Wire(1))
    places = [buckets.view(index).data_ptr() for index in (0, 3, 5)]
    buckets.start()
    for index in (5, 3, 0):
        fill(buckets, index, 1.0)
    assert [buckets.mean(index).data_ptr() for index in (0, 3, 5)] == places


def test_traffic_is_counted_tensor_by_tensor() -> None:
    buckets = three(Wire(4))
    for _ in range(2):
        buckets.start()
        for index in (5, 3, 0):
            fill(buckets, index, 1.0)
        for index in (0, 3, 5):
            buckets.mean(index)
    traffic = buckets.traffic()
    # 2 iterations of 2 * 3/4 of 4 or 8 bytes
    assert {index: (t.bytes_out, t.bytes_in) for index, t in traffic.items()} == {
        0: (12, 12),
        3: (12, 12),
        5: (24, 24),
    }
    assert all(t.on_way_s > 0 for t in traffic.values())
