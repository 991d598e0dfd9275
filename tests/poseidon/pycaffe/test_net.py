"""Nets whose blobs lie open: what pycaffe's users rely on."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

import poseidon.pycaffe as caffe
from poseidon.caffe.layers import blob as blob_module
from poseidon.engine.snapshot_files import Run, find_damage, run_of, seal
from poseidon.errors import DataError, DefinitionError, PoseidonError, SnapshotError, UsageError
from tests.poseidon.pycaffe.conftest import SIMPLE, Write

TWO_READERS = """
force_backward: true
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 } } }
layer { name: "twice" type: "Power" bottom: "x" top: "a" power_param { scale: 2 } }
layer { name: "thrice" type: "Power" bottom: "x" top: "b" power_param { scale: 3 } }
layer { name: "sum" type: "Eltwise" bottom: "a" bottom: "b" top: "y" }
"""
DEPLOY = """
input: "x" input_shape { dim: 2 dim: 3 dim: 4 dim: 4 }
layer { name: "conv" type: "Convolution" bottom: "x" top: "conv"
  convolution_param { num_output: 2 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool" pooling_param { pool: AVE global_pooling: true } }
"""


def labelled(path: Path) -> caffe.Net:
    net = caffe.Net(str(path), caffe.TRAIN)
    net.blobs["label"].data[...] = np.arange(5).reshape(5, 1, 1, 1)
    return net


def test_both_constructors_and_keywords(simple: Path, tmp_path: Path) -> None:
    first = caffe.Net(str(simple), caffe.TRAIN)
    weights = str(tmp_path / "w.caffemodel")
    first.save(weights)
    for net in (
        caffe.Net(str(simple), weights, caffe.TEST),
        caffe.Net(simple, caffe.TEST, weights=weights),
        caffe.Net(
            network_file=str(simple), phase=caffe.TEST, level=0, stages=None, weights=weights
        ),
    ):
        assert net.phase == caffe.TEST
        for name, blobs in first.params.items():
            for mine, theirs in zip(net.params[name], blobs, strict=True):
                np.testing.assert_array_equal(mine.data, theirs.data)


def test_names_inputs_outputs(simple: Path) -> None:
    net = caffe.Net(str(simple), caffe.TRAIN)
    assert (net.inputs, net.outputs) == ([], ["loss"])
    assert list(net.blobs) == ["data", "label", "conv", "ip", "loss"]
    assert list(net.params) == ["conv", "ip"]
    types = " ".join(layer.type for layer in net.layers)
    assert types == "DummyData Convolution InnerProduct SoftmaxWithLoss"
    assert net.layer_dict["ip"].type == "InnerProduct"
    assert net.bottom_names["loss"] == ["ip", "label"]
    assert net.top_names["data"] == ["data", "label"]
    assert net.blob_loss_weights == {"data": 0, "label": 0, "conv": 0, "ip": 0, "loss": 1}
    assert list(net._layer_names) == ["data", "conv", "ip", "loss"]


def test_blob_memory_outlives_the_net(simple: Path) -> None:
    net = caffe.Net(str(simple), caffe.TRAIN)
    blobs = [*net.blobs.values(), *(blob for blobs in net.params.values() for blob in blobs)]
    del net
    gc.collect()
    assert np.isfinite(sum(float(blob.data.sum() + blob.diff.sum()) for blob in blobs))


def test_arrays_stay_the_same_memory(simple: Path) -> None:
    net = labelled(simple)
    held = net.blobs["ip"].data
    net.forward()
    assert held is not net.blobs["ip"].data
    assert np.shares_memory(held, net.blobs["ip"].data)
    np.testing.assert_array_equal(held, net.blobs["ip"].data)


def test_labels_of_a_constant_filler_stay_as_written(simple: Path) -> None:
    net = labelled(simple)
    first = net.forward()["loss"].copy()
    np.testing.assert_array_equal(net.blobs["label"].data.ravel(), np.arange(5))
    data = net.blobs["data"].data.copy()
    net.forward()
    assert np.abs(net.blobs["data"].data - data).max() > 0  # the gaussian one is drawn anew
    assert first.shape == ()


def test_written_weights_and_data_count(write: Write) -> None:
    net = caffe.Net(str(write(DEPLOY)), caffe.TEST)
    net.params["conv"][0].data[...] = 1
    net.params["conv"][1].data[...] = -1
    net.blobs["x"].data[...] = 0.5
    out = net.forward()
    np.testing.assert_allclose(out["pool"].ravel(), 27 * 0.5 - 1)
    net.blobs["conv"].data[...] = 7
    np.testing.assert_allclose(net.forward(start="pool")["pool"].ravel(), 7)


def test_forward_takes_inputs_and_gives_more_blobs(write: Write) -> None:
    net = caffe.Net(str(write(DEPLOY)), caffe.TEST)
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 4))
    out = net.forward(blobs=["conv"], x=x)
    assert set(out) == {"pool", "conv"}
    np.testing.assert_allclose(net.blobs["x"].data, x, rtol=1e-6)


def test_start_and_end(simple: Path) -> None:
    net = labelled(simple)
    net.forward()
    loss = net.blobs["loss"].data.copy()
    net.blobs["ip"].data[...] = 0
    assert set(net.forward(start="loss")) == {"loss"}
    np.testing.assert_allclose(net.blobs["loss"].data, np.log(13), rtol=1e-5)
    # The net up to `ip` does not touch the loss; its data are drawn anew.
    assert set(net.forward(end="ip")) == {"ip"}
    np.testing.assert_allclose(net.blobs["loss"].data, np.log(13), rtol=1e-5)
    assert loss != net.blobs["loss"].data


def test_backward_from_start_to_end(simple: Path) -> None:
    net = labelled(simple)
    net.forward()
    net.backward()
    whole = net.blobs["conv"].diff.copy(), net.params["conv"][0].diff.copy()
    net.clear_param_diffs()
    for name in net.blobs:
        if name != "loss":
            net.blobs[name].diff[...] = 0
    assert set(net.backward(end="ip")) == {"conv"}
    np.testing.assert_array_equal(net.blobs["conv"].diff, whole[0])
    assert not net.params["conv"][0].diff.any()
    net.backward(start="conv")
    np.testing.assert_allclose(net.params["conv"][0].diff, whole[1], rtol=1e-6)


def test_param_diffs_add_up_and_are_cleared(simple: Path) -> None:
    net = labelled(simple)
    net.forward()
    net.backward()
    once = {name: blobs[0].diff.copy() for name, blobs in net.params.items()}
    net.backward()
    for name, diff in once.items():
        assert np.abs(diff).max() > 0
        np.testing.assert_allclose(net.params[name][0].diff, 2 * diff, rtol=1e-5)
    net.clear_param_diffs()
    assert all(not blob.diff.any() for blobs in net.params.values() for blob in blobs)


@pytest.mark.parametrize("apart", [False, True])
def test_backward_sees_weights_changed_after_forward(
    write: Write, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    monkeypatch.setattr(blob_module, "needs_host_copy", lambda _: apart)  # as on a GPU
    net = caffe.Net(str(write("force_backward: true\n" + DEPLOY)), caffe.TEST)
    net.params["conv"][0].data[...] = 1
    net.blobs["x"].data[...] = 1
    net.forward()
    net.params["conv"][0].data[...] = 2
    net.blobs["conv"].diff[...] = 1
    net.backward(start="conv")
    assert net.blobs["x"].diff.max() == 2 * 2 * 4  # two filters, four places


def test_backward_takes_diffs_of_the_outputs(write: Write) -> None:
    net = caffe.Net(str(write(TWO_READERS)), caffe.TEST)
    net.forward(x=np.ones((2, 3)))
    diff = np.arange(6).reshape(2, 3)
    found = net.backward(diffs=["a"], y=diff)
    np.testing.assert_array_equal(found["x"], 5 * diff)
    np.testing.assert_array_equal(found["a"], diff)


def test_splits_are_those_of_caffe(write: Write) -> None:
    net = caffe.Net(str(write(TWO_READERS)), caffe.TEST)
    assert list(net._layer_names) == ["in", "x_in_0_split", "twice", "thrice", "sum"]
    assert net.bottom_names["thrice"] == ["x_in_0_split_1"]
    # The parts of a split are one memory.
    net.blobs["x"].data[...] = 3
    net.forward(start="twice")
    np.testing.assert_array_equal(net.blobs["y"].data, 15)
    assert net.inputs == ["x"]


def test_in_place_layers_overwrite(write: Write) -> None:
    net = caffe.Net(str(write("force_backward: true\n" + DEPLOY)), caffe.TEST)
    net.blobs["x"].data[...] = np.random.default_rng(1).normal(size=(2, 3, 4, 4))
    net.forward(end="conv")
    before = net.blobs["conv"].data.copy()
    net.forward(start="relu")
    np.testing.assert_array_equal(net.blobs["conv"].data, np.maximum(before, 0))
    net.blobs["pool"].diff[...] = 4
    net.backward(end="relu")
    np.testing.assert_allclose(net.blobs["conv"].diff, before > 0)


def test_in_place_with_another_shape_is_refused(write: Write) -> None:
    pool = 'layer { name: "pool" type: "Pooling" bottom: "x" top: "x" pooling_param { kernel_size: 1 stride: 2 } }'
    message = r"layer 'pool' \(Pooling\): runs in place on 'x', but its top has shape 1x1x2x2 and its bottom 1x1x3x3"
    text = 'layer { name: "in" type: "DummyData" top: "x" dummy_data_param { shape { dim: 1 dim: 1 dim: %d dim: %d } } }'
    net = caffe.Net(str(write(text % (1, 1) + pool)), caffe.TEST)
    assert net.forward()["x"].shape == (1, 1, 1, 1)
    for run in (net.reshape, lambda: net.forward(start="pool")):
        net.blobs["x"].reshape(1, 1, 3, 3)
        with pytest.raises(DefinitionError, match=message):
            run()
    path = str(write(text % (3, 3) + pool))
    solver = str(write(f'net: "{path}" base_lr: 1 lr_policy: "fixed"', "solver.prototxt"))
    for build in (lambda: caffe.Net(path, caffe.TRAIN), lambda: caffe.get_solver(solver)):
        with pytest.raises(DefinitionError, match=message):
            build()


def test_a_mistake_in_the_data_names_the_layer(simple: Path) -> None:
    net = labelled(simple)
    net.blobs["label"].data[1] = np.nan
    with pytest.raises(DataError, match=r"net.prototxt:\d+: layer 'loss' \(SoftmaxWithLoss\)"):
        net.forward()


def test_without_a_loss_nothing_runs_backward(write: Write) -> None:
    net = caffe.Net(str(write(DEPLOY)), caffe.TEST)
    net.forward()
    net.blobs["pool"].diff[...] = 1
    net.backward()
    assert not net.blobs["x"].diff.any() and not net.params["conv"][0].diff.any()


def test_loss_weight_is_the_diff_of_a_loss(write: Write) -> None:
    path = write(SIMPLE.replace('top: "loss"', 'top: "loss" loss_weight: 2.5'))
    net = labelled(path)
    assert net.blob_loss_weights["loss"] == 2.5
    loss = net._forward(0, 3)
    assert loss == pytest.approx(2.5 * float(net.blobs["loss"].data), rel=1e-6)
    net.backward()
    weighted = net.params["ip"][1].diff.copy()
    net.clear_param_diffs()
    net.blobs["loss"].diff[...] = 1
    net.backward()
    np.testing.assert_allclose(weighted, 2.5 * net.params["ip"][1].diff, rtol=1e-5)


def test_a_loss_without_a_top_is_automatic(write: Write) -> None:
    net = labelled(write(SIMPLE.replace(' top: "loss"', "")))
    assert "(automatic)" in net.blobs
    assert net._forward(0, 3) == pytest.approx(float(net.blobs["(automatic)"].data), rel=1e-6)


def test_reshape_of_inputs_spreads(write: Write) -> None:
    net = caffe.Net(str(write(DEPLOY)), caffe.TEST)
    net.blobs["x"].reshape(5, 3, 7, 6)
    net.reshape()
    assert net.blobs["conv"].shape == (5, 2, 5, 4)
    net.blobs["x"].reshape(1, 3, 9, 9)
    net.blobs["x"].data[...] = 1
    assert net.forward()["pool"].shape == (1, 2, 1, 1)
    assert net.blobs["conv"].data.shape == (1, 2, 7, 7)


def test_share_with_is_one_memory(simple: Path) -> None:
    one, two = labelled(simple), labelled(simple)
    two.share_with(one)
    one.params["ip"][0].data[...] = 0.25
    assert np.shares_memory(one.params["ip"][0].data, two.params["ip"][0].data)
    assert not np.shares_memory(one.params["ip"][0].diff, two.params["ip"][0].diff)
    two.blobs["conv"].data[...] = 1
    two.forward(start="ip", end="ip")
    assert two.blobs["ip"].data.ravel()[0] == pytest.approx(
        two.blobs["conv"].data[0].size * 0.25 - 3, rel=1e-5
    )


def test_parameters_shared_by_name_are_one_memory(write: Write) -> None:
    net = caffe.Net(
        str(
            write("""
            force_backward: true
            layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 4 } } }
            layer { name: "one" type: "InnerProduct" bottom: "x" top: "h" param { name: "w" }
              inner_product_param { num_output: 4 bias_term: false weight_filler { type: "xavier" } } }
            layer { name: "two" type: "InnerProduct" bottom: "h" top: "y" param { name: "w" }
              inner_product_param { num_output: 4 bias_term: false } }
            """)
        ),
        caffe.TEST,
    )
    assert np.shares_memory(net.params["one"][0].data, net.params["two"][0].data)
    assert np.shares_memory(net.params["one"][0].diff, net.params["two"][0].diff)
    x = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    net.forward(x=x)
    net.backward(y=np.ones((2, 4)))
    w, ones = net.params["one"][0].data, np.ones((2, 4), np.float32)
    expected = ones.T @ (x @ w.T) + (ones @ w).T @ x
    np.testing.assert_allclose(net.params["one"][0].diff, expected, rtol=1e-4)


@pytest.mark.parametrize("suffix", ["caffemodel", "caffemodel.h5"])
def test_save_and_copy_from(simple: Path, tmp_path: Path, suffix: str) -> None:
    one, two = labelled(simple), labelled(simple)
    path = str(tmp_path / f"w.{suffix}")
    (one.save_hdf5 if suffix.endswith("h5") else one.save)(path)
    assert np.abs(two.params["ip"][0].data - one.params["ip"][0].data).max() > 0
    two.forward()
    (two.load_hdf5 if suffix.endswith("h5") else two.copy_from)(path)
    two.backward()  # what was loaded does not spoil the graph
    for name in one.params:
        for mine, theirs in zip(one.params[name], two.params[name], strict=True):
            np.testing.assert_array_equal(mine.data, theirs.data)


def test_a_model_of_a_snapshot_may_be_saved_anew(simple: Path, tmp_path: Path) -> None:
    net, model, state = labelled(simple), tmp_path / "n.caffemodel", tmp_path / "n.solverstate"
    net.save(str(model))
    state.write_bytes(b"a state")
    seal(state, model, run=Run(number=2, job="j"))
    net.params["ip"][0].data[...] = 3
    net.save(str(model))
    labelled(simple).copy_from(str(model))
    assert run_of(state) == Run(number=2, job="j")
    assert find_damage(state) is None
    state.write_bytes(b"another one")
    net.save(str(model))
    assert find_damage(state, state.name) is not None


def test_forward_all_fills_up_the_last_batch(write: Write) -> None:
    net = caffe.Net(str(write(DEPLOY)), caffe.TEST)
    x = np.random.default_rng(0).normal(size=(5, 3, 4, 4)).astype(np.float32)
    all_at_once = net.forward_all(blobs=["conv"], x=x)
    assert all_at_once["pool"].shape == (5, 2, 1, 1) and all_at_once["conv"].shape == (5, 2, 2, 2)
    net.blobs["x"].reshape(5, 3, 4, 4)
    np.testing.assert_allclose(net.forward(x=x)["pool"], all_at_once["pool"], rtol=1e-5)


def test_forward_backward_all(write: Write) -> None:
    net = caffe.Net(str(write(TWO_READERS)), caffe.TEST)
    x, y = np.ones((5, 3)), np.arange(15).reshape(5, 3)
    outs, diffs = net.forward_backward_all(diffs=["b"], x=x, y=y)
    np.testing.assert_array_equal(outs["y"], np.full((5, 3), 5))
    np.testing.assert_array_equal(diffs["x"], 5 * y)
    np.testing.assert_array_equal(diffs["b"], y)


def test_callbacks_are_called_around_each_layer(simple: Path) -> None:
    net = labelled(simple)
    seen: list[tuple[str, int]] = []
    for when in ("before_forward", "after_forward", "before_backward", "after_backward"):
        getattr(net, when)(lambda index, when=when: seen.append((when, index)))
    net.forward(start="ip")
    net.backward(end="ip")
    forward = [(when, i) for i in (2, 3) for when in ("before_forward", "after_forward")]
    backward = [(when, i) for i in (3, 2) for when in ("before_backward", "after_backward")]
    assert seen == forward + backward


STAGED = """
layer { name: "train" type: "DummyData" top: "x" include { phase: TRAIN stage: "train" }
  dummy_data_param { shape { dim: 2 dim: 3 } shape { dim: 2 } } top: "l" }
layer { name: "val" type: "DummyData" top: "x" include { phase: TEST stage: "val" }
  dummy_data_param { shape { dim: 4 dim: 3 } shape { dim: 4 } } top: "l" }
layer { name: "deploy" type: "Input" top: "x" include { phase: TEST stage: "deploy" }
  input_param { shape { dim: 1 dim: 3 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "ip" inner_product_param { num_output: 2 } }
layer { name: "deep" type: "ReLU" bottom: "ip" top: "r" include { min_level: 2 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "l" top: "loss"
  include { phase: TRAIN stage: "train" } include { phase: TEST stage: "val" } }
layer { name: "prob" type: "Softmax" bottom: "ip" top: "prob" include { phase: TEST stage: "deploy" } }
"""


@pytest.mark.parametrize(
    ("phase", "stages", "level", "outputs"),
    [
        (caffe.TRAIN, ["train"], 0, {"loss"}),
        (caffe.TEST, ["val"], 0, {"loss"}),
        (caffe.TEST, ["deploy"], 0, {"prob"}),
        (caffe.TEST, ["deploy"], 2, {"prob", "r"}),
    ],
)
def test_stages_and_levels(
    write: Write, phase: int, stages: list[str], level: int, outputs: set[str]
) -> None:
    net = caffe.Net(str(write(STAGED)), phase, stages=stages, level=level)
    assert set(net.outputs) == outputs
    net.forward()
    assert net.blobs["x"].num == {"train": 2, "val": 4, "deploy": 1}[stages[0]]


def test_errors_are_sentences(write: Write, simple: Path, tmp_path: Path) -> None:
    net = caffe.Net(str(write(DEPLOY, "deploy.prototxt")), caffe.TEST)
    cases: list[tuple[type[PoseidonError], object, str]] = [
        (UsageError, lambda: net.forward(start="cnov"), "did you mean 'conv'"),
        (UsageError, lambda: net.forward(start=1), "unknown layer '1'; known: "),
        (UsageError, lambda: net.forward(blobs=["nothing"]), "nothing"),
        (UsageError, lambda: net.forward(y=np.zeros((2, 3))), "expected every input of the net: x"),
        (UsageError, lambda: net.forward(x=np.zeros((3, 3, 4, 4))), "expected a batch: 2x3x4x4"),
        (UsageError, lambda: net.forward(x=np.zeros((2, 3, 4, 5))), "expected 2x3x4x4"),
        (UsageError, lambda: net.backward(x=np.zeros(3)), "every output of the net: pool"),
        (
            UsageError,
            lambda: net.set_input_arrays(np.zeros(1), np.zeros(1)),
            "expected a MemoryData layer",
        ),
        (UsageError, net.forward_all, "expected arrays with the same number of records"),
        (UsageError, lambda: caffe.Net(str(simple)), "phase is None: expected"),
        (UsageError, lambda: caffe.Net(str(simple), 7), "phase is 7: expected"),
        (
            DefinitionError,
            lambda: caffe.Net(str(tmp_path / "none"), caffe.TEST),
            "no such net definition",
        ),
        (SnapshotError, lambda: net.copy_from(tmp_path / "none"), "cannot read the model"),
    ]
    for kind, call, words in cases:
        with pytest.raises(kind, match=words):
            call()  # type: ignore[operator]
    with pytest.raises(RuntimeError):
        caffe.Net(str(tmp_path / "none"), caffe.TEST)
    with pytest.raises(RuntimeError, match="there is no such model"):
        caffe.Net(str(simple), str(tmp_path / "none"), caffe.TEST)
    with pytest.raises(ValueError, match="cnov"):
        net.forward(end="cnov")


def test_share_with_refuses_other_shapes(write: Write, simple: Path) -> None:
    other = caffe.Net(
        str(write(SIMPLE.replace("num_output: 13", "num_output: 14"), "b")), caffe.TRAIN
    )
    net = caffe.Net(str(simple), caffe.TRAIN)
    kept = net.params["conv"][0].data
    with pytest.raises(UsageError, match="layer 'ip' has blobs of shape"):
        net.share_with(other)
    assert np.shares_memory(kept, net.params["conv"][0].data)


def test_layers_of_one_name(tmp_path: Path) -> None:
    """`params`, `layer_dict` and the names of blobs are the later layer's; all have gradients."""
    ip = (
        'layer { name: "same" type: "InnerProduct" bottom: "%s" top: "%s" inner_product_param { '
        'num_output: %d weight_filler { type: "xavier" } } }\n'
    )
    path = tmp_path / "net.prototxt"
    path.write_text(
        'force_backward: true input: "x" input_shape { dim: 2 dim: 3 }\n'
        + ip % ("x", "y", 4)
        + ip % ("y", "z", 5)
        + 'layer { name: "same" type: "ReLU" bottom: "z" top: "z" }\n'
    )
    net = caffe.Net(str(path), caffe.TRAIN)
    assert list(net.params) == ["same"] and net.params["same"][0].data.shape == (5, 4)
    assert net.layer_dict["same"].type == "ReLU" and net.bottom_names["same"] == ["z"]
    assert [net._bottom_ids(index) for index in (1, 2)] == [[0], [1]]
    first, second = net.layers[1].blobs, net.layers[2].blobs
    x = np.arange(6.0).reshape(2, 3)
    z = net.forward(x=x)["z"]
    np.testing.assert_allclose(
        z, np.maximum(x @ first[0].data.T @ second[0].data.T, 0), rtol=1e-5, atol=1e-6
    )
    net.backward(z=np.ones((2, 5)))
    assert first[0].diff.any() and second[0].diff.any()
    net.clear_param_diffs()
    assert not first[0].diff.any() and not second[0].diff.any()
    values = [blob.data.copy() for blob in (*first, *second)]
    net.save_hdf5(str(tmp_path / "own.h5"))
    for blob in (*first, *second):
        blob.data[...] = 0
    net.load_hdf5(str(tmp_path / "own.h5"))
    for blob, value in zip((*first, *second), values, strict=True):
        np.testing.assert_array_equal(blob.data, value)
    net.save(str(tmp_path / "both.caffemodel"))
    with pytest.raises(SnapshotError, match="layer 'same': blob 0 has shape 5x4"):
        net.copy_from(str(tmp_path / "both.caffemodel"))


def test_a_layer_is_set_up_and_reshaped_by_hand(simple: Path) -> None:
    net = caffe.Net(str(simple), caffe.TEST)
    conv = net.layers[net._layer_names.index("conv")]
    weight = conv.blobs[0].data.copy()
    data, top = caffe.Blob(7, *net.blobs["data"].shape[1:]), caffe.Blob()
    conv.reshape([data], [top])
    assert top.shape == (7, *net.blobs["conv"].shape[1:])
    with pytest.raises(DefinitionError, match="layer 'conv'"):
        conv.setup([caffe.Blob(7, 1, 1, 1)], [top])
    net.forward()
    assert (conv.blobs[0].data == weight).all()
    assert net.blobs["conv"].shape[0] == net.blobs["data"].shape[0]
