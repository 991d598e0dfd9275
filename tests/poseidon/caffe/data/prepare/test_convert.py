"""MNIST's idx files into databases."""

from __future__ import annotations

import gzip
import struct
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe.data.cursor import open_cursor, records
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import decode
from poseidon.caffe.data.prepare.convert import (
    MNIST_FILES,
    Labelled,
    convert_mnist,
    random_pairs,
    read_mnist,
)
from poseidon.errors import DataError
from tests.support.databases import BACKENDS

PICTURES = np.random.default_rng(0).integers(0, 256, (6, 5, 4), np.uint8)
LABELS = np.arange(6, dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:  # type: ignore[type-arg]
    return struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "mnist"
    folder.mkdir()
    for images, labels in MNIST_FILES.values():
        (folder / f"{images}.gz").write_bytes(gzip.compress(idx(PICTURES)))
        (folder / labels).write_bytes(idx(LABELS))
    return tmp_path


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_databases(tmp_path: Path, source: Path, backend: Backend) -> None:
    made = convert_mnist(source, tmp_path / "out", backend)
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == sorted(
        path.name for path in made
    )
    for path in made:
        with closing(open_cursor(path, backend)) as cursor:
            found = [(key, *decode(value)) for key, value in records(cursor)]
        assert [key for key, _, _ in found] == [b"%08d" % i for i in range(6)]
        np.testing.assert_array_equal([image for _, image, _ in found], PICTURES[:, None])
        assert [label for _, _, label in found] == LABELS.tolist()
    with pytest.raises(DataError, match="exists already"):
        convert_mnist(source, tmp_path / "out", backend)


def test_pairs(tmp_path: Path, source: Path) -> None:
    made = convert_mnist(source, tmp_path / "out", Backend.LMDB, pairs_seed=1)
    assert [path.name for path in made] == ["mnist_siamese_train_lmdb", "mnist_siamese_test_lmdb"]
    with closing(open_cursor(made[0], Backend.LMDB)) as cursor:
        found = [decode(value) for _, value in records(cursor)]
    expected = random_pairs(Labelled(images=PICTURES[:, None], labels=LABELS), seed=1)
    np.testing.assert_array_equal([image for image, _ in found], expected.images)
    assert [label for _, label in found] == expected.labels.tolist()


def test_the_label_of_a_pair_is_whether_its_classes_are_equal() -> None:
    labels = np.arange(200, dtype=np.uint8) % 10
    images = np.broadcast_to(labels[:, None, None, None], (200, 1, 2, 3))
    made = random_pairs(Labelled(images=images, labels=labels), seed=3)
    assert made.images.shape == (200, 2, 2, 3)
    assert made.labels.tolist() == (made.images[:, 0, 0, 0] == made.images[:, 1, 0, 0]).tolist()
    assert 5 < made.labels.sum() < 40
    again, other = (
        random_pairs(Labelled(images=images, labels=labels), seed=seed) for seed in (3, 4)
    )
    assert np.array_equal(again.images, made.images)
    assert not np.array_equal(other.images, made.images)


def test_no_pairs_of_nothing() -> None:
    nothing = Labelled(images=np.zeros((0, 1, 2, 3), np.uint8), labels=np.zeros(0, np.uint8))
    with pytest.raises(DataError, match="no images"):
        random_pairs(nothing, seed=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an idx file of 3 dimensions"),
        (idx(LABELS), "not an idx file of 3 dimensions"),
        (idx(PICTURES)[:-1], r"has shape \(6, 5, 4\) in its header, but 119 bytes"),
        (gzip.compress(idx(PICTURES) + bytes(1 << 20)), "in its header, but more bytes"),
        (idx(PICTURES)[:4] + b"\xff" * 12, "in its header, but 0 bytes"),
        (idx(PICTURES[:5]), "has 5 images, but .* has 6 labels"),
        (gzip.compress(idx(PICTURES))[:-20], "cannot be read"),
    ],
)
def test_files_that_are_damaged(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "images").write_bytes(content)
    (tmp_path / "labels").write_bytes(idx(LABELS))
    with pytest.raises(DataError, match=message):
        read_mnist(tmp_path / "images", tmp_path / "labels")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no train-images-idx3-ubyte"):
        convert_mnist(tmp_path, tmp_path / "out", Backend.LMDB)
    with pytest.raises(DataError, match="absent is not a folder"):
        convert_mnist(tmp_path / "absent", tmp_path / "out", Backend.LMDB)


@pytest.mark.timeout(120)
def test_real_mnist(tmp_path: Path, shared: Path) -> None:
    test = read_mnist(*(shared / "data" / "mnist" / f"{name}.gz" for name in MNIST_FILES["test"]))
    assert test.images.shape == (10_000, 1, 28, 28)
    assert test.labels[:4].tolist() == [7, 2, 1, 0]
