"""Queues of blobs between threads: each entry is a value for each of the queue's blobs.

A rebatching queue has single examples as entries; a dequeue joins as many as it asks for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from poseidon.caffe2.operators.registry import ANY, NO_GRADIENT, Context, operator
from poseidon.caffe2.runtime.dag import wait_for
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.reader import Reader
from poseidon.caffe2.runtime.values import Blob, joined, strings_of

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
        """Close the queue: all who wait for it continue."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()


def _queue(blob: Blob) -> BlobsQueue:
    if not isinstance(blob.value, BlobsQueue):
        raise EnforceNotMet("The first input is not a queue, as CreateBlobsQueue makes")
    return blob.value


def _check_width(queue: BlobsQueue, count: int) -> None:
    if count != queue.width:
        raise EnforceNotMet(f"The queue has {queue.width} blobs, {count} are given")


def _entry_of(queue: BlobsQueue, blobs: Sequence[Blob]) -> Entry:
    """Return the values of blobs; tensors are copied, since updates change them in place."""
    _check_width(queue, len(blobs))
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in (blob.value for blob in blobs)]


def _taken(queue: BlobsQueue, count: int) -> list[Entry]:
    """Return so many entries; fewer if the queue is closed before."""
    entries: list[Entry] = []
    while len(entries) < count and (entry := queue.get()) is not None:
        entries.append(entry)
    return entries


def _give(inputs: Sequence[Blob], outputs: Sequence[Blob], entry: Entry | None = None) -> None:
    """Set outputs to an entry, or to the inputs where they are other blobs."""
    values = [blob.value for blob in inputs] if entry is None else entry
    for blob, value in zip(outputs, values, strict=False):
        blob.value = value


@operator("CreateBlobsQueue", gradient=NO_GRADIENT)
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


@operator("EnqueueBlobs", gradient=NO_GRADIENT, blobs=True, inputs=(2, ANY), outputs=(1, ANY))
def enqueue_blobs(inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
    """Append the values of blobs to a queue (first input); wait for a place.

    A closed queue is an error.
    """
    queue = _queue(inputs[0])
    if not queue.put(_entry_of(queue, inputs[1:])):
        raise EnforceNotMet("The queue is closed")
    _give(inputs[1:], outputs)


@operator("SafeEnqueueBlobs", gradient=NO_GRADIENT, blobs=True, inputs=(2, ANY), outputs=(2, ANY))
def safe_enqueue_blobs(inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
    """Append as `EnqueueBlobs`; the last output tells that a closed queue took nothing."""
    queue = _queue(inputs[0])
    done = queue.put(_entry_of(queue, inputs[1:]))
    _give(inputs[1:], outputs[:-1])
    outputs[-1].value = torch.tensor(not done)


@operator("DequeueBlobs", gradient=NO_GRADIENT, blobs=True, inputs=(1, 1), outputs=(1, ANY))
def dequeue_blobs(
    inputs: Sequence[Blob], outputs: Sequence[Blob], *, timeout_secs: float = 0.0
) -> None:
    """Take the first entry of a queue; wait for one, `timeout_secs` at most (0: without limit).

    A queue that is closed and empty is an error.
    """
    queue = _queue(inputs[0])
    _check_width(queue, len(outputs))
    entry = queue.get(timeout_secs or None)
    if entry is None:
        raise EnforceNotMet("The queue is closed")
    _give([], outputs, entry)


@operator("SafeDequeueBlobs", gradient=NO_GRADIENT, blobs=True, inputs=(1, 1), outputs=(2, ANY))
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
        entries = _taken(queue, self.count)
        outputs[-1].value = torch.tensor(not entries)
        if entries:
            one, columns = self.count == 1, zip(*entries, strict=True)
            _give([], outputs[:-1], [part[0] if one else joined(part) for part in columns])


@operator("CloseRebatchingQueue", gradient=NO_GRADIENT, blobs=True, inputs=(1, 1), outputs=(0, 0))
@operator("CloseBlobsQueue", gradient=NO_GRADIENT, blobs=True, inputs=(1, 1), outputs=(0, 1))
def close_blobs_queue(inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
    """Close a queue."""
    _queue(inputs[0]).close()


@operator(
    "WeightedSampleDequeueBlobs",
    gradient=NO_GRADIENT,
    blobs=True,
    inputs=(1, ANY),
    outputs=(2, ANY),
)
class WeightedSampleDequeueBlobs:
    """Takes an entry of one of several queues, drawn by weight.

    Args of the operator:
        weights: of the queues. table_idx_blob: the index of the output that gets the number of the
        queue in place of its value; -1 for none.

    The last output tells whether the drawn queue is closed and empty: nothing was taken.
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


class QueueCursor:
    """A queue as a database that is read once, from its first entry to its last.

    Attributes:
        position: the number of the current record.
        path: no file.
    """

    def __init__(self, queue: BlobsQueue, key: int, value: int, timeout_s: float | None) -> None:
        """Make a cursor.

        Args:
            queue: the queue.
            key, value: the indices of the blobs with a record's key (-1 for none) and its value.
            timeout_s: seconds that a read waits for an entry, None for no limit.
        """
        self.position = 0
        self.path = Path()
        self._queue, self._key, self._value, self._timeout_s = queue, key, value, timeout_s
        self._entry: Entry | None = None

    def __len__(self) -> int:
        return self.position + len(self._queue)

    def _current(self) -> Entry:
        if self._entry is None:
            self._entry = self._queue.get(self._timeout_s)
            if self._entry is None:
                raise EnforceNotMet(f"The queue is closed after record {self.position - 1}")
        return self._entry

    def key(self) -> bytes:
        """Return the key of the current record, empty where the queue has none."""
        return _text(self._current()[self._key]) if self._key >= 0 else b""

    def value(self) -> bytes:
        return _text(self._current()[self._value])

    def skip(self, count: int) -> None:
        """Drop the current record and those that follow it."""
        for _ in range(count):
            self._current()
            self._entry = None
            self.position += 1

    def seek(self, record: int) -> None:
        """Raise RuntimeError for a record that is not current: queues give entries once."""
        if record != self.position:
            raise EnforceNotMet("A queue is read once and in order; it has no shards and no rewind")

    def close(self) -> None:
        """Do nothing: the queue belongs to others too."""


def _text(value: Any) -> bytes:
    """Return a string, or the first one of a tensor of strings."""
    if isinstance(value, np.ndarray) and value.size:
        value = value.reshape(-1)[0]
    if not isinstance(value, bytes):
        raise EnforceNotMet("A record of a queue must be a string, or a tensor of strings")
    return value


@operator("CreateBlobsQueueDB")
def create_blobs_queue_db(
    queue: Any, *, key_blob_index: int = -1, value_blob_index: int = 0, timeout_secs: float = 0.0
) -> Any:
    """Return a reader whose records are the entries of a queue.

    Args:
        queue: its blobs are strings, or tensors of one string.
        key_blob_index: the blob with the key of a record, -1 for none.
        value_blob_index: the blob with the value.
        timeout_secs: how long a read waits for an entry; 0 for no limit.
    """
    if not isinstance(queue, BlobsQueue):
        raise EnforceNotMet("The input is not a queue; CreateBlobsQueue makes one")
    if not 0 <= value_blob_index < queue.width or key_blob_index >= queue.width:
        raise ValueError(f"key_blob_index and value_blob_index must be less than {queue.width}")
    cursor = QueueCursor(queue, key_blob_index, value_blob_index, timeout_secs or None)
    return Reader("of a queue", "blobs_queue_db", cursor=cursor)


@operator("CreateRebatchingQueue", gradient=NO_GRADIENT)
def create_rebatching_queue(*, capacity: int = 1, num_blobs: int = 1) -> Any:
    """Return a queue of single examples; `capacity` counts these."""
    return create_blobs_queue(capacity=capacity, num_blobs=num_blobs)


@operator(
    "EnqueueRebatchingQueue", gradient=NO_GRADIENT, blobs=True, inputs=(2, ANY), outputs=(0, 0)
)
def enqueue_rebatching_queue(
    inputs: Sequence[Blob], outputs: Sequence[Blob], *, enqueue_batch: bool = False
) -> None:
    """Append an example, or with `enqueue_batch` each row of a batch, to a queue.

    A closed queue is an error.
    """
    queue = _queue(inputs[0])
    entry = _entry_of(queue, inputs[1:])
    rows = {len(value) for value in entry} if enqueue_batch else {1}
    if len(rows) != 1:
        raise EnforceNotMet(f"The blobs of a batch differ in their rows: {sorted(rows)}")
    for row in range(rows.pop()):
        if not queue.put([value[row] for value in entry] if enqueue_batch else entry):
            raise EnforceNotMet("The queue is closed")


@operator(
    "DequeueRebatchingQueue", gradient=NO_GRADIENT, blobs=True, inputs=(1, 1), outputs=(1, ANY)
)
class DequeueRebatchingQueue:
    """Takes `num_elements` examples, stacked; fewer of a closed queue, an error if it is empty."""

    def __init__(self, *, num_elements: int = 1) -> None:
        if num_elements < 1:
            raise ValueError(f"num_elements must be at least 1, not {num_elements}")
        self.count = num_elements

    def __call__(self, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
        queue = _queue(inputs[0])
        _check_width(queue, len(outputs))
        entries = _taken(queue, self.count)
        if not entries:
            raise EnforceNotMet("The queue is closed")
        _give([], outputs, [_stacked(column) for column in zip(*entries, strict=True)])


def _stacked(values: Sequence[Any]) -> Any:
    if isinstance(values[0], torch.Tensor):
        return torch.stack(list(values))
    found = strings_of(values)
    return found if isinstance(values[0], bytes) else np.stack(values)
