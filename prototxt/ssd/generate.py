"""Writes SSD with VGG-16 and with MobileNet, and a small one: `python -m prototxt.ssd.generate`.

Layers are named as in the models that the papers' authors released.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from prototxt.backbones import vgg
from prototxt.parts import TWICE, XAVIER, constant, convolution, max_pool, put, relu, write
from prototxt.ssd.detector import Detector, Head

ONCE = [{"lr_mult": 1, "decay_mult": 1}]
STILL = [{"lr_mult": 0, "decay_mult": 0}] * 3
PLAIN = [{"lr_mult": 1, "decay_mult": 0}] * 2


def plain(n: NetSpec, top: Any, name: str, outputs: int, kernel: int, **how: int) -> Any:
    """Add a convolution with its bias and ReLU."""
    top = convolution(n, top, name, outputs, kernel, param=TWICE, weight_filler=XAVIER, **how)
    return relu(n, top, f"{name}_relu")


def vgg_body(n: NetSpec) -> None:
    """VGG-16 whose fully-connected layers are convolutions, with holes in fc6, and four more
    stages.
    """
    top = vgg(n, n.data, (64, 128, 256, 512, 512), (2, 2, 3, 3, 3))
    top = max_pool(n, top, "pool5", stride=1, pad=1)
    top = plain(n, top, "fc6", 1024, 3, pad=6, dilation=6)
    top = plain(n, top, "fc7", 1024, 1)
    for stage, (inner, outer, stride, pad) in enumerate(
        ((256, 512, 2, 1), (128, 256, 2, 1), (128, 256, 1, 0), (128, 256, 1, 0)), 6
    ):
        top = plain(n, top, f"conv{stage}_1", inner, 1)
        top = plain(n, top, f"conv{stage}_2", outer, 3, stride=stride, pad=pad)


def normalized(
    n: NetSpec, top: Any, name: str, outputs: int, kernel: int, *, stride: int = 1, group: int = 1
) -> Any:
    """Add a convolution without bias, its normalization, scale and ReLU."""
    how = {"pad": kernel // 2, "stride": stride, "group": group, "bias_term": False}
    top = convolution(n, top, name, outputs, kernel, param=ONCE, **how)
    top = put(n, f"{name}/bn", L.BatchNorm(top, in_place=True, param=STILL))
    scale = L.Scale(top, in_place=True, bias_term=True, filler=constant(1), param=PLAIN)
    return relu(n, put(n, f"{name}/scale", scale), f"{name}/relu")


# Stride and outputs of each pair of a depthwise and a 1x1 convolution.
PAIRS = (
    *((1, 64), (2, 128), (1, 128), (2, 256), (1, 256), (2, 512)),
    *([(1, 512)] * 5),
    *((2, 1024), (1, 1024)),
)


def mobilenet_body(n: NetSpec) -> None:
    """MobileNet v1 and four more stages."""
    top, channels = normalized(n, n.data, "conv0", 32, 3, stride=2), 32
    for number, (stride, outputs) in enumerate(PAIRS, 1):
        top = normalized(n, top, f"conv{number}/dw", channels, 3, stride=stride, group=channels)
        top = normalized(n, top, f"conv{number}", outputs, 1)
        channels = outputs
    for number, (inner, outer) in enumerate(((256, 512), (128, 256), (128, 256), (64, 128)), 14):
        top = normalized(n, top, f"conv{number}_1", inner, 1)
        top = normalized(n, top, f"conv{number}_2", outer, 3, stride=2)


def small_body(n: NetSpec) -> None:
    """Four stages that halve a side each."""
    top = n.data
    for number, outputs in enumerate((16, 24, 32, 48), 1):
        top = normalized(n, top, f"conv{number}", outputs, 3, stride=2)


def chain(stages: Sequence[tuple[Any, ...]]) -> tuple[Head, ...]:
    """Return heads from rows of source, least, most, ratios and step."""
    return tuple(Head(source=s, least=a, most=b, ratios=r, step=t) for s, a, b, r, t in stages)


BOTH = (2.0, 3.0)
VGG = Detector(
    stem="ssd300",
    name="VGG_VOC0712_SSD_300x300",
    about="SSD300 with VGG-16 on PASCAL VOC 2007 and 2012: 8,732 prior boxes.",
    expect="0.772 mAP on VOC 2007 test, as published.",
    heads=(
        Head(source="conv4_3", least=30, most=60, step=8, normalized=20),
        *chain(
            (
                ("fc7", 60, 111, BOTH, 16),
                ("conv6_2", 111, 162, BOTH, 32),
                ("conv7_2", 162, 213, BOTH, 64),
                ("conv8_2", 213, 264, (2.0,), 100),
                ("conv9_2", 264, 315, (2.0,), 300),
            )
        ),
    ),
    body=vgg_body,
    solver=(
        ("base_lr", 0.001),
        ("lr_policy", '"multistep"'),
        ("stepvalue", 80000),
        ("stepvalue", 100000),
        ("stepvalue", 120000),
        ("gamma", 0.1),
        ("max_iter", 120000),
        ("momentum", 0.9),
        ("weight_decay", 0.0005),
        ("display", 10),
        ("average_loss", 10),
        ("snapshot", 10000),
        ("test_interval", 10000),
        ("test_initialization", "false"),
    ),
)
MOBILENET = Detector(
    stem="mobilenet_ssd",
    name="MobileNet-SSD",
    about="SSD with MobileNet v1 on PASCAL VOC 2007 and 2012: 1,917 prior boxes.",
    expect="0.727 mAP on VOC 2007 test, as its author published, from weights trained on COCO.",
    heads=chain(
        (
            ("conv11/relu", 60, 0, (2.0,), 0),
            ("conv13/relu", 105, 150, BOTH, 0),
            ("conv14_2/relu", 150, 195, BOTH, 0),
            ("conv15_2/relu", 195, 240, BOTH, 0),
            ("conv16_2/relu", 240, 285, BOTH, 0),
            ("conv17_2/relu", 285, 300, BOTH, 0),
        )
    ),
    kernel=1,
    body=mobilenet_body,
    mean=(127.5, 127.5, 127.5),
    scale=0.007843,
    batch=(24, 8),
    solver=(
        ("base_lr", 0.0005),
        ("lr_policy", '"multistep"'),
        ("stepvalue", 20000),
        ("stepvalue", 40000),
        ("gamma", 0.5),
        ("max_iter", 120000),
        ("type", '"RMSProp"'),
        ("weight_decay", 0.00005),
        ("display", 10),
        ("average_loss", 10),
        ("snapshot", 1000),
        ("test_interval", 10000),
        ("test_initialization", "false"),
    ),
)
SHAPES = Detector(
    stem="shapes_ssd",
    name="shapes_SSD",
    about="A small SSD on drawn discs, squares and triangles: 720 prior boxes.",
    expect="about 0.89 mAP after 600 iterations, on the data of examples/ssd/make_data.py.",
    side=96,
    classes=4,
    heads=chain((("conv3/relu", 22, 34, (2.0,), 8), ("conv4/relu", 34, 54, (2.0,), 16))),
    body=small_body,
    mean=(60, 60, 60),
    scale=0.015,
    batch=(16, 16),
    data=tuple(
        f"examples/ssd/data/{name}" for name in ("train_lmdb", "test_lmdb", "labelmap.prototxt")
    ),  # type: ignore[arg-type]
    tests=8,
    distorts=False,
    solver=(
        ("base_lr", 0.005),
        ("lr_policy", '"poly"'),
        ("power", 1.0),
        ("max_iter", 600),
        ("type", '"Adam"'),
        ("momentum", 0.9),
        ("momentum2", 0.999),
        ("weight_decay", 0.0005),
        ("display", 50),
        ("average_loss", 20),
        ("test_interval", 200),
        ("test_initialization", "false"),
        ("solver_mode", "CPU"),
    ),
)


def definitions() -> dict[str, str]:
    """Return the text of each file, by its name."""
    found: dict[str, str] = {}
    for detector in (VGG, MOBILENET, SHAPES):
        found |= detector.definitions()
    return found


if __name__ == "__main__":
    write("ssd", definitions())
