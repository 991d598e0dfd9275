"""Files of trained nets: each format is read by the library that owns it; weights come back."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import safetensors.numpy
import torch
from numpy.typing import NDArray

from poseidon.caffe.export.formats import named_tensors, open_for_inference, read_tensors, write_net
from poseidon.caffe.snapshot.caffemodel import read_model, write_model
from poseidon.cli.main import main
from poseidon.engine.snapshot_files import seal
from poseidon.errors import DefinitionError, SnapshotError, UsageError

NET = """
name: "small"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 6 dim: 6 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "norm" type: "BatchNorm" bottom: "conv" top: "conv" }
layer { name: "ip" type: "InnerProduct" bottom: "conv" top: "ip"
  inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A definition and a model of it."""
    definition, model = tmp_path / "net.prototxt", tmp_path / "net.caffemodel"
    definition.write_text(NET)
    net = open_for_inference(definition, (), {})
    net.get_parameter("layers.2.factor").data.fill_(1)
    net.get_parameter("layers.2.variance").data.fill_(2)
    blobs = [
        (each.param.name, each.param.type, [blob.detach().numpy() for blob in each.blobs()])
        for _, each in net.layer_modules
    ]
    write_model(model, net.definition.param, blobs)
    return definition, model


def given() -> torch.Tensor:
    return torch.randn(3, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def wanted(files: tuple[Path, Path]) -> NDArray[np.float32]:
    net = open_for_inference(files[0], (files[1],), {})
    found: NDArray[np.float32] = net({"data": given()})["ip"].detach().numpy()
    return found


def test_onnx(files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "net.onnx"
    assert main(["export", *map(str, files), str(out)]) == 0
    assert "inputs: data Nx3x6x6; outputs: ip Nx2." in capsys.readouterr().out
    (found,) = onnxruntime.InferenceSession(str(out)).run(["ip"], {"data": given().numpy()})
    np.testing.assert_allclose(found, wanted(files), atol=1e-5)


@pytest.mark.timeout(240)  # the first trace of a process imports a large part of torch
def test_pt2(files: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "net.pt2"
    assert "inputs: data Nx3x6x6" in write_net(open_for_inference(files[0], (files[1],), {}), out)
    (found,) = torch.export.load(out).module()(given())
    np.testing.assert_array_equal(found.detach().numpy(), wanted(files))


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_weights_go_and_come_back(files: tuple[Path, Path], tmp_path: Path, suffix: str) -> None:
    out, back = tmp_path / f"net{suffix}", tmp_path / "back.caffemodel"
    assert main(["export", *map(str, files), str(out)]) == 0
    names = {
        "conv.weight",
        "conv.bias",
        "norm.mean",
        "norm.variance",
        "norm.factor",
        "ip.weight",
        "ip.bias",
    }
    if suffix == ".pth":
        assert set(torch.load(out, weights_only=True)) == names
    else:
        assert set(safetensors.numpy.load_file(out)) == names
    back.write_bytes(b"the model of a snapshot")
    state = tmp_path / "back.solverstate"
    state.write_bytes(b"its state")
    seal(state, back)
    assert main(["import", str(files[0]), str(out), str(back)]) == 0
    for (name, before), (_, after) in zip(read_model(files[1]), read_model(back), strict=True):
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)


def test_a_state_dict_with_other_names(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {
        name: torch.from_numpy(a)
        for name, a in named_tensors(open_for_inference(files[0], (), {})).items()
    }
    tensors["fc.weight"] = tensors.pop("ip.weight").half()
    tensors["extra"] = torch.zeros(3)
    torch.save({"state_dict": tensors}, tmp_path / "w.pth")
    command = ["import", str(files[0]), str(tmp_path / "w.pth"), str(tmp_path / "m.caffemodel")]
    assert main(command) == 1
    assert "the file has no tensor ip.weight; it has " in capsys.readouterr().err
    assert main([*command, "--name=ip.weight=fc.w"]) == 1
    assert "the file has no tensor fc.w; it has " in capsys.readouterr().err
    assert main([*command, "--name=ip.weight=fc.weight"]) == 0
    assert len(dict(read_model(tmp_path / "m.caffemodel"))["ip"]) == 2


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"a": 1}, "'a' is a int, expected a tensor"),
        (torch.zeros(2), "has no tensors by name"),
        (None, "is not a file of tensors by name"),
    ],
)
def test_a_file_of_something_else(content: object, text: str, tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    if content is None:
        path.write_bytes(b"no archive")
    else:
        torch.save(content, path)
    with pytest.raises(SnapshotError, match=text):
        read_tensors(path)
    (tmp_path / "w.safetensors").write_bytes(b"nothing")
    with pytest.raises(SnapshotError, match="is not a file of tensors by name"):
        read_tensors(tmp_path / "w.safetensors")
    with pytest.raises(SnapshotError, match="cannot read"):
        read_tensors(tmp_path / "absent.pth")


class Foreign:
    """Something that is not a tensor."""


def test_a_pickle_of_other_objects_is_refused_without_advice_to_trust_it(tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_bytes(pickle.dumps({"a": Foreign()}, protocol=4))
    with pytest.raises(SnapshotError, match="has other objects than tensors; expected ") as caught:
        read_tensors(tmp_path / "w.pth")
    assert "weights_only" not in str(caught.value)


def test_refusals(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", *map(str, files), str(tmp_path / "net.tflite")]) == 2
    assert "expected a name that ends with .onnx, .safetensors, .pth" in capsys.readouterr().err
    for flag in ("--input=data", "--input=data:1,x", "--input=:1,2", "--input=data:0,3"):
        with pytest.raises(SystemExit):
            main(["export", *map(str, files), str(tmp_path / "net.onnx"), flag])
        assert "expected NAME:N,C,H,W" in capsys.readouterr().err
    with pytest.raises(UsageError, match="the net has Input layers"):
        open_for_inference(files[0], (), {"data": (1, 3, 6, 6)})
    assert not list(tmp_path.glob("*.onnx"))


def test_pt2_of_shapes_that_depend_on_data(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text(
        'layer { name: "x" type: "Input" top: "x" top: "s" input_param { shape { dim: 4 dim: 2 } '
        "shape { dim: 4 } } }"
        'layer { name: "f" type: "Filter" bottom: "x" bottom: "s" top: "y" }'
    )
    with pytest.raises(DefinitionError, match="shapes depend on its data"):
        write_net(open_for_inference(path, (), {}), tmp_path / "net.pt2")
