"""`poseidon test` and `poseidon time`: what they print, their exit codes, their errors."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from poseidon.caffe.data.cursor import open_cursor
from poseidon.caffe.data.databases import Backend, detect
from poseidon.caffe.launch import extraction_job
from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN
from poseidon.caffe.snapshot import hdf5
from poseidon.caffe.snapshot.caffemodel import write_model
from poseidon.caffe.tools.solo import NetRequest, open_net
from poseidon.cli.main import main, parse_arguments, run_command
from poseidon.cli.nets import from_caffe_arguments
from poseidon.errors import JobError, UsageError
from poseidon.observe.metrics.glog_lines import GlogLine, GlogSink
from tests.support.databases import make_pictures

NET = """
layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TEST stage: "small" }
  data_param { source: "db" backend: LMDB batch_size: 2 } }
layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TEST not_stage: "small" }
  data_param { source: "db" backend: LMDB batch_size: 4 } }
layer { name: "data" type: "DummyData" top: "data" top: "label" include { phase: TRAIN }
  dummy_data_param { shape { dim: 3 dim: 60 } shape { dim: 3 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 10
  weight_filler { type: "gaussian" std: 1 } } }
layer { name: "fix" type: "InnerProduct" bottom: "data" top: "fix" inner_product_param { num_output: 1 } }
layer { name: "quiet" type: "Silence" bottom: "fix" }
layer { name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy" include { phase: TEST } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_pictures(tmp_path / "db", 8)
    (tmp_path / "net.prototxt").write_text(NET, encoding="utf-8")
    net = open_net(NetRequest(model=tmp_path / "net.prototxt", phase=TEST))
    with torch.no_grad():
        blobs = net.layer_blobs()
    net.close()
    write_model(tmp_path / "m.caffemodel", net.definition.param, blobs)
    hdf5.write_model(tmp_path / "m.caffemodel.h5", blobs, owned=net.owned_blobs())
    return tmp_path


def texts(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]


def test_both_forms_of_a_model_score_alike(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = []
    for weights in ("m.caffemodel", "m.caffemodel.h5", "m.caffemodel.h5,{0}/m.caffemodel"):
        model = f"{folder}/{weights.format(folder)}"
        assert (
            main(
                ["test", "-model", f"{folder}/net.prototxt", "-weights", model, "-iterations", "2"]
            )
            == 0
        )
        scores.append(texts(capsys))
    assert scores[0] == scores[1] == scores[2]
    assert scores[0][:2] == ["Use CPU.", "Running for 2 iterations."]
    assert scores[0][2].startswith("Batch 0, accuracy = ")
    assert scores[0][-3].startswith("Loss: ")
    assert scores[0][-1].endswith(" loss)")


@pytest.mark.parametrize(("command", "batch"), [("test", "Batch 1, "), ("time", "Iteration: 2 ")])
def test_ctrl_c_prints_the_means_so_far(
    command: str,
    batch: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write = GlogSink.write

    def press(sink: GlogSink, *lines: GlogLine) -> None:
        write(sink, *lines)
        if any(line.text.startswith(batch) for line in lines) and not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)

    pressed = list[bool]()
    monkeypatch.setattr(GlogSink, "write", press)
    words = [f"-model={folder}/net.prototxt", f"-weights={folder}/m.caffemodel"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main([command, *words, "-phase=TEST", "-iterations=1000"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    said = texts(capsys)
    ending = said[said.index("Interrupted: the means are of 2 of 1000 iterations.") + 1 :]
    assert len(ending) > 2


def test_stages_choose_layers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "test",
        f"--model={folder}/net.prototxt",
        f"--weights={folder}/m.caffemodel",
        "-iterations=1",
    ]
    outputs = []
    for extra in ([], ["-stage=small,other"]):
        assert main([*command, *extra]) == 0
        outputs.append(texts(capsys))
    assert outputs[0] != outputs[1]


def test_time_prints_every_layer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["time", f"-model={folder}/net.prototxt", "-iterations=2"]) == 0
    found = texts(capsys)
    assert sum(line.startswith("Iteration: ") for line in found) == 2
    assert sum("\tbackward: " in line for line in found) == 5
    assert found[-1] == "*** Benchmark ends ***"


def test_the_phase_of_a_net_is_train_for_time(folder: Path) -> None:
    net = open_net(NetRequest(model=folder / "net.prototxt", phase=TRAIN))
    assert net.blob_shapes["data"] == (3, 60)
    net.close()


def test_device_query_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["device_query", "-gpu", "all"]) == 1
    assert "there is no CUDA device on this machine" in capsys.readouterr().err


def test_device_query(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Found:
        name, major, minor, total_memory = "K20", 3, 5, 5 << 30

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Found)
    assert main(["device_query"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "Querying GPUs all",
        "Device id:                     0",
        "Major revision number:         3",
    ]
    assert lines.count("Name:                          K20") == 2


@pytest.mark.parametrize("command", ["test", "time"])
def test_a_net_runs_in_16_bits(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command, "-model", f"{folder}/net.prototxt", "-weights", f"{folder}/m.caffemodel"]
    words += ["-iterations", "1", "--channels_last"]
    assert main([*words, "--precision=bfloat16"]) == 0
    capsys.readouterr()
    assert main([*words, "--precision=tf32"]) == 2
    assert "--precision=tf32 is for GPUs" in capsys.readouterr().err


EXTRACTED_NET = """
layer { name: "data" type: "Data" top: "data" top: "label"
  data_param { source: "db" backend: LMDB batch_size: 4 shared_file_system: true } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 2 } }
"""


@pytest.fixture
def extraction_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POSEIDON_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    make_pictures(tmp_path / "db", 10)
    (tmp_path / "net.prototxt").write_text(EXTRACTED_NET, encoding="utf-8")
    net = open_net(NetRequest(model=tmp_path / "net.prototxt", phase=TEST))
    write_model(tmp_path / "m.caffemodel", net.definition.param, net.layer_blobs())
    net.close()
    return tmp_path


def test_caffes_words(extraction_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["m.caffemodel", "net.prototxt", "data,ip", "f_data,f_ip", "100", "lmdb", "CPU"]
    assert main(["extract_features", *words]) == 0
    for name in ("f_data", "f_ip"):
        assert detect(extraction_folder / name) is Backend.LMDB
        cursor = open_cursor(extraction_folder / name, Backend.LMDB)
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
    extraction_folder: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], device: str
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
        (["n.prototxt", "m.caffemodel", "a", "b", "1", "lmdb"], "WEIGHTS is the definition"),
        (["m.caffemodel", "n", "a", "b", "1", "lmdb", "TPU"], "'TPU' is neither CPU nor GPU"),
        (["m.caffemodel", "n", "a,b", "b", "1", "lmdb"], "2 blobs and 1"),
        (["m.caffemodel", "n", "a", "b", "1", "sqlite"], "unknown backend 'sqlite'"),
    ],
)
def test_words_that_will_not_do(extraction_folder: Path, words: list[str], message: str) -> None:
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
        (("--model=net.prototxt", *FLAGS[1:]), 2, "--weights is missing: name a trained model"),
        (("--model=net.prototxt", *FLAGS[:1], *FLAGS[2:]), 2, "--extract_feature_blob_names"),
        (("--model=net.prototxt", *FLAGS, "--workers=0"), 2, "--workers is 0"),
        (("--model=net.prototxt", *FLAGS, "word"), 2, "either the arguments of Caffe's tool or"),
        (("--model=net.prototxt", *FLAGS, "--workers=2", "--backend=lmdb"), 1, "f_0_1 exists"),
        (
            ("--model=net.prototxt", *FLAGS, "--output=m.caffemodel/out"),
            1,
            "--output: cannot write",
        ),
    ],
)
def test_nothing_is_started(
    extraction_folder: Path,
    words: tuple[str, ...],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (extraction_folder / "f_0_1").mkdir()
    before = sorted(extraction_folder.iterdir())
    assert main(["extract_features", *words]) == code
    assert message in capsys.readouterr().err
    assert sorted(extraction_folder.iterdir()) == before


def test_a_job_that_fails_before_it_writes_leaves_no_folder(
    extraction_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        assert (extraction_folder / "out").is_dir()
        raise JobError("no process could be started")

    monkeypatch.setattr(extraction_job, "_supervise", fail)
    before = sorted(extraction_folder.iterdir())
    assert main(["extract_features", "--model=net.prototxt", *FLAGS, "--output=out"]) == 1
    assert sorted(extraction_folder.iterdir()) == before
