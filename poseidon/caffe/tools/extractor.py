"""Features of a trained net, written to databases: Caffe's extract_features, alone or as a
worker of a job.

Law: each record of the data is extracted once, by one worker, however many workers there are and
whatever the length of the data; a database appears when it is complete. Records have Caffe's keys
(%010d, counted in each database) and are Datums: the features as float_data, the label of the net's
blob `label`, if it has one.
"""

from __future__ import annotations

import logging
import queue
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import repeat
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from poseidon.caffe.data.cursor import DatabaseWriter, write_database
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import encode_datum
from poseidon.caffe.layers.rearrange import INTEGERS, outside
from poseidon.caffe.layers.registry import import_modules, location_in
from poseidon.caffe.net.compile import layer_context
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST
from poseidon.caffe.tools.preflight import Extraction
from poseidon.caffe.tools.solo import NetRequest, open_net, zero_inputs
from poseidon.engine.work import NOTHING, Work
from poseidon.errors import DataError, JobError, UsageError, unknown

LOGGER = logging.getLogger("poseidon.extract_features")
LABEL = "label"
RECORDS_PER_LINE = 1000
"""Records between two lines of progress in the log, as in Caffe's tool."""
OnBatch = Callable[[int, int, int], object]
"""Called after each batch: batches done, batches in all (0: not known), records done."""


def run_extraction(extraction: Extraction, on_batch: OnBatch = lambda *_: None) -> int:
    """Extract the features of one worker's records. Return the number of records in each database.

    Args:
        on_batch: called after each batch; may raise to abort, which leaves no database.

    Raises:
        PoseidonError: a mistake in the definition or the names; data is missing or
            broken, or a database exists already.
    """
    import_modules(extraction.imports)
    context = layer_context(extraction, phase=TEST, seed=1)
    weights = tuple(map(Path, extraction.weights))
    request = NetRequest(model=Path(extraction.model), phase=TEST, weights=weights)
    with closing(open_net(request, context)) as net:
        return _extract(net, extraction, on_batch)


def _extract(net: Net, extraction: Extraction, on_batch: OnBatch) -> int:
    for name in extraction.blobs:
        if name not in net.blob_shapes:
            raise UsageError(f"{extraction.model}: {unknown('blob', name, net.blob_shapes)}")
    total, counts = fresh_counts(net, extraction)
    net.keep_blobs = True
    backend = Backend.parse(extraction.backend)
    LOGGER.info("Extracting Features")
    done = logged = 0
    with ExitStack() as stack:
        writers = [
            stack.enter_context(write_database(path, backend)) for path in extraction.paths()
        ]
        for batches, done in enumerate(_write(net, extraction, counts, writers), 1):
            logged = _log_progress(extraction, done, logged)
            on_batch(batches, total, done)
    for name in extraction.blobs if done % RECORDS_PER_LINE or not done else ():
        LOGGER.info("Extracted features of %d query images for feature blob %s", done, name)
    LOGGER.info("Successfully extracted the features!")
    return done


def _write(
    net: Net, extraction: Extraction, counts: Iterable[int], writers: Sequence[DatabaseWriter]
) -> Iterator[int]:
    """Run and store batch after batch. Yield the number of records stored."""
    done, inputs = 0, zero_inputs(net)
    for count in counts:
        with torch.no_grad():
            net(inputs)
        labels = _labels(net, count)
        for name, writer in zip(extraction.blobs, writers, strict=True):
            for index, datum in enumerate(datums(_rows(net, name, count), labels)):
                writer.put(b"%010d" % (done + index), datum)
        done += count
        yield done


def _log_progress(extraction: Extraction, done: int, logged: int) -> int:
    """Log the progress at each full thousand of records. Return the thousands logged."""
    thousands = done // RECORDS_PER_LINE
    for name in extraction.blobs if thousands > logged else ():
        LOGGER.info("Extracted features of %d query images for feature blob %s", done, name)
    return thousands


def fresh_counts(net: Net, extraction: Extraction) -> tuple[int, Iterable[int]]:
    """Return the number of batches of this worker, and the records to take from each: all,
    except where the data ends.

    Raises:
        UsageError: the data has no end and no number of batches is given; or a blob does not have
            one row a record.
    """
    limit = extraction.batches
    reader = next((reader for _, reader in net.readers()), None)
    if reader is None and not limit:
        raise UsageError(
            f"{extraction.model} reads no database, so its data has no end; give NUM_MINI_BATCHES"
        )
    rows = {name: net.blob_shapes[name][:1] for name in extraction.blobs}
    batch = reader.shape[:1] if reader is not None else max(rows.values())
    for name, found in rows.items():
        if not found or found != batch:
            where = f" for a batch of {batch[0]} records" if batch else ""
            raise UsageError(
                f"blob '{name}' has {found[0] if found else 'no'} rows{where}, expected one a record"
            )
    if reader is None:
        return limit, repeat(batch[0], limit)
    counts: list[int] = []
    while (not limit or len(counts) < limit) and (count := reader.fresh_records(len(counts))):
        counts.append(count)
    return len(counts), counts


def datums(features: NDArray[np.float32], labels: NDArray[np.int64]) -> Iterator[bytes]:
    """Yield a Datum for each row: channels, height and width are the row's axes, 1 where it has
    fewer.
    """
    shape = (*features.shape[1:], 1, 1, 1)[:3] if features.ndim <= 4 else (features[0].size, 1, 1)
    for row, label in zip(features.reshape(len(features), *shape), labels.tolist(), strict=True):
        yield encode_datum(row, label)


def _rows(net: Net, name: str, count: int) -> NDArray[np.float32]:
    return np.asarray(net.blobs[name].detach().cpu().numpy()[:count], dtype=np.float32)


def _labels(net: Net, count: int) -> NDArray[np.int64]:
    """Return the net's labels, one a record; zeros if it has none."""
    found = net.blobs.get(LABEL)
    if found is None or found.numel() < count or found.numel() != found.shape[0]:
        return np.zeros(count, np.int64)
    labels = found.detach().cpu().reshape(-1)[:count]
    if wrong := outside(labels, INTEGERS):
        raise DataError(f"blob '{LABEL}' has the label {wrong}, expected integers of 32 bits")
    return labels.long().numpy()


class ExtractionWork(Work[Extraction]):
    """One worker of `poseidon extract_features`."""

    document_class = Extraction

    def location(self, error: BaseException) -> str:
        """See `Work`: a line of the modules that register layers."""
        return location_in(self.document.imports, error)

    def run(self) -> Mapping[str, object]:
        """Write the databases of this worker."""
        # unwinds: no partial database stays
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        self.launcher.send("ready")
        run_extraction(self.document, self._after_batch)
        return NOTHING

    def _after_batch(self, done: int, total: int, records: int) -> None:
        """Report progress. Raise an error when the launcher requests a stop or has gone."""
        images = records * self.document.workers
        self.launcher.send("progress", iteration=done, max_iter=total, images=images)
        while True:
            try:
                do = self.launcher.requests.commands.get_nowait().get("do")
            except queue.Empty:
                return
            if do in ("stop", "gone"):
                raise JobError(
                    "the extraction was stopped before its end; no database of this worker was left"
                )
