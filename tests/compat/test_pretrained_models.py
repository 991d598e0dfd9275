"""Models that Caffe trained compute here what OpenCV's dnn computes from the same files, on real
pictures.
"""

from __future__ import annotations

import gzip
import re
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import encode_datum
from poseidon.caffe.data.mean import read_mean
from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST, NetParameter, NetState
from poseidon.caffe.proto.definition import NetDefinition, read_net
from poseidon.caffe.proto.text import parse
from poseidon.caffe.snapshot.caffemodel import read_model, write_model
from poseidon.cli.main import main
from tests.support import opencv
from tests.support.databases import make_database
from tests.support.nets import inputs

PHOTOGRAPHS = ("cat.jpg", "eagle.jpg", "fish-bike.jpg")
IMAGENET_MEAN = (104.0, 117.0, 123.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """A model, and how its pictures are prepared: (value - mean) * scale."""

    prototxt: str
    model: str
    mean: tuple[float, ...] = (127.5, 127.5, 127.5)
    scale: float = 1 / 128


MODELS = {
    "squeezenet": Pretrained(
        prototxt="squeezenet_v1.0_deepcompression/SqueezeNet_deploy.prototxt",
        model="squeezenet_v1.0_deepcompression/squeezenet_v1.0_decompressed.caffemodel",
        mean=IMAGENET_MEAN,
        scale=1,
    ),
    "lenet": Pretrained(
        prototxt="lenet_caffe-tensorflow_V2/lenet.prototxt",
        model="lenet_caffe-tensorflow_V2/lenet_iter_10000.caffemodel",
        mean=(0,),
        scale=1 / 256,
    ),
    **{
        f"cifar10_quick after {iteration}": Pretrained(
            prototxt="cifar10_quick_everpeace_V1/cifar10_quick.prototxt",
            model=f"cifar10_quick_everpeace_V1/cifar10_quick_iter_{iteration}.caffemodel",
            mean=(113.9, 123.0, 125.3),
            scale=1,
        )
        for iteration in (4000, 5000)
    },
    **{
        f"mtcnn det{number}": Pretrained(
            prototxt=f"mtcnn_cholihao/det{number}.prototxt",
            model=f"mtcnn_cholihao/det{model}.caffemodel",
        )
        for number, model in ((1, 1), (2, 3), (3, 2), (4, 4))  # the folder has two of them crossed
    },
}


@pytest.fixture
def models(shared: Path) -> Path:
    return shared / "data" / "models"


def load(definition: NetDefinition, model: Path) -> Net:
    context = LayerContext(phase=TEST, seed=1)
    net = compile_net(definition, context, state=NetState(phase=TEST))
    report = net.load_blobs(read_model(model))
    assert not report.kept  # every layer with weights was in the file
    return net


def photographs(shared: Path, shape: tuple[int, ...], case: Pretrained) -> np.ndarray:
    """The photographs, as many as the net's batch, at its size."""
    _, channels, height, width = shape
    found = []
    for name in PHOTOGRAPHS:
        kind = cv2.IMREAD_GRAYSCALE if channels == 1 else cv2.IMREAD_COLOR
        image = cv2.resize(
            cv2.imread(str(shared / "data" / "images" / name), kind), (width, height)
        )
        planes = (np.atleast_3d(image) - np.array(case.mean)) * case.scale
        # A net of several crops (15 channels are five) gets the picture in each.
        found.append(np.tile(planes.transpose(2, 0, 1), (max(channels // 3, 1), 1, 1)))
    return np.stack(found).astype(np.float32)


def mnist_images(shared: Path, count: int) -> np.ndarray:
    with gzip.open(shared / "data" / "mnist" / "t10k-images-idx3-ubyte.gz") as file:
        content = file.read(16 + count * 784)
    return np.frombuffer(content, np.uint8, offset=16).reshape(count, 1, 28, 28) / np.float32(256)


def cifar10_images(shared: Path, count: int) -> np.ndarray:
    """Records of the archive's first batch, blue first, less the mean image."""
    with tarfile.open(shared / "data" / "cifar10" / "cifar-10-binary.tar.bz2", "r|bz2") as archive:
        member = next(entry for entry in archive if entry.isfile())
        stream = archive.extractfile(member)
        assert stream is not None
        records = np.frombuffer(stream.read(count * 3073), np.uint8).reshape(count, 3073)
    mean = read_mean(shared / "data" / "models" / "cifar10_full_h5" / "mean.binaryproto")
    return records[:, 1:].reshape(count, 3, 32, 32)[:, ::-1].astype(np.float32) - mean


def compare(
    net: Net, prototxt: Path | None, model: Path, pictures: np.ndarray
) -> dict[str, torch.Tensor]:
    (name,) = net.input_shapes
    with torch.no_grad():
        ours = net({name: torch.from_numpy(np.ascontiguousarray(pictures))})
    param = net.definition.param
    theirs = opencv.outputs(
        prototxt or param, model, {name: pictures}, opencv.makers(param, list(ours))
    )
    for (output, mine), other in zip(ours.items(), theirs, strict=True):
        assert opencv.largest_difference(mine.numpy(), other) <= 1e-4, output
    return ours


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS.keys())
def test_photographs(shared: Path, models: Path, case: Pretrained) -> None:
    prototxt, model = models / case.prototxt, models / case.model
    net = load(read_net(prototxt), model)
    (shape,) = net.input_shapes.values()
    compare(net, prototxt, model, photographs(shared, shape, case))


@pytest.mark.parametrize(
    ("case", "images"),
    [
        ("lenet", mnist_images),
        ("cifar10_quick after 4000", cifar10_images),
        ("cifar10_quick after 5000", cifar10_images),
    ],
)
def test_test_images(
    shared: Path, models: Path, case: str, images: Callable[[Path, int], np.ndarray]
) -> None:
    found = MODELS[case]
    net = load(read_net(models / found.prototxt), models / found.model)
    compare(net, models / found.prototxt, models / found.model, images(shared, 64))


def test_cifar10_full_from_hdf5(shared: Path, models: Path, tmp_path: Path) -> None:
    """OpenCV reads no HDF5, so it gets the binary form that is written here."""
    folder = models / "cifar10_full_h5"
    trained = read_net(folder / "cifar10_full_train_test.prototxt")
    param = parse(inputs(data=(64, 3, 32, 32)), NetParameter(), source="deploy")
    param.layer.extend(
        layer
        for layer in trained.param.layer
        if layer.type not in ("Data", "Accuracy", "SoftmaxWithLoss")
    )
    definition = NetDefinition(param=param, source="deploy", layer_lines=(), folder=folder)
    net = load(definition, folder / "cifar10_full_iter_70000.caffemodel.h5")
    model = tmp_path / "full.caffemodel"
    write_model(model, net.definition.param, net.layer_blobs())
    compare(net, None, model, cifar10_images(shared, 64))


def test_scores_over_lmdb_are_those_of_opencv(
    repository: Path, shared: Path, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """LeNet on the first 500 images of MNIST's test set, by `poseidon test` and its own
    definition.
    """
    images = mnist_images(shared, 500)
    with gzip.open(shared / "data" / "mnist" / "t10k-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(508), np.uint8, offset=8)
    raw = (images * 256).astype(np.uint8)
    entries = (
        (b"%08d" % number, encode_datum(image, int(labels[number])))
        for number, image in enumerate(raw)
    )
    make_database(tmp_path / "mnist_test_lmdb", Backend.LMDB, entries)
    text = (repository / "prototxt" / "lenet" / "lenet_train_test.prototxt").read_text(
        encoding="utf-8"
    )
    (tmp_path / "net.prototxt").write_text(text.replace("examples/mnist/", ""), encoding="utf-8")
    case = MODELS["lenet"]
    words = [f"-model={tmp_path}/net.prototxt", f"-weights={models / case.model}", "-iterations=5"]
    assert main(["test", *words]) == 0
    found = dict(re.findall(r"\] (accuracy|loss) = (\S+)", capsys.readouterr().err))
    (scores,) = opencv.outputs(
        models / case.prototxt, models / case.model, {"data": images}, ["prob"]
    )
    right = float((scores.argmax(axis=1) == labels).mean())
    assert float(found["accuracy"]) == pytest.approx(right, abs=1e-6)
    loss = -np.log(scores[np.arange(500), labels]).mean()
    assert float(found["loss"]) == pytest.approx(loss, rel=1e-4)
