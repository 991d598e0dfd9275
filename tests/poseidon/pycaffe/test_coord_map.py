"""Coordinates from blob to blob."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import poseidon.pycaffe as caffe
from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from poseidon.pycaffe.coord_map import (
    AxisMismatchException,
    UndefinedMapException,
    compose,
    coord_map,
    coord_map_from_to,
    crop,
    inverse,
)


def up_and_down(pad: int = 0, up_pad: int = 0, kernel: Any = 3) -> NetSpec:
    """Half the size by pooling, and up again."""
    n = NetSpec()
    n.data = L.Input(shape={"dim": [2, 1, 100, 100]})
    n.other = L.Input(shape={"dim": [2, 1, 20, 20]})
    n.conv = L.Convolution(n.data, num_output=10, kernel_size=kernel, stride=1, pad=pad)
    n.pool = L.Pooling(n.conv, pool="MAX", kernel_size=2, stride=2, pad=0)
    n.up = L.Deconvolution(
        n.pool, convolution_param={"num_output": 10, "kernel_size": 4, "stride": 2, "pad": up_pad}
    )
    return n


def test_there_and_back() -> None:
    n = up_and_down()
    axis, a, b = coord_map_from_to(n.up, n.data)
    assert (axis, a) == (1, 1)
    back = coord_map_from_to(n.data, n.up)
    assert back[1:] == (1, -b)


@pytest.mark.parametrize("pad", [1, 4])
def test_pads_shift(pad: int) -> None:
    _, a, b = _map(up_and_down())
    assert _map(up_and_down(pad=pad))[1:] == (a, b - pad)
    assert _map(up_and_down(up_pad=pad))[1:] == (a, b + pad)


def _map(n: NetSpec) -> tuple[Any, Any, Any]:
    return coord_map_from_to(n.up, n.data)


def test_the_crop_is_aligned_with_the_image(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """A single bright pixel, passed down and up by means, stays where it is after the crop."""
    n = NetSpec()
    n.data = L.Input(shape={"dim": [1, 1, 12, 12]})
    n.conv = L.Convolution(n.data, num_output=1, kernel_size=3, pad=4, bias_term=False)
    n.cut = crop(n.conv, n.data)
    path = tmp_path / "net.prototxt"
    path.write_text(str(n.to_proto()))
    net = caffe.Net(str(path), caffe.TEST)
    net.params["conv"][0].data[0, 0, 1, 1] = 1
    picture = np.random.default_rng(0).normal(size=(1, 1, 12, 12)).astype(np.float32)
    np.testing.assert_allclose(net.forward(data=picture)["cut"], picture, rtol=1e-6)


def test_each_coordinate_its_own() -> None:
    axis, a, b = _map(up_and_down(kernel=[3, 5]))
    assert (axis, a.tolist(), (b[1] - b[0])) == (1, [1], 1)


def test_what_changes_no_place_changes_nothing() -> None:
    n = up_and_down()
    n.sum = L.Eltwise(L.ReLU(n.up), n.up)
    assert coord_map_from_to(n.sum, n.data) == _map(n)


def test_crop_layers_count() -> None:
    n = up_and_down()
    n.cut = L.Crop(n.up, n.data, crop_param={"axis": 2, "offset": 3})
    assert coord_map_from_to(n.cut, n.data)[2] == _map(n)[2] + 3


def test_composition_and_inverse() -> None:
    first, second = (1, 2.0, 3.0), (None, 5.0, 7.0)
    assert compose(first, second) == (1, 10.0, 17.0)
    assert compose(inverse(first), first) == (1, 1.0, 0.0)
    with pytest.raises(AxisMismatchException, match=r"different axes: 1 and 2"):
        compose(first, (2, 1, 0))


def test_nothing_in_common() -> None:
    n = up_and_down()
    with pytest.raises(RuntimeError, match="no common ancestor"):
        coord_map_from_to(n.up, n.other)
    with pytest.raises(UndefinedMapException, match="InnerProduct"):
        coord_map(L.InnerProduct(n.data, num_output=1).fn)
    with pytest.raises(ValueError, match="kernel_h"):
        coord_map(L.Convolution(n.data, num_output=1, kernel_h=1, kernel_w=2).fn)


def test_what_cannot_be_cropped() -> None:
    n = up_and_down()
    with pytest.raises(AssertionError, match="scale"):
        crop(n.pool, n.data)
    with pytest.raises(AssertionError, match="negative offset"):
        crop(n.conv, n.data)
    n.even = L.Convolution(n.data, num_output=1, kernel_size=2, pad=3)
    with pytest.raises(AssertionError, match="between two pixels"):
        crop(n.even, n.data)
