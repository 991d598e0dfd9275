"""Caffe's layer types as torch modules. Importing this package registers all of them."""

# ruff: noqa: F401 - the modules register their types
from poseidon.caffe.layers import (
    activation,
    batch_norm,
    combine,
    convolution,
    database_data,
    detection,
    detection_output,
    image_data,
    inner_product,
    losses,
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
