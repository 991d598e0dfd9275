"""Caffe's layer types as torch modules. Importing this package registers all of them."""

from poseidon.layers.base import BlobSpec, Layer, LayerContext, LayerError
from poseidon.layers.common.combine import Concat, Eltwise, Silence, Slice, Split
from poseidon.layers.common.inner_product import Embed, InnerProduct
from poseidon.layers.common.rearrange import BatchReindex, Crop, Filter, ShuffleChannel, Tile
from poseidon.layers.common.recurrent import LSTM, RNN, LSTMUnit
from poseidon.layers.common.reduction import ArgMax, Reduction
from poseidon.layers.common.reshape import Flatten, Reshape
from poseidon.layers.common.softmax import Softmax, SoftmaxWithLoss
from poseidon.layers.inputs.annotated_data import AnnotatedData
from poseidon.layers.inputs.data import Data
from poseidon.layers.inputs.dense_image_data import DenseImageData, ImageSegData
from poseidon.layers.inputs.hdf5_data import HDF5Data, HDF5Output
from poseidon.layers.inputs.image_data import ImageData
from poseidon.layers.inputs.memory_data import MemoryData
from poseidon.layers.inputs.roi_data import ROIData
from poseidon.layers.inputs.sources import DummyData, Input
from poseidon.layers.inputs.window_data import WindowData
from poseidon.layers.loss.accuracy import Accuracy
from poseidon.layers.loss.classification_loss import (
    HingeLoss,
    InfogainLoss,
    MultinomialLogisticLoss,
    SigmoidCrossEntropyLoss,
)
from poseidon.layers.loss.distance_loss import ContrastiveLoss, EuclideanLoss, SmoothL1Loss
from poseidon.layers.loss.ohem import BoxAnnotatorOHEM, SmoothL1LossOHEM, SoftmaxWithLossOHEM
from poseidon.layers.neuron.activation import (
    BNLL,
    ELU,
    Clip,
    PReLU,
    ReLU,
    ReLU6,
    SeLu,
    Sigmoid,
    Swish,
    TanH,
    Threshold,
)
from poseidon.layers.neuron.affine import Axpy, Bias, Parameter, Scale
from poseidon.layers.neuron.batch_norm import BatchNorm
from poseidon.layers.neuron.bn import BN
from poseidon.layers.neuron.dropout import Dropout, SeLuDropout
from poseidon.layers.neuron.normalization import LRN, MVN, Normalize
from poseidon.layers.neuron.pointwise import AbsVal, Exp, Log, Power
from poseidon.layers.python_layer import Python
from poseidon.layers.registry import create, known_types, register
from poseidon.layers.ssd.detection_evaluate import DetectionEvaluate
from poseidon.layers.ssd.detection_output import DetectionOutput
from poseidon.layers.ssd.multibox_loss import MultiBoxLoss
from poseidon.layers.vision import rpn as rpn  # registers what replaces Python layers
from poseidon.layers.vision.convolution import (
    Convolution,
    ConvolutionDepthwise,
    DepthwiseConvolution,
    HoleConvolution,
)
from poseidon.layers.vision.deconvolution import Deconvolution, Im2col
from poseidon.layers.vision.detection import Permute, PriorBox
from poseidon.layers.vision.pooling import Pooling
from poseidon.layers.vision.proposal import AnchorTarget, Proposal, ProposalTarget
from poseidon.layers.vision.regions import PSROIPooling, ROIAlign, ROIPooling
from poseidon.layers.vision.resize import Interp, Reorg, Upsample
from poseidon.layers.vision.spp import SPP

__all__ = [
    "BN",
    "BNLL",
    "ELU",
    "LRN",
    "LSTM",
    "MVN",
    "RNN",
    "SPP",
    "AbsVal",
    "Accuracy",
    "AnchorTarget",
    "AnnotatedData",
    "ArgMax",
    "Axpy",
    "BatchNorm",
    "BatchReindex",
    "Bias",
    "BlobSpec",
    "BoxAnnotatorOHEM",
    "Clip",
    "Concat",
    "ContrastiveLoss",
    "Convolution",
    "ConvolutionDepthwise",
    "Crop",
    "Data",
    "Deconvolution",
    "DenseImageData",
    "DepthwiseConvolution",
    "DetectionEvaluate",
    "DetectionOutput",
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
    "HoleConvolution",
    "Im2col",
    "ImageData",
    "ImageSegData",
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
    "MultiBoxLoss",
    "MultinomialLogisticLoss",
    "Normalize",
    "PReLU",
    "PSROIPooling",
    "Parameter",
    "Permute",
    "Pooling",
    "Power",
    "PriorBox",
    "Proposal",
    "ProposalTarget",
    "Python",
    "ROIAlign",
    "ROIData",
    "ROIPooling",
    "ReLU",
    "ReLU6",
    "Reduction",
    "Reorg",
    "Reshape",
    "Scale",
    "SeLu",
    "SeLuDropout",
    "ShuffleChannel",
    "Sigmoid",
    "SigmoidCrossEntropyLoss",
    "Silence",
    "Slice",
    "SmoothL1Loss",
    "SmoothL1LossOHEM",
    "Softmax",
    "SoftmaxWithLoss",
    "SoftmaxWithLossOHEM",
    "Split",
    "Swish",
    "TanH",
    "Threshold",
    "Tile",
    "Upsample",
    "WindowData",
    "create",
    "known_types",
    "register",
]
