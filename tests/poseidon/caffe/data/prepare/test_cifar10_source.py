"""CIFAR-10 in all the forms it comes in, and what only looks like it.

Small stand-ins have the real layout.
"""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poseidon.caffe.data.prepare import cifar10_source
from poseidon.caffe.data.prepare.cifar10_source import (
    TEST_BATCH,
    TRAIN_BATCHES,
    find_cifar10,
    read_cifar10,
)
from poseidon.errors import DataError

PER_BATCH = 20


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10_source, "TRAIN_RECORDS", 5 * PER_BATCH)
    monkeypatch.setattr(cifar10_source, "TEST_RECORDS", PER_BATCH)


def batch(name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Pixels (20, 3072) and labels, two of each class."""
    random = np.random.default_rng(len(name) + ord(name[-1]))
    return random.integers(0, 256, (PER_BATCH, 3072), np.uint8), random.permutation(
        np.arange(PER_BATCH) % 10
    )


def binary(name: str) -> tuple[str, bytes]:
    pixels, labels = batch(name)
    return f"{name}.bin", np.column_stack([labels.astype(np.uint8), pixels]).tobytes()


def python(name: str) -> tuple[str, bytes]:
    """As Python 2 pickled it: text keys are bytes, protocol 2."""
    pixels, labels = batch(name)
    return name, pickle.dumps(
        {b"data": pixels, b"labels": labels.tolist(), b"batch_label": b"x"}, protocol=2
    )


FORMS = {"binary": (binary, "cifar-10-batches-bin"), "python": (python, "cifar-10-batches-py")}
ENDINGS = {"tar": "w:", "tar.gz": "w:gz", "tar.bz2": "w:bz2", "tar.xz": "w:xz"}


def files(version: str) -> dict[str, bytes]:
    return dict(FORMS[version][0](name) for name in (*TRAIN_BATCHES, TEST_BATCH))


def unpack(folder: Path, version: str) -> Path:
    folder.mkdir(parents=True)
    for name, content in files(version).items():
        (folder / name).write_bytes(content)
    (folder / "readme.html").write_text("<html>")
    return folder


def pack(path: Path, version: str, ending: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, ENDINGS[ending]) as archive:  # type: ignore[call-overload]
        for name, content in files(version).items():
            member = tarfile.TarInfo(f"{FORMS[version][1]}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def assert_is_whole(place: Path | None) -> None:
    assert place is not None
    data = read_cifar10(place)
    assert str(place) in data.origin
    expected = [batch(name) for name in TRAIN_BATCHES]
    np.testing.assert_array_equal(
        data.train.images.reshape(-1, 3072), np.concatenate([p for p, _ in expected])
    )
    np.testing.assert_array_equal(
        data.train.labels, np.concatenate([labels for _, labels in expected])
    )
    np.testing.assert_array_equal(data.test.images.reshape(-1, 3072), batch(TEST_BATCH)[0])
    assert data.train.images.shape[1:] == (3, 32, 32)


@pytest.mark.parametrize("version", FORMS)
@pytest.mark.parametrize(
    "under", ["", "cifar10", "cifar-10-batches-{}", "cifar10/cifar-10-batches-{}"]
)
def test_unpacked(tmp_path: Path, version: str, under: str) -> None:
    unpack(tmp_path / "place" / under.format(FORMS[version][1][-2:].replace("in", "bin")), version)
    assert_is_whole(find_cifar10(tmp_path / "place"))


@pytest.mark.parametrize("version", FORMS)
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("under", ["", "cifar10/"])
def test_archives(tmp_path: Path, version: str, ending: str, under: str) -> None:
    archive = pack(tmp_path / f"{under}cifar-10-{version}.{ending}", version, ending)
    assert find_cifar10(tmp_path) == find_cifar10(archive) == archive
    assert_is_whole(archive)


def test_a_batch_beyond_reason_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = pack(tmp_path / "cifar-10-binary.tar.xz", "binary", "tar.xz")
    monkeypatch.setattr(cifar10_source, "LARGEST_BATCH", 20 * 3073 - 1)
    with pytest.raises(DataError, match="has data_batch_1 of 61460 bytes; expected at most 61459"):
        read_cifar10(archive)


def test_what_is_unpacked_is_read_first(tmp_path: Path) -> None:
    pack(tmp_path / "cifar-10-binary.tar.gz", "binary", "tar.gz")
    unpacked = unpack(tmp_path / "cifar-10-batches-py", "python")
    assert find_cifar10(tmp_path) == unpacked


def test_nothing_to_find(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no archive")
    assert find_cifar10(tmp_path) is None
    assert find_cifar10(tmp_path / "notes.txt") is None
    assert find_cifar10(tmp_path / "none") is None


class Evil:
    """Pickles to a call of a function that must not be called."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def corrupt(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None  # type: ignore[func-returns-value]


LABELLED_WRONG = np.column_stack([np.zeros(PER_BATCH, np.uint8), batch("test_batch")[0]]).tobytes()


@pytest.mark.parametrize(
    ("version", "spoil", "message"),
    [
        ("binary", corrupt("data_batch_2.bin", b""), "data_batch_2 in .* has 0 bytes"),
        ("binary", corrupt("data_batch_2.bin", bytes(3072)), "3072 bytes: expected records"),
        ("binary", corrupt("test_batch.bin", bytes(3073)), "the test set .* has 1 images"),
        ("binary", corrupt("test_batch.bin", LABELLED_WRONG), r"has \[20, 0, .* expected 2 each"),
        (
            "binary",
            lambda folder: (folder / "data_batch_5.bin").unlink(),
            "not complete: data_batch_5 of CIFAR-10 is missing",
        ),
        ("python", corrupt("data_batch_1", b"\x80\x02rubbish"), "data_batch_1 in .* not a batch"),
        (
            "python",
            corrupt("data_batch_1", pickle.dumps({b"data": 3})),
            "not a batch of the python version",
        ),
        (
            "python",
            corrupt("data_batch_1", pickle.dumps([1], protocol=2)),
            "not a batch of the python version",
        ),
        (
            "python",
            corrupt("data_batch_1", pickle.dumps(Evil(), protocol=2)),
            "mkdir, which is not allowed",
        ),
    ],
)
def test_what_is_damaged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    spoil: Callable[[Path], None],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = unpack(tmp_path / "batches", version)
    spoil(folder)
    with pytest.raises(DataError, match=message):
        read_cifar10(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("ending", ["tar.gz", "tar.bz2", "tar.xz", "tar"])
def test_an_archive_that_is_cut_short(tmp_path: Path, ending: str) -> None:
    archive = pack(tmp_path / f"cifar-10-binary.{ending}", "binary", ending)
    os.truncate(archive, archive.stat().st_size // 2)
    with pytest.raises(
        DataError, match=r"cifar-10-binary.tar.*(is damaged|is missing|has \d+ bytes)"
    ):
        read_cifar10(archive)
