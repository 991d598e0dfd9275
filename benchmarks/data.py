"""Measure whether the LMDB pipeline keeps up with training.

    python benchmarks/data.py [--need IMAGES_PER_S] [--need_encoded IMAGES_PER_S] [--seconds 5] [--threads 2]

Two databases are made in a temporary folder: raw 32 x 32 pictures with a mean file, as
cifar10_quick reads them, and JPEG-encoded 256 x 256 pictures that are cropped to 227 and mirrored,
as AlexNet reads them.

Reading the table:
  alone     images/s that the reader hands out when nothing else runs: what it can do at most.
  need      images/s that training asks for: what was given with --need, or, for the raw pictures, measured here
            with cifar10_quick written by hand in torch, on pictures that lie in memory (forward,
            backward, SGD).
  headroom  alone / need. Above 1 the reader is the faster one; on a CPU both share the cores, so look at the next.
  waits     the same training once more, fed by the reader: share of its time spent in next(), beside the few
            microseconds that next() itself takes. Near 0 % means that training is never blocked
            once warm.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

# a checkout works without being installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from poseidon.cli.entry import use_environment

use_environment()

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch_models import CifarQuick

from poseidon.caffe.data.batches.numbered import NumberedReader, Share
from poseidon.caffe.data.batches.reader import DatumMaker, DatumPlan, open_maker
from poseidon.caffe.data.batches.transform import Transform
from poseidon.caffe.data.cursor import open_cursor, write_database
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.mean import compute_mean, write_mean
from poseidon.caffe.data.prepare.convert import write_labelled
from poseidon.caffe.data.prepare.procedural import draw_images
from poseidon.caffe.proto.caffe_pb2 import Datum, TransformationParameter

BATCH = 100
RAW_PICTURES, ENCODED_PICTURES = 10_000, 500
WARM_UP_STEPS = 5
Batch = tuple[Tensor, Tensor]
Reader = NumberedReader[DatumMaker]


def make_raw(folder: Path) -> Reader:
    """Make a reader of raw 32 x 32 pictures with a mean file."""
    path = folder / "raw_lmdb"
    write_labelled(path, Backend.LMDB, draw_images(RAW_PICTURES, seed=1), key_digits=5)
    with closing(open_cursor(path, Backend.LMDB)) as cursor:
        write_mean(folder / "mean", compute_mean(cursor))
    return open_reader(path, TransformationParameter(mean_file=str(folder / "mean")))


def make_encoded(folder: Path) -> Reader:
    """Make a reader of JPEG-encoded 256 x 256 pictures, cropped to 227 and mirrored."""
    path = folder / "encoded_lmdb"
    small = draw_images(ENCODED_PICTURES, seed=2)
    with write_database(path, Backend.LMDB) as writer:
        for number, image in enumerate(small.images):
            buffer = io.BytesIO()
            picture = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).resize(
                (256, 256)
            )
            picture.save(buffer, "JPEG", quality=90)
            datum = Datum(data=buffer.getvalue(), encoded=True, label=int(small.labels[number]))
            writer.put(b"%05d" % number, datum.SerializeToString())
    param = TransformationParameter(crop_size=227, mirror=True, mean_value=[104, 117, 123])
    return open_reader(path, param)


def open_reader(path: Path, param: TransformationParameter) -> Reader:
    transform = Transform(param, train=True, resolve=Path)
    plan = DatumPlan(batch_size=BATCH, transform=transform, share=Share(), seed=1)
    maker = open_maker(path, Backend.LMDB, lambda cursor: DatumMaker(cursor, plan))
    return NumberedReader(path, maker)


def rate(step: Callable[[], object], seconds: float) -> float:
    """Images/s of a step of one batch, measured for about so long."""
    for _ in range(WARM_UP_STEPS):
        step()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds or not count:
        step()
        count += 1
    return count * BATCH / (time.perf_counter() - start)


def in_memory(reader: Reader, batches: int) -> Iterator[Batch]:
    """Yield a few batches of `reader`, over and over."""
    kept = [reader.next() for _ in range(batches)]
    while True:
        yield from kept


def training_step(batches: Iterator[Batch], device: torch.device) -> Callable[[], None]:
    """One iteration of SGD on cifar10_quick."""
    net = CifarQuick().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9, weight_decay=0.004)

    def step() -> None:
        data, labels = next(batches)
        loss = net(data.to(device), labels.to(device, torch.int64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step


def timed_next(reader: Reader, waited: list[float]) -> Iterator[Batch]:
    """Yield the reader's batches; append to `waited` the seconds that each took."""
    while True:
        start = time.perf_counter()
        batch = reader.next()
        waited.append(time.perf_counter() - start)
        yield batch


def measure_waits(reader: Reader, device: torch.device, seconds: float) -> float:
    """Share of training's time that is spent waiting for the reader."""
    waited: list[float] = []
    step = training_step(timed_next(reader, waited), device)
    for _ in range(WARM_UP_STEPS):
        step()
    waited.clear()
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        step()
    return sum(waited) / (time.perf_counter() - start)


def row(name: str, alone: float, need: float | None, waits: float | None) -> str:
    cells = [
        f"{need:10.0f}" if need else f"{'-':>10}",
        f"{alone / need:9.1f}" if need else f"{'-':>9}",
        f"{waits:7.1%}" if waits is not None else f"{'-':>7}",
    ]
    return f"{name:<34} {alone:10.0f} {' '.join(cells)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--need", type=float, help="images/s that training on raw 32 x 32 pictures asks for"
    )
    parser.add_argument(
        "--need_encoded", type=float, help="images/s for the encoded images; not measured"
    )
    parser.add_argument(
        "--seconds", type=float, default=5, help="length of each measurement (default %(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="threads of torch"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as name:
        print(f"batches of {BATCH}, training on {device.type}, {options.threads} threads of torch")
        print(f"{'pipeline':<34} {'alone':>10} {'need':>10} {'headroom':>9} {'waits':>7}")
        with make_raw(Path(name)) as reader:
            alone = rate(reader.next, options.seconds)
            need = options.need or rate(
                training_step(in_memory(reader, 20), device), options.seconds
            )
            waits = measure_waits(reader, device, options.seconds)
        print(row("raw 3x32x32, mean file", alone, need, waits), flush=True)
        with make_encoded(Path(name)) as reader:
            alone = rate(reader.next, options.seconds)
        print(row("JPEG 3x256x256, crop 227, mirror", alone, options.need_encoded, None))
    print(
        "images/s. headroom = alone / need: above 1 the reader outruns training. waits = share of "
        "training's time spent "
        "waiting for data, when fed by the reader."
    )


if __name__ == "__main__":
    main()
