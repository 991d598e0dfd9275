"""A small synthetic data set, for a first run without CIFAR-10 and without a network.

Law: the same seed gives the same images. The ten classes are ten shapes. Position, size, rotation,
colors, shading and noise are independent of the class, so that a linear classifier of pixels fails
and a small convolutional net succeeds.

Legend: N images; maps are float32 (N, 32, 32); u and v are coordinates in the frame of the shape,
which fills about -1..1; a shape is a function f(u, v) that is negative inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from poseidon.caffe.data.prepare.convert import Labelled
from poseidon.caffe.data.progress_reports import Report, silent

Map = npt.NDArray[Any]
Shape = Callable[[Map, Map], Map]

SIDE = 32
CHUNK = 500  # images drawn at a time, to bound the memory


def _disc(u: Map, v: Map) -> Map:
    return np.hypot(u, v) - 0.8


def _ring(u: Map, v: Map) -> Map:
    return np.abs(np.hypot(u, v) - 0.62) - 0.22


def _square(u: Map, v: Map) -> Map:
    return np.maximum(np.abs(u), np.abs(v)) - 0.72


def _triangle(u: Map, v: Map) -> Map:
    return np.maximum(np.abs(u) * 0.866 + v * 0.5, -v) - 0.5


def _cross(u: Map, v: Map) -> Map:
    a, b = np.abs(u), np.abs(v)
    cross: Map = np.minimum(np.maximum(a - 0.26, b - 0.9), np.maximum(b - 0.26, a - 0.9))
    return cross


def _star(u: Map, v: Map) -> Map:
    star: Map = np.hypot(u, v) - 0.62 - 0.3 * np.cos(5 * np.arctan2(v, u))
    return star


def _crescent(u: Map, v: Map) -> Map:
    return np.maximum(np.hypot(u, v) - 0.85, 0.7 - np.hypot(u - 0.45, v))


def _bars(u: Map, v: Map) -> Map:
    return np.maximum(np.abs(np.abs(u) - 0.5) - 0.22, np.abs(v) - 0.85)


def _corners(u: Map, v: Map) -> Map:
    corners: Map = np.maximum(np.maximum(np.abs(u), np.abs(v)) - 0.8, -u * v * 4)
    return corners


def _dots(u: Map, v: Map) -> Map:
    turns = (0.0, 2 * np.pi / 3, 4 * np.pi / 3)
    distances = [np.hypot(u - 0.6 * np.cos(t), v - 0.6 * np.sin(t)) for t in turns]
    nearest: Map = np.minimum.reduce(distances)
    return nearest - 0.32


SHAPES: dict[str, Shape] = {
    "disc": _disc,
    "ring": _ring,
    "square": _square,
    "triangle": _triangle,
    "cross": _cross,
    "star": _star,
    "crescent": _crescent,
    "bars": _bars,
    "corners": _corners,
    "dots": _dots,
}
"""The ten classes, in the order of their labels."""


def draw_images(count: int, *, seed: int, report: Report = silent) -> Labelled:
    """Draw `count` images with labels 0..9, as equal in number as possible, in random order.

    Returns:
        images (count, 3, 32, 32) uint8 in RGB order, as in CIFAR-10, and their labels.
    """
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(count) % len(SHAPES)).astype(np.uint8)
    chunks = []
    for start in range(0, count, CHUNK):
        chunks.append(_draw(labels[start : start + CHUNK], random))
        report("drawing", min(start + CHUNK, count), count)
    return Labelled(images=np.concatenate(chunks), labels=labels)


def _draw(labels: npt.NDArray[np.uint8], random: np.random.Generator) -> npt.NDArray[np.uint8]:
    count = len(labels)
    inside = _coverage(labels, random)[:, np.newaxis]  # N, 1, 32, 32
    background, foreground = _colors(count, random)
    image = (
        background * _shading(count, random) * (1 - inside)
        + foreground * _shading(count, random) * inside
    )
    noise = random.uniform(0.02, 0.12, (count, 1, 1, 1)) * random.standard_normal(
        (count, 3, SIDE, SIDE), np.float32
    )
    pixels: Map = np.clip((image + noise) * 255, 0, 255)
    return pixels.astype(np.uint8)


def _coverage(labels: npt.NDArray[np.uint8], random: np.random.Generator) -> Map:
    """Return the fraction of each pixel that the shape covers, 0..1."""
    count = len(labels)
    y, x = np.mgrid[-1 : 1 : SIDE * 1j, -1 : 1 : SIDE * 1j].astype(np.float32)
    left, top = random.uniform(-0.3, 0.3, (2, count, 1, 1)).astype(np.float32)
    size = random.uniform(0.4, 0.8, (count, 1, 1)).astype(np.float32)
    stretch = random.uniform(0.8, 1.25, (count, 1, 1)).astype(np.float32)
    turn = random.uniform(-1.2, 1.2, (count, 1, 1)).astype(np.float32)
    u = ((x - left) * np.cos(turn) + (y - top) * np.sin(turn)) / (size * stretch)
    v = ((y - top) * np.cos(turn) - (x - left) * np.sin(turn)) / (size / stretch)
    outline = np.empty_like(u)
    for label, shape in enumerate(SHAPES.values()):
        selected = labels == label
        outline[selected] = shape(u[selected], v[selected])
    # A pixel is 2 / 32 wide, so the edge is one pixel wide.
    coverage: Map = np.clip(0.5 - outline * size * (SIDE / 2), 0, 1)
    return coverage


def _colors(count: int, random: np.random.Generator) -> tuple[Map, Map]:
    """Draw two colors (N, 3, 1, 1), for backbackground and shape. The shape is always lighter."""
    background = random.uniform(0.05, 0.55, (count, 3, 1, 1))
    difference = np.abs(random.standard_normal((count, 3, 1, 1)))
    difference *= random.uniform(0.2, 0.6, (count, 1, 1, 1)) / np.linalg.norm(
        difference, axis=1, keepdims=True
    )
    foreground = np.minimum(background + difference, 1)
    return background.astype(np.float32), foreground.astype(np.float32)


def _shading(count: int, random: np.random.Generator) -> Map:
    """Draw brightness maps (N, 1, 32, 32) around 1, with a gradient and a wave."""
    y, x = np.mgrid[-1 : 1 : SIDE * 1j, -1 : 1 : SIDE * 1j].astype(np.float32)
    slope = random.uniform(-0.25, 0.25, (2, count, 1, 1, 1)).astype(np.float32)
    wave = random.uniform(-7, 7, (2, count, 1, 1, 1)).astype(np.float32)
    phase = random.uniform(0, 2 * np.pi, (count, 1, 1, 1)).astype(np.float32)
    ripple = random.uniform(0, 0.1, (count, 1, 1, 1)).astype(np.float32)
    light: Map = (
        1 + slope[0] * x + slope[1] * y + ripple * np.sin(wave[0] * x + wave[1] * y + phase)
    )
    return light
