"""Gradient clipping."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import brew, core, workspace
from poseidon.caffe2.model_helper import ModelHelper
from poseidon.caffe2.modeling.gradient_clipping import GradientClipping

W = np.array([[1.0, 2.0]], np.float32)
GRADIENT = np.array([3.0, -4.0], np.float32)
"""Of the weight: the norms are 5 and 7."""


def clipped(*args: Any, **kwargs: Any) -> np.ndarray:
    """The gradient of the weight of y = x W^T + b for a loss that sums y, with x = (3, -4)."""
    workspace.ResetWorkspace()
    model = ModelHelper("m")
    y = brew.fc(model, "x", "y", 2, 1)
    model.AddGradientOperators([y])
    GradientClipping(*args, **kwargs)(model.net, grad_map=model.param_to_grad)
    workspace.RunNetOnce(model.param_init_net)
    workspace.FeedBlob("y_w", W)
    workspace.FeedBlob("x", GRADIENT[None])
    workspace.RunNetOnce(model.net)
    assert workspace.FetchBlob("y_b_grad").tolist() == [1]
    found: np.ndarray = workspace.FetchBlob("y_w_grad")[0]
    return found


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"grad_clip_method": "by_norm", "clip_threshold": 1.0}, GRADIENT / 5),
        ({"grad_clip_method": "by_norm", "clip_threshold": 9}, GRADIENT),
        ({"grad_clip_method": "by_norm", "clip_norm_type": "l1_norm", "clip_threshold": 1}, GRADIENT / 7),
        (
            {"grad_clip_method": "by_norm", "clip_threshold": 1, "use_parameter_norm": True, "blobs_to_include": ["y_w"]},
            GRADIENT / 5 * np.sqrt(5),
        ),
        ({"grad_clip_method": "by_value", "clip_max": 2, "clip_min": -3}, [2, -3]),
        ({"grad_clip_method": "by_value", "blobs_to_exclude": ["y_w"]}, GRADIENT),
    ],
)  # fmt: skip
def test_a_gradient_is_clipped(settings: dict[str, Any], wanted: Any) -> None:
    np.testing.assert_allclose(clipped(**settings), wanted, rtol=1e-6)


def test_the_ratio_of_norms() -> None:
    clipped("by_norm", use_parameter_norm=True, compute_norm_ratio=True, blobs_to_include=["y_w"])
    assert workspace.FetchBlob("y_w_norm_ratio").item() == pytest.approx(np.sqrt(5))


def test_sparse_gradients_stay() -> None:
    net = core.Net("n")
    sparse = core.GradientSlice(indices="i", values="v")
    GradientClipping("by_norm")(net, grad_map={"w": sparse})
    assert not net.Proto().op


def test_what_cannot_be_clipped_is_named() -> None:
    with pytest.raises(ValueError, match="unknown grad_clip_method 'norm'; did you mean 'by_norm'"):
        GradientClipping("norm")
    with pytest.raises(ValueError, match="unknown clip_norm_type 'max'"):
        GradientClipping("by_norm", clip_norm_type="max")
    with pytest.raises(ValueError, match="the gradient of q cannot be clipped: grad_map has none"):
        clipped("by_norm", blobs_to_include=["q"])
