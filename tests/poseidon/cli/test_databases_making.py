"""The commands that make data: what they print, their exit codes, their errors."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe.data.databases import Backend, detect
from poseidon.caffe.data.mean import read_mean
from poseidon.caffe.data.prepare import cifar10, cifar10_source
from poseidon.caffe.data.prepare.cifar10_source import TEST_BATCH, TRAIN_BATCHES
from poseidon.caffe.data.prepare.convert import MNIST_FILES
from poseidon.cli.main import parse_arguments, run_command
from poseidon.errors import DataError, UsageError
from tests.support.databases import BACKENDS, make_pictures, picture


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10_source, "TRAIN_RECORDS", 50)
    monkeypatch.setattr(cifar10_source, "TEST_RECORDS", 10)
    monkeypatch.setattr(cifar10, "BUILT_IN_TRAIN", 30)
    monkeypatch.setattr(cifar10, "BUILT_IN_TEST", 10)
    monkeypatch.delenv("POSEIDON_DATA", raising=False)


@pytest.fixture
def real(tmp_path: Path) -> Path:
    folder = tmp_path / "real" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name in (*TRAIN_BATCHES, TEST_BATCH):
        records = np.column_stack([np.arange(10, dtype=np.uint8), np.zeros((10, 3072), np.uint8)])
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return tmp_path / "real"


def run(*words: str) -> int:
    return run_command(parse_arguments(words))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compute_image_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: Backend
) -> None:
    path = make_pictures(tmp_path / "db", 3, backend=backend)
    assert run("compute_image_mean", str(path), str(tmp_path / "mean")) == 0
    assert run("compute_image_mean", str(path), str(tmp_path / "new" / "folder" / "mean")) == 0
    assert (tmp_path / "new" / "folder" / "mean").read_bytes() == (tmp_path / "mean").read_bytes()
    capsys.readouterr()
    assert run("compute_image_mean", str(path), str(tmp_path / "mean")) == 0
    expected = np.mean([picture(i) for i in range(3)], axis=0)
    np.testing.assert_allclose(read_mean(tmp_path / "mean"), expected, rtol=1e-6)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Processed 3 files."
    assert lines[2] == f"mean_value channel [1]: {expected[1].mean():g}"


def test_compute_image_mean_of_the_wrong_kind(tmp_path: Path) -> None:
    path = make_pictures(tmp_path / "db", 3)
    with pytest.raises(DataError, match=r"was named as LevelDB: write --backend=lmdb$"):
        run("compute_image_mean", "-backend=leveldb", str(path))


@pytest.mark.parametrize("flags", [["--data"], ["-data"]])
def test_prepare_cifar10(
    tmp_path: Path, real: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert (
        run("prepare_cifar10", *flags, str(real), "--folder", str(tmp_path / "out"), "--url=") == 0
    )
    captured = capsys.readouterr()
    assert captured.out.startswith("CIFAR-10 is ready: ")
    assert captured.err == (
        f"preparing CIFAR-10 in {tmp_path}/out: two databases and their mean; this may take "
        "minutes\n"
    )
    assert detect(tmp_path / "out" / "cifar10_train_lmdb") is Backend.LMDB
    assert (
        run("prepare_cifar10", *flags, str(real), "--folder", str(tmp_path / "out"), "--url=") == 0
    )
    assert capsys.readouterr().err == "", "there is nothing to do"


def test_prepare_cifar10_from_the_environment(
    tmp_path: Path, real: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSEIDON_DATA", str(real))
    command = (
        "prepare_cifar10",
        "--folder",
        str(tmp_path / "out"),
        "--backend=leveldb",
        "--clients=2",
        "--url=",
    )
    assert run(*command) == 0
    assert "NOT CIFAR-10" not in capsys.readouterr().err
    assert detect(tmp_path / "out" / "cifar10_test_leveldb_1") is Backend.LEVELDB


def test_prepare_cifar10_for_no_client(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--clients=0: expected 1 or more$"):
        run("prepare_cifar10", "--clients=0", f"--folder={tmp_path / 'out'}", "--url=")
    assert not (tmp_path / "out").exists()


def test_prepare_cifar10_says_loudly_that_it_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for first in (True, False):
        assert run("prepare_cifar10", "--folder", str(tmp_path / "out"), "--url=") == 0
        captured = capsys.readouterr()
        assert captured.out == ""
        *before, warning = captured.err.splitlines()
        assert len(before) == first
        because = " (CIFAR-10 was not found)" if first else ""
        assert warning == (
            f"*** THIS IS NOT CIFAR-10 *** but pictures that Poseidon draws{because}; for the "
            "real data: "
            "poseidon prepare_cifar10 --folder=out --data=DIR"
        )


def test_prepare_cifar10_from_an_address_or_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an earlier run has drawn is not taken in its place."""
    command = ("prepare_cifar10", "--folder", str(tmp_path))
    (tmp_path / "other.tar.gz").write_bytes(b"another file")
    assert run(*command, "--url=") == 0
    with pytest.raises(DataError, match=r"other\.tar\.gz is not the published file"):
        run(*command, f"--url={(tmp_path / 'other.tar.gz').as_uri()}")
    with pytest.raises(DataError, match=r"^bogus cannot be downloaded: .*; if you have CIFAR-10"):
        run(*command, "--url=bogus")
    assert "THIS IS NOT CIFAR-10" in capsys.readouterr().err


def test_download_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "archive.tar.gz").write_bytes(b"")
    url = (tmp_path / "archive.tar.gz").as_uri()
    command = (
        "prepare_cifar10",
        "--download_only",
        "--folder",
        str(tmp_path / "out"),
        "--url",
        url,
    )
    assert run(*command, "--md5=d41d8cd98f00b204e9800998ecf8427e") == 0
    assert capsys.readouterr().out == f"CIFAR-10 is at {tmp_path}/out/data/archive.tar.gz\n"
    (tmp_path / "out" / "data" / "archive.tar.gz").unlink()
    with pytest.raises(DataError, match="is not the published file"):
        run(*command)
    (tmp_path / "archive.tar.gz").unlink()
    with pytest.raises(DataError, match=r"cannot be downloaded: .*; if you have CIFAR-10"):
        run(*command)


def test_convert_cifar(tmp_path: Path, real: Path) -> None:
    assert run("convert_cifar", str(real), str(tmp_path / "out"), "leveldb") == 0
    assert detect(tmp_path / "out" / "cifar10_train_leveldb") is Backend.LEVELDB
    with pytest.raises(DataError, match="no CIFAR-10 at"):
        run("convert_cifar", str(tmp_path / "out"), str(tmp_path / "out"), "lmdb")


def test_convert_mnist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for images, labels in MNIST_FILES.values():
        (tmp_path / f"{images}.gz").write_bytes(
            gzip.compress(struct.pack(">4I", 0x803, 2, 1, 1) + b"ab")
        )
        (tmp_path / f"{labels}.gz").write_bytes(
            gzip.compress(struct.pack(">2I", 0x801, 2) + b"\1\2")
        )
    assert run("convert_mnist", str(tmp_path), "--folder", str(tmp_path / "out")) == 0
    assert capsys.readouterr().err.startswith(f"preparing MNIST in {tmp_path}/out: two databases; ")
    assert detect(tmp_path / "out" / "mnist_train_lmdb") is Backend.LMDB
    assert (
        run("convert_mnist_siamese", str(tmp_path), "--folder", str(tmp_path / "out"), "--seed=2")
        == 0
    )
    assert detect(tmp_path / "out" / "mnist_siamese_test_lmdb") is Backend.LMDB


def test_pairs_of_a_seed_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("convert_mnist_siamese", str(tmp_path), "--seed=-1")
    assert "expected a whole number, 0 or more, found" in capsys.readouterr().err
