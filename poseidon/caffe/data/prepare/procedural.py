"""Small synthetic data sets, for a first run without a network: images of shapes by class, and
scenes for detection and segmentation.

Law: the same seed gives the same images. The ten classes are ten shapes. Position, size, rotation,
colors, shading and noise are independent of the class, so that a linear classifier of pixels fails
and a small convolutional net succeeds.

Legend: N images; maps are float32 (N, 32, 32); u and v are coordinates in the frame of the shape,
which fills about -1..1; a shape is a function f(u, v) that is negative inside.

A small synthetic set for detection and segmentation: shapes on backgrounds, with boxes and
masks.

Law: a scene is a function of its seed and its number. The classes are shapes; position, size,
rotation and colors are independent of the class. Shapes may touch and hide each other in part, but
less than half.

Legend: H x W images; u and v are coordinates in the frame of a shape, which fills about -1 .. 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from poseidon.caffe.data.datum import label_map_text
from poseidon.caffe.data.prepare.convert import Labelled
from poseidon.caffe.data.staging import Report, silent

Map = npt.NDArray[Any]
Shape = Callable[[Map, Map], Map]

SIDE = 32
CHUNK = 500  # images drawn at a time, to bound the memory


def _cross(u: Map, v: Map) -> Map:
    a, b = np.abs(u), np.abs(v)
    cross: Map = np.minimum(np.maximum(a - 0.26, b - 0.9), np.maximum(b - 0.26, a - 0.9))
    return cross


def _dots(u: Map, v: Map) -> Map:
    turns = (0.0, 2 * np.pi / 3, 4 * np.pi / 3)
    distances = [np.hypot(u - 0.6 * np.cos(t), v - 0.6 * np.sin(t)) for t in turns]
    nearest: Map = np.minimum.reduce(distances)
    return nearest - 0.32


SHAPES: dict[str, Shape] = {
    "disc": lambda u, v: np.hypot(u, v) - 0.8,
    "ring": lambda u, v: np.abs(np.hypot(u, v) - 0.62) - 0.22,
    "square": lambda u, v: np.maximum(np.abs(u), np.abs(v)) - 0.72,
    "triangle": lambda u, v: np.maximum(np.abs(u) * 0.866 + v * 0.5, -v) - 0.5,
    "cross": _cross,
    "star": lambda u, v: np.hypot(u, v) - 0.62 - 0.3 * np.cos(5 * np.arctan2(v, u)),
    "crescent": lambda u, v: np.maximum(np.hypot(u, v) - 0.85, 0.7 - np.hypot(u - 0.45, v)),
    "bars": lambda u, v: np.maximum(np.abs(np.abs(u) - 0.5) - 0.22, np.abs(v) - 0.85),
    "corners": lambda u, v: np.maximum(np.maximum(np.abs(u), np.abs(v)) - 0.8, -u * v * 4),
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


DEFAULT = ("disc", "square", "triangle")
# The size of a shape, in fractions of the image's shorter side.
SMALLEST, LARGEST = 0.25, 0.55


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """An image with its objects.

    Attributes:
        image: (H, W, 3) uint8, in BGR order.
        labels: the class of each object, from 1; 0 is the background.
        boxes: (objects, 4) integers: xmin, ymin, xmax, ymax in pixels. The last row and column are
            outside.
        mask: (H, W) uint8: the class of each pixel.
    """

    image: npt.NDArray[np.uint8]
    labels: tuple[int, ...]
    boxes: npt.NDArray[np.int64]
    mask: npt.NDArray[np.uint8]


def draw_scene(
    number: int,
    *,
    seed: int = 0,
    size: tuple[int, int] = (96, 96),
    most: int = 3,
    names: Sequence[str] = DEFAULT,
) -> Scene:
    """Draw scene `number` >= 0.

    Args:
        seed: the seed of the set, >= 0.
        size: height and width.
        most: the largest number of objects; there is at least one.
        names: the classes, of `procedural.SHAPES`; the first has label 1.
    """
    random = np.random.default_rng((seed, number))
    height, width = size
    image = _background(size, random)
    owner = np.full(size, -1, np.int64)
    labels: list[int] = []
    wanted = int(random.integers(1, most + 1))
    for _ in range(20 * wanted):
        if len(labels) == wanted:
            break
        label = int(random.integers(len(names))) + 1
        inside = _inside(names[label - 1], (height, width), random)
        hidden = inside & (owner >= 0)
        if not inside.any() or any(
            (hidden & (owner == other)).sum() > 0.2 * (owner == other).sum()
            for other in range(len(labels))
        ):
            continue
        owner[inside] = len(labels)
        labels.append(label)
        color = random.uniform(150, 255, 3) * (random.random(3) > 0.3)
        image[inside] = np.maximum(color, 90)
    image += random.normal(0, 6, image.shape)
    boxes = np.array([_bounds(owner == index) for index in range(len(labels))], np.int64)
    classes = np.array([*labels, 0], np.uint8)
    return Scene(
        image=image.clip(0, 255).astype(np.uint8),
        labels=tuple(labels),
        boxes=boxes,
        mask=classes[owner],
    )


def _background(size: tuple[int, int], random: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return a dark image with a gradient."""
    y, x = np.mgrid[0 : 1 : size[0] * 1j, 0 : 1 : size[1] * 1j]
    slopes = random.uniform(-30, 30, (2, 3))
    base = random.uniform(10, 60, 3)
    found: npt.NDArray[np.float64] = base + x[..., None] * slopes[0] + y[..., None] * slopes[1]
    return found


def _inside(name: str, size: tuple[int, int], random: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Return the pixels of a shape at a random place."""
    radius = random.uniform(SMALLEST, LARGEST) * min(size) / 2
    top, left = (random.uniform(radius, side - radius) for side in size)
    turn = random.uniform(-0.3, 0.3)
    y, x = np.mgrid[0 : size[0], 0 : size[1]] + 0.5
    u = ((x - left) * np.cos(turn) + (y - top) * np.sin(turn)) / radius
    v = ((y - top) * np.cos(turn) - (x - left) * np.sin(turn)) / radius
    inside: npt.NDArray[np.bool_] = SHAPES[name](u, v) < 0
    return inside


def _bounds(inside: npt.NDArray[np.bool_]) -> tuple[int, int, int, int]:
    rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def write_detection_set(folder: Path, count: int, *, first: int = 0, **options: Any) -> Path:
    """Write scenes as PNG images with annotations in the format of PASCAL VOC. Return the list.

    Creates `images/`, `annotations/`, `list.txt` (an image and its annotation in each line),
    `labelmap.prototxt` and `sizes.txt` (name, height and width in each line), as `poseidon
    convert_annoset` and the layers of SSD read them.

    Args:
        first: the number of the first scene.
        options: the arguments of `draw_scene`.
    """
    names = tuple(options.get("names", DEFAULT))
    for part in ("images", "annotations"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    lines, sizes = [], []
    for number in range(first, first + count):
        scene, name = draw_scene(number, **options), f"{number:06d}"
        _write_image(folder / "images" / f"{name}.png", scene.image)
        (folder / "annotations" / f"{name}.xml").write_text(
            voc_annotation(scene, names), encoding="utf-8"
        )
        lines.append(f"images/{name}.png annotations/{name}.xml\n")
        sizes.append(f"{name} {scene.image.shape[0]} {scene.image.shape[1]}\n")
    (folder / "list.txt").write_text("".join(lines), encoding="utf-8")
    (folder / "sizes.txt").write_text("".join(sizes), encoding="utf-8")
    (folder / "labelmap.prototxt").write_text(label_map_text(names), encoding="utf-8")
    return folder / "list.txt"


def _write_image(path: Path, pixels: npt.NDArray[np.uint8]) -> None:
    _, content = cv2.imencode(".png", pixels)
    path.write_bytes(bytes(content))


def voc_annotation(scene: Scene, names: Sequence[str] = DEFAULT) -> str:
    """Return the annotation of a scene in the XML format of PASCAL VOC."""
    height, width = scene.image.shape[:2]
    objects = "".join(
        f"  <object><name>{names[label - 1]}</name><difficult>0</difficult><bndbox>"
        + "".join(
            f"<{side}>{value}</{side}>"
            for side, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
        )
        + "</bndbox></object>\n"
        for label, box in zip(scene.labels, scene.boxes.tolist(), strict=True)
    )
    size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    return f"<annotation>\n  {size}\n{objects}</annotation>\n"
