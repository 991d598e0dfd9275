"""Caffe's layer types as torch modules, by family; importing this package registers them all."""

from poseidon.layers.accuracy import Accuracy
from poseidon.layers.activation import ReLU, Sigmoid, TanH
from poseidon.layers.base import BlobSpec, Layer, LayerContext, LayerError
from poseidon.layers.combine import Concat, Eltwise, Slice, Split
from poseidon.layers.convolution import Convolution
from poseidon.layers.data import Data
from poseidon.layers.distance_loss import EuclideanLoss
from poseidon.layers.dropout import Dropout
from poseidon.layers.inner_product import InnerProduct
from poseidon.layers.normalization import LRN
from poseidon.layers.pooling import Pooling
from poseidon.layers.registry import create, known_types, register
from poseidon.layers.reshape import Flatten, Reshape
from poseidon.layers.sinks import Silence
from poseidon.layers.softmax import Softmax, SoftmaxWithLoss
from poseidon.layers.sources import DummyData, Input

__all__ = [
    "LRN",
    "Accuracy",
    "BlobSpec",
    "Concat",
    "Convolution",
    "Data",
    "Dropout",
    "DummyData",
    "Eltwise",
    "EuclideanLoss",
    "Flatten",
    "InnerProduct",
    "Input",
    "Layer",
    "LayerContext",
    "LayerError",
    "Pooling",
    "ReLU",
    "Reshape",
    "Sigmoid",
    "Silence",
    "Slice",
    "Softmax",
    "SoftmaxWithLoss",
    "Split",
    "TanH",
    "create",
    "known_types",
    "register",
]
