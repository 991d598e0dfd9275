"""The shapes of the nets that measurements emulate, read from their definitions.

`poseidon/observe/plan/shapes.py` says what a shape holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.proto.caffe_pb2 import TEST, NetState
from poseidon.caffe.proto.definition import read_net
from poseidon.observe.plan.shapes import LayerShape, Shape, net_layers

ROOT = Path(__file__).resolve().parents[2]
CLASSES_22K = 21841
PAPER_SCALE = 40
GPT2, GPT2_SCALE = (50257, 1024, 768, 12), 4
"""Vocabulary, positions, width, blocks."""
DLRM_NUMBERS, DLRM_WIDTH, DLRM_MOST_ROWS = 13, 64, 100_000
DLRM_CATEGORIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""The categories of each column of the Criteo Kaggle data."""


@cache
def layers_of(net: str) -> tuple[LayerShape, ...]:
    """Return the layers of one of `NETS` that are trained.

    Raises:
        KeyError: there is no such net.
    """
    return NETS[net]()


def to_json(layers: Sequence[LayerShape]) -> str:
    """Return one line of text, for a worker."""
    return json.dumps([asdict(layer) for layer in layers])


def from_json(text: str) -> tuple[LayerShape, ...]:
    """Parse the text of `to_json`."""
    return tuple(
        LayerShape(**{**layer, "tensors": tuple(tuple(shape) for shape in layer["tensors"])})
        for layer in json.loads(text)
    )


def divided(layers: Sequence[LayerShape], by: float) -> tuple[LayerShape, ...]:
    """Return layers of `1/by` of the size: the sides of each weight shrink by its root, the work
    stays.

    The three channels of an image stay too, which is why the first layer shrinks less. With
    `1/sqrt(by)` of the rows, factors shrink by the same `by` as weights.
    """
    root = math.sqrt(by)

    def side(size: int) -> int:
        return max(1, round(size / root)) if size > 3 else size

    def shape(old: Shape) -> Shape:
        return (*(side(size) for size in old[:2]), *old[2:])

    return tuple(
        replace(layer, tensors=tuple(shape(old) for old in layer.tensors)) for layer in layers
    )


def read_layers(definition: str) -> tuple[LayerShape, ...]:
    """Return the layers of a definition, a path under `prototxt/`, that are trained."""
    net = compile_net(
        read_net(ROOT / "prototxt" / definition),
        LayerContext(phase=TEST, seed=1),
        state=NetState(phase=TEST),
    )
    try:
        return net_layers(net)
    finally:
        net.close()


def _as_convolution(layer: LayerShape) -> LayerShape:
    if not layer.fully_connected:
        return layer
    weight, *others = layer.tensors
    return replace(layer, tensors=((*weight, 1, 1), *others), fully_connected=False)


def _resnet50() -> tuple[LayerShape, ...]:
    """Return ResNet-50 with its last layer as a 1x1 convolution, so that no weight has factors."""
    return tuple(_as_convolution(layer) for layer in read_layers("resnet/resnet50_deploy.prototxt"))


def _vgg19_22k() -> tuple[LayerShape, ...]:
    *layers, last = read_layers("vgg/vgg19_deploy.prototxt")
    inputs = last.tensors[0][1]
    wide = replace(
        last,
        tensors=((CLASSES_22K, inputs), (CLASSES_22K,)),
        work=last.work // last.tensors[1][0] * CLASSES_22K,
    )
    return (*layers, wide)


def _dense(name: str, inputs: int, outputs: int, work: int = 0) -> LayerShape:
    """Return a fully-connected layer with a bias; `work` is added to its product's."""
    return LayerShape(
        name=name,
        tensors=((outputs, inputs), (outputs,)),
        work=inputs * outputs + work,
        fully_connected=True,
    )


def _norm(name: str, width: int) -> LayerShape:
    return LayerShape(name=name, tensors=((width,), (width,)), work=width)


def _gpt2() -> tuple[LayerShape, ...]:
    """Return GPT-2 with 124 M parameters (Radford et al. 2019); a row is a token.

    The head uses the weight of the embedding, so `wte` has one gradient. It is complete when the
    backward pass ends, and the forward pass needs its value first: the tensors are the embedding's,
    the time of the head's product is at the end.
    """
    vocabulary, positions, width, blocks = GPT2
    layers = [
        LayerShape(name="wte", tensors=((vocabulary, width),), work=width),
        LayerShape(name="wpe", tensors=((positions, width),), work=width),
    ]
    for block in range(blocks):
        # two products with half of the positions each, since a token sees those before it
        attention = positions * width
        layers += [
            _norm(f"h{block}.ln_1", width),
            _dense(f"h{block}.attn.c_attn", width, 3 * width, attention),
            _dense(f"h{block}.attn.c_proj", width, width),
            _norm(f"h{block}.ln_2", width),
            _dense(f"h{block}.mlp.c_fc", width, 4 * width),
            _dense(f"h{block}.mlp.c_proj", 4 * width, width),
        ]
    return (
        *layers,
        _norm("ln_f", width),
        LayerShape(name="head", tensors=(), work=vocabulary * width),
    )


def _dlrm() -> tuple[LayerShape, ...]:
    """Return a recommendation net like DLRM (Naumov et al. 2019): an embedding for each of
    Criteo's 26 categories; a row is a sample.

    Tables have at most 100,000 rows. Their gradients are dense, as torch's are by default.
    """
    sides = (DLRM_NUMBERS, 512, 256, DLRM_WIDTH)
    bottom = [_dense(f"bottom{index}", *pair) for index, pair in enumerate(pairwise(sides))]
    tables = [
        LayerShape(
            name=f"table{index}",
            tensors=((min(size, DLRM_MOST_ROWS), DLRM_WIDTH),),
            work=DLRM_WIDTH,
        )
        for index, size in enumerate(DLRM_CATEGORIES)
    ]
    vectors = len(tables) + 1
    products = vectors * (vectors - 1) // 2
    sides = (products + DLRM_WIDTH, 512, 256, 1)
    first, *others = [_dense(f"top{index}", *pair) for index, pair in enumerate(pairwise(sides))]
    return (*bottom, *tables, replace(first, work=first.work + products * DLRM_WIDTH), *others)


NETS: dict[str, Callable[[], tuple[LayerShape, ...]]] = {
    "alexnet": lambda: read_layers("alexnet/deploy.prototxt"),
    "dlrm": _dlrm,
    "googlenet": lambda: read_layers("googlenet/deploy.prototxt"),
    "gpt2": _gpt2,
    "gpt2/4": lambda: divided(_gpt2(), GPT2_SCALE),
    "resnet50": _resnet50,
    "vgg19": lambda: read_layers("vgg/vgg19_deploy.prototxt"),
    "vgg19-22k": _vgg19_22k,
    "vgg19-22k/40": lambda: divided(_vgg19_22k(), PAPER_SCALE),
}
"""The nets that a measurement can emulate, by their names on the command line.

`NET/N` is a net of an Nth of the bytes: at an Nth of a rate it stands for the whole net at that
rate.
"""

IMAGES = 32
ROWS = {"dlrm": 2048, "gpt2": 8192, "gpt2/4": 4096}
"""Rows of a host's batch by default, if not `IMAGES`: samples, or tokens of eight sequences; of
a quarter half as many.
"""


def default_rows(net: str) -> int:
    """Return the rows of a host's batch of one of `NETS`."""
    return ROWS.get(net, IMAGES)
