"""HDF5 snapshots: Caffe's layout, Caffe's own files, and damage named."""

from __future__ import annotations

import random
from pathlib import Path

import h5py
import numpy as np
import pytest

from poseidon.caffe.proto.blob import from_array, to_array
from poseidon.caffe.proto.caffe_pb2 import PoseidonState, SolverState
from poseidon.caffe.snapshot import caffemodel, hdf5, solverstate
from poseidon.errors import SnapshotError

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)
BIAS = np.array([0.5, -1], np.float32)
BLOBS = [
    ("data", "Input", []),
    ("ip", "InnerProduct", [WEIGHT, BIAS]),
    ("twin", "InnerProduct", [WEIGHT, BIAS + 1]),
]
OWNED = {"ip.0", "ip.1", "twin.1"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.caffemodel.h5"
    hdf5.write_model(path, BLOBS, owned=OWNED)
    return path


@pytest.fixture
def state(tmp_path: Path) -> Path:
    path = tmp_path / "s.solverstate.h5"
    message = SolverState(iter=12, learned_net="m.caffemodel.h5", current_step=2)
    message.history.extend([from_array(WEIGHT), from_array(BIAS)])
    message.poseidon.CopyFrom(PoseidonState(workers=2, random_seed=99))
    hdf5.write_state(path, message)
    return path


def test_the_layout_is_caffes(model: Path, state: Path) -> None:
    with h5py.File(model) as file:
        assert list(file) == ["data"]
        assert {name: list(group) for name, group in file["data"].items()} == {
            "data": [],
            "ip": ["0", "1"],
            "twin": ["1"],  # its weight is saved with its owner
        }
        assert file["data/ip/0"].dtype == np.float32
    with h5py.File(state) as file:
        assert (file["iter"].shape, file["iter"].dtype, file["iter"][0]) == ((1,), np.int32, 12)
        assert (file["current_step"].shape, file["current_step"][0]) == ((1,), 2)
        assert file["learned_net"][()] == b"m.caffemodel.h5"
        assert file["learned_net"].dtype == "S16"  # with the zero that ends a C string
        assert list(file["history"]) == ["0", "1"]


def test_gradients_are_written_with_every_sharer(tmp_path: Path) -> None:
    path = tmp_path / "m.caffemodel.h5"
    hdf5.write_model(
        path, BLOBS, owned=OWNED, diffs=[(n, t, [a * 2 for a in arrays]) for n, t, arrays in BLOBS]
    )
    with h5py.File(path) as file:
        assert list(file["data/twin"]) == ["1"]
        assert np.array_equal(file["diff/twin/0"], WEIGHT * 2)


def test_models_round_trip(model: Path) -> None:
    saved = dict(caffemodel.read_model(model))
    assert saved["data"] == []
    assert np.array_equal(saved["ip"][0], WEIGHT)
    assert saved["twin"][0] is None
    assert np.array_equal(saved["twin"][1], BIAS + 1)


def test_a_layer_named_with_slashes_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "m.caffemodel.h5"
    names = ["inception_3a/1x1", "inception_3a/relu", "inception_3a", "a/b/c"]
    hdf5.write_model(
        path, [(name, "", [BIAS]) for name in names], owned={f"{name}.0" for name in names}
    )
    saved = dict(hdf5.read_model(path))
    assert sorted(saved) == sorted(names)
    assert all(np.array_equal(arrays[0], BIAS) for arrays in saved.values())


@pytest.mark.parametrize(
    "names", [("a/0", "a"), ("a", "a/0"), ("a/", "a"), ("/a", "b"), (".", "b"), ("", "b")]
)
def test_layers_that_share_a_group_are_refused(names: tuple[str, str], tmp_path: Path) -> None:
    blobs = [(name, "InnerProduct", [np.zeros((2, 3), np.float32)]) for name in names]
    for refused in (
        lambda: hdf5.check_layers((name, 1) for name in names),
        lambda: hdf5.write_model(tmp_path / "m.h5", blobs, owned=[f"{name}.0" for name in names]),
    ):
        with pytest.raises(SnapshotError, match="rename it, or use snapshot_format: BINARYPROTO"):
            refused()
    assert not (tmp_path / "m.h5").exists()


def test_blobs_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "m.caffemodel.h5"
    arrays = [np.full(1, number, np.float32) for number in range(12)]
    hdf5.write_model(path, [("lstm", "", arrays)], owned={f"lstm.{number}" for number in range(12)})
    assert [float(array[0]) for array in dict(hdf5.read_model(path))["lstm"]] == list(range(12))


def test_states_round_trip(state: Path) -> None:
    found = hdf5.read_state(state)
    assert (found.iter, found.learned_net, found.current_step) == (12, "m.caffemodel.h5", 2)
    assert np.array_equal(to_array(found.history[0]), WEIGHT)
    assert (found.poseidon.workers, solverstate.read_head(state).seed) == (2, 99)


def test_the_same_snapshot_has_the_same_bytes(model: Path) -> None:
    first = model.read_bytes()
    hdf5.write_model(model, BLOBS, owned=OWNED)
    assert model.read_bytes() == first


def test_large_iterations_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "s.solverstate.h5"
    hdf5.write_state(path, SolverState(iter=2**31 - 1))
    assert hdf5.read_state(path).iter == 2**31 - 1


def test_caffes_own_files(shared: Path) -> None:
    folder = shared / "data" / "models" / "cifar10_full_h5"
    saved = dict(caffemodel.read_model(folder / "cifar10_full_iter_70000.caffemodel.h5"))
    assert [array.shape for array in saved["ip1"]] == [(500, 1024), (500,)]
    assert saved["pool1"] == []
    path = folder / "cifar10_full_iter_70000.solverstate.h5"
    shapes = [
        array.shape for name in ("conv1", "conv2", "conv3", "ip1", "ip2") for array in saved[name]
    ]
    found = solverstate.read_state(path, [(str(shape), shape) for shape in shapes], 1)
    assert (found.iteration, found.current_step) == (70000, 0)
    assert found.model == "examples/cifar10/cifar10_full_iter_70000.caffemodel.h5"
    assert solverstate.learned_net(found, path) == folder / "cifar10_full_iter_70000.caffemodel.h5"
    assert found.histories[0][0].any()


def test_hdf5_is_known_by_content_or_ending(model: Path, tmp_path: Path) -> None:
    renamed = model.rename(tmp_path / "m.caffemodel")
    assert dict(caffemodel.read_model(renamed))["ip"]
    other = tmp_path / "text.caffemodel.h5"
    other.write_text("layer { }")
    with pytest.raises(SnapshotError, match=r"text\.caffemodel\.h5 is not a model in HDF5"):
        caffemodel.read_model(other)
    with pytest.raises(SnapshotError, match=r"cannot read the model .*absent\.h5: No such file"):
        caffemodel.read_model(tmp_path / "absent.h5")
    with pytest.raises(SnapshotError, match=r"cannot read the model .*: Is a directory"):
        hdf5.read_model(tmp_path)


def test_a_state_is_no_model_and_a_model_no_state(model: Path, state: Path) -> None:
    with pytest.raises(SnapshotError, match="is not a model: it has no group /data"):
        hdf5.read_model(state)
    with pytest.raises(SnapshotError, match="is not a solver state: it has no /iter and /history"):
        hdf5.read_state(model)


def test_a_dataset_that_claims_more_than_the_file_holds_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.caffemodel.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("data/ip/0", shape=(1 << 20, 1 << 20), dtype="f4", chunks=(64, 64))
    with pytest.raises(SnapshotError, match="claims 4398046511104 bytes"):
        hdf5.read_model(path)


def test_values_in_other_files_are_not_read(tmp_path: Path) -> None:
    secret, path = tmp_path / "secret", tmp_path / "m.h5"
    secret.write_bytes(bytes(8))
    layout = h5py.VirtualLayout((2,), "f4")
    layout[:] = h5py.VirtualSource(path, "iter", (2,))
    with h5py.File(path, "w") as file:
        outside = {"shape": (2,), "dtype": "f4", "external": [(secret, 0, 8)]}
        file.create_dataset("data/ip/0", **outside)
        file.create_virtual_dataset("history/0", layout)
        file["iter"] = np.ones(1)
        file.create_dataset("poseidon", **outside)
    with pytest.raises(SnapshotError, match="/data/ip/0 is not in the file itself"):
        hdf5.read_model(path)
    for name in ("history/0", "poseidon"):
        with pytest.raises(SnapshotError, match=f"/{name} is not in the file itself"):
            hdf5.read_state(path)
        with h5py.File(path, "a") as file:
            del file[name]


def test_text_where_numbers_belong_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.caffemodel.h5"
    with h5py.File(path, "w") as file:
        file["data/ip/0"] = "weights"
    with pytest.raises(SnapshotError, match="/data/ip/0 is not an array of numbers"):
        hdf5.read_model(path)


def test_damage_is_an_error_or_harmless(model: Path, state: Path) -> None:
    chance = random.Random(5)
    for path, read in ((model, hdf5.read_model), (state, hdf5.read_state)):
        content = path.read_bytes()
        for _ in range(150):
            damaged = bytearray(content)
            for _ in range(chance.randint(1, 4)):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            path.write_bytes(
                damaged[: chance.randint(1, len(damaged))] if chance.random() < 0.3 else damaged
            )
            try:
                read(path)
            except SnapshotError as error:
                assert str(path) in str(error)
