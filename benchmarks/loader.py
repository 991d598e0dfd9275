"""Compare LMDB input with a torch DataLoader that does the same work in Python, one core each.

    python benchmarks/loader.py [--rounds 9]

The work of both: read a raw Datum from an LMDB, crop it at random, mirror half of them, subtract
the mean file, give float32 batches. The DataLoader runs in this process (`num_workers=0`), our
batches are made in this thread: so each has one core, and more cores would help both alike.

Reading the table: `ratio` is the median over the rounds of (our images/s / the DataLoader's) of
that round; the promise is at least 2. The first row has ImageNet's pictures, where copying pixels
is the work; the second CIFAR's, where it is Python.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

# a checkout works without being installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from poseidon.cli.entry import use_environment

use_environment()

import lmdb
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from poseidon.caffe.data.batches.numbered import Share
from poseidon.caffe.data.batches.reader import DatumMaker, DatumPlan
from poseidon.caffe.data.batches.transform import Transform
from poseidon.caffe.data.cursor import open_cursor, write_database
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import encode_datum
from poseidon.caffe.data.mean import read_mean, write_mean
from poseidon.caffe.proto.caffe_pb2 import Datum, TransformationParameter

BATCH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row: square pictures of `extent`, cropped to `crop`, `records` of them."""

    extent: int
    crop: int
    records: int


CASES = {
    "imagenet": Case(extent=256, crop=227, records=500),
    "cifar10": Case(extent=32, crop=28, records=10_000),
}


class Pictures(Dataset[tuple[Tensor, int]]):
    """The database as one would read it by hand."""

    def __init__(self, path: Path, mean: Path, crop: int) -> None:
        self.transaction = lmdb.open(str(path), readonly=True, lock=False).begin(buffers=True)
        self.count = self.transaction.stat()["entries"]
        self.mean = read_mean(mean)
        self.crop = crop
        self.random = np.random.default_rng(0)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        datum = Datum.FromString(bytes(self.transaction.get(b"%08d" % index)))
        picture = np.frombuffer(datum.data, np.uint8).reshape(
            datum.channels, datum.height, datum.width
        )
        top, left = self.random.integers(0, datum.height - self.crop + 1, 2)
        window = (slice(None), slice(top, top + self.crop), slice(left, left + self.crop))
        values = picture[window].astype(np.float32) - self.mean[window]
        if self.random.integers(2):
            values = values[:, :, ::-1].copy()
        return torch.from_numpy(values), datum.label


def prepare(folder: Path, case: Case) -> tuple[Path, Path]:
    """Make a database of random pictures, and a mean file."""
    random = np.random.default_rng(1)
    shape = (3, case.extent, case.extent)
    with write_database(folder / "lmdb", Backend.LMDB) as writer:
        for number in range(case.records):
            picture = random.integers(0, 256, shape, np.uint8)
            writer.put(b"%08d" % number, encode_datum(picture, number % 10))
    write_mean(folder / "mean", random.normal(120, 5, shape).astype(np.float32))
    return folder / "lmdb", folder / "mean"


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(name: str, rounds: int) -> str:
    """One row of the table."""
    case = CASES[name]
    batches = case.records // BATCH
    with tempfile.TemporaryDirectory() as place:
        path, mean = prepare(Path(place), case)
        param = TransformationParameter(crop_size=case.crop, mirror=True, mean_file=str(mean))
        transform = Transform(param, train=True, resolve=Path)
        plan = DatumPlan(batch_size=BATCH, transform=transform, share=Share(), seed=1)
        # One process opens an LMDB once.
        copy = shutil.copytree(path, Path(place) / "copy")
        loader = DataLoader(Pictures(copy, mean, case.crop), batch_size=BATCH)
        with closing(DatumMaker(open_cursor(path, Backend.LMDB), plan)) as maker:

            def ours() -> None:
                for number in range(batches):
                    maker.tensors(number)

            def theirs() -> None:
                for _ in loader:
                    pass

            ours(), theirs()
            times = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    ratio = statistics.median(other / own for own, other in times)
    rates = [case.records / statistics.median(column) for column in zip(*times, strict=True)]
    return f"{name:<10} {case.extent:>7} {case.crop:>5} {rates[0]:>12.0f} {rates[1]:>12.0f} {ratio:>7.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=9, help="interleaved rounds (default %(default)s)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"one core each, CPU clock, {options.rounds} interleaved rounds, batches of {BATCH}")
    print(
        f"{'pictures':<10} {'extent':>7} {'crop':>5} {'ours /s':>12} {'loader /s':>12} {'ratio':>7}"
    )
    for name in CASES:
        print(measure(name, options.rounds), flush=True)
    print("ratio = our images/s over the DataLoader's, median over rounds; at least 2 is promised.")


if __name__ == "__main__":
    main()
