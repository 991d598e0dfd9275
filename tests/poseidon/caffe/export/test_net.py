"""ONNX models of nets: each layer type in odd settings, whole definitions, refusals; ONNX
Runtime gives the numbers.
"""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch

from poseidon.caffe.export.graph import LAYERS, OPSET
from poseidon.caffe.export.net import NEEDS_LABELS, Exported, export_net, inference_definition
from poseidon.caffe.layers.registry import known_types, layer_class
from poseidon.caffe.layers.sources import Source
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST
from poseidon.errors import DefinitionError, UsageError
from tests.support.nets import build, definition, inputs, layer, stack, stacks

FILLED = "weight_filler { type: 'gaussian' std: 0.5 } bias_filler { type: 'gaussian' std: 0.5 }"
RECURRENT = f"recurrent_param {{ num_output: 4 {FILLED} }}"
CASES = stacks(
    """
conv: Convolution IMAGE > y | convolution_param { num_output: 4 kernel_size: 3 pad: 1 stride: 2 FILLED }
conv of sides: Convolution IMAGE > y | convolution_param { num_output: 4 kernel_h: 3 kernel_w: 2 pad_h: 1 pad_w: 0 dilation: 2 group: 2 FILLED }
conv of points: Convolution x=2,5 > y | convolution_param { num_output: 4 FILLED }
conv of 3 axes: Convolution x=2,3,4,5,3 > y | convolution_param { num_output: 4 kernel_size: 2 FILLED }
conv of axis 2: Convolution x=2,3,4,5 > y | convolution_param { num_output: 4 kernel_size: 2 axis: 2 FILLED }
hole: HoleConvolution IMAGE > y | convolution_param { num_output: 4 kernel_size: 3 hole: 2 FILLED }
depthwise: ConvolutionDepthwise IMAGE > y | convolution_param { num_output: 4 kernel_size: 3 FILLED }
deconvolution: Deconvolution IMAGE > y | convolution_param { num_output: 4 kernel_size: 3 stride: 2 pad: 1 group: 2 FILLED }
im2col: Im2col IMAGE > y | convolution_param { kernel_size: 3 stride: 2 pad: 1 dilation: 2 }
max pool: Pooling IMAGE > y | pooling_param { kernel_size: 3 stride: 2 }
max pool of a clipped window: Pooling IMAGE > y | pooling_param { kernel_size: 3 stride: 3 pad: 1 }
max pool of wide padding: Pooling IMAGE > y | pooling_param { kernel_size: 3 stride: 2 pad: 2 }
max pool with a mask: Pooling IMAGE > y mask | pooling_param { kernel_size: 3 stride: 2 pad: 1 }
mean pool: Pooling IMAGE > y | pooling_param { pool: AVE kernel_size: 3 stride: 2 }
mean pool of wide padding: Pooling IMAGE > y | pooling_param { pool: AVE kernel_h: 2 kernel_w: 3 stride: 2 pad: 1 }
mean pool rounded down: Pooling IMAGE > y | pooling_param { pool: AVE kernel_size: 2 stride: 2 round_mode: FLOOR }
global pool: Pooling IMAGE > y | pooling_param { pool: AVE global_pooling: true }
stochastic pool: AbsVal IMAGE > a; Pooling a > y | pooling_param { pool: STOCHASTIC kernel_size: 3 stride: 2 }
spp: SPP IMAGE > y | spp_param { pyramid_height: 2 pool: MAX }
spp of one level: SPP IMAGE > y | spp_param { pyramid_height: 1 pool: AVE }
unpooling: Pooling IMAGE > p m | pooling_param { kernel_size: 2 stride: 2 }; Upsample p m > y | upsample_param { upsample_h: 7 upsample_w: 6 }
nearest: Upsample IMAGE > y | upsample_param { scale: 3 }
interp like another: Interp x=1,3,6,7 z=1,2,11,5 > y | interp_param { use_blob_size: true pad_end: -1 }
interp: Interp IMAGE > y | interp_param { height: 11 width: 5 pad_beg: -1 }
reorg: Reorg x=2,4,6,4 > y | reorg_param { stride: 2 }
reorg reversed: Reorg IMAGE > y | reorg_param { stride: 2 reverse: true }
roi pooling: ROIPooling REGIONS > y | roi_pooling_param { pooled_h: 3 pooled_w: 2 spatial_scale: 0.5 }
psroi pooling: PSROIPooling REGIONS > y | psroi_pooling_param { output_dim: 2 group_size: 2 spatial_scale: 0.5 }
roi align: ROIAlign REGIONS > y | roi_align_param { pooled_h: 3 pooled_w: 2 spatial_scale: 0.5 sampling_ratio: 2 }
inner product: InnerProduct IMAGE > y | inner_product_param { num_output: 3 FILLED }
inner product transposed: InnerProduct IMAGE > y | inner_product_param { num_output: 3 transpose: true bias_term: false FILLED }
inner product of axis 2: InnerProduct IMAGE > y | inner_product_param { num_output: 3 axis: 2 FILLED }
embed: Embed index=2,5 > y | embed_param { num_output: 3 input_dim: 9 FILLED }
relu: ReLU IMAGE > y
leaky relu: ReLU IMAGE > y | relu_param { negative_slope: 0.1 }
prelu: PReLU IMAGE > y
shared prelu: PReLU IMAGE > y | prelu_param { channel_shared: true }
elu: ELU IMAGE > y | elu_param { alpha: 0.7 }
selu: SeLu IMAGE > y | selu_param { lambda: 1.5 alpha: 0.7 }
selu dropout: SeLuDropout IMAGE > y
sigmoid: Sigmoid IMAGE > y
tanh: TanH IMAGE > y
abs: AbsVal IMAGE > y
bnll: BNLL IMAGE > y
dropout: Dropout IMAGE > y
dropout of fast r-cnn: Dropout IMAGE > y | dropout_param { dropout_ratio: 0.25 scale_train: false }
swish: Swish IMAGE > y | swish_param { beta: 1.5 }
clip: Clip IMAGE > y | clip_param { min: -0.5 max: 0.25 }
clip upside down: Clip IMAGE > y | clip_param { min: 0.5 max: 0.25 }
relu6: ReLU6 IMAGE > y
threshold: Threshold IMAGE > y | threshold_param { threshold: 0.1 }
power: Power IMAGE > y | power_param { power: 2 scale: 0.5 shift: 0.25 }
power of 0: Power IMAGE > y | power_param { power: 3 scale: 0 shift: 2 }
power of 1: Power IMAGE > y
exp: Exp IMAGE > y | exp_param { base: 2 scale: 0.5 shift: 0.25 }
log: AbsVal IMAGE > a; Log a > y | log_param { base: 2 shift: 0.25 }
scale: Scale IMAGE > y | scale_param { FILLER bias_term: true }
scale of axes: Scale IMAGE > y | scale_param { axis: 2 num_axes: -1 FILLER }
scale by a bottom: Scale x=2,4,3 s=2,4 > y | scale_param { axis: 0 bias_term: true }
bias: Bias IMAGE > y | bias_param { FILLER }
bias of a bottom: Bias x=2,4,3 b=2,4 > y | bias_param { axis: 0 }
axpy: Axpy a=2,4 x=2,4,3,3 z=2,4,3,3 > y
batch norm: BatchNorm IMAGE > y
batch norm of a batch: BatchNorm IMAGE > y | batch_norm_param { use_global_stats: false }
batch norm of a vector: BatchNorm x=5 > y
bn: BN IMAGE > y | bn_param { slope_FILLER bias_FILLER momentum: 0.9 }
bn of segnet: BN IMAGE > y | bn_param { scale_FILLER shift_FILLER bn_mode: INFERENCE }
bn with statistics: BN IMAGE > y mean variance | bn_param { scale_FILLER shift_FILLER bn_mode: LEARN }
lrn: LRN IMAGE > y | lrn_param { local_size: 3 alpha: 0.5 beta: 0.75 k: 2 }
lrn within: LRN IMAGE > y | lrn_param { local_size: 3 alpha: 0.5 norm_region: WITHIN_CHANNEL }
mvn: MVN IMAGE > y
mvn across: MVN x=2,4,3 > y | mvn_param { across_channels: true normalize_variance: false }
normalize: Normalize IMAGE > y | norm_param { across_spatial: false scale_FILLER }
normalize all: Normalize IMAGE > y | norm_param { channel_shared: true }
split: Split IMAGE > y z
concat: Concat x=2,3,4 z=2,2,4 > y
slice: Slice IMAGE > y z | slice_param { slice_point: 1 }
sum: Eltwise x=2,3 y_=2,3 z=2,3 > y | eltwise_param { coeff: 1 coeff: -0.5 coeff: 2 }
product: Eltwise x=2,3 y_=2,3 z=2,3 > y | eltwise_param { operation: PROD }
maximum: Eltwise x=2,3 z=2,3 > y | eltwise_param { operation: MAX }
flatten: Flatten IMAGE > y | flatten_param { axis: 1 end_axis: 2 }
reshape: Reshape IMAGE > y | reshape_param { shape { dim: 0 dim: -1 dim: 3 } }
reshape of the batch: Reshape IMAGE > y | reshape_param { shape { dim: -1 dim: 3 } }
permute: Permute IMAGE > y | permute_param { order: 0 order: 2 }
crop: Crop x=2,3,7,6 like=2,3,4,3 > y | crop_param { axis: 2 offset: 1 offset: 2 }
tile: Tile IMAGE > y | tile_param { axis: 1 tiles: 3 }
tile of the batch: Tile IMAGE > y | tile_param { axis: 0 tiles: 3 }
reindex: BatchReindex x=4,3 index=3 > y
filter: Filter x=4,3 chosen=4 > y
shuffle: ShuffleChannel IMAGE > y | shuffle_channel_param { group: 2 }
softmax: Softmax IMAGE > y
softmax of axis 2: Softmax IMAGE > y | softmax_param { axis: 2 }
reduction: Reduction IMAGE > y | reduction_param { operation: SUMSQ axis: 1 coeff: 0.5 }
reduction of all: Reduction IMAGE > y | reduction_param { operation: ASUM }
reduction to means: Reduction IMAGE > y | reduction_param { operation: MEAN axis: 2 }
argmax: ArgMax IMAGE > y | argmax_param { top_k: 3 out_max_val: true }
argmax of ties: Threshold IMAGE > t; ArgMax t > y | argmax_param { axis: 1 top_k: 2 }
parameter: ReLU IMAGE > y; Parameter > w | parameter_param { shape { dim: 2 dim: 3 } }
lstm: LSTM SEQUENCE > y | RECURRENT
lstm with static inputs: LSTM SEQUENCE static=2,3 > y | RECURRENT
lstm exposed: LSTM SEQUENCE h=1,2,4 c=1,2,4 > y hT cT | recurrent_param { expose_hidden: true num_output: 4 FILLED }
rnn: RNN SEQUENCE > y | RECURRENT
lstm unit: LSTMUnit c=1,2,3 gates=1,2,12 cont=1,2 > y h
silence: ReLU IMAGE > y; Silence x >
in place: ReLU IMAGE > y; Sigmoid y > y
""",
    IMAGE="x=2,4,7,6",
    REGIONS="x=1,8,9,8 rois=3,5",
    SEQUENCE="x=3,2,5 cont=3,2",
    RECURRENT=RECURRENT,
    FILLED=FILLED,
    FILLER="filler { type: 'gaussian' std: 1 }",
)


def values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Random values of an input: indices, flags or regions where its name says so."""
    if name == "index":
        return torch.randint(3, shape, generator=generator).float()
    if name in ("cont", "chosen"):
        return (torch.rand(shape, generator=generator) > 0.4).float()
    if name == "rois":
        low = torch.randint(-2, 8, (shape[0], 2), generator=generator).float()
        size = torch.randint(0, 9, (shape[0], 2), generator=generator).float()
        return torch.cat((torch.zeros(shape[0], 1), low + 0.25, low + size), 1)
    return torch.randn(shape, generator=generator)


def randomized(net: Net, generator: torch.Generator) -> Net:
    """Statistics of BatchNorm and BN as after training."""
    for blob, parameter in net.named_parameters():
        last = blob.rpartition(".")[2]
        if last in ("variance", "factor"):
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        elif last in ("mean", "value"):
            parameter.data.normal_(generator=generator)
    return net


def largest_difference(net: Net, exported: Exported, batch: int | None = None) -> float:
    """The largest difference of an output, relative to the larger of 1 and its values."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        name: shape if batch is None else (batch, *shape[1:])
        for name, shape in net.input_shapes.items()
    }
    given = {name: values(name, shape, generator) for name, shape in shapes.items()}
    with torch.no_grad():
        wanted = net(given)
    session = onnxruntime.InferenceSession(exported.model.SerializeToString())
    read = {each.name for each in session.get_inputs()}
    found = session.run(
        list(wanted), {name: x.numpy() for name, x in given.items() if name in read}
    )
    worst = 0.0
    for (name, ours), theirs in zip(wanted.items(), found, strict=True):
        assert tuple(ours.shape) == theirs.shape, name
        if theirs.size:
            scale = max(1.0, float(ours.detach().abs().max()))
            worst = max(worst, float(np.abs(ours.detach().numpy() - theirs).max()) / scale)
    return worst


@pytest.mark.parametrize("case", CASES)
def test_a_layer_computes_the_same_in_onnx(case: str) -> None:
    net = randomized(build(CASES[case], phase=TEST), torch.Generator().manual_seed(1))
    exported = export_net(net)
    assert exported.model.opset_import[0].version == OPSET
    assert largest_difference(net, exported) < 1e-5
    if not exported.fixed:
        assert largest_difference(net, exported, batch=3) < 1e-5


def test_every_layer_type_has_a_form_or_is_known_to_have_none() -> None:
    without = {kind for kind in known_types() if kind not in LAYERS}
    sources = {kind for kind in known_types() if issubclass(layer_class(kind), Source)}
    assert without == (NEEDS_LABELS | sources | {"Python"}) - {"DummyData"}


SSD = """
layer {{ name: "p" type: "PriorBox" bottom: "f" bottom: "x" top: "p"
  prior_box_param {{ min_size: 8 aspect_ratio: 2 flip: true clip: true variance: 0.1 variance: 0.1 variance: 0.2 variance: 0.2 }} }}
layer {{ name: "d" type: "DetectionOutput" bottom: "loc" bottom: "conf" bottom: "p" top: "d"
  detection_output_param {{ num_classes: 3 share_location: true background_label_id: 0 keep_top_k: {keep}
    nms_param {{ nms_threshold: 0.3 top_k: {top} }} code_type: {code} confidence_threshold: {least} }} }}
"""


@pytest.mark.parametrize(
    ("keep", "top", "code", "least"),
    [(5, 6, "CENTER_SIZE", 0.0), (-1, -1, "CORNER", 0.5), (200, 400, "CORNER_SIZE", -9.0)],
)
def test_detections_are_the_same(keep: int, top: int, code: str, least: float) -> None:
    """Rows of two images, in the order of the layer."""
    text = inputs(f=(2, 1, 4, 3), x=(2, 3, 32, 24), loc=(2, 144), conf=(2, 108))
    net = build(text + SSD.format(keep=keep, top=top, code=code, least=least), phase=TEST)
    exported = export_net(net)
    assert largest_difference(net, exported) < 1e-5
    assert largest_difference(net, exported, batch=1) < 1e-5


def test_proposals_are_the_same() -> None:
    fields = "proposal_param { feat_stride: 4 base_size: 4 scale: 2 scale: 4 min_size: 3 pre_nms_topn: 40 post_nms_topn: 9 nms_thresh: 0.5 }"
    text = inputs(scores=(1, 12, 5, 6), deltas=(1, 24, 5, 6), im_info=(1, 3))
    net = build(
        text + layer("Proposal", "scores deltas im_info", "rois kept", fields, name="p"), phase=TEST
    )
    exported = export_net(net)
    generator = torch.Generator().manual_seed(2)
    given = {
        name: torch.randn(shape, generator=generator) * 0.5
        for name, shape in net.input_shapes.items()
    }
    given["im_info"] = torch.tensor([[20.0, 24.0, 1.0]])
    session = onnxruntime.InferenceSession(exported.model.SerializeToString())
    wanted = net(given)
    for ours, theirs in zip(
        wanted.values(),
        session.run(list(wanted), {n: x.numpy() for n, x in given.items()}),
        strict=True,
    ):
        np.testing.assert_allclose(theirs, ours.numpy(), atol=1e-4)


def test_a_batch_that_cannot_change_is_explained() -> None:
    exported = export_net(build(CASES["lstm"], phase=TEST))
    assert exported.fixed == "the steps of its recurrent layers are unrolled"
    line = f"opset {OPSET}; inputs: x 3x2x5, cont 3x2; outputs: y 3x2x4"
    assert exported.summary() == f"{line}; the batch is fixed: {exported.fixed}"
    assert "inputs: x Nx4x7x6" in export_net(build(CASES["relu"], phase=TEST)).summary()


def test_a_layer_without_a_form_is_named() -> None:
    net = build(stack("Accuracy x=2,3 label=2 > y"), phase=TEST)
    with pytest.raises(DefinitionError, match="layer 'layer' of type Accuracy has no form in ONNX"):
        export_net(net)


DUMMY = """
layer {{ name: "d" type: "DummyData" top: "a" top: "b" dummy_data_param {{ shape {{ dim: 2 dim: 3 }} {fillers} }} }}
layer {{ name: "s" type: "Eltwise" bottom: "a" bottom: "b" top: "s" }}
layer {{ name: "loss" type: "Python" bottom: "s" top: "l" loss_weight: 1 python_param {{ module: "own" layer: "Own" }} }}
"""


def test_random_data_is_an_input_and_constant_data_a_constant() -> None:
    """A Python layer with a loss weight is left out, whatever its module."""
    text = DUMMY.format(fillers='data_filler { type: "gaussian" }')
    kept = inference_definition(definition(text), {})
    assert [(each.type, list(each.top)) for each in kept.param.layer] == [
        ("Input", ["a", "b"]),
        ("Eltwise", ["s"]),
    ]
    assert [list(each.dim) for each in kept.param.layer[0].input_param.shape] == [[2, 3], [2, 3]]
    fillers = "data_filler { type: 'constant' value: 3 } data_filler { type: 'constant' value: 4 }"
    kept = inference_definition(definition(DUMMY.format(fillers=fillers)), {})
    added = inputs(x=(2, 3)) + layer("Eltwise", "x s", "y", name="e")
    net = build(str(kept.param) + added, phase=TEST)
    exported = export_net(net)
    assert exported.fixed == "the net has layers of constants"
    assert largest_difference(net, exported) == 0


TRAINED = """
layer { name: "data" type: "Data" top: "data" top: "label" data_param { source: "absent" batch_size: 4 } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 3 } }
layer { name: "flat" type: "Flatten" bottom: "label" top: "flat" }
layer { name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "flat" top: "accuracy" }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


def test_data_becomes_an_input_and_losses_go() -> None:
    kept = inference_definition(definition(TRAINED), {"data": (1, 3, 4, 4)})
    assert [each.type for each in kept.param.layer] == ["Input", "InnerProduct"]
    labelled = stack("ReLU x=2,3 > y\nAccuracy y label=2 > a")
    kept = inference_definition(definition(labelled), {})
    assert [list(each.top) for each in kept.param.layer] == [["x"], ["y"]]
    with pytest.raises(UsageError, match=r"add --input=data:1,C,H,W"):
        inference_definition(definition(TRAINED), {})
    with pytest.raises(UsageError, match="no data 'picture' in this net; expected data, label"):
        inference_definition(definition(TRAINED), {"picture": (1,)})
