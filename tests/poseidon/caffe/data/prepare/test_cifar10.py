"""Which data the example's databases are made of, and what changes when real data turns up."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe.data.cursor import open_cursor, records
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import decode
from poseidon.caffe.data.mean import read_mean
from poseidon.caffe.data.prepare import cifar10, cifar10_source
from poseidon.caffe.data.prepare.cifar10 import Cifar10Request, PreparedCifar10, fetch, prepare
from poseidon.caffe.data.prepare.split import existing_parts
from poseidon.errors import DataError
from tests.support.databases import BACKENDS, make_pictures

NO_SERVER = "http://127.0.0.1:1/cifar-10-binary.tar.gz"
PER_BATCH = 10


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10_source, "TRAIN_RECORDS", 5 * PER_BATCH)
    monkeypatch.setattr(cifar10_source, "TEST_RECORDS", PER_BATCH)
    monkeypatch.setattr(cifar10, "BUILT_IN_TRAIN", 30)
    monkeypatch.setattr(cifar10, "BUILT_IN_TEST", 10)


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A folder with a stand-in for real CIFAR-10: ten pictures in each batch."""
    folder = tmp_path / "real" / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for number, name in enumerate((*cifar10_source.TRAIN_BATCHES, cifar10_source.TEST_BATCH)):
        pixels = np.random.default_rng(number).integers(0, 256, (PER_BATCH, 3072), np.uint8)
        content = np.column_stack([np.arange(PER_BATCH, dtype=np.uint8), pixels]).tobytes()
        (folder / f"{name}.bin").write_bytes(content)
    return tmp_path / "real"


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., PreparedCifar10]:
    def run(**fields: object) -> PreparedCifar10:
        values = {"folder": tmp_path / "example", "url": "", **fields}
        return prepare(Cifar10Request(**values))  # type: ignore[arg-type]

    return run


def contents(path: Path, backend: Backend) -> list[tuple[bytes, bytes]]:
    with closing(open_cursor(path, backend)) as cursor:
        return [(key, bytes(value)) for key, value in records(cursor)]


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()} if folder.exists() else set()


LMDB_NAMES = {"cifar10_train_lmdb", "cifar10_test_lmdb", "mean.binaryproto", "SOURCE.txt"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("given", ["data", "hint"])
def test_real_data_that_is_found(
    tmp_path: Path, real: Path, make: Callable[..., PreparedCifar10], backend: Backend, given: str
) -> None:
    prepared = make(backend=backend, **{given: real})
    assert prepared.warning is None
    assert str(real) in prepared.origin
    train = contents(prepared.train, backend)
    assert [key for key, _ in train] == [b"%05d" % i for i in range(50)]
    images = np.array([decode(value)[0] for _, value in train])
    assert [decode(value)[1] for _, value in train] == list(range(10)) * 5
    raw = np.frombuffer(
        (real / "cifar10/cifar-10-batches-bin/data_batch_2.bin").read_bytes(), np.uint8
    )
    np.testing.assert_array_equal(images[10:20].reshape(10, -1), raw.reshape(10, -1)[:, 1:])
    np.testing.assert_array_equal(read_mean(prepared.mean), images.mean(axis=0).astype(np.float32))
    assert len(contents(prepared.test, backend)) == 10
    kind = backend.suffix
    assert names(tmp_path / "example") == {name.replace("lmdb", kind) for name in LMDB_NAMES}


def test_the_built_in_set_warns_every_time(
    tmp_path: Path, make: Callable[..., PreparedCifar10]
) -> None:
    first = make(url=NO_SERVER)
    assert first.warning is not None
    assert "THIS IS NOT CIFAR-10" in first.warning
    assert "127.0.0.1:1" in first.warning
    assert "\n" not in first.warning
    stamp = (first.train / "data.mdb").stat().st_mtime_ns
    again = make(url=NO_SERVER)
    assert again.warning is not None
    assert "THIS IS NOT CIFAR-10" in again.warning
    assert (again.train / "data.mdb").stat().st_mtime_ns == stamp
    assert len(contents(first.train, Backend.LMDB)) == 30
    # The shell's glob of the example's folder, after a failed download: no archive, nothing
    # half-made.
    assert names(tmp_path / "example") - {"data"} == LMDB_NAMES


@pytest.mark.parametrize("given", ["data", "hint", "downloads"])
@pytest.mark.parametrize("clients", [1, 2])
def test_real_data_replaces_the_built_in_set(
    tmp_path: Path, real: Path, make: Callable[..., PreparedCifar10], given: str, clients: int
) -> None:
    make()
    leveldb = make(backend=Backend.LEVELDB, clients=3)
    assert len(existing_parts(leveldb.train)) == 3
    if given == "downloads":
        (tmp_path / "example" / "data").mkdir()
        (real / "cifar10" / "cifar-10-batches-bin").rename(
            tmp_path / "example" / "data" / "cifar-10-batches-bin"
        )
        prepared = make(clients=clients)
    else:
        prepared = make(clients=clients, **{given: real})
    assert prepared.warning is None
    assert len(contents(prepared.train, Backend.LMDB)) == 50
    assert read_mean(prepared.mean).mean() > 120
    assert names(tmp_path / "example") - {"data"} == LMDB_NAMES, (
        "databases of the other kind are gone as well"
    )


def test_databases_made_earlier_are_used(
    tmp_path: Path, real: Path, make: Callable[..., PreparedCifar10]
) -> None:
    make(data=real)
    stamp = (tmp_path / "example" / "cifar10_train_lmdb" / "data.mdb").stat().st_mtime_ns
    for fields in ({}, {"data": real}, {"data": tmp_path / "gone"}, {"url": NO_SERVER}):
        assert make(**fields).warning is None
    assert (tmp_path / "example" / "cifar10_train_lmdb" / "data.mdb").stat().st_mtime_ns == stamp


def test_databases_that_others_made_are_used_and_get_a_mean(
    tmp_path: Path, make: Callable[..., PreparedCifar10]
) -> None:
    (tmp_path / "example").mkdir()
    for part in ("train", "test"):
        make_pictures(tmp_path / "example" / f"cifar10_{part}_lmdb", 4, shape=(3, 32, 32))
    prepared = make()
    assert prepared.warning is None
    assert read_mean(prepared.mean).shape == (3, 32, 32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_other_kind_is_copied_from_databases_made_earlier(
    real: Path, make: Callable[..., PreparedCifar10], backend: Backend
) -> None:
    other = Backend(1 - backend)
    first = make(data=real, backend=backend)
    second = make(backend=other)
    assert second.origin == first.origin
    assert contents(second.train, other) == contents(first.train, backend)


def test_leveldb_for_several_clients_has_parts(
    real: Path, make: Callable[..., PreparedCifar10]
) -> None:
    # One client asks for no parts, and leaves alone what is there.
    for clients, expected in ((1, 0), (2, 2), (3, 3), (3, 3), (1, 3)):
        prepared = make(data=real, backend=Backend.LEVELDB, clients=clients)
        for database in (prepared.train, prepared.test):
            assert len(existing_parts(database)) == expected
    together = sorted(
        record
        for part in existing_parts(prepared.train)
        for record in contents(part, Backend.LEVELDB)
    )
    assert together == contents(prepared.train, Backend.LEVELDB)


def test_a_named_place_without_data_is_an_error(
    tmp_path: Path, make: Callable[..., PreparedCifar10]
) -> None:
    with pytest.raises(DataError, match=rf"no CIFAR-10 at {tmp_path}/none: expected an archive"):
        make(data=tmp_path / "none")
    make()
    with pytest.raises(DataError, match=r"no CIFAR-10 at"):
        make(data=tmp_path / "none")


def test_damaged_data_is_an_error_and_leaves_nothing(
    tmp_path: Path, real: Path, make: Callable[..., PreparedCifar10]
) -> None:
    (real / "cifar10" / "cifar-10-batches-bin" / "data_batch_3.bin").write_bytes(b"short")
    with pytest.raises(DataError, match="data_batch_3"):
        make(data=real)
    assert names(tmp_path / "example") == set()


@pytest.mark.parametrize("activity", ["writing train", "writing test", "copying test"])
def test_an_interrupt_leaves_nothing_half_made(tmp_path: Path, real: Path, activity: str) -> None:
    folder = tmp_path / "example"
    copying = activity.startswith("copying")
    if copying:
        prepare(Cifar10Request(folder=folder, data=real, url=""))

    def interrupt(current: str, done: int, total: int) -> None:
        if (current, done) == (activity, 5):
            raise KeyboardInterrupt

    request = Cifar10Request(folder=folder, data=real, url="", backend=Backend.LEVELDB)
    with pytest.raises(KeyboardInterrupt):
        prepare(request, report=interrupt)
    assert names(folder) == (LMDB_NAMES if copying else set())
    assert len(contents(prepare(request).train, Backend.LEVELDB)) == 50


def test_fetching_keeps_the_archive(tmp_path: Path) -> None:
    source = tmp_path / "served.tar.gz"
    source.write_bytes(b"archive")
    request = Cifar10Request(
        folder=tmp_path / "example",
        url=source.as_uri(),
        url_md5=hashlib.md5(b"archive").hexdigest(),
    )
    assert fetch(request).read_bytes() == b"archive"
    source.unlink()
    assert fetch(request).read_bytes() == b"archive", "fetched once"


@pytest.mark.timeout(300)
@pytest.mark.thorough
def test_real_cifar10(tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole set, and its mean to the bit. Most of the time goes into unpacking the archive."""
    monkeypatch.undo()
    prepared = prepare(Cifar10Request(folder=tmp_path, data=shared / "data", url=""))
    assert prepared.warning is None
    with closing(open_cursor(prepared.train, Backend.LMDB)) as train:
        assert len(train) == 50_000
        train.seek(49_999)
        assert train.key() == b"49999"
    published = shared / "data" / "models" / "cifar10_full_h5" / "mean.binaryproto"
    np.testing.assert_array_equal(read_mean(prepared.mean), read_mean(published))
