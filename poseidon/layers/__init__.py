"""Caffe's layer types as torch modules. Importing this package registers all of them."""

# ruff: noqa: F401 - the modules register their types
from poseidon.layers import python_layer
from poseidon.layers.common import (
    combine,
    inner_product,
    rearrange,
    recurrent,
    reduction,
    reshape,
    softmax,
)
from poseidon.layers.inputs import (
    annotated_data,
    data,
    dense_image_data,
    hdf5_data,
    image_data,
    memory_data,
    roi_data,
    sources,
    window_data,
)
from poseidon.layers.loss import accuracy, classification_loss, distance_loss, ohem
from poseidon.layers.neuron import (
    activation,
    affine,
    batch_norm,
    bn,
    dropout,
    normalization,
    pointwise,
)
from poseidon.layers.ssd import detection_evaluate, detection_output, multibox_loss
from poseidon.layers.vision import (
    convolution,
    deconvolution,
    detection,
    pooling,
    proposal,
    regions,
    resize,
    rpn,
    spp,
)
