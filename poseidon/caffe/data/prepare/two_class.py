"""A small drawn set of pictures of two classes, cars and boats, for a first run without a download.

Law: a picture depends on seed, number and label only. Size, position, direction, colors, background
and noise are independent of the class: only the shape differs between the classes.
"""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

CLASS_NAMES = ("car", "boat")
SIDES = (96, 144)
"""The least and the largest side, in pixels."""
SUBPIXEL = 4
"""Bits of a fraction of a pixel in OpenCV's coordinates."""
JPEG_QUALITY = 90

# Outlines in a frame of -1..1 in both directions, y downwards.
CAR = (
    (
        (-1, 0.35),
        (-1, -0.05),
        (-0.6, -0.1),
        (-0.35, -0.5),
        (0.35, -0.5),
        (0.62, -0.1),
        (1, 0),
        (1, 0.35),
    ),
    ((-0.45, -0.1), (-0.28, -0.4), (0.0, -0.4), (0.0, -0.1)),
    ((0.08, -0.1), (0.08, -0.4), (0.28, -0.4), (0.45, -0.1)),
)
WHEELS = ((-0.55, 0.38), (0.55, 0.38))
BOAT = (
    ((-1, 0.25), (1, 0.15), (0.7, 0.65), (-0.7, 0.65)),
    ((-0.04, -0.95), (0.04, -0.95), (0.04, 0.25), (-0.04, 0.25)),
    ((0.1, -0.85), (0.75, 0.08), (0.1, 0.1)),
    ((-0.1, -0.7), (-0.6, 0.1), (-0.1, 0.1)),
)


def draw_labels(count: int, *, seed: int) -> npt.NDArray[np.int64]:
    """Return `count` labels, 0 and 1 as equal in number as possible, in random order."""
    labels: npt.NDArray[np.int64] = np.random.default_rng((seed, count)).permutation(
        np.arange(count) % 2
    )
    return labels


def draw_picture(number: int, label: int, *, seed: int) -> bytes:
    """Return picture `number` as a JPEG file: a car for label 0, a boat for label 1."""
    random = np.random.default_rng((seed, number))
    height, width = (int(side) for side in random.integers(SIDES[0], SIDES[1] + 1, 2))
    image = _background(height, width, random)
    _draw(image, label, random)
    values = image.astype(np.float32) + random.normal(0, random.uniform(2, 12), image.shape)
    pixels = cv2.GaussianBlur(np.clip(values, 0, 255).astype(np.uint8), (3, 3), 0)
    _, content = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    return bytes(content)


def _background(height: int, width: int, random: np.random.Generator) -> Array:
    """Return two areas, one above the other, each with a gradient of its own."""
    image = np.empty((height, width, 3), np.float32)
    horizon = int(height * random.uniform(0.35, 0.75))
    for part in (image[:horizon], image[horizon:]):
        colors = random.uniform(60, 200, (2, 3))
        share = np.linspace(0, 1, len(part))[:, np.newaxis]
        part[...] = (colors[0] * (1 - share) + colors[1] * share)[:, np.newaxis]
    pixels: Array = image.astype(np.uint8)
    return pixels


def _draw(image: Array, label: int, random: np.random.Generator) -> None:
    height, width = image.shape[:2]
    size = min(height, width) * random.uniform(0.28, 0.45)
    center = np.array([width, height]) * random.uniform(0.42, 0.58, 2)
    turn = np.deg2rad(random.uniform(-12, 12))
    flip = random.choice([-1.0, 1.0])
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])

    def placed(points: Any) -> Array:
        there = np.asarray(points) * [flip, 1.0] @ rotation.T * size + center
        moved: Array = np.round(there * (1 << SUBPIXEL)).astype(np.int32)
        return moved

    for outline in CAR if label == 0 else BOAT:
        cv2.fillPoly(image, [placed(outline)], _color(random), cv2.LINE_AA, SUBPIXEL)
    for wheel in placed(WHEELS) if label == 0 else ():
        for share in (0.2, 0.09):
            radius = round(size * share * (1 << SUBPIXEL))
            cv2.circle(
                image,
                (int(wheel[0]), int(wheel[1])),
                radius,
                _color(random),
                -1,
                cv2.LINE_AA,
                SUBPIXEL,
            )


def _color(random: np.random.Generator) -> tuple[int, int, int]:
    blue, green, red = (int(part) for part in random.integers(0, 256, 3))
    return blue, green, red
