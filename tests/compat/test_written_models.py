"""Models that are written here load in an independent reader, OpenCV's dnn, and compute the same
there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from poseidon.caffe.proto.blob import to_array
from poseidon.caffe.proto.caffe_pb2 import TEST, NetParameter
from poseidon.caffe.snapshot.caffemodel import write_model
from tests.support import opencv
from tests.support.nets import build, stacks

NETS = stacks(
    """
convolutions: CONV c1 | convolution_param { num_output: 4 kernel_size: 3 pad: 1 stride: 2 FILL }; Convolution c1 > c2 | convolution_param { num_output: 6 kernel_h: 1 kernel_w: 3 dilation: 2 group: 2 FILL }; ReLU c2 > c2 | relu_param { negative_slope: 0.1 }
pooling rounds up: CONV c | THREE; Pooling c > max | pooling_param { kernel_size: 3 stride: 2 }; Pooling max > mean | pooling_param { pool: AVE kernel_size: 2 stride: 2 pad: 1 }
normalization: CONV c | THREE; LRN c > n | lrn_param { local_size: 3 alpha: 0.5 beta: 0.75 }; LRN n > w | lrn_param { local_size: 3 alpha: 0.5 beta: 0.75 norm_region: WITHIN_CHANNEL }
a classifier: CONV c | THREE; TanH c > t; InnerProduct t > ip | inner_product_param { num_output: 5 FILL }; Softmax ip > prob
one value at a time: AbsVal x=2,3,13,11 > a; Power a > p | power_param { power: 1.5 scale: 2 shift: 0.1 }; ELU x > e | elu_param { alpha: 0.7 }; BNLL x > b
shapes: Slice x=2,3,13,11 > s1 s2 | slice_param { slice_point: 1 }; Flatten s1 > f; Reshape s2 > r | reshape_param { shape { dim: 0 dim: -1 dim: 11 } }; MVN x > m
deconvolution: Deconvolution x=2,3,13,11 > d | convolution_param { num_output: 4 kernel_size: 4 stride: 2 pad: 1 FILL }
joins: CONV a | ONE; Convolution x > b | ONE; Eltwise a b > sum | eltwise_param { coeff: 1 coeff: -0.5 }; Concat a sum > joined; Sigmoid joined > s
a residual block's parts: CONV c | convolution_param { num_output: 4 kernel_size: 3 bias_term: false FILL }; BatchNorm c > bn; Scale bn > scaled | scale_param { bias_term: true filler { type: 'uniform' min: 0.5 max: 2 } }; PReLU scaled > p | prelu_param { filler { type: 'uniform' } }
permutations: Permute x=2,3,13,11 > p | permute_param { order: 0 order: 2 order: 3 order: 1 }; Permute x > q | permute_param { order: 0 order: 3 order: 1 order: 2 }
normalizations: CONV c | THREE; Normalize c > each | norm_param { across_spatial: false channel_shared: false scale_filler { type: 'uniform' min: 5 max: 20 } }
prior boxes: Pooling x=2,3,13,11 > m | pooling_param { kernel_size: 3 stride: 3 }; PriorBox m x > a | prior_box_param { PRIOR clip: false offset: 0.5 }; PriorBox m x > b | prior_box_param { PRIOR clip: true step: 4 offset: 0.3 }; PriorBox m x > c | prior_box_param { PRIOR step_h: 3 step_w: 5 flip: false clip: false }
""",
    CONV="Convolution x=2,3,13,11 >",
    THREE="convolution_param { num_output: 6 kernel_size: 3 FILL }",
    ONE="convolution_param { num_output: 4 kernel_size: 1 FILL }",
    FILL="weight_filler { type: 'gaussian' std: 0.3 } bias_filler { type: 'uniform' min: -1 max: 1 }",
    PRIOR="min_size: 4 min_size: 7 max_size: 6 max_size: 9 aspect_ratio: 2 aspect_ratio: 3 "
    "variance: 0.1 variance: 0.1 variance: 0.2 variance: 0.2",
)


@pytest.mark.parametrize("text", NETS.values(), ids=NETS.keys())
def test_opencv_reads_what_is_written(tmp_path: Path, text: str) -> None:
    net = build(text, phase=TEST)
    generator = torch.Generator().manual_seed(4)
    for _, module in net.layer_modules:
        if module.param.type == "BatchNorm":  # sums of means and variances, and their weight
            mean, variance, factor = (blob.detach() for blob in module.blobs())
            mean.normal_(generator=generator)
            variance.uniform_(0.5, 3, generator=generator)
            factor.fill_(1.5)
    x = torch.randn(2, 3, 13, 11, generator=generator)
    with torch.no_grad():
        ours = net({"x": x})
    path = tmp_path / "m.caffemodel"
    write_model(path, net.definition.param, net.layer_blobs())
    param = net.definition.param
    theirs = opencv.outputs(param, path, {"x": x.numpy()}, opencv.makers(param, list(ours)))
    for (name, mine), other in zip(ours.items(), theirs, strict=True):
        assert opencv.largest_difference(mine.numpy(), other) <= 1e-4, name


@pytest.mark.parametrize("case", ["sgd_momentum", "adam", "adadelta"])
def test_a_model_that_caffe_wrote_is_written_again_byte_for_byte(
    shared: Path, tmp_path: Path, case: str
) -> None:
    """Fields in the order of Caffe's writer, shapes in its new form, numbers packed."""
    theirs = shared / "golden" / "files" / f"{case}_iter_12.caffemodel"
    net = NetParameter.FromString(theirs.read_bytes())
    blobs = [
        (layer.name, layer.type, [to_array(blob) for blob in layer.blobs]) for layer in net.layer
    ]
    ours = tmp_path / "m.caffemodel"
    write_model(ours, net, blobs)
    assert ours.read_bytes() == theirs.read_bytes()
