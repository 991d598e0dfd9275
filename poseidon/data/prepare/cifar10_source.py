"""CIFAR-10 as it is published: found in a folder, read, and checked.

Law: whatever the form (binary or python version, archive or unpacked), the same pictures come out in the published
order, or an error that names the file. Pickles are read by an unpickler that knows arrays and nothing else.

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

from poseidon.data.prepare.download import file_md5
from poseidon.data.prepare.labelled import Labelled
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cifar10:
    """The data set in memory.

    Args:
        train: 50,000 pictures in the order of the five published batches.
        test: 10,000 pictures.
        origin: where it was read from, in words.
    """

    train: Labelled
    test: Labelled
    origin: str


# Reads the named batches out of a place: name without ending -> contents of the file.
_Contents = Mapping[str, bytes]


def find_cifar10(place: Path) -> Path | None:
    """CIFAR-10 at or under `place`: an unpacked folder or an archive, whichever is read fastest.

    `place` may be the archive or the unpacked folder itself, or a folder that holds one, directly or in `cifar10/`.
    """
    if place.is_file():
        return place if tarfile.is_tarfile(place) else None
    return next((found for folder in (place, place / "cifar10") for found in _candidates(folder)), None)


def _candidates(folder: Path) -> Iterator[Path]:
    for unpacked in (folder, folder / "cifar-10-batches-bin", folder / "cifar-10-batches-py"):
        if (unpacked / f"{TEST_BATCH}.bin").is_file() or (unpacked / TEST_BATCH).is_file():
            yield unpacked
    for version in ("binary", "python"):
        for ending in ("tar", "tar.gz", "tgz", "tar.bz2", "tar.xz"):
            archive = folder / f"cifar-10-{version}.{ending}"
            if archive.is_file():
                yield archive


def read_cifar10(place: Path) -> Cifar10:
    """Read what `find_cifar10` found.

    Raises:
        DataError: damaged, incomplete, or not CIFAR-10.
    """
    contents = _read_folder(place) if place.is_dir() else _read_archive(place)
    missing = [name for name in (*TRAIN_BATCHES, TEST_BATCH) if name not in contents]
    if missing:
        raise DataError(f"{place} is not the whole of CIFAR-10: {', '.join(missing)} is missing")
    batches = {name: _parse(content, f"{name} in {place}") for name, content in contents.items()}
    parts = [batches[name] for name in TRAIN_BATCHES]
    train = Labelled(
        images=np.concatenate([part.images for part in parts]),
        labels=np.concatenate([part.labels for part in parts]),
    )
    _check(train, TRAIN_RECORDS, f"the training set in {place}")
    _check(batches[TEST_BATCH], TEST_RECORDS, f"the test set in {place}")
    return Cifar10(train=train, test=batches[TEST_BATCH], origin=_origin(place))


def _origin(place: Path) -> str:
    if place.is_dir():
        return f"CIFAR-10 from {place}"
    known = PUBLISHED_MD5.get(file_md5(place))
    word = f"the published {known}" if known else "not the published archive, but its records check out"
    return f"CIFAR-10 from {place} ({word})"


def _batch_name(file_name: str) -> str | None:
    """Return the batch that a file of this name holds, or None."""
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
    """One pass through the archive, in memory: nothing is unpacked to disk, so no member's path matters."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                name = _batch_name(member.name)
                file = archive.extractfile(member) if name is not None and member.isfile() else None
                if name is not None and file is not None:
                    found[name] = file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"the archive {path} is damaged: {error}") from error
    return found


def _parse(content: bytes, place: str) -> Labelled:
    """Return a batch of either version."""
    # A pickle of the published protocol starts with 0x80; as a label that byte would be no class.
    return _parse_pickle(content, place) if content[:1] in (b"\x80", b"(") else _parse_binary(content, place)


def _parse_binary(content: bytes, place: str) -> Labelled:
    """Records of one label byte and 3072 pixels: red, green and blue plane."""
    if not content or len(content) % (1 + PIXELS):
        raise DataError(f"{place} has {len(content)} bytes: expected records of {1 + PIXELS} bytes")
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + PIXELS)
    return Labelled(images=records[:, 1:].reshape(-1, *SHAPE), labels=records[:, 0].copy())


def _parse_pickle(content: bytes, place: str) -> Labelled:
    """Return a dictionary with `data`, (N, 3072) uint8, and `labels`, N integers."""
    try:
        batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        entries = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        images = np.asarray(entries["data"])
        labels = np.asarray(entries["labels"])
        if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != PIXELS:
            raise ValueError(f"data has type {images.dtype} and shape {images.shape}")
        if labels.min() < 0 or labels.max() >= CLASSES:
            raise ValueError("a label is not 0..9")
        return Labelled(images=images.reshape(-1, *SHAPE), labels=labels.astype(np.uint8))
    # An unpickler fed with rubbish may raise nearly anything.
    except Exception as error:
        raise DataError(f"{place} is not a batch of the python version: {error}") from error


class _ArrayUnpickler(pickle.Unpickler):
    """Builds dictionaries, lists, texts, numbers and numpy arrays; refuses every other class and function."""

    # numpy 1 and 2 keep the constructor in modules of different names; old files name the first.
    _CONSTRUCTOR: Any = np.empty(0).__reduce__()[0]
    _ALLOWED: Mapping[tuple[str, str], Callable[..., Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): _CONSTRUCTOR,
        ("numpy._core.multiarray", "_reconstruct"): _CONSTRUCTOR,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        # How Python 3 spells bytes in the protocols of Python 2.
        ("_codecs", "encode"): _codecs.encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed") from None


def _check(part: Labelled, count: int, place: str) -> None:
    """The published sets hold equally many pictures of each class."""
    if len(part) != count:
        raise DataError(f"{place} has {len(part)} pictures: expected {count}")
    histogram: npt.NDArray[np.intp] = np.bincount(part.labels, minlength=CLASSES)
    if histogram.tolist() != [count // CLASSES] * CLASSES:
        raise DataError(
            f"{place} has {histogram.tolist()} pictures of each class: expected {count // CLASSES} each"
        )
