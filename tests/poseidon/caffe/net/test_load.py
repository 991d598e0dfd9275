"""Saved blobs into a net."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.caffe.net.load import same_shape
from poseidon.caffe.net.net import Net
from poseidon.errors import SnapshotError
from tests.support.nets import build, inputs, layer

TEXT = inputs(x=(2, 3)) + layer(
    "InnerProduct", "x", "y", "inner_product_param { num_output: 4 }", name="ip"
)
WEIGHT, BIAS = np.arange(12.0).reshape(4, 3), np.arange(4.0)


def blobs(net: Net) -> list[np.ndarray]:
    return next(arrays for name, _, arrays in net.layer_blobs() if name == "ip")


def test_copied_ignored_kept() -> None:
    net = build(
        TEXT + layer("InnerProduct", "y", "z", "inner_product_param { num_output: 1 }", name="new")
    )
    report = net.load_blobs([("ip", [WEIGHT, BIAS]), ("gone", [BIAS]), ("in_x", [])])
    assert (report.copied, report.ignored, report.kept) == (("ip",), ("gone",), ("new",))
    assert (
        report.summary() == "weights of 1 layer loaded (ip); unchanged: new; not in this net: gone"
    )
    assert (blobs(net)[0] == WEIGHT).all() and (blobs(net)[1] == BIAS).all()


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ([WEIGHT], "layer 'ip': the file has 1 blobs, expected 2"),
        ([WEIGHT.T, BIAS], "layer 'ip': blob 0 has shape 3x4 in the file, expected 4x3; to keep"),
        ([WEIGHT, BIAS[:3]], "layer 'ip': blob 1 has shape 3 in the file, expected 4"),
    ],
)
def test_a_misfit_changes_nothing(saved: list[np.ndarray], message: str) -> None:
    net = build(TEXT)
    with pytest.raises(SnapshotError, match=message):
        net.load_blobs([("ip", saved)])
    assert not blobs(net)[0].any()


@pytest.mark.parametrize(
    ("saved", "wanted", "fits"),
    [
        ((1, 1, 4, 3), (4, 3), True),
        ((1, 1, 1, 4), (4,), True),
        ((1, 1, 1, 1), (), True),
        ((1, 4, 1, 3), (4, 3), False),
        ((1, 4, 3), (4, 3), False),
        ((4, 3), (1, 1, 4, 3), False),
        ((4, 3), (4, 3), True),
    ],
)
def test_old_files_put_ones_in_front(
    saved: tuple[int, ...], wanted: tuple[int, ...], fits: bool
) -> None:
    assert same_shape(saved, wanted) == fits


def test_a_blob_that_another_layer_owns_may_be_left_out() -> None:
    body = 'inner_product_param { num_output: 4 } param { name: "w" }'
    both = "".join(layer("InnerProduct", "x", name, body, name=name) for name in "ab")
    text = inputs(x=(1, 3)) + both
    net = build(text)
    net.load_blobs([("a", [WEIGHT, BIAS]), ("b", [None, BIAS + 1])])
    a, b = (dict(net.layer_modules)[name].blobs() for name in ("a", "b"))
    assert (a[0] == b[0]).all() and a[0].any()
    assert b[1].tolist() == (BIAS + 1).tolist()
    with pytest.raises(SnapshotError, match="layer 'a': the file has 1 blobs, expected 2"):
        net.load_blobs([("a", [None, BIAS])])


def test_saved_layers_of_one_name_go_to_the_first_and_own_ones_to_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first is Caffe's rule, for models of others; the second restores a job's own state."""
    body = "inner_product_param { num_output: 4 }"
    text = inputs(x=(2, 4)) + layer("InnerProduct", "x", "y", body, name="ip")
    text += layer("InnerProduct", "y", "z", body, name="ip")
    weight = np.arange(16.0).reshape(4, 4)
    saved = [("ip", [weight, BIAS]), ("ip", [weight + 1, BIAS + 1])]
    net = build(text)
    first, second = (layers for layers in net.layer_modules if layers[1].blob_specs)
    net.load_blobs(saved)
    assert "two layers 'ip' with different blobs" in caplog.text
    assert (first[1].blobs()[0].detach().numpy() == weight + 1).all()
    assert not second[1].blobs()[0].any()
    net.load_blobs(saved, own=True)
    for (_, layer_), (_, arrays) in zip((first, second), saved, strict=True):
        assert all(
            (blob.detach().numpy() == array).all()
            for blob, array in zip(layer_.blobs(), arrays, strict=True)
        )
    caplog.clear()
    net.load_blobs([saved[0], saved[0]])
    assert not caplog.text


def test_a_nets_own_state_has_all_its_weights() -> None:
    net = build(TEXT.replace('"ip"', '"renamed"'))
    saved = [("ip", [WEIGHT, BIAS])]
    assert net.load_blobs(saved).kept == ("renamed",)
    with pytest.raises(SnapshotError, match="no weights for renamed"):
        net.load_blobs(saved, own=True)


def test_a_layer_whose_blobs_are_all_shared_may_be_missing_in_a_nets_own_state() -> None:
    """Caffe's HDF5 models have nothing of it."""
    body = "param { name: 'w' } param { name: 'b' } inner_product_param { num_output: 3 }"
    text = inputs(x=(2, 3)) + layer("InnerProduct", "x", "y", body, name="a")
    net = build(text + layer("InnerProduct", "y", "z", body, name="b"))
    net.load_blobs([("a", [np.eye(3), np.ones(3)]), ("b", [])], own=True)
    assert all(arrays[1].all() for name, _, arrays in net.layer_blobs() if name in "ab")
