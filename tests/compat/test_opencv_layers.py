"""Layers of branches of Caffe against OpenCV's importer, on the same numbers and weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from poseidon.caffe.proto.caffe_pb2 import TEST
from poseidon.caffe.snapshot.caffemodel import write_model
from tests.support import opencv
from tests.support.nets import build, inputs, layer, stack

Floats = opencv.Floats
REGIONS = np.array(
    [[0, 3, 2, 40, 50], [0, 10, 5, 90, 33], [0, 0, 0, 4, 4], [0, 60, 70, 127, 95]], np.float32
)
GAUSS = "filler { type: 'gaussian' mean: 1 std: 0.3 }"
# OpenCV does not read min_size.
ANCHORS = "feat_stride: 16 base_size: 16 min_size: 1 ratio: [0.5, 1, 2] scale: [8, 16, 32]"


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> Floats:
    return np.float32(scale) * np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def both(folder: Path, text: str, given: dict[str, Floats], top: str) -> tuple[Floats, Floats]:
    """A top, as this program and as OpenCV compute it."""
    shapes = {name: value.shape for name, value in given.items()}
    net = build(inputs(**shapes) + text, phase=TEST)
    ours = net({name: torch.from_numpy(value) for name, value in given.items()})[top]
    model = folder / "net.caffemodel"
    param = net.definition.param
    # OpenCV knows no blob without axes.
    blobs = [
        (name, kind, [np.atleast_1d(array) for array in arrays])
        for name, kind, arrays in net.layer_blobs()
    ]
    write_model(model, param, blobs)
    (theirs,) = opencv.outputs(param, model, given, opencv.makers(param, [top]))
    return ours.detach().numpy(), theirs


PLAIN = {
    "reorg": ("Reorg", "reorg_param { stride: 2 }", {"x": noise(1, 8, 6, 10)}),
    "reorg_square": ("Reorg", "reorg_param { stride: 2 }", {"x": noise(1, 64, 26, 26)}),
    "normalize": (
        "Normalize",
        f"norm_param {{ across_spatial: false channel_shared: false scale_{GAUSS} }}",
        {"x": noise(1, 4, 5, 6)},
    ),
    "normalize_image": (
        "Normalize",
        f"norm_param {{ eps: 1e-3 scale_{GAUSS} }}",
        {"x": noise(1, 4, 5, 6)},
    ),
    "permute": (
        "Permute",
        "permute_param { order: 0 order: 2 order: 3 order: 1 }",
        {"x": noise(2, 4, 5, 6)},
    ),
    "psroi_pooling": (
        "PSROIPooling",
        "psroi_pooling_param { spatial_scale: 0.125 output_dim: 4 group_size: 3 }",
        {"x": noise(1, 36, 12, 16), "r": REGIONS},
    ),
    "roi_pooling": (
        "ROIPooling",
        "roi_pooling_param { spatial_scale: 0.125 pooled_h: 3 pooled_w: 2 }",
        {"x": noise(1, 6, 12, 16), "r": REGIONS},
    ),
    "pool_floor": (
        "Pooling",
        "pooling_param { kernel_size: 3 stride: 2 ceil_mode: false }",
        {"x": noise(1, 4, 8, 10)},
    ),
    "interp": ("Interp", "interp_param { height: 9 width: 13 }", {"x": noise(1, 3, 5, 7)}),
}


@pytest.mark.parametrize("case", PLAIN)
def test_a_layer_agrees_with_opencv(tmp_path: Path, case: str) -> None:
    kind, body, given = PLAIN[case]
    ours, theirs = both(tmp_path, layer(kind, " ".join(given), "y", body), given, "y")
    assert opencv.largest_difference(ours, theirs) < 1e-4


@pytest.mark.parametrize("seed", range(3))
def test_proposals_agree_with_opencv(tmp_path: Path, seed: int) -> None:
    given = {
        "s": np.abs(noise(1, 18, 12, 15, seed=seed)),
        "d": noise(1, 36, 12, 15, seed=seed + 10, scale=0.2),
        "i": np.array([[192, 240, 1]], np.float32),
    }
    body = f"proposal_param {{ {ANCHORS} pre_nms_topn: 1000 post_nms_topn: 50 nms_thresh: 0.6 }}"
    ours, theirs = both(tmp_path, layer("Proposal", "s d i", "y", body), given, "y")
    assert len(ours) == 50
    np.testing.assert_allclose(ours, theirs[: len(ours)], rtol=1e-4, atol=1e-3)


HEAD = """
Convolution data > c1 | convolution_param { num_output: 16 kernel_size: 5 stride: 4 pad: 2 weight_filler { type: 'gaussian' std: 0.1 } }
ReLU c1 > c1
Pooling c1 > p1 | pooling_param { kernel_size: 2 stride: 2 ceil_mode: false }
Convolution p1 > c2 | convolution_param { num_output: 24 kernel_size: 3 stride: 2 pad: 1 XAVIER NOISE }
ReLU c2 > c2
Convolution c2 > rpn_score | convolution_param { num_output: 18 kernel_size: 1 XAVIER }
Convolution c2 > rpn_box | convolution_param { num_output: 36 kernel_size: 1 weight_filler { type: 'gaussian' std: 0.01 } }
Reshape rpn_score > rpn_pairs | reshape_param { shape { dim: 0 dim: 2 dim: -1 dim: 0 } }
Softmax rpn_pairs > rpn_prob
Reshape rpn_prob > rpn_prob2 | reshape_param { shape { dim: 0 dim: 18 dim: -1 dim: 0 } }
Proposal rpn_prob2 rpn_box im_info > rois | proposal_param { ANCHORS pre_nms_topn: 500 post_nms_topn: 20 nms_thresh: 0.6 }
Convolution c2 > maps | convolution_param { num_output: 45 kernel_size: 1 XAVIER NOISE }
Convolution c2 > box_maps | convolution_param { num_output: 72 kernel_size: 1 XAVIER }
PSROIPooling maps rois > parts | psroi_pooling_param { spatial_scale: 0.0625 output_dim: 5 group_size: 3 }
PSROIPooling box_maps rois > box_parts | psroi_pooling_param { spatial_scale: 0.0625 output_dim: 8 group_size: 3 }
Pooling parts > scores | pooling_param { pool: AVE kernel_size: 3 stride: 3 }
Pooling box_parts > boxes | pooling_param { pool: AVE kernel_size: 3 stride: 3 }
Softmax scores > prob
"""
HEAD = HEAD.replace("ANCHORS", ANCHORS).replace("XAVIER", "weight_filler { type: 'xavier' }")
HEAD = HEAD.replace("NOISE", "bias_filler { type: 'gaussian' std: 0.1 }")


@pytest.mark.parametrize("top", ["rois", "prob", "boxes"])
def test_a_whole_head_of_rfcn_agrees_with_opencv(tmp_path: Path, top: str) -> None:
    given = {
        "data": noise(1, 3, 192, 240, seed=5),
        "im_info": np.array([[192, 240, 1]], np.float32),
    }
    text = stack(HEAD.partition("Convolution c2 > maps")[0] if top == "rois" else HEAD)
    ours, theirs = both(tmp_path, text, given, top)
    assert len(ours) == 20
    np.testing.assert_allclose(
        ours,
        theirs[: len(ours)].reshape(ours.shape),
        rtol=1e-4,
        atol=1e-3 if top == "rois" else 1e-4,
    )
