"""A small synthetic set for detection and segmentation: shapes on backgrounds, with boxes and
masks.

Law: a scene is a function of its seed and its number. The classes are shapes; position, size,
rotation and colors are independent of the class. Shapes may touch and hide each other in part, but
less than half.

Legend: H x W images; u and v are coordinates in the frame of a shape, which fills about -1 .. 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from poseidon.caffe.data.label_map import label_map_text
from poseidon.caffe.data.prepare.procedural import SHAPES

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
        number: the number of the scene.
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
    """Write scenes as PNG images with annotations in the format of PASCAL VOC.

    Creates `images/`, `annotations/`, `list.txt` (an image and its annotation in each line),
    `labelmap.prototxt` and `sizes.txt` (name, height and width in each line), as `poseidon
    convert_annoset` and the layers of SSD read them.

    Args:
        folder: the folder, which is created.
        count: the number of scenes.
        first: the number of the first scene.
        options: the arguments of `draw_scene`.

    Returns:
        the list.
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
