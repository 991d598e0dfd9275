"""The small nets of prototxt/: each builds, goes forward and back, trains with each of its
solvers, and round-trips.
"""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

import poseidon.pycaffe as caffe
from poseidon.caffe.proto.caffe_pb2 import NetParameter, SolverParameter
from poseidon.caffe.proto.definition import read_net, read_solver

SOURCES = ("Data", "HDF5Data", "ImageData", "Input", "DummyData")
NOISE = 'data_filler { type: "uniform" min: 0 max: 1 }'
ONE = 'data_filler { type: "constant" value: 1 }'
ZERO = 'data_filler { type: "constant" value: 0 }'


@dataclass(frozen=True)
class Model:
    """One net of the zoo.

    Attributes:
        net: its definition for training, below prototxt/.
        tops: top of its sources -> shape and filler that replace what is read.
        learned: values of all blobs that the solver moves, each counted once.
        solvers: how the names of its solvers begin, in the same folder.
        deploy: definition for use, beside `net`.
    """

    net: str
    tops: dict[str, tuple[tuple[int, ...], str]]
    learned: int
    solvers: tuple[str, ...]
    deploy: str = ""


def pictures(*shape: int) -> dict[str, tuple[tuple[int, ...], str]]:
    return {"data": (shape, NOISE), "label": (shape[:1], ZERO)}


MODELS = {
    "lenet": Model(
        "lenet/lenet_train_test.prototxt",
        pictures(2, 1, 28, 28),
        431_080,
        ("lenet_*solver*",),
        "lenet.prototxt",
    ),
    "cifar10_full_sigmoid": Model(
        "cifar10/cifar10_full_sigmoid_train_test.prototxt",
        pictures(2, 3, 32, 32),
        89_578,
        ("cifar10_full_sigmoid_solver",),
        "cifar10_full_sigmoid.prototxt",
    ),
    "cifar10_full_sigmoid_bn": Model(
        "cifar10/cifar10_full_sigmoid_bn_train_test.prototxt",
        pictures(2, 3, 32, 32),
        89_450,
        ("cifar10_full_sigmoid_bn_solver",),
        "cifar10_full_sigmoid_bn.prototxt",
    ),
    "mnist_autoencoder": Model(
        "mnist_autoencoder/mnist_autoencoder_train_test.prototxt",
        pictures(2, 1, 28, 28),
        2_837_314,
        ("*solver",),
        "mnist_autoencoder.prototxt",
    ),
    "siamese": Model(
        "siamese/mnist_siamese_train_test.prototxt",
        pictures(2, 1, 28, 28) | {"pair_data": ((2, 2, 28, 28), NOISE), "sim": ((2,), ONE)},
        431_102,
        ("*solver",),
        "mnist_siamese.prototxt",
    ),
    "logistic_regression": Model(
        "hdf5_classification/train_test.prototxt",
        pictures(3, 4),
        10,
        ("solver",),
        "deploy.prototxt",
    ),
    "nonlinear": Model(
        "hdf5_classification/nonlinear_train_test.prototxt",
        pictures(3, 4),
        282,
        ("nonlinear_solver",),
        "nonlinear_deploy.prototxt",
    ),
    "lstm": Model(
        "lstm/lstm_train_test.prototxt",
        {"data": ((20, 1, 2), NOISE), "cont": ((20, 1), ONE), "target": ((20, 1, 1), NOISE)},
        1_233,
        ("*solver",),
        "lstm.prototxt",
    ),
}


def with_dummies(net: NetParameter, tops: dict[str, tuple[tuple[int, ...], str]]) -> NetParameter:
    """The net with one DummyData in place of its sources."""
    wanted = {
        top for layer in net.layer if layer.type in SOURCES for top in layer.top
    } & tops.keys()
    source = NetParameter().layer.add(
        name="dummies", type="DummyData", top=[top for top in tops if top in wanted]
    )
    for top in source.top:
        shape, filler = tops[top]
        text_format.Merge(filler, source.dummy_data_param)
        source.dummy_data_param.shape.add(dim=shape)
    rest = [layer for layer in net.layer if layer.type not in SOURCES]
    return NetParameter(name=net.name, layer=[source, *rest])


def build(definition: NetParameter, folder: Path, phase: int) -> caffe.Net:
    path = folder / "net.prototxt"
    path.write_text(str(definition))
    return caffe.Net(str(path), phase)


def learned_blobs(net: caffe.Net) -> dict[int, caffe.Blob]:
    """Each blob of the layers that the solver moves, once however many layers share it."""
    kinds = {name: layer.type for name, layer in net.layer_dict.items()}
    return {
        blob.data.__array_interface__["data"][0]: blob
        for name, blobs in net.params.items()
        if kinds[name] != "BatchNorm"
        for blob in blobs
    }


@pytest.fixture(scope="module")
def zoo(repository: Path) -> Path:
    return repository / "prototxt"


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_a_step_moves_gradients_to_every_learned_blob(
    zoo: Path, tmp_path: Path, model: Model
) -> None:
    net = build(with_dummies(read_net(zoo / model.net).param, model.tops), tmp_path, caffe.TRAIN)
    blobs = learned_blobs(net)
    assert sum(blob.data.size for blob in blobs.values()) == model.learned
    assert all(np.isfinite(value).all() for value in net.forward().values())
    net.backward()
    assert all(np.isfinite(blob.diff).all() for blob in blobs.values())
    kinds = {name: layer.type for name, layer in net.layer_dict.items()}
    still = [
        name for name, blobs in net.params.items() if not any(blob.diff.any() for blob in blobs)
    ]
    assert [name for name in still if kinds[name] != "BatchNorm"] == []


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_definitions_survive_printing_and_weights_saving(
    zoo: Path, tmp_path: Path, model: Model
) -> None:
    param = read_net(zoo / model.net).param
    assert text_format.Parse(str(param), NetParameter()) == param
    definition = with_dummies(param, model.tops)
    first = build(definition, tmp_path, caffe.TRAIN)
    first.save(str(tmp_path / "net.caffemodel"))
    second = build(definition, tmp_path, caffe.TRAIN)
    second.copy_from(str(tmp_path / "net.caffemodel"))
    for name, blobs in first.params.items():
        for mine, read in zip(blobs, second.params[name], strict=True):
            np.testing.assert_array_equal(mine.data, read.data)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_the_net_for_use_takes_the_trained_weights(zoo: Path, tmp_path: Path, model: Model) -> None:
    if not model.deploy:
        pytest.skip("this net has no definition for use")
    trained = build(
        with_dummies(read_net(zoo / model.net).param, model.tops), tmp_path, caffe.TRAIN
    )
    trained.save(str(tmp_path / "net.caffemodel"))
    param = read_net((zoo / model.net).parent / model.deploy).param
    deployed = build(with_dummies(param, model.tops), tmp_path, caffe.TEST)
    deployed.copy_from(str(tmp_path / "net.caffemodel"))
    assert all(np.isfinite(value).all() for value in deployed.forward().values())
    for name, blobs in deployed.params.items():
        for mine, other in zip(blobs, trained.params[name], strict=True):
            np.testing.assert_array_equal(mine.data, other.data)


def solver_files(repository: Path) -> list[tuple[Path, Model]]:
    return [
        (path, model)
        for model in MODELS.values()
        for pattern in model.solvers
        for path in sorted((repository / "prototxt" / model.net).parent.glob(f"{pattern}.prototxt"))
    ]


SOLVERS = solver_files(Path(__file__).parents[1])


@pytest.mark.parametrize(("path", "model"), SOLVERS, ids=[path.stem for path, _ in SOLVERS])
def test_each_solver_trains_an_iteration(path: Path, model: Model, tmp_path: Path) -> None:
    param = read_solver(path).param
    definition = (
        param.net_param
        if param.HasField("net_param")
        else read_net(path.parent / Path(param.net).name).param
    )
    definition = with_dummies(definition, model.tops)
    for name in ("net", "net_param", "test_iter", "test_interval", "test_state"):
        param.ClearField(name)  # type: ignore[arg-type]
    param.net_param.CopyFrom(definition)
    param.solver_mode = SolverParameter.CPU
    file = tmp_path / "solver.prototxt"
    file.write_text(str(param))
    solver = caffe.get_solver(str(file))
    blobs = learned_blobs(solver.net)
    before = {key: blob.data.copy() for key, blob in blobs.items()}
    solver.step(1)
    assert all(np.isfinite(blob.data).all() for blob in blobs.values())
    assert any((blob.data != before[key]).any() for key, blob in blobs.items())


def trained(
    repository: Path, folder: Path, example: str, net: str, solver: str, iterations: int
) -> caffe.SGDSolver:
    """The solver after some iterations on the data that the example's script writes."""
    runpy.run_path(str(repository / "examples" / example / "make_data.py"))["make"](folder)
    param = read_solver(repository / "prototxt" / example / solver).param
    definition = read_net(repository / "prototxt" / example / net).param
    for layer in definition.layer:
        if layer.type == "HDF5Data":
            layer.hdf5_data_param.source = str(folder / Path(layer.hdf5_data_param.source).name)
    param.ClearField("net")
    param.net_param.CopyFrom(definition)
    param.random_seed = 1
    param.test_interval = param.max_iter
    (folder / "solver.prototxt").write_text(str(param))
    result = caffe.get_solver(str(folder / "solver.prototxt"))
    result.step(iterations)
    return result


def test_the_lstm_learns_to_keep_a_number(repository: Path, tmp_path: Path) -> None:
    solver = trained(
        repository, tmp_path, "lstm", "lstm_train_test.prototxt", "lstm_solver.prototxt", 0
    )
    first = float(np.mean([float(solver.net.forward()["loss"]) for _ in range(10)]))
    solver.step(100)
    assert float(np.mean([float(solver.net.forward()["loss"]) for _ in range(10)])) < 0.75 * first


def test_a_hidden_layer_parts_the_rows_of_hdf5(repository: Path, tmp_path: Path) -> None:
    names = ("nonlinear_train_test.prototxt", "nonlinear_solver.prototxt")
    solver = trained(repository, tmp_path, "hdf5_classification", *names, 600)
    test = solver.test_nets[0]
    test.share_with(solver.net)
    assert np.mean([float(test.forward()["accuracy"]) for _ in range(50)]) > 0.88
