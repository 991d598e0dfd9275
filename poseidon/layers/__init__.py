"""Caffe's layer types as torch modules, by family; importing this package registers them all."""

from poseidon.layers.accuracy import Accuracy
from poseidon.layers.activation import BNLL, ELU, Clip, PReLU, ReLU, ReLU6, Sigmoid, Swish, TanH, Threshold
from poseidon.layers.affine import Axpy, Bias, Parameter, Scale
from poseidon.layers.base import BlobSpec, Layer, LayerContext, LayerError
from poseidon.layers.batch_norm import BatchNorm
from poseidon.layers.classification_loss import (
    HingeLoss,
    InfogainLoss,
    MultinomialLogisticLoss,
    SigmoidCrossEntropyLoss,
)
from poseidon.layers.combine import Concat, Eltwise, Slice, Split
from poseidon.layers.convolution import Convolution, ConvolutionDepthwise, DepthwiseConvolution
from poseidon.layers.data import Data
from poseidon.layers.deconvolution import Deconvolution, Im2col
from poseidon.layers.detection import Permute, PriorBox, ROIPooling
from poseidon.layers.distance_loss import ContrastiveLoss, EuclideanLoss, SmoothL1Loss
from poseidon.layers.dropout import Dropout
from poseidon.layers.embed import Embed
from poseidon.layers.hdf5_data import HDF5Data, HDF5Output
from poseidon.layers.image_data import ImageData
from poseidon.layers.inner_product import InnerProduct
from poseidon.layers.memory_data import MemoryData
from poseidon.layers.normalization import LRN, MVN, Normalize
from poseidon.layers.pointwise import AbsVal, Exp, Log, Power
from poseidon.layers.pooling import Pooling
from poseidon.layers.python_layer import Python
from poseidon.layers.rearrange import BatchReindex, Crop, Filter, ShuffleChannel, Tile
from poseidon.layers.recurrent import LSTM, RNN, LSTMUnit
from poseidon.layers.reduction import ArgMax, Reduction
from poseidon.layers.registry import create, known_types, register
from poseidon.layers.reshape import Flatten, Reshape
from poseidon.layers.resize import Interp
from poseidon.layers.sinks import Silence
from poseidon.layers.softmax import Softmax, SoftmaxWithLoss
from poseidon.layers.sources import DummyData, Input
from poseidon.layers.spp import SPP
from poseidon.layers.window_data import WindowData

__all__ = [
    "BNLL",
    "ELU",
    "LRN",
    "LSTM",
    "MVN",
    "RNN",
    "SPP",
    "AbsVal",
    "Accuracy",
    "ArgMax",
    "Axpy",
    "BatchNorm",
    "BatchReindex",
    "Bias",
    "BlobSpec",
    "Clip",
    "Concat",
    "ContrastiveLoss",
    "Convolution",
    "ConvolutionDepthwise",
    "Crop",
    "Data",
    "Deconvolution",
    "DepthwiseConvolution",
    "Dropout",
    "DummyData",
    "Eltwise",
    "Embed",
    "EuclideanLoss",
    "Exp",
    "Filter",
    "Flatten",
    "HDF5Data",
    "HDF5Output",
    "HingeLoss",
    "Im2col",
    "ImageData",
    "InfogainLoss",
    "InnerProduct",
    "Input",
    "Interp",
    "LSTMUnit",
    "Layer",
    "LayerContext",
    "LayerError",
    "Log",
    "MemoryData",
    "MultinomialLogisticLoss",
    "Normalize",
    "PReLU",
    "Parameter",
    "Permute",
    "Pooling",
    "Power",
    "PriorBox",
    "Python",
    "ROIPooling",
    "ReLU",
    "ReLU6",
    "Reduction",
    "Reshape",
    "Scale",
    "ShuffleChannel",
    "Sigmoid",
    "SigmoidCrossEntropyLoss",
    "Silence",
    "Slice",
    "SmoothL1Loss",
    "Softmax",
    "SoftmaxWithLoss",
    "Split",
    "Swish",
    "TanH",
    "Threshold",
    "Tile",
    "WindowData",
    "create",
    "known_types",
    "register",
]
