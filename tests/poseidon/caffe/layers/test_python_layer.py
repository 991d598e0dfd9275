"""Layers written in Python, in the engine's net: torch's graph runs through them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from poseidon.caffe.layers.python_layer import PythonLayerError
from poseidon.errors import DataError, DefinitionError
from tests.support.nets import build, inputs, layer, noise

MODULE = "tests.support.python_layers"


def python(
    kind: str, bottoms: str, tops: str, text: str = "", more: str = "", *, name: str = "py"
) -> str:
    fields = f'module: "{MODULE}" layer: "{kind}"' + (f" param_str: '{text}'" if text else "")
    return layer("Python", bottoms, tops, f"python_param {{ {fields} }} {more}", name=name)


def test_forward_and_backward_are_the_users() -> None:
    net = build("force_backward: true " + inputs(x=(2, 3)) + python("Scaled", "x", "y", "4"))
    x = noise(2, 3).requires_grad_()
    y = net({"x": x})["y"]
    torch.testing.assert_close(y, 4 * x)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(x.grad, torch.full((2, 3), 4.0))


def test_blobs_start_as_setup_filled_them_and_learn() -> None:
    net = build(
        inputs(x=(2, 3), t=(2, 2))
        + python("Affine", "x", "y", '{"outputs": 2}')
        + layer("EuclideanLoss", "y t", "loss", name="loss")
    )
    assert [(info.name, info.shape) for info in net.parameters_info] == [
        ("py.0", (2, 3)),
        ("py.1", (2,)),
    ]
    w, b = (info.parameter for info in net.parameters_info)
    torch.testing.assert_close(w.detach(), torch.full((2, 3), 0.5))
    torch.testing.assert_close(b.detach(), torch.tensor([0.0, 1.0]))
    x, t = noise(2, 3), noise(2, 2, seed=1)
    net({"x": x, "t": t})
    net.loss.backward()
    difference = (x @ w.T + b - t).detach() / 2
    torch.testing.assert_close(w.grad, difference.T @ x)
    torch.testing.assert_close(b.grad, difference.sum(0))
    with torch.no_grad():
        w.add_(1.0)
    torch.testing.assert_close(net({"x": x, "t": t})["loss"], ((x @ w.T + b - t) ** 2).sum() / 4)


def test_a_data_layer_and_a_loss_of_ones_own() -> None:
    body = "inner_product_param { num_output: 2 weight_filler { value: 1 } }"
    net = build(
        python("Counting", "", "x l", name="data")
        + layer("InnerProduct", "x", "y", body, name="ip")
        + python("HalfSquare", "y x", "loss", more="loss_weight: 2")
    )
    net()
    first = float(net.loss.detach())
    assert first == 0 + 2 * sum((2 * v - v) ** 2 * 2 for v in range(4)) / 4 / 2
    net.loss.backward()
    expected = sum(2 * v * v for v in range(4)) / 4  # loss_weight * (y - x) * x / 4
    torch.testing.assert_close(net.parameters_info[0].parameter.grad, torch.full((2, 2), expected))
    net()
    assert float(net.loss.detach()) > first


def test_in_place_leaves_the_bottom_of_others_alone() -> None:
    text = (
        "force_backward: true "
        + inputs(x=(2, 3))
        + layer("Power", "x", "y", "power_param { shift: 1 }", name="p")
    )
    net = build(text + python("InPlace", "y", "y"))
    x = noise(2, 3).requires_grad_()
    y = net({"x": x})["y"]
    torch.testing.assert_close(y, x + 2)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(x.grad, torch.full((2, 3), 2.0))


def test_reshape_is_called_in_each_pass() -> None:
    net = build(inputs(x=(2, 3)) + python("Scaled", "x", "y"))
    assert net({"x": noise(5, 3)})["y"].shape == (5, 3)


def test_tops_of_other_shapes_reach_the_layers_above() -> None:
    pool = layer(
        "Pooling", "x", "y", "pooling_param { pool: AVE global_pooling: true }", name="pool"
    )
    net = build(python("Growing", "", "x") + pool + layer("Flatten", "x", "z", name="flat"))
    for side in (4, 5, 6):
        tops = net()
        assert tops["z"].shape == (1, 2 * side * side)
        assert tops["y"].tolist() == [[[[side]], [[side]]]]


def test_a_layer_that_ends_its_process_is_an_error_with_its_place() -> None:
    net = build(inputs(x=(2, 3)) + python("Raising", "x", "y", "exit"))
    with pytest.raises(DataError, match=r"layer 'py' \(Python\).*Raising, forward: SystemExit: 3"):
        net({"x": noise(2, 3)})


@pytest.mark.parametrize("method", ["setup", "reshape"])
def test_what_setup_raises_is_one_sentence_with_its_place(method: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        build(inputs(x=(2, 3)) + python("Raising", "x", "y", method))
    text = str(caught.value)
    assert "layer 'py' (Python)" in text and f"RuntimeError: no {method} today" in text
    assert "python_layers.py:" in text and "\n" not in text


def test_what_forward_and_backward_raise_names_the_layer() -> None:
    net = build("force_backward: true " + inputs(x=(2, 3)) + python("Raising", "x", "y", "forward"))
    with pytest.raises(DataError, match=r"layer 'py' \(Python\).*Raising, forward: RuntimeError"):
        net({"x": noise(2, 3)})
    net = build(
        "force_backward: true " + inputs(x=(2, 3)) + python("Raising", "x", "y", "backward")
    )
    y = net({"x": noise(2, 3).requires_grad_()})["y"]
    with pytest.raises(PythonLayerError, match=r"layer 'py' \(Python\).*Raising, backward"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("kind", "module", "words"),
    [
        ("Scaled", "no.such.module", "import: ModuleNotFoundError: No module named 'no'"),
        ("Nothing", MODULE, "has no class 'Nothing'"),
        ("", MODULE, r"layer 'layer' \(Python\): has no layer in python_param"),
        ("Scaled", "", r"layer 'layer' \(Python\): has no module in python_param"),
        ("NotALayer", MODULE, "does not derive from caffe.Layer"),
    ],
)
def test_a_class_that_is_not_there(kind: str, module: str, words: str) -> None:
    body = f'python_param {{ module: "{module}" layer: "{kind}" }}'
    with pytest.raises(DefinitionError, match=words):
        build(inputs(x=(2, 3)) + layer("Python", "x", "y", body))


def test_modules_of_the_working_directory_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lying_here.py").write_text(
        "from tests.support.python_layers import Scaled as Here\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    body = 'python_param { module: "lying_here" layer: "Here" }'
    net = build(inputs(x=(2, 3)) + layer("Python", "x", "y", body))
    x = noise(2, 3)
    torch.testing.assert_close(net({"x": x})["y"], 10 * x)
    sys.modules.pop("lying_here")
