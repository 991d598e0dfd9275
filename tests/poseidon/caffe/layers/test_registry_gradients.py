"""One sweep over every differentiable layer: its gradients against finite differences."""

from __future__ import annotations

import pytest
import torch

from poseidon.caffe.layers.registry import known_types, layer_class
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN
from tests.support.gradient_check import check_gradients
from tests.support.nets import build, definition, inputs, layer, noise, stack, stacks

CASES = stacks(
    """
conv: Convolution IMAGE > y | convolution_param { num_output: 4 kernel_size: 3 group: 2 stride: 2 pad: 1 GAUSS }
conv_dilated_rectangle: Convolution IMAGE > y | convolution_param { num_output: 2 kernel_h: 2 kernel_w: 3 dilation: 2 GAUSS }
conv_0d: Convolution x=2,3 > y | convolution_param { num_output: 2 kernel_size: 1 GAUSS }
pool_max_wide_pad: Pooling IMAGE > y | pooling_param { kernel_size: 3 stride: 2 pad: 2 }
pool_max_mask: Pooling IMAGE > y m | pooling_param { kernel_size: 3 stride: 2 pad: 1 }
pool_ave_wide_pad: Pooling IMAGE > y | pooling_param { pool: AVE kernel_size: 3 stride: 2 pad: 2 }
relu: ReLU FLAT > y
relu_falling: ReLU FLAT > y | relu_param { negative_slope: -0.3 }
sigmoid: Sigmoid FLAT > y
tanh: TanH FLAT > y
lrn_across: LRN IMAGE > y | lrn_param { local_size: 3 alpha: 2 beta: 0.75 k: 1.5 }
lrn_across_power: LRN IMAGE > y | lrn_param { local_size: 5 alpha: 3 beta: 0.6 }
lrn_across_half: LRN IMAGE > y | lrn_param { local_size: 7 alpha: 3 beta: 0.5 }
lrn_within: LRN IMAGE > y | lrn_param { local_size: 3 alpha: 2 norm_region: WITHIN_CHANNEL }
ip: InnerProduct IMAGE > y | inner_product_param { num_output: 2 axis: -2 transpose: true GAUSS }
softmax: Softmax IMAGE > y | softmax_param { axis: 2 }
softmax_loss: SoftmaxWithLoss MAPS > y | loss_param { ignore_label: 1 normalization: BATCH_SIZE }
softmax_loss_of_weighted_classes: SoftmaxWithLoss x=4,5 l=4 > y | loss_param { weight_by_label_freqs: true class_weighting: [1, 0.5, 3, 2, 2] }
euclidean: EuclideanLoss PAIR > loss
split: Split FLAT > a b
concat: Concat PAIR > z
slice: Slice IMAGE > a b | slice_param { slice_point: 1 }
eltwise_sum: Eltwise PAIR > z | eltwise_param { coeff: 0.5 coeff: -2 }
eltwise_product: Eltwise PAIR > z | eltwise_param { operation: PROD }
flatten: Flatten IMAGE > y
reshape: Reshape IMAGE > y | reshape_param { shape { dim: 0 dim: -1 dim: 3 } }
abs: AbsVal FLAT > y
power_cube: Power FLAT > y | power_param { power: 3 }
power_constant: Power FLAT > y | power_param { power: 0 scale: 2 }
power_no_scale: Power FLAT > y | power_param { power: 1.5 scale: 0 shift: 2 }
exp_base: Exp FLAT > y | exp_param { base: 3 scale: 0.7 shift: -0.2 }
log_base: Log FLAT > y | log_param { base: 10 scale: 0.2 shift: 3 }
elu_falling: ELU FLAT > y | elu_param { alpha: -0.5 }
selu: SeLu FLAT > y | selu_param { lambda: 1.5 alpha: 0.5 }
prelu: PReLU IMAGE > y
prelu_shared: PReLU FLAT > y | prelu_param { channel_shared: true filler { value: -0.3 } }
swish_beta: Swish FLAT > y | swish_param { beta: 1.5 }
bnll: BNLL FLAT > y
clip: Clip FLAT > y | clip_param { min: 0 max: 9 }
clip_crossed: Clip FLAT > y | clip_param { min: 1 max: -1 }
scale_scalar: Scale IMAGE > y | scale_param { num_axes: 0 bias_term: true FILLER bias_FILLER }
scale_tail: Scale IMAGE > y | scale_param { axis: -2 num_axes: -1 FILLER }
scale_two: Scale MATES > y | scale_param { axis: 1 bias_term: true FILLER bias_FILLER }
bias: Bias IMAGE > y | bias_param { axis: 1 num_axes: 2 }
axpy: Axpy a=2,3,1,1 x=2,3,2,2 y=2,3,2,2 > z
parameter: Parameter > y | parameter_param { shape { dim: 2 dim: 3 } }
batch_norm: BatchNorm IMAGE > y
batch_norm_line: BatchNorm x=7 > y
batch_norm_global: BatchNorm IMAGE > y | batch_norm_param { use_global_stats: true eps: 1 }
mvn_across: MVN IMAGE > y | mvn_param { across_channels: true }
mvn_mean: MVN IMAGE > y | mvn_param { normalize_variance: false }
normalize: Normalize IMAGE > y | norm_param { scale_filler { value: 20 } }
normalize_channels: Normalize IMAGE > y | norm_param { across_spatial: false channel_shared: false eps: 0.1 scale_FILLER }
lstm_unit: LSTMUnit x=1,2,3 g=1,2,12 k=1,2 > c h
rnn_static: RNN x=3,2,2,2 k=3,2 s=2,3 > y | recurrent_param { num_output: 2 GAUSS }
lstm_static: LSTM x=3,2,3 k=3,2 s=2,2,2 > y | recurrent_param { num_output: 2 GAUSS }
tile: Tile IMAGE > y | tile_param { axis: 2 tiles: 3 }
crop: Crop x=2,3,5,6 z=2,3,2,3 > y | crop_param { offset: 1 offset: 2 }
batch_reindex: BatchReindex x=3,2,2 l=5 > y
filter: Filter x=3,4 k=3 > y
shuffle_channel: ShuffleChannel IMAGE > y | shuffle_channel_param { group: 2 }
permute: Permute IMAGE > y | permute_param { order: 0 order: 2 order: 3 }
interp: Interp IMAGE > y | interp_param { height: 9 width: 4 pad_beg: -1 }
interp_like: Interp x=2,3,4,5 z=1,2,7,3 > y | interp_param { use_blob_size: true }
relu6: ReLU6 FLAT > y
smooth_l1: SmoothL1Loss x=2,3 z=2,3 h=2,3 k=2,3 > y | smooth_l1_loss_param { sigma: 3 }
smooth_l1_ohem: SmoothL1LossOHEM PAIR > z | loss_param { normalization: NONE }
softmax_loss_ohem: SoftmaxWithLossOHEM MAPS > y p z | loss_param { ignore_label: 1 }
embed: Embed l=2,3 > y | embed_param { num_output: 4 input_dim: 3 GAUSS }
hinge: HingeLoss x=4,5 l=4 > y
sigmoid_cross_entropy: SigmoidCrossEntropyLoss x=4,5 k=4,5 > y | loss_param { ignore_label: 0 normalization: VALID }
infogain: InfogainLoss x=4,3 l=4 h=3,3 > y
contrastive_legacy: ContrastiveLoss x=3,2 z=3,2 k=3 > y | contrastive_loss_param { margin: 9 legacy_version: true }
deconv: Deconvolution IMAGE > y | convolution_param { num_output: 2 kernel_size: 3 stride: 2 pad: 1 group: 2 GAUSS }
deconv_1d: Deconvolution x=2,3,4 > y | convolution_param { num_output: 2 kernel_size: 3 dilation: 2 GAUSS }
conv_depthwise: ConvolutionDepthwise IMAGE > y | convolution_param { num_output: 4 kernel_size: 3 GAUSS }
im2col_dilated: Im2col x=2,3,8 > y | convolution_param { kernel_size: 3 dilation: 2 }
spp_ave: SPP x=2,2,5,6 > y | spp_param { pyramid_height: 2 pool: AVE }
reduce_squares: Reduction IMAGE > y | reduction_param { operation: SUMSQ axis: -1 coeff: -1 }
bn_segnet: BN IMAGE > y m v | bn_param { scale_FILLER shift_FILLER }
bn_inference: BN IMAGE > y | bn_param { bn_mode: INFERENCE scale_FILLER shift_FILLER }
bn_axis: BN IMAGE > y | bn_param { axis: 2 var_eps: 0.1 scale_FILLER }
bn_momentum: BN FLAT > y | bn_param { momentum: 0.5 slope_FILLER bias_FILLER }
bn_frozen: BN IMAGE > y | bn_param { frozen: true slope_FILLER }
reorg: Reorg x=2,8,4,6 > y | reorg_param { stride: 2 }
reorg_reverse: Reorg x=2,8,4,6 > y | reorg_param { stride: 2 reverse: true }
upsample_squares: Upsample IMAGE > y | upsample_param { scale: 2 }
psroi_pooling: PSROIPooling x=1,8,3,4 h=2,5 > y | psroi_pooling_param { spatial_scale: 1 output_dim: 2 group_size: 2 }
roi_align: ROIAlign x=1,2,5,4 h=2,5 > y | roi_align_param { pooled_h: 2 pooled_w: 1 }
""",
    IMAGE="x=2,4,5,6",
    FLAT="x=3,5",
    PAIR="x=2,3,2 y=2,3,2",
    MAPS="x=2,3,2,2 l=2,2,2",
    MATES="x=2,3,4,2 s=3,4",
    GAUSS="weight_filler { type: 'gaussian' std: 0.5 } bias_filler { type: 'gaussian' }",
    FILLER="filler { type: 'gaussian' }",
)
KINKS = ("relu", "abs", "elu", "selu", "prelu", "clip")
"""Layers whose gradient changes at zero."""


def type_of(text: str) -> str:
    return definition(text).param.layer[-1].type


# Types whose gradient is not what finite differences say, or that have none, each with the test
# that holds it.
# Sources, layers without a gradient, copies of others, and those with a test file of their own.
HELD_ELSEWHERE = """
AnnotatedData Data DenseImageData DummyData HDF5Data ImageData ImageSegData Input MemoryData
ROIData WindowData
Accuracy AnchorTarget ArgMax BoxAnnotatorOHEM DetectionEvaluate DetectionOutput HDF5Output
PriorBox Proposal ProposalTarget Silence Threshold
ContrastiveLoss DepthwiseConvolution Dropout HoleConvolution MultiBoxLoss
MultinomialLogisticLoss Python ROIPooling SeLuDropout
"""


def test_every_differentiable_type_is_here() -> None:
    held = {type_of(text) for text in CASES.values()} | set(HELD_ELSEWHERE.split())
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
    net = build(CASES[name]).double()
    given = values(net)
    variables = [value for value in [*given.values(), *net.parameters()] if value.requires_grad]

    wanted = [place for place, top in enumerate(net(given).values()) if top.requires_grad]

    def tops_with_gradients() -> list[torch.Tensor]:
        found = list(net(given).values())
        return [found[place] for place in wanted]

    kink_range = 1e-3 if name.startswith(KINKS) and name != "clip_crossed" else 0
    check_gradients(tops_with_gradients, variables, kink_range=kink_range)


@pytest.mark.parametrize(
    "name",
    [name for name, text in CASES.items() if layer_class(type_of(text)).TOPS_MAY_BE_OVERWRITTEN],
)
def test_tops_that_may_be_overwritten(name: str) -> None:
    """The layer above may write over the tops: neither the bottoms nor the gradients change."""
    results = []
    for value in (None, 1e6):
        net = build(CASES[name]).double()
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
    net = build(stack("Dropout x=50,40 > y | dropout_param { dropout_ratio: 0.3 }"))
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


def test_dropout_in_test_passes_everything() -> None:
    net = build(inputs(x=(3, 4)) + layer("Dropout", "x", "y"), phase=TEST)
    x = noise(3, 4)
    assert net({"x": x})["y"] is x


def test_dropout_may_scale_in_test_instead() -> None:
    text = stack("Dropout x=50,40 > y | dropout_param { dropout_ratio: 0.25 scale_train: false }")
    x = noise(50, 40)
    kept = build(text)({"x": x})["y"]
    assert torch.equal(kept[kept != 0], x[kept != 0])
    torch.testing.assert_close(build(text, phase=TEST)({"x": x})["y"], 0.75 * x)


def test_dropout_may_draw_in_test() -> None:
    """Bayesian SegNet's form."""
    net = build(
        stack("Dropout x=50,40 > y | dropout_param { sample_weights_test: true }"),
        phase=TEST,
    )
    y = net({"x": torch.ones(50, 40)})["y"]
    assert sorted(set(y.flatten().tolist())) == [0, 2]
