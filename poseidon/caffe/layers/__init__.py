"""Caffe's layer types as torch modules. Importing this package registers all of them."""

# ruff: noqa: F401 - the modules register their types
from poseidon.caffe.layers import (
    activation,
    batch_norm,
    classification_loss,
    combine,
    convolution,
    database_data,
    detection,
    detection_output,
    distance_loss,
    image_data,
    inner_product,
    multibox_loss,
    normalization,
    ohem,
    pointwise,
    pooling,
    proposal,
    python_layer,
    rearrange,
    recurrent,
    regions,
    resize,
    softmax,
    sources,
)
