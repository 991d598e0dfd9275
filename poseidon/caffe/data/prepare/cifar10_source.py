"""A reader of CIFAR-10 in its published formats.

Law: every format (binary or python version, archive or unpacked) gives the same images in the
published order, or an error that names the file. Pickles are read by an unpickler that allows
arrays only.

Source: https://www.cs.toronto.edu/~kriz/cifar.html for both layouts.
"""

from __future__ import annotations

import _codecs
import io
import lzma
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from poseidon.caffe.data.prepare.convert import Labelled
from poseidon.caffe.data.prepare.download import file_digest
from poseidon.errors import DataError

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
URL_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
PUBLISHED_MD5 = {URL_MD5: "binary version", "c58f30108f718f92721af3b95e74349a": "python version"}

CLASSES = 10
SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_BATCH = "test_batch"
TRAIN_RECORDS, TEST_RECORDS = 50_000, 10_000
LARGEST_BATCH = 256 << 20
"""Bytes. A published one has 31 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cifar10:
    """The data set in memory.

    Args:
        train: 50,000 images in the order of the five published batches.
        test: 10,000 images.
        origin: a description of the source.
    """

    train: Labelled
    test: Labelled
    origin: str


# The batch files: name without suffix -> content.
_Contents = Mapping[str, bytes]


def find_cifar10(path: Path) -> Path | None:
    """Return the path of CIFAR-10 at or under `path`, or None.

    Formats that are read faster are preferred.

    `path` is an archive, an unpacked folder, or a folder that holds one of them, directly or in
    `cifar10/`.
    """
    if path.is_file():
        return path if tarfile.is_tarfile(path) else None
    return next(
        (found for folder in (path, path / "cifar10") for found in _candidates(folder)), None
    )


def _candidates(folder: Path) -> Iterator[Path]:
    for unpacked in (folder, folder / "cifar-10-batches-bin", folder / "cifar-10-batches-py"):
        if (unpacked / f"{TEST_BATCH}.bin").is_file() or (unpacked / TEST_BATCH).is_file():
            yield unpacked
    for version in ("binary", "python"):
        for ending in ("tar", "tar.gz", "tgz", "tar.bz2", "tar.xz"):
            archive = folder / f"cifar-10-{version}.{ending}"
            if archive.is_file():
                yield archive


def read_cifar10(path: Path) -> Cifar10:
    """Read the data set at a path that `find_cifar10` returned.

    Raises:
        DataError: the data is damaged, incomplete, or not CIFAR-10.
    """
    contents = _read_folder(path) if path.is_dir() else _read_archive(path)
    missing = [name for name in (*TRAIN_BATCHES, TEST_BATCH) if name not in contents]
    if missing:
        raise DataError(f"{path} is not complete: {', '.join(missing)} of CIFAR-10 is missing")
    batches = {name: _parse(content, f"{name} in {path}") for name, content in contents.items()}
    parts = [batches[name] for name in TRAIN_BATCHES]
    train = Labelled(
        images=np.concatenate([part.images for part in parts]),
        labels=np.concatenate([part.labels for part in parts]),
    )
    _check(train, TRAIN_RECORDS, f"the training set in {path}")
    _check(batches[TEST_BATCH], TEST_RECORDS, f"the test set in {path}")
    return Cifar10(train=train, test=batches[TEST_BATCH], origin=_origin(path))


def _origin(path: Path) -> str:
    if path.is_dir():
        return f"CIFAR-10 from {path}"
    known = PUBLISHED_MD5.get(file_digest(path, "md5"))
    status = (
        f"the published {known}"
        if known
        else "not the published archive, but its records check out"
    )
    return f"CIFAR-10 from {path} ({status})"


def _batch_name(file_name: str) -> str | None:
    """Return the name of the batch in a file of this name, or None."""
    name = Path(file_name).name.removesuffix(".bin")
    return name if name in (*TRAIN_BATCHES, TEST_BATCH) else None


def _read_folder(folder: Path) -> _Contents:
    found: dict[str, bytes] = {}
    for path in sorted(folder.iterdir()):
        name = _batch_name(path.name)
        if name is not None and name not in found and path.is_file():
            found[name] = path.read_bytes()
    return found


def _read_archive(path: Path) -> _Contents:
    """Read an archive in one pass, in memory.

    No file is unpacked, so the members' paths are harmless.
    """
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                name = _batch_name(member.name)
                file = archive.extractfile(member) if name is not None and member.isfile() else None
                if name is not None and file is not None:
                    if member.size > LARGEST_BATCH:
                        raise DataError(
                            f"the archive {path} has {name} of {member.size} bytes; expected at "
                            f"most {LARGEST_BATCH}"
                        )
                    found[name] = file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"the archive {path} is damaged: {error}") from error
    return found


def _parse(content: bytes, path: str) -> Labelled:
    """Parse a batch of either version."""
    # A pickle of the published protocol starts with 0x80, which is not a legal label.
    return (
        _parse_pickle(content, path)
        if content[:1] in (b"\x80", b"(")
        else _parse_binary(content, path)
    )


def _parse_binary(content: bytes, path: str) -> Labelled:
    """Parse records of one label byte and 3072 pixels: the red, green and blue plane."""
    if not content or len(content) % (1 + PIXELS):
        raise DataError(f"{path} has {len(content)} bytes: expected records of {1 + PIXELS} bytes")
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + PIXELS)
    return Labelled(images=records[:, 1:].reshape(-1, *SHAPE), labels=records[:, 0].copy())


def _parse_pickle(content: bytes, path: str) -> Labelled:
    """Parse a pickled dictionary with `data`, (N, 3072) uint8, and `labels`, N integers."""
    try:
        batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        entries = {
            key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()
        }
        images = np.asarray(entries["data"])
        labels = np.asarray(entries["labels"])
        if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != PIXELS:
            raise ValueError(f"data has type {images.dtype} and shape {images.shape}")
        if labels.min() < 0 or labels.max() >= CLASSES:
            raise ValueError("a label is not 0..9")
        return Labelled(images=images.reshape(-1, *SHAPE), labels=labels.astype(np.uint8))
    # An unpickler can raise nearly any exception on damaged input.
    except Exception as error:
        raise DataError(f"{path} is not a batch of the python version: {error}") from error


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler for dictionaries, lists, strings, numbers and numpy arrays.
    Other classes and functions are errors.
    """

    # numpy 1 and 2 have the constructor in different modules. The published files name the first.
    _CONSTRUCTOR: Any = np.empty(0).__reduce__()[0]
    _ALLOWED: Mapping[tuple[str, str], Callable[..., Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): _CONSTRUCTOR,
        ("numpy._core.multiarray", "_reconstruct"): _CONSTRUCTOR,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        # Python 3 writes bytes in the protocols of Python 2 this way.
        ("_codecs", "encode"): _codecs.encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it needs {module}.{name}, which is not allowed"
            ) from None


def _check(part: Labelled, count: int, path: str) -> None:
    """Raise DataError unless a set has `count` images, the same number of each class."""
    if len(part) != count:
        raise DataError(f"{path} has {len(part)} images: expected {count}")
    histogram: npt.NDArray[np.intp] = np.bincount(part.labels, minlength=CLASSES)
    if histogram.tolist() != [count // CLASSES] * CLASSES:
        raise DataError(
            f"{path} has {histogram.tolist()} images of each class: expected {count // CLASSES} "
            "each"
        )
