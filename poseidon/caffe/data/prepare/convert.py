"""Conversion of MNIST and of labelled images in memory to databases, as by Caffe's converters.

Law: the key of record i is i in decimal with leading zeros, so that key order is the order of the
data set.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from poseidon.base.foreign_files import open_regular
from poseidon.caffe.data.cursor import open_writer, refuse_existing, translated_writes
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import encode_datum
from poseidon.caffe.data.staging import Report, silent, staging
from poseidon.errors import DataError

MNIST_KEY_DIGITS = 8
# Part -> its files of images and labels.
MNIST_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
# The first four bytes of an idx file: two zeros, the type (unsigned byte), the number of
# dimensions.
IDX_MAGIC = {3: 0x803, 1: 0x801}


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """Labelled images in memory.

    Args:
        images: (N, C, H, W) uint8.
        labels: (N) uint8.
    """

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise ValueError(f"{len(self.images)} images have {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)


def write_labelled(
    path: Path,
    backend: Backend,
    labelled: Labelled,
    *,
    key_digits: int,
    report: Report = silent,
    activity: str = "writing",
) -> None:
    """Write a new database at `path`.

    The database is visible at once, so `path` should be in a staging folder.

    Args:
        key_digits: the number of digits of a key. Caffe uses 5 for CIFAR-10 and 8 for MNIST.
    """
    with closing(open_writer(path, backend)) as writer:
        for number, (image, label) in enumerate(zip(labelled.images, labelled.labels, strict=True)):
            writer.put(b"%0*d" % (key_digits, number), encode_datum(image, int(label)))
            report(activity, number + 1, len(labelled))


def convert_mnist(
    source: Path,
    folder: Path,
    backend: Backend,
    *,
    pairs_seed: int | None = None,
    report: Report = silent,
) -> tuple[Path, Path]:
    """Create databases `mnist_train_<kind>` and `mnist_test_<kind>` in `folder`, both or none.
    Return the paths of the training and the test database.

    Args:
        source: a folder with the four published files, gzipped or not, directly or in `mnist/`.
        pairs_seed: make pairs drawn with this seed, `mnist_siamese_train_<kind>` and so on; None:
            single images.

    Raises:
        DataError: a file is missing or damaged, or a database exists already.
    """
    name = "mnist" if pairs_seed is None else "mnist_siamese"
    targets = [folder / f"{name}_{part}_{backend.suffix}" for part in MNIST_FILES]
    for target in targets:
        refuse_existing(target)
    sets = [
        read_mnist(*(_mnist_file(source, file) for file in files)) for files in MNIST_FILES.values()
    ]
    if pairs_seed is not None:
        sets = [random_pairs(labelled, seed=pairs_seed) for labelled in sets]
    with translated_writes(folder), staging(folder / name) as stage:
        for part, target, labelled in zip(MNIST_FILES, targets, sets, strict=True):
            write_labelled(
                stage.folder / target.name,
                backend,
                labelled,
                key_digits=MNIST_KEY_DIGITS,
                report=report,
                activity=f"writing {part}",
            )
        stage.publish([target.name for target in targets])
    return targets[0], targets[1]


def random_pairs(labelled: Labelled, *, seed: int) -> Labelled:
    """Draw as many pairs as there are images: two random images as channels, label 1 if their
    labels are equal, else 0.

    Raises:
        DataError: there are no images.
    """
    if not len(labelled):
        raise DataError("there are no images to make pairs of")
    first, second = np.random.default_rng(seed).integers(0, len(labelled), (2, len(labelled)))
    images, labels = labelled.images, labelled.labels
    return Labelled(
        images=np.concatenate([images[first], images[second]], axis=1),
        labels=(labels[first] == labels[second]).astype(np.uint8),
    )


def _mnist_file(source: Path, name: str) -> Path:
    """Return the path of a file.

    Raises:
        DataError: the folder does not hold it.
    """
    paths = [
        folder / f"{name}{ending}"
        for folder in (source, source / "mnist")
        for ending in ("", ".gz")
    ]
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        problem = f"has no {name} or {name}.gz" if source.is_dir() else "is not a folder"
        raise DataError(f"{source} {problem}; expected the folder of MNIST's four published files")
    return found


def read_mnist(images: Path, labels: Path) -> Labelled:
    """Read images (N, 1, H, W) and labels from two idx files, plain or gzipped.

    Raises:
        DataError: a file is missing or damaged, or the two differ in the number of records.
    """
    pixels, digits = _read_idx(images, 3), _read_idx(labels, 1)
    if len(pixels) != len(digits):
        raise DataError(f"{images} has {len(pixels)} images, but {labels} has {len(digits)} labels")
    return Labelled(images=pixels[:, np.newaxis], labels=digits)


def _read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    start = 4 * (1 + dimensions)
    try:
        with open_regular(path) as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            stream = gzip.GzipFile(fileobj=file) if zipped else file
            header = stream.read(start)
            if len(header) < start or struct.unpack(">I", header[:4])[0] != IDX_MAGIC[dimensions]:
                raise DataError(f"{path} is not an idx file of {dimensions} dimensions of bytes")
            shape = struct.unpack(f">{dimensions}I", header[4:])
            size, content = math.prod(shape), bytearray()
            while len(content) <= size and (block := stream.read(1 << 20)):
                content += block  # no more than one block too many
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if len(content) != size:
        held = len(content) if len(content) < size else "more"
        raise DataError(f"{path} has shape {shape} in its header, but {held} bytes of data")
    return np.frombuffer(content, np.uint8).reshape(shape)
