"""A torch module that `poseidon.distribute` trained, as the command exports it."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

import poseidon
from poseidon.caffe.export.graph import typed_name
from poseidon.caffe.export.modules import names_module
from poseidon.caffe.snapshot.caffemodel import read_model
from poseidon.cli.main import main

SCRIPT = """
import torch

class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(9, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.ip = torch.nn.Linear(4, 3)

    def forward(self, words, scale):
        return self.ip(self.norm(self.embed(words).mean(1))) * scale

class Fixed(Words):
    def forward(self, words, scale):
        return super().forward(words, scale).reshape(2, 3)

def build():
    torch.manual_seed(1)
    return Words()

def fixed():
    return Fixed()

def number():
    return 3

def broken():
    raise RuntimeError("no data here")
"""
INPUTS = ("--input=words:int64:2,5", "--input=scale:2,1")


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[tuple[Path, Path, Any]]:
    """A script, a checkpoint of a group, and the module after three steps."""
    script = tmp_path / "own_words.py"
    script.write_text(SCRIPT)
    spec = importlib.util.spec_from_file_location("own_words", script)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    model = made.build()
    with poseidon.distribute(model, poseidon.SGD(lr=0.1)) as group:
        for _ in range(3):
            model(torch.arange(10).reshape(2, 5) % 9, torch.ones(2, 1)).sum().backward()
            group.step()
        path = group.save(tmp_path / "net")
    before = list(sys.path)
    yield script, path, model.eval()
    sys.path[:] = before
    sys.modules.pop("own_words", None)


@pytest.mark.timeout(240)  # the first trace of a process imports a large part of torch
def test_onnx_and_pt2(trained: tuple[Path, Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    script, checkpoint, model = trained
    words, scale = torch.arange(15).reshape(3, 5) % 9, torch.randn(3, 1)
    wanted = model(words, scale).detach().numpy()
    onnx, pt2 = script.with_suffix(".onnx"), script.with_suffix(".pt2")
    assert main(["export", f"{script}:build", str(checkpoint), str(onnx), *INPUTS]) == 0
    assert "opset 18; inputs: words Nx5, scale Nx1." in capsys.readouterr().out
    session = onnxruntime.InferenceSession(str(onnx))
    (found,) = session.run(["output"], {"words": words.numpy(), "scale": scale.numpy()})
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert main(["export", f"{script}:build", str(checkpoint), str(pt2), *INPUTS]) == 0
    np.testing.assert_allclose(
        torch.export.load(pt2).module()(words, scale).detach().numpy(), wanted, atol=1e-6
    )
    assert main(["export", f"{script}:fixed", str(checkpoint), str(onnx), *INPUTS]) == 0
    assert "words 2x5, scale 2x1; the batch is fixed" in capsys.readouterr().out


def test_weights_of_a_checkpoint(trained: tuple[Path, Path, Any]) -> None:
    """A checkpoint alone gives its tensors; `poseidon import` reads it as it reads a state dict."""
    script, checkpoint, model = trained
    out, caffe = script.with_suffix(".pth"), script.with_suffix(".caffemodel")
    assert main(["export", str(checkpoint), str(out)]) == 0
    assert set(torch.load(out, weights_only=True)) == set(model.state_dict())
    net = script.with_suffix(".prototxt")
    net.write_text(
        'layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 1 dim: 4 } } }'
        'layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y" inner_product_param { '
        "num_output: 3 } }"
    )
    assert main(["import", str(net), str(checkpoint), str(caffe)]) == 0
    np.testing.assert_array_equal(
        dict(read_model(caffe))["ip"][0], model.ip.weight.detach().numpy()
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((":absent", "net_iter_3.pt", "a.onnx"), "has no function absent"),
        (("absent.py:build", "net_iter_3.pt", "a.onnx"), "there is no file"),
        ((":number", "net_iter_3.pt", "a.onnx"), "gives a int, expected a torch module"),
        ((":broken", "net_iter_3.pt", "a.onnx"), "RuntimeError: no data here"),
        ((":build", "net_iter_3.pt", "a.onnx"), "name each input of forward(words, scale)"),
        ((":build", "net_iter_3.pt", "a.onnx", "--input=x:1,2"), "name each input"),
        ((":build", "a.onnx"), "name a checkpoint after it"),
        ((":build", "other.pth", "a.pth"), "has no tensor embed.weight (8 such names)"),
        (("net_iter_3.pt", "a.onnx"), "needs the module: poseidon export train.py:build_model"),
    ],
)
def test_refusals(
    trained: tuple[Path, Path, Any],
    words: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script, _, _ = trained
    torch.save({"other": torch.zeros(1)}, script.parent / "other.pth")
    paths = [
        f"{script}{word}"
        if word.startswith(":")
        else word
        if word.startswith("--")
        else str(script.parent / word)
        for word in words
    ]
    assert main(["export", *paths]) in (1, 2)
    assert said in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.timeout(240)  # the first trace of a process imports a large part of torch
def test_the_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is docs/export.md."""
    monkeypatch.chdir(tmp_path)
    net = "torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.Flatten())"
    lines = (
        "import torch",
        "class Net(torch.nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
    )
    lines += (
        f"        self.net = {net}",
        "    def forward(self, x):",
        "        return self.net(x)",
    )
    Path("train.py").write_text("\n".join((*lines, "def build_model():", "    return Net()")))
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.Flatten())
    state = {f"net.{name}": value for name, value in model.state_dict().items()}
    torch.save({"poseidon": 1, "model": state}, "checkpoint_iter_500.pt")
    monkeypatch.setattr(sys, "path", list(sys.path))
    page = (Path(__file__).parents[4] / "docs/export.md").read_text(encoding="utf-8")
    found = [line for line in page.splitlines() if "checkpoint_iter_500.pt " in line]
    assert len(found) == 3
    for line in found:
        assert main(shlex.split(line, comments=True)[1:]) == 0
    assert {path.suffix for path in tmp_path.glob("net.*")} == {".safetensors", ".onnx", ".pt2"}


def test_names() -> None:
    assert typed_name("words:int64") == ("words", "int64")
    assert typed_name("data:0") == ("data:0", "")
    assert names_module(Path("a/train.py:build")) and not names_module(Path("a/net.prototxt"))
