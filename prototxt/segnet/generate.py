"""Writes SegNet: `python -m prototxt.segnet.generate`.

Layers are named as in the authors' tutorial.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from poseidon.caffe.proto.caffe_pb2 import NetParameter
from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from poseidon.pycaffe import params as P
from prototxt import backbones
from prototxt.parts import TWICE, constant, convolution, put, relu, write

NAME = "segnet"
# The authors' weights of CamVid's 11 classes: median frequency / frequency of the class.
CAMVID = (0.2595, 0.1826, 4.5640, 0.1417, 0.9051, 0.3826, 9.6446, 1.8418, 0.6823, 6.2478, 7.3614)


@dataclass(frozen=True, kw_only=True)
class Size:
    """The extents of a net.

    Attributes:
        classes: of pixels.
        widths: channels of each stage.
        counts: convolutions of each stage.
        image: height and width.
        batch: images of one worker.
        weights: of the classes in the loss; empty: all 1.
        ignored: the label of pixels that are left out; None: none.
        source: the list for training; and for tests.
    """

    classes: int = 11
    widths: tuple[int, ...] = (64, 128, 256, 512, 512)
    counts: tuple[int, ...] = (2, 2, 3, 3, 3)
    image: tuple[int, int] = (360, 480)
    batch: int = 4
    weights: tuple[float, ...] = CAMVID
    ignored: int | None = 11
    source: str = "data/camvid_train.txt"
    test_source: str = "data/camvid_test.txt"


def unit(n: NetSpec, top: Any, name: str, width: int, *, inference: bool) -> Any:
    """Add a convolution, its BN and its ReLU."""
    top = convolution(n, top, name, width, 3, pad=1, param=TWICE)
    how: dict[str, Any] = {"bn_mode": P.BN.INFERENCE} if inference else {}
    norm = L.BN(
        top,
        in_place=True,
        param=[{"lr_mult": 1, "decay_mult": 1}, {"lr_mult": 1, "decay_mult": 0}],
        scale_filler=constant(1),
        shift_filler=constant(0.001),
        **how,
    )
    return relu(n, put(n, f"{name}_bn", norm), f"relu{name.removeprefix('conv')}")


def extents(size: Size) -> list[tuple[int, int]]:
    """Return height and width before each pooling layer."""
    found = [size.image]
    for _ in size.widths[1:]:
        found.append((-(-found[-1][0] // 2), -(-found[-1][1] // 2)))
    return found


def body(n: NetSpec, size: Size, *, inference: bool = False) -> Any:
    """From `data` to the scores of each pixel."""
    top, masks = n.data, []
    for stage, (width, count) in enumerate(zip(size.widths, size.counts, strict=True), 1):
        for place in range(1, count + 1):
            top = unit(n, top, f"conv{stage}_{place}", width, inference=inference)
        n[f"pool{stage}"], n[f"pool{stage}_mask"] = L.Pooling(
            top, ntop=2, name=f"pool{stage}", pool=P.Pooling.MAX, kernel_size=2, stride=2
        )
        top = n[f"pool{stage}"]
        masks.append(n[f"pool{stage}_mask"])
    for stage in range(len(size.widths), 0, -1):
        high, wide = extents(size)[stage - 1]
        n[f"upsample{stage}"] = L.Upsample(top, masks[stage - 1], upsample_h=high, upsample_w=wide)
        top = n[f"upsample{stage}"]
        for place in range(size.counts[stage - 1], 0, -1):
            last = place == 1
            if stage == 1 and last:
                break
            width = size.widths[max(stage - 2, 0)] if last else size.widths[stage - 1]
            top = unit(n, top, f"conv{stage}_{place}_D", width, inference=inference)
    return convolution(n, top, "conv1_1_D", size.classes, 3, pad=1, param=TWICE)


def train(size: Size = Size()) -> NetParameter:
    """Return the net for training and tests."""
    weighted = {"weight_by_label_freqs": True, "class_weighting": list(size.weights)}
    return backbones.segmented(
        NAME,
        (size.source, size.test_source),
        size.batch,
        lambda n: body(n, size),
        loss=weighted if size.weights else {},
        ignored=size.ignored,
    )


def deploy(size: Size = Size(), *, inference: bool = True) -> NetParameter:
    """Return the net for use; with bn_mode INFERENCE if the statistics are merged into its
    scales and shifts.
    """
    return backbones.scored(NAME, size.image, lambda n: body(n, size, inference=inference))


def definitions() -> dict[str, str]:
    """Return the text of each file, by its name."""
    return backbones.definitions(
        "segnet",
        about="SegNet on CamVid: an encoder of VGG-16's shape, and a decoder that puts maxima "
        "back to their places.",
        paper='Badrinarayanan, Kendall, Cipolla, "SegNet: a deep convolutional encoder-decoder '
        'architecture" (2015).',
        expect="0.88 of CamVid's pixels, 0.556 mean IoU, as the paper.",
        train=train(),
        deploy=deploy(),
        solver={
            "net": "train_val.prototxt",
            "test_iter": 233,
            "test_interval": 1000,
            "base_lr": 0.001,
            "lr_policy": "step",
            "gamma": 1.0,
            "stepsize": 10000000,
            "display": 20,
            "momentum": 0.9,
            "max_iter": 40000,
            "weight_decay": 0.0005,
            "snapshot": 1000,
            "snapshot_prefix": "segnet",
        },
    )


if __name__ == "__main__":
    write("segnet", definitions())
