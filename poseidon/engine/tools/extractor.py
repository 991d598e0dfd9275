"""Features of a trained net into databases: Caffe's extract_features, alone or as a worker of a job.

Law: each record of the data is extracted once, by one worker, however many workers there are and whatever the length of
the data; a database appears when it is complete. Records have Caffe's keys (%010d, counted in each database) and are
Datums: the features as float_data, the label of the net's blob `label`, if it has one.

As `python -m poseidon.engine.tools.extractor` it is one worker, started by `poseidon extract_features` with an `Extraction` on
its first line of standard input; events go to standard output.
"""

from __future__ import annotations

import argparse
import logging
import queue
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from poseidon import log
from poseidon.data.databases.kinds import Backend
from poseidon.data.databases.writer import DatabaseWriter, write_database
from poseidon.data.datum import encode_datum
from poseidon.engine.launcher_connection import LauncherConnection
from poseidon.engine.tools.extraction import Extraction, read_extraction
from poseidon.engine.tools.solo import NetRequest, open_net, zero_inputs
from poseidon.errors import JobError, PoseidonError, UsageError, unknown
from poseidon.layers.base import LayerContext
from poseidon.layers.user_modules import import_modules
from poseidon.net.net import Net
from poseidon.proto.caffe_pb2 import TEST
from ps_server.numerics import prepare_process

LOGGER = logging.getLogger("poseidon.extract_features")
LABEL = "label"
# As often as Caffe's tool says how far it is.
RECORDS_PER_LINE = 1000
OnBatch = Callable[[int, int, int], object]
"""Told after each batch: batches done, batches in all (0: not known), records done."""


def run_extraction(extraction: Extraction, on_batch: OnBatch = lambda *_: None) -> int:
    """Extract one worker's share.

    Args:
        extraction: what, from where, to where.
        on_batch: told after each batch; may raise to break off, which leaves no database.

    Returns:
        how many records each database has.

    Raises:
        PoseidonError: a mistake in the definition or the names, or data that is missing, broken or in the way.
    """
    import_modules(extraction.imports)
    context = LayerContext(
        phase=TEST,
        seed=1,
        rank=extraction.rank,
        workers=extraction.workers,
        client=extraction.client,
        clients=extraction.clients,
        local_rank=extraction.local_rank,
        local_workers=extraction.local_workers,
        device=torch.device(extraction.device),
    )
    weights = tuple(map(Path, extraction.weights))
    net = open_net(NetRequest(model=Path(extraction.model), phase=TEST, weights=weights), context)
    try:
        return _extract(net, extraction, on_batch)
    finally:
        net.close()


def _extract(net: Net, extraction: Extraction, on_batch: OnBatch) -> int:
    for name in extraction.blobs:
        if name not in net.blob_shapes:
            raise UsageError(f"{extraction.model}: {unknown('blob', name, net.blob_shapes)}")
    total, counts = fresh_counts(net, extraction)
    net.keep_blobs = True
    backend = Backend.parse(extraction.backend)
    LOGGER.info("Extracting Features")
    done = told = 0
    with ExitStack() as stack:
        writers = [stack.enter_context(write_database(path, backend)) for path in extraction.paths()]
        for batches, done in enumerate(_write(net, extraction, counts, writers), 1):
            told = _tell(extraction, done, told)
            on_batch(batches, total, done)
    for name in extraction.blobs if done % RECORDS_PER_LINE or not done else ():
        LOGGER.info("Extracted features of %d query images for feature blob %s", done, name)
    LOGGER.info("Successfully extracted the features!")
    return done


def _write(
    net: Net, extraction: Extraction, counts: Iterable[int], writers: Sequence[DatabaseWriter]
) -> Iterator[int]:
    """Run and store batch after batch; yields how many records are stored."""
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


def _tell(extraction: Extraction, done: int, told: int) -> int:
    """Log how far it is when another thousand is full; returns the thousands logged."""
    thousands = done // RECORDS_PER_LINE
    for name in extraction.blobs if thousands > told else ():
        LOGGER.info("Extracted features of %d query images for feature blob %s", done, name)
    return thousands


def fresh_counts(net: Net, extraction: Extraction) -> tuple[int, Iterable[int]]:
    """How many batches this worker runs, and how many records to take from each: all, save where the data ends.

    Raises:
        UsageError: the data has no end, and no number of batches is given; or a blob has not one row a record.
    """
    limit = extraction.batches
    readers = [reader for _, reader in net.readers()]
    if not readers:
        if not limit:
            raise UsageError(
                f"{extraction.model} reads no database, so its data has no end; expected a num_mini_batches"
            )
        return limit, repeat(net.blob_shapes[extraction.blobs[0]][0], limit)
    reader = readers[0]
    for name in extraction.blobs:
        rows = net.blob_shapes[name][:1]
        if rows != (reader.shape[0],):
            raise UsageError(
                f"blob '{name}' has {rows[0] if rows else 'no'} rows for a batch of {reader.shape[0]} records, expected one "
                "a record"
            )
    counts: list[int] = []
    while (not limit or len(counts) < limit) and (count := reader.fresh_records(len(counts))):
        counts.append(count)
    return len(counts), counts


def datums(features: NDArray[np.float32], labels: NDArray[np.int64]) -> Iterator[bytes]:
    """A Datum for each row: channels, height and width are the row's axes, 1 where it has fewer."""
    shape = (*features.shape[1:], 1, 1, 1)[:3] if features.ndim <= 4 else (features[0].size, 1, 1)
    for row, label in zip(features.reshape(len(features), *shape), labels.tolist(), strict=True):
        yield encode_datum(row, label)


def _rows(net: Net, name: str, count: int) -> NDArray[np.float32]:
    return np.asarray(net.blobs[name].detach().cpu().numpy()[:count], dtype=np.float32)


def _labels(net: Net, count: int) -> NDArray[np.int64]:
    """The net's labels, zeros when it has none, one a record."""
    found = net.blobs.get(LABEL)
    if found is None or found.numel() < count or found.numel() != found.shape[0]:
        return np.zeros(count, np.int64)
    return found.detach().cpu().reshape(-1)[:count].long().numpy()


def main(arguments: list[str] | None = None) -> int:
    """Run a worker of a job; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m poseidon.engine.tools.extractor",
        description="One worker of a feature extraction; started by `poseidon extract_features`.",
    )
    parser.add_argument("--job", help="marks the process as part of a job")
    parser.add_argument("--rank", help="marks the process for people")
    parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's business
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # unwinds: no half database stays
    launcher = LauncherConnection()
    try:
        extraction = read_extraction(sys.stdin.readline())
        prepare_process(extraction.threads or None)
        outputs = log.setup(stream=sys.stderr, file=Path(extraction.output) / f"worker_{extraction.rank}.log")
    except (PoseidonError, OSError) as error:
        launcher.send("error", message=str(error), exit_code=getattr(error, "exit_code", 1))
        return 1
    with outputs:
        return _run_worker(extraction, launcher)


def _run_worker(extraction: Extraction, launcher: LauncherConnection) -> int:
    launcher.start()
    launcher.send("ready")

    def on_batch(done: int, total: int, records: int) -> None:
        launcher.send("progress", iteration=done, max_iter=total, images=records * extraction.workers)
        _obey(launcher)

    try:
        run_extraction(extraction, on_batch)
    except PoseidonError as error:
        LOGGER.critical("%s", error)
        launcher.send("error", message=str(error), exit_code=error.exit_code)
        return 1
    finally:
        launcher.close()
    launcher.send("done")
    return 0


def _obey(launcher: LauncherConnection) -> None:
    """Break off when the launcher says so, or has gone."""
    while True:
        try:
            do = launcher.commands.get_nowait().get("do")
        except queue.Empty:
            return
        if do in ("stop", "gone"):
            raise JobError("the extraction was stopped before its end; no database of this worker was left")


if __name__ == "__main__":
    raise SystemExit(main())
