"""Every definition that the project ships parses, and every solver finds its nets."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.message import Message

from poseidon.caffe.proto.definition import filter_net, read_net, read_solver

ROOT = Path(__file__).parents[4]
FILES = sorted((ROOT / "prototxt").rglob("*.prototxt"))
SOLVERS = [path for path in FILES if "solver" in path.name]
NETS = [path for path in FILES if "solver" not in path.name]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Layers that read files, with the block that names them.
BLOCKS = {
    "AnnotatedData": "data_param",
    "Data": "data_param",
    "DenseImageData": "dense_image_data_param",
    "HDF5Data": "hdf5_data_param",
    "ImageData": "image_data_param",
    "ROIData": "roi_data_param",
}
SOURCES = set(BLOCKS)
# Their references evaluate them in a program of its own.
WITHOUT_TESTS = {"faster_rcnn", "rfcn"}


def test_there_are_definitions() -> None:
    assert len(SOLVERS) >= 14
    assert len(NETS) >= 8


def test_each_net_parses_and_names_each_line() -> None:
    for path in NETS:
        definition = read_net(path)
        assert len(definition.layer_lines) == len(definition.param.layer) > 0, path
        lines = path.read_text(encoding="utf-8").splitlines()
        assert all(lines[line - 1] == "layer {" for line in definition.layer_lines), path
        sources = [layer for layer in definition.param.layer if layer.type in BLOCKS]
        if "train" in path.name:  # a shared database is marked as such
            assert sources, path
            assert all(
                getattr(layer, BLOCKS[layer.type]).shared_file_system for layer in sources
            ), path


@pytest.mark.parametrize("path", SOLVERS, ids=name_of)
def test_solver_finds_its_nets(path: Path) -> None:
    solver = read_solver(path)
    train = solver.net_definition()
    state = solver.train_state(train)
    types = {layer.type for layer in filter_net(train, state).param.layer}
    assert types & SOURCES and any("Loss" in kind for kind in types)
    tests = solver.test_nets()
    assert len(tests) == len(solver.param.test_iter)
    assert bool(tests) == (path.parent.name not in WITHOUT_TESTS)
    for test in tests:
        kept = filter_net(test.definition, test.state).param.layer
        assert SOURCES.intersection(layer.type for layer in kept)


def test_the_header_describes_the_file() -> None:
    for path in FILES:
        head = path.read_text(encoding="utf-8").split("\n\n")[0]
        assert head.startswith("# "), path
        assert "# Run:" in head or "for use after training" in head, path


@pytest.mark.parametrize(
    "net, deploy",
    [
        ("cifar10/cifar10_quick_train_test", "cifar10/cifar10_quick"),
        ("cifar10/cifar10_full_train_test", "cifar10/cifar10_full"),
        ("lenet/lenet_train_test", "lenet/lenet"),
        ("alexnet/train_val", "alexnet/deploy"),
    ],
)
def test_deploy_net_has_the_layers_of_its_train_net(net: str, deploy: str) -> None:
    ends = {"Data", "Input", "Accuracy", "SoftmaxWithLoss", "Softmax"}
    train = read_net(ROOT / "prototxt" / f"{net}.prototxt").param
    use = read_net(ROOT / "prototxt" / f"{deploy}.prototxt").param
    assert [layer for layer in train.layer if layer.type not in ends] == [
        layer for layer in use.layer if layer.type not in ends
    ]


@pytest.mark.parametrize(
    "ours, caffes, batch_size",
    [
        ("cifar10/cifar10_quick_train_test", "examples/cifar10/cifar10_quick_train_test", 50),
        ("cifar10/cifar10_full_train_test", "examples/cifar10/cifar10_full_train_test", 50),
        ("lenet/lenet_train_test", "examples/mnist/lenet_train_test", 32),
        ("alexnet/train_val", "models/bvlc_alexnet/train_val", 128),
    ],
)
def test_numbers_are_caffes(shared: Path, ours: str, caffes: str, batch_size: int) -> None:
    corpus = shared / "data" / "prototxt-corpus" / "BVLC__caffe"
    expected = read_net(corpus / f"{caffes}.prototxt").param
    found = read_net(ROOT / "prototxt" / f"{ours}.prototxt").param
    assert found.layer[0].data_param.batch_size == batch_size
    found.layer[0].data_param.batch_size = expected.layer[0].data_param.batch_size
    assert _told(found) == _told(expected)


def _told(message: Message) -> dict[str, object]:
    """What a message sets to anything but its default, however it is written."""
    told: dict[str, object] = {}
    for setting, value in message.ListFields():
        if setting.is_repeated:
            values = [_told(item) if setting.message_type else item for item in value]
            # The stride of a convolution is a list without a default; 1 is what none means.
            if (setting.name, values) != ("stride", [1]):
                told[setting.name] = values
        elif setting.message_type:
            told[setting.name] = _told(value)
        elif value != setting.default_value and setting.name != "shared_file_system":
            told[setting.name] = value
    return told
