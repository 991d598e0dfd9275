"""`poseidon extract_features`: Caffe's words, the flags, and what is refused before any process
starts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.caffe.data.cursor import open_cursor
from poseidon.caffe.data.databases import Backend, detect
from poseidon.caffe.launch import extraction_job
from poseidon.caffe.proto.caffe_pb2 import TEST
from poseidon.caffe.snapshot.caffemodel import write_model
from poseidon.caffe.tools.solo import NetRequest, open_net
from poseidon.cli.extract_features import from_caffe_arguments
from poseidon.cli.main import main, parse_arguments, run_command
from poseidon.errors import JobError, UsageError
from tests.support.databases import make_pictures

NET = """
layer { name: "data" type: "Data" top: "data" top: "label"
  data_param { source: "db" backend: LMDB batch_size: 4 shared_file_system: true } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 2 } }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    make_pictures(tmp_path / "db", 10)
    (tmp_path / "net.prototxt").write_text(NET, encoding="utf-8")
    net = open_net(NetRequest(model=tmp_path / "net.prototxt", phase=TEST))
    write_model(tmp_path / "m.caffemodel", net.definition.param, net.layer_blobs())
    net.close()
    return tmp_path


def test_caffes_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["m.caffemodel", "net.prototxt", "data,ip", "f_data,f_ip", "100", "lmdb", "CPU"]
    assert main(["extract_features", *words]) == 0
    for name in ("f_data", "f_ip"):
        assert detect(folder / name) is Backend.LMDB
        cursor = open_cursor(folder / name, Backend.LMDB)
        assert len(cursor) == 10
        cursor.close()
    lines = [
        line.partition("] ")[2] for line in capsys.readouterr().err.splitlines() if "] " in line
    ]
    assert lines == [
        "Extracting Features",
        "Extracted features of 10 query images for feature blob data",
        "Extracted features of 10 query images for feature blob ip",
        "Successfully extracted the features!",
    ]


@pytest.mark.parametrize(
    ("more", "device"),
    [
        ([], "cpu"),
        (["CPU"], "cpu"),
        (["GPU"], "cuda:0"),
        (["GPU", "1"], "cuda:1"),
        (["GPU", "DEVICE_ID=1"], "cuda:1"),
    ],
)
def test_the_device_among_caffes_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], device: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    found = from_caffe_arguments(
        ["m.caffemodel,m.caffemodel", "n", "fc7", "f", "10", "LEVELDB", *more]
    )
    assert (found.device, found.backend, found.batches) == (device, "leveldb", 10)
    assert found.weights == ("m.caffemodel", "m.caffemodel")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["m.caffemodel"], "expected WEIGHTS NET .*, found 1 argument$"),
        (["m.caffemodel", "n", "a", "b", "1"], "expected WEIGHTS NET .*, found 5 arguments$"),
        (
            ["n.prototxt", "m.caffemodel", "a", "b", "1", "lmdb"],
            "WEIGHTS is the definition n.prototxt; the order is WEIGHTS N",
        ),
        (
            ["m.caffemodel", "n", "a", "b", "0", "lmdb"],
            "NUM_MINI_BATCHES is '0', expected 1 or more",
        ),
        (["m.caffemodel", "n", "a", "b", "1", "lmdb", "TPU"], "'TPU' is neither CPU nor GPU"),
        (
            ["m.caffemodel", "n", "a,b", "b", "1", "lmdb"],
            "2 blobs are to be extracted into 1 databases",
        ),
        (["m.caffemodel", "n", "a", "b", "1", "sqlite"], "unknown backend 'sqlite'"),
    ],
)
def test_words_that_will_not_do(folder: Path, words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run_command(parse_arguments(["extract_features", *words]))


FLAGS = (
    "--weights=m.caffemodel",
    "--extract_feature_blob_names=ip",
    "--save_feature_leveldb_names=f",
)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (FLAGS, 2, "--model is missing; or give the arguments of Caffe's tool"),
        (
            ("--model=net.prototxt", *FLAGS[1:]),
            2,
            "--weights is missing: name a trained model, such as the .caffemodel in a job's folder",
        ),
        (
            ("--model=net.prototxt", *FLAGS[:1], *FLAGS[2:]),
            2,
            "--extract_feature_blob_names is missing",
        ),
        (("--model=absent.prototxt", *FLAGS), 1, "absent.prototxt"),
        (("--model=net.prototxt", *FLAGS, "--workers=0"), 2, "--workers is 0"),
        (("--model=net.prototxt", *FLAGS, "--hostfile=absent"), 1, "absent"),
        (
            ("--model=net.prototxt", *FLAGS, "word"),
            2,
            "either the arguments of Caffe's tool or flags",
        ),
        (
            ("--model=net.prototxt", *FLAGS, "--workers=2", "--backend=lmdb"),
            1,
            "f_0_1 exists already",
        ),
        (
            ("--model=net.prototxt", *FLAGS, "--output=m.caffemodel/out"),
            1,
            "--output: nothing can be written to",
        ),
        (
            ("--model=net.prototxt", *FLAGS, "--weights=no.caffemodel"),
            1,
            "there is no file no.caffemodel",
        ),
    ],
)
def test_nothing_is_started(
    folder: Path,
    words: tuple[str, ...],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "f_0_1").mkdir()
    before = sorted(folder.iterdir())
    assert main(["extract_features", *words]) == code
    assert message in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before


def test_a_job_that_fails_before_it_writes_leaves_no_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        assert (folder / "out").is_dir()
        raise JobError("no process could be started")

    monkeypatch.setattr(extraction_job, "_supervise", fail)
    before = sorted(folder.iterdir())
    assert main(["extract_features", "--model=net.prototxt", *FLAGS, "--output=out"]) == 1
    assert sorted(folder.iterdir()) == before
