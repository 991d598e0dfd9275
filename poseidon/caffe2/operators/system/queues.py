"""Queues of blobs between threads: each entry is a value for each of the queue's blobs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from poseidon.caffe2.operators.registry import Context, operator
from poseidon.caffe2.runtime.blob import Blob
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.waits import wait_for

Entry = list[Any]


class BlobsQueue:
    """A queue of a limited length. A closed one takes nothing more, and gives what it has."""

    def __init__(self, capacity: int, width: int) -> None:
        """Make a queue of so many entries, each of so many values."""
        self.capacity, self.width = capacity, width
        self.closed = False
        self._entries: deque[Entry] = deque()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: Entry) -> bool:
        """Wait for a place and append an entry; return whether the queue is still open.

        Raises:
            Cancelled: the plan of this thread ends first.
        """
        with self._changed:
            wait_for(self._changed, lambda: self.closed or len(self._entries) < self.capacity)
            if not self.closed:
                self._entries.append(entry)
                self._changed.notify_all()
            return not self.closed

    def get(self, timeout_s: float | None = None) -> Entry | None:
        """Wait for an entry and return it; None from a queue that is closed and empty.

        Raises:
            RuntimeError: there is none within the limit.
            Cancelled: the plan of this thread ends first.
        """
        with self._changed:
            if not wait_for(self._changed, lambda: bool(self.closed or self._entries), timeout_s):
                raise EnforceNotMet(f"DequeueBlobs timed out in {timeout_s} secs")
            if not self._entries:
                return None
            self._changed.notify_all()
            return self._entries.popleft()

    def close(self) -> None:
        """Close the queue: all who wait for it go on."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()


def _queue(blob: Blob) -> BlobsQueue:
    if not isinstance(blob.value, BlobsQueue):
        raise EnforceNotMet("The first input is no queue; CreateBlobsQueue makes one")
    return blob.value


def _check_width(queue: BlobsQueue, count: int) -> None:
    if count != queue.width:
        raise EnforceNotMet(f"The queue has {queue.width} blobs, {count} are given")


def _entry_of(queue: BlobsQueue, blobs: Sequence[Blob]) -> Entry:
    """Return the values of blobs; tensors are copied, since updates of parameters change them in place."""
    _check_width(queue, len(blobs))
    return [blob.value.clone() if isinstance(blob.value, torch.Tensor) else blob.value for blob in blobs]


def _give(inputs: Sequence[Blob], outputs: Sequence[Blob], entry: Entry | None = None) -> None:
    """Set outputs to an entry, or to the inputs where they are other blobs."""
    values = [blob.value for blob in inputs] if entry is None else entry
    for blob, value in zip(outputs, values, strict=False):
        blob.value = value


@operator("CreateBlobsQueue")
def create_blobs_queue(
    *,
    capacity: int = 1,
    num_blobs: int = 1,
    enforce_unique_name: bool = False,
    field_names: list[str] = [],  # noqa: B006
) -> Any:
    """Return a queue.

    Args:
        capacity: the number of entries.
        num_blobs: the number of values of an entry.
        enforce_unique_name, field_names: names of statistics, without effect.

    Raises:
        ValueError: the capacity is not positive.
    """
    if capacity < 1:
        raise ValueError(f"the capacity of a queue must be at least 1, not {capacity}")
    return BlobsQueue(capacity, num_blobs)


@operator("EnqueueBlobs", blobs=True, inputs=(2, 1 << 30), outputs=(1, 1 << 30))
class EnqueueBlobs:
    """Appends the values of blobs to a queue (first input); waits for a place. A closed queue is an error."""

    def __call__(self, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
        queue = _queue(inputs[0])
        if not queue.put(_entry_of(queue, inputs[1:])):
            raise EnforceNotMet("The queue is closed")
        _give(inputs[1:], outputs)


@operator("SafeEnqueueBlobs", blobs=True, inputs=(2, 1 << 30), outputs=(2, 1 << 30))
class SafeEnqueueBlobs:
    """Appends as `EnqueueBlobs` does; the last output tells whether the queue is closed, so that nothing was appended."""

    def __call__(self, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
        queue = _queue(inputs[0])
        done = queue.put(_entry_of(queue, inputs[1:]))
        _give(inputs[1:], outputs[:-1])
        outputs[-1].value = torch.tensor(not done)


@operator("DequeueBlobs", blobs=True, inputs=(1, 1), outputs=(1, 1 << 30))
class DequeueBlobs:
    """Takes the first entry of a queue; waits for one, `timeout_secs` at most (0: without limit).

    A queue that is closed and empty is an error.
    """

    def __init__(self, *, timeout_secs: float = 0.0) -> None:
        self.timeout_s = timeout_secs or None

    def __call__(self, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
        queue = _queue(inputs[0])
        _check_width(queue, len(outputs))
        entry = queue.get(self.timeout_s)
        if entry is None:
            raise EnforceNotMet("The queue is closed")
        _give([], outputs, entry)


@operator("SafeDequeueBlobs", blobs=True, inputs=(1, 1), outputs=(2, 1 << 30))
class SafeDequeueBlobs:
    """Takes the first `num_records` entries of a queue, joined by their first dimension.

    The last output tells whether the queue is closed and empty, so that nothing was taken.
    """

    def __init__(self, *, num_records: int = 1) -> None:
        if num_records < 1:
            raise ValueError(f"num_records must be at least 1, not {num_records}")
        self.count = num_records

    def __call__(self, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
        queue = _queue(inputs[0])
        _check_width(queue, len(outputs) - 1)
        entries: list[Entry] = []
        while len(entries) < self.count and (entry := queue.get()) is not None:
            entries.append(entry)
        outputs[-1].value = torch.tensor(not entries)
        if entries:
            columns = zip(*entries, strict=True)
            _give([], outputs[:-1], [column[0] if self.count == 1 else _joined(column) for column in columns])


def _joined(values: Sequence[Any]) -> Any:
    return np.concatenate(values) if isinstance(values[0], np.ndarray) else torch.cat(list(values))


@operator("CloseBlobsQueue", blobs=True, inputs=(1, 1), outputs=(0, 1))
class CloseBlobsQueue:
    """Closes a queue."""

    def __call__(self, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
        _queue(inputs[0]).close()


@operator("WeightedSampleDequeueBlobs", blobs=True, inputs=(1, 1 << 30), outputs=(2, 1 << 30))
class WeightedSampleDequeueBlobs:
    """Takes an entry of one of several queues, drawn by weight.

    Args of the operator:
        weights: of the queues.
        table_idx_blob: the index of the output that gets the number of the queue in place of its value; -1 for none.

    The last output tells whether the queue that was drawn is closed and empty, so that nothing was taken.
    """

    def __init__(self, *, context: Context, weights: list[float], table_idx_blob: int = -1) -> None:
        self.weights = torch.tensor(weights, dtype=torch.float64)
        self.generator, self.place = context.generator, table_idx_blob
        if len(weights) != len(context.definition.input) or not (self.weights > 0).all():
            raise ValueError("weights must be positive, one for each queue")
        if table_idx_blob >= context.outputs:
            raise ValueError(f"table_idx_blob must be less than {context.outputs}")

    def __call__(self, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
        number = int(torch.multinomial(self.weights, 1, generator=self.generator))
        queue = _queue(inputs[number])
        _check_width(queue, len(outputs) - 1)
        entry = queue.get()
        _give([], outputs[:-1], entry or [])
        if self.place >= 0:
            outputs[self.place].value = torch.tensor([number], dtype=torch.int32)
        outputs[-1].value = torch.tensor(entry is None)
