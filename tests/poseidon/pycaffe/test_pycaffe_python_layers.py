"""Layers written in Python, in pycaffe's nets: the user's code works on the net's own blobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import poseidon.pycaffe as caffe
from poseidon.errors import DefinitionError
from tests.poseidon.pycaffe.conftest import Write

MODULE = "tests.support.python_layers"


def python(name: str, bottoms: str, tops: str, kind: str, text: str = "", more: str = "") -> str:
    joined = "".join(f' bottom: "{b}"' for b in bottoms.split()) + "".join(
        f' top: "{t}"' for t in tops.split()
    )
    fields = f'module: "{MODULE}" layer: "{kind}"' + (f" param_str: '{text}'" if text else "")
    return f'layer {{ name: "{name}" type: "Python"{joined} python_param {{ {fields} }} {more} }}\n'


CHAIN = (
    'force_backward: true input: "data" input_shape { dim: 10 dim: 9 dim: 8 }\n'
    + python("one", "data", "one", "Scaled")
    + python("two", "one", "two", "Scaled", "2")
    + python("three", "two", "three", "Scaled")
)
PARAMETERS = 'force_backward: true input: "x" input_shape { dim: 4 dim: 3 }\n' + python(
    "affine", "x", "y", "Affine", '{"outputs": 2}'
)


@pytest.fixture
def chain(write: Write) -> caffe.Net:
    return caffe.Net(str(write(CHAIN)), caffe.TRAIN)


def test_forward(chain: caffe.Net) -> None:
    chain.blobs["data"].data[...] = 8
    chain.forward()
    assert (chain.blobs["three"].data == 8 * 200).all()


def test_backward_needs_no_forward(chain: caffe.Net) -> None:
    chain.blobs["three"].diff[...] = 7
    chain.backward()
    assert (chain.blobs["data"].diff == 7 * 200).all()


def test_other_shapes_of_other_axes_spread(chain: caffe.Net) -> None:
    chain.blobs["data"].reshape(4, 4, 4, 4)
    chain.forward()
    assert {blob.data.shape for blob in chain.blobs.values()} == {(4, 4, 4, 4)}


def test_the_layer_is_the_users_own_object(chain: caffe.Net) -> None:
    layer: Any = chain.layers[list(chain._layer_names).index("two")]
    assert isinstance(layer, caffe.Layer) and layer.type == "Python"
    layer.factor = 5
    chain.blobs["data"].data[...] = 1
    chain.forward()
    assert (chain.blobs["three"].data == 500).all()


def test_blobs_of_ones_own_are_saved_loaded_and_shared(write: Write, tmp_path: Path) -> None:
    path = str(write(PARAMETERS))
    net = caffe.Net(path, caffe.TRAIN)
    layer = net.layer_dict["affine"]
    np.testing.assert_array_equal(layer.blobs[1].data, [0, 1])
    net.blobs["x"].data[...] = np.arange(12).reshape(4, 3)
    net.forward()
    net.blobs["y"].diff[...] = 1
    net.backward()
    net.backward()
    np.testing.assert_array_equal(layer.blobs[1].diff, [8, 8])
    np.testing.assert_array_equal(net.params["affine"][0].diff, 2 * np.tile([18, 22, 26], (2, 1)))
    layer.blobs[0].data[...] = 7
    saved = str(tmp_path / "w.caffemodel")
    net.save(saved)
    layer.blobs[0].data[...] = -1
    net.copy_from(saved)
    assert (layer.blobs[0].data == 7).all()
    other = caffe.Net(path, caffe.TRAIN)
    other.share_with(net)
    assert (other.layer_dict["affine"].blobs[0].data == 7).all()
    other.forward(x=np.ones((4, 3)))
    np.testing.assert_array_equal(other.blobs["y"].data, np.tile([21, 22], (4, 1)))


def test_phase(write: Write) -> None:
    path = str(write(python("phase", "", "phase", "Phase")))
    for phase in (caffe.TRAIN, caffe.TEST):
        assert caffe.Net(path, phase).forward()["phase"] == phase


def test_a_data_layer_goes_on_where_it_was(write: Write) -> None:
    net = caffe.Net(str(write(python("data", "", "x l", "Counting"))), caffe.TRAIN)
    for start in (0, 4, 8):
        np.testing.assert_array_equal(net.forward()["x"][:, 0], np.arange(start, start + 4))


def test_in_place(write: Write) -> None:
    text = 'force_backward: true input: "x" input_shape { dim: 2 dim: 3 }\n'
    text += python("ten", "x", "y", "Scaled") + python("plus", "y", "y", "InPlace")
    net = caffe.Net(str(write(text)), caffe.TEST)
    assert (net.forward(x=np.ones((2, 3)))["y"] == 11).all()
    assert (net.backward(y=np.ones((2, 3)))["x"] == 20).all()


def test_in_place_with_another_shape(write: Write) -> None:
    text = 'input: "x" input_shape { dim: 2 dim: 3 %s }\n' + python("flat", "x", "x", "Flat")
    message = r"layer 'flat' \(Python\): runs in place on 'x', but its top has shape 2x3 and its bottom 2x3x1"
    with pytest.raises(DefinitionError, match=message):
        caffe.Net(str(write(text % "dim: 1")), caffe.TEST)
    net = caffe.Net(str(write(text % "")), caffe.TEST)
    assert (net.forward(x=np.zeros((2, 3)))["x"] == 1).all()
    for run in (net.reshape, net.forward):
        net.blobs["x"].reshape(2, 3, 1)
        with pytest.raises(DefinitionError, match=message):
            run()


def test_a_loss_of_ones_own_and_numerical_gradients(write: Write) -> None:
    text = 'force_backward: true input: "x" input_shape { dim: 3 dim: 2 } input: "t" input_shape { dim: 3 dim: 2 }\n'
    text += python(
        "loss",
        "x t",
        "loss",
        "HalfSquare",
        more="loss_weight: 1 propagate_down: true propagate_down: false",
    )
    net = caffe.Net(str(write(text)), caffe.TEST)
    rng = np.random.default_rng(0)
    x, t = rng.normal(size=(2, 3, 2))
    assert net.forward(x=x, t=t)["loss"][0] == pytest.approx(((x - t) ** 2).sum() / 6, rel=1e-5)
    gradient = net.backward()["x"].copy()
    for index in np.ndindex(3, 2):
        moved = x.copy()
        moved[index] += 0.5
        plus = float(net.forward(x=moved, t=t)["loss"][0])
        moved[index] -= 1
        minus = float(net.forward(x=moved, t=t)["loss"][0])
        assert gradient[index] == pytest.approx(plus - minus, abs=1e-4)


@pytest.mark.parametrize("method", ["setup", "reshape"])
def test_the_users_exception_comes_out_of_the_constructor(write: Write, method: str) -> None:
    text = 'input: "x" input_shape { dim: 2 dim: 3 }\n' + python("r", "x", "y", "Raising", method)
    with pytest.raises(RuntimeError, match=f"no {method} today"):
        caffe.Net(str(write(text)), caffe.TEST)


@pytest.mark.parametrize("method", ["forward", "backward"])
def test_the_users_exception_comes_out_of_the_run(write: Write, method: str) -> None:
    text = 'force_backward: true input: "x" input_shape { dim: 2 dim: 3 }\n' + python(
        "r", "x", "y", "Raising", method
    )
    net = caffe.Net(str(write(text)), caffe.TEST)
    with pytest.raises(RuntimeError, match=f"no {method} today"):
        net.forward()
        net.backward()


def test_a_missing_module_is_an_import_error(write: Write) -> None:
    text = CHAIN.replace(MODULE, "no_such_module")
    with pytest.raises(ImportError, match="no_such_module"):
        caffe.Net(str(write(text)), caffe.TEST)
    with pytest.raises(DefinitionError, match=r"does not derive from caffe.Layer"):
        caffe.Net(str(write(CHAIN.replace('"Scaled"', '"NotALayer"'))), caffe.TEST)


def test_python_layers_learn_in_a_solver(write: Write) -> None:
    net = write(
        python("data", "", "x l", "Counting")
        + python("affine", "x", "y", "Affine", '{"outputs": 2}')
        + 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "y" bottom: "l" top: "loss" }'
    )
    solver = caffe.get_solver(
        write(
            f'net: "{net}" base_lr: 0.1 lr_policy: "fixed" max_iter: 3 snapshot_after_train: false',
            "s",
        )
    )
    before = solver.net.params["affine"][1].data.copy()
    solver.step(2)
    assert np.abs(solver.net.params["affine"][1].data - before).max() > 0
    assert solver.net.layer_dict["data"].next == 8  # type: ignore[union-attr]


def test_tops_of_other_shapes_reach_the_layers_above(write: Write) -> None:
    text = python("data", "", "x", "Growing")
    text += 'layer { name: "flat" type: "Flatten" bottom: "x" top: "z" }'
    net = caffe.Net(str(write(text)), caffe.TEST)
    for side in (4, 5, 6):
        assert net.forward()["z"].shape == (1, 2 * side * side)
