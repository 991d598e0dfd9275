"""Writes Inception v3: `python -m prototxt.inception_v3.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from prototxt.imagenet import Recipe
from prototxt.parts import MSRA, TWICE, XAVIER, dropout, max_pool, mean_pool, normalized, put, write

# One convolution: outputs, height and width of its kernel. It keeps the size of the map, unless it
# strides.
Step = tuple[int, int, int]


def convolution(
    n: NetSpec, bottom: Any, name: str, step: Step, *, stride: int = 1, same: bool = True
) -> Any:
    """Add a convolution without bias, its normalization, scale and ReLU."""
    outputs, high, wide = step
    layer = L.Convolution(
        bottom,
        num_output=outputs,
        kernel_h=high,
        kernel_w=wide,
        stride=stride,
        pad_h=high // 2 if same else 0,
        pad_w=wide // 2 if same else 0,
        bias_term=False,
        weight_filler=MSRA,
    )
    names = f"{name}/bn", f"{name}/scale", f"{name}/relu"
    return normalized(n, put(n, name, layer), *names, eps=0.001)


def chain(
    n: NetSpec, bottom: Any, name: str, steps: Sequence[Step], *, shrink: bool = False
) -> Any:
    """Convolutions one after the other; the last one strides if the module shrinks its map."""
    for place, step in enumerate(steps, 1):
        last = shrink and place == len(steps)
        bottom = convolution(
            n, bottom, f"{name}_{place}", step, stride=2 if last else 1, same=not last
        )
    return bottom


def pooled(n: NetSpec, bottom: Any, name: str, outputs: int) -> Any:
    """Add the mean of each position's neighbourhood, then 1x1."""
    top = mean_pool(n, bottom, f"{name}/pool", kernel_size=3, stride=1, pad=1)
    return convolution(n, top, f"{name}/pool_proj", (outputs, 1, 1))


def joined(n: NetSpec, name: str, *ways: Any) -> Any:
    """Add the concatenation of the ways of a module."""
    return put(n, f"{name}/output", L.Concat(*ways))


def module_a(n: NetSpec, bottom: Any, name: str, pool: int) -> Any:
    return joined(
        n,
        name,
        chain(n, bottom, f"{name}/1x1", [(64, 1, 1)]),
        chain(n, bottom, f"{name}/5x5", [(48, 1, 1), (64, 5, 5)]),
        chain(n, bottom, f"{name}/3x3", [(64, 1, 1), (96, 3, 3), (96, 3, 3)]),
        pooled(n, bottom, name, pool),
    )


def module_b(n: NetSpec, bottom: Any, name: str) -> Any:
    return joined(
        n,
        name,
        chain(n, bottom, f"{name}/3x3", [(384, 3, 3)], shrink=True),
        chain(n, bottom, f"{name}/3x3_double", [(64, 1, 1), (96, 3, 3), (96, 3, 3)], shrink=True),
        max_pool(n, bottom, f"{name}/pool"),
    )


def module_c(n: NetSpec, bottom: Any, name: str, width: int) -> Any:
    twice = [(width, 1, 1), (width, 7, 1), (width, 1, 7), (width, 7, 1), (192, 1, 7)]
    return joined(
        n,
        name,
        chain(n, bottom, f"{name}/1x1", [(192, 1, 1)]),
        chain(n, bottom, f"{name}/7x7", [(width, 1, 1), (width, 1, 7), (192, 7, 1)]),
        chain(n, bottom, f"{name}/7x7_double", twice),
        pooled(n, bottom, name, 192),
    )


def module_d(n: NetSpec, bottom: Any, name: str) -> Any:
    return joined(
        n,
        name,
        chain(n, bottom, f"{name}/3x3", [(192, 1, 1), (320, 3, 3)], shrink=True),
        chain(
            n,
            bottom,
            f"{name}/7x7",
            [(192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3)],
            shrink=True,
        ),
        max_pool(n, bottom, f"{name}/pool"),
    )


def fork(n: NetSpec, bottom: Any, name: str) -> Any:
    """Add a 1x3 and a 3x1 convolution, side by side."""
    row = convolution(n, bottom, f"{name}_1x3", (384, 1, 3))
    column = convolution(n, bottom, f"{name}_3x1", (384, 3, 1))
    return put(n, f"{name}_fork", L.Concat(row, column))


def module_e(n: NetSpec, bottom: Any, name: str) -> Any:
    return joined(
        n,
        name,
        chain(n, bottom, f"{name}/1x1", [(320, 1, 1)]),
        fork(n, chain(n, bottom, f"{name}/3x3", [(384, 1, 1)]), f"{name}/3x3"),
        fork(
            n,
            chain(n, bottom, f"{name}/3x3_double", [(448, 1, 1), (384, 3, 3)]),
            f"{name}/3x3_double",
        ),
        pooled(n, bottom, name, 192),
    )


def body(n: NetSpec, train: bool) -> Any:
    """From `data` to the scores `fc`."""
    top = convolution(n, n.data, "conv1a", (32, 3, 3), stride=2, same=False)
    top = convolution(n, top, "conv2a", (32, 3, 3), same=False)
    top = max_pool(n, convolution(n, top, "conv2b", (64, 3, 3)), "pool1")
    top = convolution(n, top, "conv3b", (80, 1, 1))
    top = max_pool(n, convolution(n, top, "conv4a", (192, 3, 3), same=False), "pool2")
    for name, pool in (("mixed_5b", 32), ("mixed_5c", 64), ("mixed_5d", 64)):
        top = module_a(n, top, name, pool)
    top = module_b(n, top, "mixed_6a")
    for name, width in (("mixed_6b", 128), ("mixed_6c", 160), ("mixed_6d", 160), ("mixed_6e", 192)):
        top = module_c(n, top, name, width)
    top = module_d(n, top, "mixed_7a")
    for name in ("mixed_7b", "mixed_7c"):
        top = module_e(n, top, name)
    top = dropout(n, mean_pool(n, top, "pool3"), "drop", 0.5)
    return put(n, "fc", L.InnerProduct(top, num_output=1000, param=TWICE, weight_filler=XAVIER))


def definitions() -> dict[str, str]:
    """Return the text of each file, by its name."""
    return Recipe(
        name="Inception-v3",
        folder="inception_v3",
        about="Inception v3 on ImageNet, without the loss half way; 23,834,568 parameters learn.",
        paper='Szegedy et al., "Rethinking the Inception architecture for computer vision" (2015).',
        expect="0.788 top-1 and 0.944 top-5 on the validation pictures, as published (one crop).",
        body=body,
        crop=299,
        mean=(128,),
        scale=0.0078125,
        solver={
            "base_lr": 0.045,
            "lr_policy": "step",
            "gamma": 0.94,
            "stepsize": 80000,
            "max_iter": 4000000,
            "type": "RMSProp",
            "rms_decay": 0.9,
            "weight_decay": 0.00004,
        },
    ).definitions()


if __name__ == "__main__":
    write("inception_v3", definitions())
