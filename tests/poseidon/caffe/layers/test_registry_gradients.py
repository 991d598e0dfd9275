"""One sweep over every differentiable layer: its gradients against finite differences."""

from __future__ import annotations

import pytest
import torch

from poseidon.caffe.layers.registry import known_types, layer_class
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN
from poseidon.errors import DefinitionError
from tests.support.gradient_check import check_gradients
from tests.support.nets import build, inputs, layer, noise

IMAGE = {"x": (2, 4, 5, 6)}
FLAT = {"x": (3, 5)}
SCORES = {"x": (4, 5), "l": (4,)}
MAPS = {"x": (2, 3, 2, 2), "l": (2, 2, 2)}
PAIR = {"x": (2, 3, 2), "y": (2, 3, 2)}
GAUSS = "weight_filler { type: 'gaussian' std: 0.5 } bias_filler { type: 'gaussian' }"
FILLER = "filler { type: 'gaussian' }"
FILLERS = f"{FILLER} bias_{FILLER}"
MATES = {"x": (2, 3, 4, 2), "s": (3, 4)}

# name: (input shapes, layer type, bottoms, tops, body, kink range around zero)
CASES = {
    "conv": (
        IMAGE,
        "Convolution",
        "x",
        "y",
        f"convolution_param {{ num_output: 2 kernel_size: 3 {GAUSS} }}",
        0,
    ),
    "conv_group_stride_pad": (
        IMAGE,
        "Convolution",
        "x",
        "y",
        f"convolution_param {{ num_output: 4 kernel_size: 3 group: 2 stride: 2 pad: 1 {GAUSS} }}",
        0,
    ),
    "conv_dilated_rectangle": (
        IMAGE,
        "Convolution",
        "x",
        "y",
        f"convolution_param {{ num_output: 2 kernel_h: 2 kernel_w: 3 dilation: 2 {GAUSS} }}",
        0,
    ),
    "conv_1d": (
        {"x": (2, 3, 7)},
        "Convolution",
        "x",
        "y",
        f"convolution_param {{ num_output: 2 kernel_size: 3 {GAUSS} }}",
        0,
    ),
    "conv_0d": (
        {"x": (2, 3)},
        "Convolution",
        "x",
        "y",
        f"convolution_param {{ num_output: 2 kernel_size: 1 {GAUSS} }}",
        0,
    ),
    "conv_two_bottoms": (
        {"x": (1, 2, 4, 4), "z": (1, 2, 4, 4)},
        "Convolution",
        "x z",
        "y w",
        f"convolution_param {{ num_output: 2 kernel_size: 3 {GAUSS} }}",
        0,
    ),
    "pool_max": (IMAGE, "Pooling", "x", "y", "pooling_param { kernel_size: 3 stride: 2 }", 0),
    "pool_max_wide_pad": (
        IMAGE,
        "Pooling",
        "x",
        "y",
        "pooling_param { kernel_size: 3 stride: 2 pad: 2 }",
        0,
    ),
    "pool_max_mask": (
        IMAGE,
        "Pooling",
        "x",
        "y m",
        "pooling_param { kernel_size: 3 stride: 2 pad: 1 }",
        0,
    ),
    "pool_ave": (
        IMAGE,
        "Pooling",
        "x",
        "y",
        "pooling_param { pool: AVE kernel_size: 3 stride: 2 pad: 1 }",
        0,
    ),
    "pool_ave_wide_pad": (
        IMAGE,
        "Pooling",
        "x",
        "y",
        "pooling_param { pool: AVE kernel_size: 3 stride: 2 pad: 2 }",
        0,
    ),
    "pool_global": (
        IMAGE,
        "Pooling",
        "x",
        "y",
        "pooling_param { pool: AVE global_pooling: true }",
        0,
    ),
    "relu": (FLAT, "ReLU", "x", "y", "", 1e-3),
    "relu_leaky": (FLAT, "ReLU", "x", "y", "relu_param { negative_slope: 0.3 }", 1e-3),
    "relu_falling": (FLAT, "ReLU", "x", "y", "relu_param { negative_slope: -0.3 }", 1e-3),
    "sigmoid": (FLAT, "Sigmoid", "x", "y", "", 0),
    "tanh": (FLAT, "TanH", "x", "y", "", 0),
    "lrn_across": (
        IMAGE,
        "LRN",
        "x",
        "y",
        "lrn_param { local_size: 3 alpha: 2 beta: 0.75 k: 1.5 }",
        0,
    ),
    "lrn_across_power": (
        IMAGE,
        "LRN",
        "x",
        "y",
        "lrn_param { local_size: 5 alpha: 3 beta: 0.6 }",
        0,
    ),
    "lrn_across_half": (
        IMAGE,
        "LRN",
        "x",
        "y",
        "lrn_param { local_size: 7 alpha: 3 beta: 0.5 }",
        0,
    ),
    "lrn_within": (
        IMAGE,
        "LRN",
        "x",
        "y",
        "lrn_param { local_size: 3 alpha: 2 norm_region: WITHIN_CHANNEL }",
        0,
    ),
    "ip": (FLAT, "InnerProduct", "x", "y", f"inner_product_param {{ num_output: 4 {GAUSS} }}", 0),
    "ip_transpose": (
        FLAT,
        "InnerProduct",
        "x",
        "y",
        f"inner_product_param {{ num_output: 4 transpose: true {GAUSS} }}",
        0,
    ),
    "ip_axis": (
        IMAGE,
        "InnerProduct",
        "x",
        "y",
        f"inner_product_param {{ num_output: 2 axis: -2 {GAUSS} }}",
        0,
    ),
    "softmax": (FLAT, "Softmax", "x", "y", "", 0),
    "softmax_axis": (IMAGE, "Softmax", "x", "y", "softmax_param { axis: 2 }", 0),
    "softmax_loss": (SCORES, "SoftmaxWithLoss", "x l", "y", "", 0),
    "softmax_loss_maps": (
        MAPS,
        "SoftmaxWithLoss",
        "x l",
        "y",
        "loss_param { ignore_label: 1 normalization: BATCH_SIZE }",
        0,
    ),
    "euclidean": (PAIR, "EuclideanLoss", "x y", "loss", "", 0),
    "split": (FLAT, "Split", "x", "a b", "", 0),
    "concat": (PAIR, "Concat", "x y", "z", "", 0),
    "slice": (IMAGE, "Slice", "x", "a b", "slice_param { slice_point: 1 }", 0),
    "eltwise_sum": (PAIR, "Eltwise", "x y", "z", "eltwise_param { coeff: 0.5 coeff: -2 }", 0),
    "eltwise_product": (PAIR, "Eltwise", "x y", "z", "eltwise_param { operation: PROD }", 0),
    "eltwise_max": (PAIR, "Eltwise", "x y", "z", "eltwise_param { operation: MAX }", 0),
    "flatten": (IMAGE, "Flatten", "x", "y", "", 0),
    "reshape": (IMAGE, "Reshape", "x", "y", "reshape_param { shape { dim: 0 dim: -1 dim: 3 } }", 0),
}
CASES |= {
    "abs": (FLAT, "AbsVal", "x", "y", "", 1e-3),
    "power_linear": (FLAT, "Power", "x", "y", "power_param { scale: -2 shift: 1 }", 0),
    "power_square": (FLAT, "Power", "x", "y", "power_param { power: 2 scale: 0.5 shift: 3 }", 0),
    "power_cube": (FLAT, "Power", "x", "y", "power_param { power: 3 }", 0),
    "power_constant": (FLAT, "Power", "x", "y", "power_param { power: 0 scale: 2 }", 0),
    "power_no_scale": (FLAT, "Power", "x", "y", "power_param { power: 1.5 scale: 0 shift: 2 }", 0),
    "exp": (FLAT, "Exp", "x", "y", "", 0),
    "exp_base": (FLAT, "Exp", "x", "y", "exp_param { base: 3 scale: 0.7 shift: -0.2 }", 0),
    "log_base": (FLAT, "Log", "x", "y", "log_param { base: 10 scale: 0.2 shift: 3 }", 0),
    "elu": (FLAT, "ELU", "x", "y", "elu_param { alpha: 0.5 }", 1e-3),
    "selu": (FLAT, "SeLu", "x", "y", "selu_param { lambda: 1.5 alpha: 0.5 }", 1e-3),
    "interp_like": (
        {"x": (2, 3, 4, 5), "z": (1, 2, 7, 3)},
        "Interp",
        "x z",
        "y",
        "interp_param { use_blob_size: true }",
        0,
    ),
    "elu_falling": (FLAT, "ELU", "x", "y", "elu_param { alpha: -0.5 }", 1e-3),
    "prelu": (IMAGE, "PReLU", "x", "y", "", 1e-3),
    "prelu_shared": (
        FLAT,
        "PReLU",
        "x",
        "y",
        "prelu_param { channel_shared: true filler { value: -0.3 } }",
        1e-3,
    ),
    "swish": (FLAT, "Swish", "x", "y", "", 0),
    "swish_beta": (FLAT, "Swish", "x", "y", "swish_param { beta: 1.5 }", 0),
    "bnll": (FLAT, "BNLL", "x", "y", "", 0),
    "clip": (FLAT, "Clip", "x", "y", "clip_param { min: 0 max: 9 }", 1e-3),
    "clip_crossed": (FLAT, "Clip", "x", "y", "clip_param { min: 1 max: -1 }", 0),
    "scale": (IMAGE, "Scale", "x", "y", f"scale_param {{ bias_term: true {FILLERS} }}", 0),
    "scale_scalar": (
        IMAGE,
        "Scale",
        "x",
        "y",
        f"scale_param {{ num_axes: 0 bias_term: true {FILLERS} }}",
        0,
    ),
    "scale_tail": (
        IMAGE,
        "Scale",
        "x",
        "y",
        f"scale_param {{ axis: -2 num_axes: -1 {FILLERS} }}",
        0,
    ),
    "scale_two": (
        MATES,
        "Scale",
        "x s",
        "y",
        f"scale_param {{ axis: 1 bias_term: true {FILLERS} }}",
        0,
    ),
    "bias": (IMAGE, "Bias", "x", "y", "bias_param { axis: 1 num_axes: 2 }", 0),
    "bias_two": (MATES, "Bias", "x s", "y", "bias_param { axis: 1 }", 0),
    "axpy": (
        {"a": (2, 3, 1, 1), "x": (2, 3, 2, 2), "y": (2, 3, 2, 2)},
        "Axpy",
        "a x y",
        "z",
        "",
        0,
    ),
    "parameter": (FLAT, "Parameter", "", "y", "parameter_param { shape { dim: 2 dim: 3 } }", 0),
    "batch_norm": (IMAGE, "BatchNorm", "x", "y", "", 0),
    "batch_norm_flat": (FLAT, "BatchNorm", "x", "y", "batch_norm_param { eps: 0.1 }", 0),
    "batch_norm_line": ({"x": (7,)}, "BatchNorm", "x", "y", "", 0),
    "batch_norm_global": (
        IMAGE,
        "BatchNorm",
        "x",
        "y",
        "batch_norm_param { use_global_stats: true eps: 1 }",
        0,
    ),
    "mvn": (IMAGE, "MVN", "x", "y", "", 0),
    "mvn_across": (IMAGE, "MVN", "x", "y", "mvn_param { across_channels: true }", 0),
    "mvn_mean": (IMAGE, "MVN", "x", "y", "mvn_param { normalize_variance: false }", 0),
    "normalize": (IMAGE, "Normalize", "x", "y", "norm_param { scale_filler { value: 20 } }", 0),
    "normalize_channels": (
        IMAGE,
        "Normalize",
        "x",
        "y",
        f"norm_param {{ across_spatial: false channel_shared: false eps: 0.1 scale_{FILLER} }}",
        0,
    ),
    "lstm_unit": (
        {"x": (1, 2, 3), "g": (1, 2, 12), "k": (1, 2)},
        "LSTMUnit",
        "x g k",
        "c h",
        "",
        0,
    ),
    "rnn": (
        {"x": (3, 2, 4), "k": (3, 2)},
        "RNN",
        "x k",
        "y",
        f"recurrent_param {{ num_output: 3 {GAUSS} }}",
        0,
    ),
    "rnn_static": (
        {"x": (3, 2, 2, 2), "k": (3, 2), "s": (2, 3)},
        "RNN",
        "x k s",
        "y",
        f"recurrent_param {{ num_output: 2 {GAUSS} }}",
        0,
    ),
    "lstm": (
        {"x": (4, 2, 3), "k": (4, 2)},
        "LSTM",
        "x k",
        "y",
        f"recurrent_param {{ num_output: 2 {GAUSS} }}",
        0,
    ),
    "lstm_static": (
        {"x": (3, 2, 3), "k": (3, 2), "s": (2, 2, 2)},
        "LSTM",
        "x k s",
        "y",
        f"recurrent_param {{ num_output: 2 {GAUSS} }}",
        0,
    ),
}
PYRAMID = {"x": (2, 2, 5, 6)}
CASES |= {
    "tile": (IMAGE, "Tile", "x", "y", "tile_param { axis: 2 tiles: 3 }", 0),
    "crop": (
        {"x": (2, 3, 5, 6), "z": (2, 3, 2, 3)},
        "Crop",
        "x z",
        "y",
        "crop_param { offset: 1 offset: 2 }",
        0,
    ),
    "batch_reindex": ({"x": (3, 2, 2), "l": (5,)}, "BatchReindex", "x l", "y", "", 0),
    "filter": ({"x": (3, 4), "k": (3,)}, "Filter", "x k", "y", "", 0),
    "shuffle_channel": (IMAGE, "ShuffleChannel", "x", "y", "shuffle_channel_param { group: 2 }", 0),
    "permute": (IMAGE, "Permute", "x", "y", "permute_param { order: 0 order: 2 order: 3 }", 0),
    "interp": (IMAGE, "Interp", "x", "y", "interp_param { height: 9 width: 4 pad_beg: -1 }", 0),
    "relu6": (FLAT, "ReLU6", "x", "y", "", 1e-3),
    "smooth_l1": (
        {"x": (2, 3), "z": (2, 3), "h": (2, 3), "k": (2, 3)},
        "SmoothL1Loss",
        "x z h k",
        "y",
        "smooth_l1_loss_param { sigma: 3 }",
        0,
    ),
    "embed": (
        {"l": (2, 3)},
        "Embed",
        "l",
        "y",
        f"embed_param {{ num_output: 4 input_dim: 3 {GAUSS} }}",
        0,
    ),
    "hinge": (SCORES, "HingeLoss", "x l", "y", "", 0),
    "hinge_squares": (SCORES, "HingeLoss", "x l", "y", "hinge_loss_param { norm: L2 }", 0),
    "sigmoid_cross_entropy": (
        {"x": (4, 5), "k": (4, 5)},
        "SigmoidCrossEntropyLoss",
        "x k",
        "y",
        "",
        0,
    ),
    "sigmoid_cross_entropy_valid": (
        {"x": (4, 5), "k": (4, 5)},
        "SigmoidCrossEntropyLoss",
        "x k",
        "y",
        "loss_param { ignore_label: 0 normalization: VALID }",
        0,
    ),
    "infogain": ({"x": (4, 3), "l": (4,), "h": (3, 3)}, "InfogainLoss", "x l h", "y", "", 0),
    "contrastive_legacy": (
        {"x": (3, 2), "z": (3, 2), "k": (3,)},
        "ContrastiveLoss",
        "x z k",
        "y",
        "contrastive_loss_param { margin: 9 legacy_version: true }",
        0,
    ),
    "deconv": (
        IMAGE,
        "Deconvolution",
        "x",
        "y",
        f"convolution_param {{ num_output: 2 kernel_size: 3 stride: 2 pad: 1 group: 2 {GAUSS} }}",
        0,
    ),
    "deconv_1d": (
        {"x": (2, 3, 4)},
        "Deconvolution",
        "x",
        "y",
        f"convolution_param {{ num_output: 2 kernel_size: 3 dilation: 2 {GAUSS} }}",
        0,
    ),
    "conv_depthwise": (
        IMAGE,
        "ConvolutionDepthwise",
        "x",
        "y",
        f"convolution_param {{ num_output: 4 kernel_size: 3 {GAUSS} }}",
        0,
    ),
    "im2col": (
        IMAGE,
        "Im2col",
        "x",
        "y",
        "convolution_param { kernel_size: 3 stride: 2 pad: 1 }",
        0,
    ),
    "im2col_dilated": (
        {"x": (2, 3, 8)},
        "Im2col",
        "x",
        "y",
        "convolution_param { kernel_size: 3 dilation: 2 }",
        0,
    ),
    "spp": (PYRAMID, "SPP", "x", "y", "spp_param { pyramid_height: 2 }", 0),
    "spp_ave": (PYRAMID, "SPP", "x", "y", "spp_param { pyramid_height: 2 pool: AVE }", 0),
    "reduce_sum": (IMAGE, "Reduction", "x", "y", "reduction_param { axis: 2 coeff: 3 }", 0),
    "reduce_absolute": (
        FLAT,
        "Reduction",
        "x",
        "y",
        "reduction_param { operation: ASUM axis: 1 }",
        1e-3,
    ),
    "reduce_squares": (
        FLAT,
        "Reduction",
        "x",
        "y",
        "reduction_param { operation: SUMSQ coeff: -1 }",
        0,
    ),
    "reduce_mean": (
        IMAGE,
        "Reduction",
        "x",
        "y",
        "reduction_param { operation: MEAN axis: -1 }",
        0,
    ),
}

GROUPS = {"x": (2, 8, 5, 6), "h": (3, 5)}
CASES |= {
    "bn_segnet": (IMAGE, "BN", "x", "y m v", f"bn_param {{ scale_{FILLER} shift_{FILLER} }}", 0),
    "bn_inference": (
        IMAGE,
        "BN",
        "x",
        "y",
        f"bn_param {{ bn_mode: INFERENCE scale_{FILLER} shift_{FILLER} }}",
        0,
    ),
    "bn_axis": (IMAGE, "BN", "x", "y", f"bn_param {{ axis: 2 var_eps: 0.1 scale_{FILLER} }}", 0),
    "bn_momentum": (
        FLAT,
        "BN",
        "x",
        "y",
        f"bn_param {{ momentum: 0.5 slope_{FILLER} bias_{FILLER} }}",
        0,
    ),
    "bn_frozen": (IMAGE, "BN", "x", "y", f"bn_param {{ frozen: true slope_{FILLER} }}", 0),
    "pool_max_ceil_mode": (
        IMAGE,
        "Pooling",
        "x",
        "y",
        "pooling_param { kernel_size: 3 stride: 2 ceil_mode: false }",
        0,
    ),
    "reorg": ({"x": (2, 8, 4, 6)}, "Reorg", "x", "y", "reorg_param { stride: 2 }", 0),
    "reorg_reverse": (
        {"x": (2, 8, 4, 6)},
        "Reorg",
        "x",
        "y",
        "reorg_param { stride: 2 reverse: true }",
        0,
    ),
    "upsample_squares": (IMAGE, "Upsample", "x", "y", "upsample_param { scale: 2 }", 0),
    "psroi_pooling": (
        GROUPS,
        "PSROIPooling",
        "x h",
        "y",
        "psroi_pooling_param { spatial_scale: 1 output_dim: 2 group_size: 2 }",
        0,
    ),
    "roi_align": (GROUPS, "ROIAlign", "x h", "y", "roi_align_param { pooled_h: 2 pooled_w: 1 }", 0),
    "smooth_l1_ohem": (
        PAIR,
        "SmoothL1LossOHEM",
        "x y",
        "z",
        "loss_param { normalization: NONE }",
        0,
    ),
    "softmax_loss_ohem": (
        MAPS,
        "SoftmaxWithLossOHEM",
        "x l",
        "y p z",
        "loss_param { ignore_label: 1 }",
        0,
    ),
    "softmax_loss_of_weighted_classes": (
        SCORES,
        "SoftmaxWithLoss",
        "x l",
        "y",
        "loss_param { weight_by_label_freqs: true class_weighting: [1, 0.5, 3, 2, 2] }",
        0,
    ),
}

# Types whose gradient is not what finite differences say, or that have none, each with the test
# that holds it.
HELD_ELSEWHERE = {
    "Accuracy": "has no gradient",
    "AnchorTarget": "has no gradient",
    "AnnotatedData": "a source",
    "ArgMax": "has no gradient",
    "BoxAnnotatorOHEM": "has no gradient",
    "ContrastiveLoss": "Caffe adds 1e-4 to the distance: test_distance_loss.py; its legacy form "
    "is above",
    "Data": "a source",
    "DenseImageData": "a source",
    "DepthwiseConvolution": "is Convolution",
    "DetectionEvaluate": "has no gradient",
    "DetectionOutput": "has no gradient",
    "Dropout": "draws: below",
    "DummyData": "a source",
    "HDF5Data": "a source",
    "HoleConvolution": "is Convolution",
    "HDF5Output": "has no top",
    "ImageData": "a source",
    "ImageSegData": "a source",
    "Input": "a source",
    "MemoryData": "a source",
    "MultiBoxLoss": "ssd/test_multibox_loss.py",
    "MultinomialLogisticLoss": "of probabilities: test_classification_loss.py",
    "PriorBox": "has no gradient",
    "Proposal": "has no gradient",
    "ProposalTarget": "has no gradient",
    "Python": "the user's: test_python_layer.py",
    "ROIData": "a source",
    "ROIPooling": "against pooling: test_regions.py",
    "SeLuDropout": "draws: below",
    "Silence": "has no top",
    "Threshold": "has no gradient",
    "WindowData": "a source",
}


def test_every_differentiable_type_is_here() -> None:
    held = {case[1] for case in CASES.values()} | set(HELD_ELSEWHERE)
    assert sorted(known_types() - held) == []


def values(net: Net) -> dict[str, torch.Tensor]:
    """Noise for each input; whole labels below three for one named l; 0 or 1 for one named k, 0
    at first and last; a constant for one named h.
    """
    generator = torch.Generator().manual_seed(7)
    found = {}
    for name, shape in net.input_shapes.items():
        if name == "l":
            found[name] = torch.randint(3, shape, generator=generator).double()
        elif name == "k":
            found[name] = torch.ones(shape, dtype=torch.float64)
            found[name][0] = 0
            found[name].view(-1)[-1] = 0
        elif name == "h":
            found[name] = torch.rand(shape, generator=generator, dtype=torch.float64)
        else:
            found[name] = torch.randn(
                shape, generator=generator, dtype=torch.float64
            ).requires_grad_()
    return found


@pytest.mark.parametrize("name", CASES)
def test_against_finite_differences(name: str) -> None:
    shapes, kind, bottoms, tops, body, kink_range = CASES[name]
    net = build(inputs(**shapes) + layer(kind, bottoms, tops, body))
    net.double()
    given = values(net)
    variables = [value for value in [*given.values(), *net.parameters()] if value.requires_grad]

    wanted = [place for place, top in enumerate(net(given).values()) if top.requires_grad]

    def tops_with_gradients() -> list[torch.Tensor]:
        found = list(net(given).values())
        return [found[place] for place in wanted]

    check_gradients(tops_with_gradients, variables, kink_range=kink_range)


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if layer_class(case[1]).TOPS_MAY_BE_OVERWRITTEN]
)
def test_tops_that_may_be_overwritten(name: str) -> None:
    """The layer above may write over the tops: neither the bottoms nor the gradients change."""
    shapes, kind, bottoms, tops, body, _ = CASES[name]
    results = []
    for value in (None, 1e6):
        net = build(inputs(**shapes) + layer(kind, bottoms, tops, body))
        net.double()
        given = values(net)
        before = {key: tensor.detach().clone() for key, tensor in given.items()}
        found = [top for top in net(given).values() if top.requires_grad]
        for top in found if value else []:
            top.data.fill_(value)
        assert all(torch.equal(before[key], tensor) for key, tensor in given.items())
        leaves = [tensor for tensor in [*given.values(), *net.parameters()] if tensor.requires_grad]
        weights = [torch.ones_like(top) for top in found]
        results.append(
            torch.autograd.grad(found, leaves, weights, allow_unused=True) if found else ()
        )
    for plain, overwritten in zip(*results, strict=True):
        assert (plain is None and overwritten is None) or torch.equal(plain, overwritten)


def test_dropout_scales_its_gradient_by_its_mask() -> None:
    """The mask is drawn anew each pass, so finite differences do not apply: y = m x, dy/dx = m."""
    net = build(
        inputs(x=(50, 40)) + layer("Dropout", "x", "y", "dropout_param { dropout_ratio: 0.3 }")
    )
    x = torch.full((50, 40), 2.0, requires_grad=True)
    y = net({"x": x})["y"]
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(y.detach(), x.grad * 2)
    assert sorted(set(x.grad.flatten().tolist())) == pytest.approx([0, 1 / 0.7])
    assert 0.25 < float((x.grad == 0).float().mean()) < 0.35


def test_selu_dropout_keeps_mean_and_variance() -> None:
    """y = a x + b where kept, else a alpha + b; dy/dx = a where kept."""
    body = "selu_dropout_param { dropout_ratio: 0.25 alpha: -2 }"
    net = build(inputs(x=(200, 200)) + layer("SeLuDropout", "x", "y", body))
    x = noise(200, 200).requires_grad_()
    y = net({"x": x})["y"]
    y.sum().backward()
    assert x.grad is not None
    kept = x.grad != 0
    a = (0.75 + 4 * 0.75 * 0.25) ** -0.5
    b = a * 0.25 * 2
    torch.testing.assert_close(x.grad, kept * a)
    torch.testing.assert_close(y.detach(), torch.where(kept, a * x.detach() + b, -2 * a + b))
    assert 0.74 < float(kept.float().mean()) < 0.76
    assert abs(float(y.detach().mean())) < 0.02 and abs(float(y.detach().var()) - 1) < 0.02


@pytest.mark.parametrize(("phase", "ratio"), [(TEST, 0.5), (TRAIN, 0)])
def test_selu_dropout_passes_everything(phase: int, ratio: float) -> None:
    body = f"selu_dropout_param {{ dropout_ratio: {ratio} }}"
    net = build(inputs(x=(3, 4)) + layer("SeLuDropout", "x", "x", body), phase=phase)
    x = noise(3, 4)
    assert torch.equal(net({"x": x})["x"], x)


def test_selu_dropout_needs_a_ratio_below_one() -> None:
    with pytest.raises(DefinitionError, match="dropout_ratio is 1"):
        build(
            inputs(x=(3,))
            + layer("SeLuDropout", "x", "y", "selu_dropout_param { dropout_ratio: 1 }")
        )


def test_dropout_in_test_passes_everything() -> None:
    net = build(inputs(x=(3, 4)) + layer("Dropout", "x", "y"), phase=TEST)
    x = noise(3, 4)
    assert net({"x": x})["y"] is x


def test_dropout_may_scale_in_test_instead() -> None:
    text = inputs(x=(50, 40)) + layer(
        "Dropout", "x", "y", "dropout_param { dropout_ratio: 0.25 scale_train: false }"
    )
    x = noise(50, 40)
    kept = build(text)({"x": x})["y"]
    assert torch.equal(kept[kept != 0], x[kept != 0])
    torch.testing.assert_close(build(text, phase=TEST)({"x": x})["y"], 0.75 * x)


def test_dropout_may_draw_in_test() -> None:
    """Bayesian SegNet's form."""
    net = build(
        inputs(x=(50, 40))
        + layer("Dropout", "x", "y", "dropout_param { sample_weights_test: true }"),
        phase=TEST,
    )
    y = net({"x": torch.ones(50, 40)})["y"]
    assert sorted(set(y.flatten().tolist())) == [0, 2]
