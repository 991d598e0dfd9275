"""Caffe's layer types as torch modules. Importing this package registers all of them."""

# ruff: noqa: F401 - the modules register their types
from poseidon.caffe.layers import python_layer
from poseidon.caffe.layers.common import combine, inner_product, rearrange, recurrent, softmax
from poseidon.caffe.layers.inputs import data, image_data, sources
from poseidon.caffe.layers.loss import classification_loss, distance_loss, ohem
from poseidon.caffe.layers.neuron import activation, batch_norm, normalization, pointwise
from poseidon.caffe.layers.ssd import detection_output, multibox_loss
from poseidon.caffe.layers.vision import convolution, detection, pooling, proposal, regions, resize
