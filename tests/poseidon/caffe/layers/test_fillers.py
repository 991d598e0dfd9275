"""Fillers: distribution, determinism, and what they refuse."""

from __future__ import annotations

import math

import pytest
import torch

from poseidon.caffe.layers.fillers import FILLERS, FillerError, check, fill
from poseidon.caffe.proto.caffe_pb2 import FillerParameter
from poseidon.caffe.proto.text import parse


def filler(text: str) -> FillerParameter:
    return parse(text, FillerParameter(), source="filler")


def filled(text: str, *shape: int, seed: int = 1) -> torch.Tensor:
    blob = torch.full(shape, math.nan)
    fill(blob, filler(text), torch.Generator().manual_seed(seed))
    return blob


SHAPE = (200, 30, 5, 5)
FAN_IN, FAN_OUT = 750, 5000
# text: (mean, standard deviation, least, largest), None where it is not bounded
MOMENTS = {
    "value: 3": (3, 0, 3, 3),
    "type: 'uniform' min: -2 max: 4": (1, 6 / math.sqrt(12), -2, 4),
    "type: 'gaussian' mean: 1 std: 0.5": (1, 0.5, None, None),
    "type: 'xavier'": (0, math.sqrt(1 / FAN_IN), -math.sqrt(3 / FAN_IN), math.sqrt(3 / FAN_IN)),
    "type: 'xavier' variance_norm: FAN_OUT": (
        0,
        math.sqrt(1 / FAN_OUT),
        None,
        math.sqrt(3 / FAN_OUT),
    ),
    "type: 'xavier' variance_norm: AVERAGE": (0, math.sqrt(2 / (FAN_IN + FAN_OUT)), None, None),
    "type: 'msra'": (0, math.sqrt(2 / FAN_IN), None, None),
    "type: 'msra' variance_norm: FAN_OUT": (0, math.sqrt(2 / FAN_OUT), None, None),
    "type: 'msra' variance_norm: AVERAGE": (0, math.sqrt(4 / (FAN_IN + FAN_OUT)), None, None),
}


@pytest.mark.parametrize("text", MOMENTS)
def test_moments(text: str) -> None:
    mean, deviation, least, largest = MOMENTS[text]
    blob = filled(text, *SHAPE).double()
    assert float(blob.mean()) == pytest.approx(mean, abs=0.02 * deviation + 1e-6)
    assert float(blob.std()) == pytest.approx(deviation, rel=0.02, abs=1e-6)
    assert least is None or float(blob.min()) >= least - 1e-6
    assert largest is None or float(blob.max()) <= largest + 1e-6


def test_sparse_gaussian_keeps_about_that_many_of_each_row() -> None:
    blob = filled("type: 'gaussian' std: 1 sparse: 20", 100, 1000)
    assert float((blob != 0).double().mean()) == pytest.approx(0.2, abs=0.01)


def test_positive_unitball_rows_sum_to_one() -> None:
    blob = filled("type: 'positive_unitball'", 7, 3, 4)
    assert float(blob.min()) >= 0
    torch.testing.assert_close(blob.flatten(1).sum(1), torch.ones(7))


def test_bilinear_is_the_upsampling_kernel() -> None:
    blob = filled("type: 'bilinear'", 2, 1, 4, 4)
    line = torch.tensor([0.25, 0.75, 0.75, 0.25])
    torch.testing.assert_close(blob, (line[:, None] * line).expand(2, 1, 4, 4))


def test_vector_fan() -> None:
    """A vector has fan_in 1 and fan_out its length."""
    assert float(filled("type: 'xavier'", 1000).abs().max()) <= math.sqrt(3)
    assert float(filled("type: 'xavier' variance_norm: FAN_OUT", 1000).abs().max()) <= math.sqrt(
        3 / 1000
    )


@pytest.mark.parametrize("kind", FILLERS)
def test_the_generator_alone_decides(kind: str) -> None:
    text = f"type: '{kind}'"
    first, again = filled(text, 4, 3, 3, 3), filled(text, 4, 3, 3, 3)
    assert torch.equal(first, again)
    other = filled(text, 4, 3, 3, 3, seed=2)
    assert torch.equal(first, other) == (kind in ("constant", "bilinear"))


WRONG = {
    "type: 'gausian'": ((2, 2), "unknown filler type 'gausian'; did you mean 'gaussian'?"),
    "type: 'uniform' sparse: 3": ((2, 2), "cannot be sparse"),
    "type: 'xavier'": ((), "at least one axis"),
    "type: 'gaussian' std: -1": ((2,), "std -1"),
    "type: 'uniform' min: 2": ((2,), "min 2 above max 1"),
    "type: 'bilinear'": ((2, 2, 3, 4), "square kernel"),
}


@pytest.mark.parametrize("text", WRONG)
def test_refusals(text: str) -> None:
    shape, message = WRONG[text]
    with pytest.raises(FillerError, match=message.replace("?", r"\?")):
        check(filler(text), shape)
