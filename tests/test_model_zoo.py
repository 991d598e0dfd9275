"""The ImageNet nets of prototxt/: what is committed is what their scripts write, and it builds,
learns and is saved.
"""

from __future__ import annotations

import importlib
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from google.protobuf import text_format

from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.layers.batch_norm import BatchNorm
from poseidon.caffe.layers.registry import layer_class
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.net.net import Net
from poseidon.caffe.net.net_plan import plan_net
from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN, NetParameter, NetState
from poseidon.caffe.proto.definition import filter_net, read_net, read_solver
from poseidon.caffe.snapshot.caffemodel import read_model, write_model

FOLDER = Path(__file__).parents[1] / "prototxt"
SCRIPTS = (
    "caffenet", "densenet", "faster_rcnn", "googlenet", "inception_v3", "mobilenet", "nin", "pspnet", "resnet", "rfcn", "segnet",
    "senet", "shufflenet", "squeezenet", "ssd", "vgg",
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """One net.

    Attributes:
        train: its definition, below prototxt/.
        learned: numbers that the solver moves.
        extent: height and width of the picture that it is tried on; the smallest that it can take,
            or nearly.
        saved: whether its weights are written and read again: for the largest that says nothing
            new, and takes gigabytes.
        deployed: numbers of the deploy net that learn; None: as many.
    """

    train: str
    learned: int
    extent: int
    saved: bool = True
    deployed: int | None = None


MODELS = {
    "alexnet": Model("alexnet/train_val", 60_965_224, 227),
    "caffenet": Model("caffenet/train_val", 60_965_224, 227),
    "densenet121": Model("densenet/train_val", 7_978_856, 64),
    "googlenet": Model("googlenet/train_val", 13_378_280, 224, deployed=6_998_552),
    "inception_v3": Model("inception_v3/train_val", 23_834_568, 107),
    "mobilenet": Model("mobilenet/train_val", 4_231_976, 64),
    "nin": Model("nin/train_val", 7_595_176, 67),
    "resnet18": Model("resnet/resnet18_train_val", 11_689_512, 64),
    # The released model's first convolution has a bias.
    "resnet50": Model("resnet/resnet50_train_val", 25_557_032 + 64, 64),
    "resnet101": Model("resnet/resnet101_train_val", 44_549_160, 64),
    "resnet152": Model("resnet/resnet152_train_val", 60_192_808, 64),
    "senet": Model("senet/train_val", 28_088_024, 64),
    "shufflenet": Model("shufflenet/train_val", 1_865_728, 64),
    "squeezenet": Model("squeezenet/train_val", 1_235_496, 67),
    "vgg16": Model("vgg/vgg16_train_val", 138_357_544, 224, saved=False),
    "vgg19": Model("vgg/vgg19_train_val", 143_667_240, 224, saved=False),
}


def build(path: Path, phase: int, extent: int, seed: int = 1) -> Net:
    """The net with blobs that the caller gives in place of what it reads."""
    state = NetState(phase=phase)  # type: ignore[arg-type]
    definition = filter_net(read_net(path), state)
    for layer in definition.param.layer:
        if layer.type in ("Data", "Input"):
            layer.type = "Input"
            del layer.input_param.shape[:]
            layer.input_param.shape.add(dim=(2, 3, extent, extent))
            if len(layer.top) > 1:
                layer.input_param.shape.add(dim=(2,))
    return compile_net(definition, LayerContext(phase=phase, seed=seed), state=state)


def learned(net: Net) -> int:
    layers = (layer for _, layer in net.layer_modules if not isinstance(layer, BatchNorm))
    return sum(blob.numel() for layer in layers for blob in layer.blobs())


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_committed_files_are_what_the_script_writes(script: str) -> None:
    written = importlib.import_module(f"prototxt.{script}.generate").definitions()
    committed = {
        path.name: path.read_text(encoding="utf-8") for path in (FOLDER / script).glob("*.prototxt")
    }
    assert committed == written


LARGE = ("caffenet", "resnet101", "resnet152", "vgg16", "vgg19")
"""Hundreds of megabytes each, with the layers of others: left to `--thorough`."""
WRITTEN = ("densenet121", "googlenet", "mobilenet", "resnet50", "shufflenet", "squeezenet")
"""Those whose weights are written in each run: they have every kind of layer with weights."""


def models(names: Iterable[str], always: Container[str]) -> list[ParameterSet]:
    """These models as parameters of a test; those that are not in `always` are thorough."""
    return [
        pytest.param(name, marks=() if name in always else pytest.mark.thorough) for name in names
    ]


@pytest.mark.parametrize("name", models(MODELS, MODELS.keys() - set(LARGE)))
def test_it_builds_and_learns(name: str) -> None:
    model = MODELS[name]
    net = build(FOLDER / f"{model.train}.prototxt", TRAIN, model.extent)
    assert learned(net) == model.learned
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(2, 3, model.extent, model.extent, generator=generator)
    net({"data": data, "label": torch.tensor([1.0, 2.0])})
    net.loss.backward()
    assert torch.isfinite(net.loss.detach())
    for info in net.parameters_info:
        assert info.statistics or torch.isfinite(info.parameter.grad).all(), info.name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", models((name for name, model in MODELS.items() if model.saved), WRITTEN)
)
def test_its_weights_are_saved_and_read_for_use(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    path = FOLDER / f"{model.train.replace('train_val', 'deploy')}.prototxt"
    first, second = (build(path, TEST, model.extent, seed) for seed in (1, 2))
    assert learned(first) == (model.deployed or model.learned)
    for _, layer in first.layer_modules:
        if isinstance(layer, BatchNorm):
            for blob in layer.blobs():
                blob.detach().fill_(1)  # as after a batch of mean and variance 1
    write_model(tmp_path / "model", first.definition.param, first.layer_blobs())
    second.load_blobs(read_model(tmp_path / "model"))
    data = torch.randn(2, 3, model.extent, model.extent)
    with torch.no_grad():
        ours, theirs = first({"data": data}), second({"data": data})
    assert list(ours) == list(theirs) == ["prob"]
    assert torch.equal(ours["prob"], theirs["prob"])


@pytest.mark.parametrize("name", MODELS)
def test_definitions_survive_printing_and_solvers_are_there(name: str) -> None:
    path = FOLDER / f"{MODELS[name].train}.prototxt"
    deploy = path.with_name(path.name.replace("train_val", "deploy"))
    for found in (path, deploy):
        net = read_net(found).param
        assert text_format.Parse(str(net), NetParameter()) == net
    assert "prob" in plan_net(read_net(deploy), layer_class).names
    solver = read_solver(path.with_name(path.name.replace("train_val", "solver")))
    assert solver.net_definition().source == str(path)


def test_every_folder_says_what_it_holds() -> None:
    for folder in FOLDER.iterdir():
        if folder.is_dir() and any(folder.glob("*.prototxt")):
            assert (folder / "README.md").is_file(), folder.name
            assert list(folder.glob("*solver*.prototxt")), folder.name
