"""Models: what is written is read back, what Caffe wrote is read, what is broken is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from poseidon.caffe.proto.caffe_pb2 import NetParameter, SolverState
from poseidon.caffe.snapshot import hdf5
from poseidon.caffe.snapshot.caffemodel import (
    check_model,
    model_path,
    read_message,
    read_model,
    state_path,
    write_model,
)
from poseidon.engine.snapshot_files import seal
from poseidon.errors import SnapshotError


def test_names_are_caffes() -> None:
    assert model_path(Path("a/quick"), 4000) == Path("a/quick_iter_4000.caffemodel")
    assert state_path(Path("a/v1.0"), 7) == Path("a/v1.0_iter_7.solverstate")


@pytest.mark.parametrize("content", [b"\xff\xff\xff", b"\x0a\x7fabc"])
def test_unparsable_content_is_reported(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state"
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match="is not a solver state, or it is truncated"):
        read_message(path, SolverState(), "solver state")


def test_tensors_of_torch_are_no_model_and_the_command_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    path.write_bytes(b"\xff\xff\xff")
    with pytest.raises(SnapshotError, match=r"w\.pth is not a model"):
        read_message(path, SolverState(), "model")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"cannot read the model .*absent: No such file"):
        read_message(tmp_path / "absent", SolverState(), "model")


def net() -> NetParameter:
    message = NetParameter(name="n")
    message.layer.add(name="data", type="Input")
    message.layer.add(name="ip", type="InnerProduct", bottom=["data"], top=["ip"])
    return message


BLOBS = [
    ("data", "Input", []),
    (
        "ip",
        "InnerProduct",
        [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, dtype=np.float32)],
    ),
]


def test_round_trip_keeps_definition_and_blobs(tmp_path: Path) -> None:
    path = tmp_path / "m.caffemodel"
    write_model(path, net(), BLOBS)
    saved = dict(read_model(path))
    assert saved["data"] == []
    assert np.array_equal(saved["ip"][0], BLOBS[1][2][0])
    message = NetParameter.FromString(path.read_bytes())
    assert message.layer[1].bottom == ["data"]
    assert list(message.layer[1].blobs[0].shape.dim) == [2, 3]


@pytest.mark.parametrize("in_hdf5", [False, True])
def test_a_model_that_changed_after_its_snapshot_is_refused(tmp_path: Path, in_hdf5: bool) -> None:
    path, state = (named(tmp_path / "n", 5, hdf5=in_hdf5) for named in (model_path, state_path))
    if in_hdf5:
        hdf5.write_model(path, BLOBS, owned={"ip.0", "ip.1"})
    else:
        write_model(path, net(), BLOBS)
    state.write_bytes(b"not read here")
    seal(state, path)
    assert read_model(path)
    content = bytearray(path.read_bytes())
    content[content.index(BLOBS[1][2][0].tobytes()) + 23] ^= 0x40  # 5 becomes a huge number
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match=f"{path.name} is truncated or changed"):
        read_model(path)
    state.with_name(f"{state.name}.sha256").unlink()
    assert read_model(path)


@pytest.mark.parametrize("case", ["sgd_momentum", "adam", "adadelta"])
def test_caffes_own_files_hold_the_last_step(shared: Path, case: str) -> None:
    saved = dict(read_model(shared / "golden" / "files" / f"{case}_iter_12.caffemodel"))
    steps = np.load(shared / "golden" / "solvers" / f"{case}.npz")
    for layer in ("ip1", "ip2"):
        for index in range(2):
            assert np.array_equal(saved[layer][index], steps[f"step11:{layer}:{index}"])


def test_the_grammar_of_2014_is_read(shared: Path) -> None:
    folder = shared / "data" / "models" / "cifar10_quick_everpeace_V1"
    saved = dict(read_model(folder / "cifar10_quick_iter_5000.caffemodel"))
    assert saved["conv1"][0].shape == (32, 3, 5, 5)
    assert saved["ip2"][1].size == 10


def test_every_truncation_is_refused_or_lacks_layers(tmp_path: Path) -> None:
    path = tmp_path / "m.caffemodel"
    write_model(path, net(), BLOBS)
    content = path.read_bytes()
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        try:
            assert dict(read_model(path)).get("ip") is None
        except SnapshotError as error:
            assert str(path) in str(error)


def test_a_blob_whose_sizes_disagree_is_named(tmp_path: Path) -> None:
    message = net()
    blob = message.layer[1].blobs.add()
    blob.shape.dim.extend([2, 3])
    blob.data.extend([1.0] * 5)
    path = tmp_path / "m.caffemodel"
    path.write_bytes(message.SerializeToString())
    with pytest.raises(SnapshotError, match="layer 'ip'"):
        read_model(path)


def test_every_model_passes_the_check_before_a_job(shared: Path) -> None:
    files = [
        *(shared / "golden" / "files").glob("*.caffemodel*"),
        *(shared / "data" / "models").rglob("*.caffemodel"),
    ]
    assert len(files) > 3
    for path in files:
        check_model(path)


def test_the_check_before_a_job_agrees_with_reading(tmp_path: Path) -> None:
    """It reads the outermost fields only, and refuses whatever has not the last layer."""
    path = tmp_path / "m.caffemodel"
    write_model(path, net(), BLOBS)
    check_model(path)
    content = path.read_bytes()
    boundaries = []
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        try:
            check_model(path)
        except SnapshotError as error:
            assert str(path) in str(error)
        else:
            boundaries.append(cut)
            assert read_model(path)
    assert len(boundaries) == 1  # between the two layers: a model with the first one


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'name: "net"',
        b"\x89PNG\r\n\x1a\n" + bytes(50),
        b"\x08\x05\x12\x01a",
        b"\xff" * 20,
        b"\x0a\xff\xff\xff\xff\x7f",
    ],
)
def test_what_is_no_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match="is not a model"):
        check_model(path)
    with pytest.raises(SnapshotError, match="cannot read the model"):
        check_model(tmp_path / "none")


@pytest.mark.parametrize("read", [read_model, check_model])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("net.prototxt", b'name: "net"\nlayer {\n', "is not a model: it is text, as a definition"),
        ("m.solverstate", b"\xff" * 20, "is not a model: it is a solver state"),
        ("m.caffemodel", b"\xff" * 20, "is not a model, or it is truncated"),
    ],
)
def test_what_was_given_for_a_model_is_named(
    tmp_path: Path, read: Callable[[Path], object], name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SnapshotError, match=message):
        read(tmp_path / name)


def test_hdf5_is_checked_too(tmp_path: Path) -> None:
    path = tmp_path / "m.caffemodel.h5"
    hdf5.write_model(path, BLOBS, owned={"ip.0", "ip.1"})
    check_model(path)
    with h5py.File(path, "w") as file:
        file["iter"] = 5
    with pytest.raises(SnapshotError, match="is not a model: it has no group /data"):
        check_model(path)


@pytest.mark.parametrize("read", [read_model, check_model])
def test_a_model_of_0_bytes_names_what_caffe_does(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "empty.caffemodel"
    path.touch()
    with pytest.raises(SnapshotError, match=r"has 0 bytes\. Caffe takes such a file for a model"):
        read(path)
