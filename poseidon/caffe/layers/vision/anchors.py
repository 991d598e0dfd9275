"""Boxes of region proposal networks (Ren et al., 2015): anchors, coordinates relative to them,
overlaps, suppression.

Law: pure functions. A box is x1, y1, x2, y2 with both corners inside, so its
width is x2 - x1 + 1. All results are float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

RATIOS = (0.5, 1.0, 2.0)
SCALES = (8.0, 16.0, 32.0)


def base_anchors(size: int, ratios: Sequence[float], scales: Sequence[float]) -> Tensor:
    """Return the anchors of the cell at the origin, ratios x scales boxes.

    Args:
        size: the side of the square that ratios and scales change.
        ratios: height through width, in the order of the boxes.
        scales: factors of both sides, for each ratio.
    """
    center = (size - 1) / 2
    boxes = []
    for ratio in ratios:
        # Rounded half to even, as by numpy.
        wide = float(round(math.sqrt(size * size / ratio)))
        high = float(round(wide * ratio))
        for scale in scales:
            reach_x, reach_y = (wide * scale - 1) / 2, (high * scale - 1) / 2
            boxes.append((center - reach_x, center - reach_y, center + reach_x, center + reach_y))
    return torch.tensor(boxes, dtype=torch.float32)


def anchors_of_map(base: Tensor, high: int, wide: int, stride: int) -> Tensor:
    """Return the anchors of every cell of a map, (high x wide x len(base)) x 4 in the order of
    rows, columns, boxes.
    """
    y, x = torch.meshgrid(
        torch.arange(high, device=base.device) * stride,
        torch.arange(wide, device=base.device) * stride,
        indexing="ij",
    )
    shifts = torch.stack((x, y, x, y), -1).view(-1, 1, 4)
    return (base + shifts).view(-1, 4)


def _centers(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the centers and the sides of boxes, ... x 2 each."""
    sides = boxes[..., 2:] - boxes[..., :2] + 1
    return boxes[..., :2] + 0.5 * sides, sides


def decode(anchors: Tensor, deltas: Tensor) -> Tensor:
    """Return the boxes of relative coordinates dx, dy, log dw, log dh."""
    center, sides = _centers(anchors)
    middle = deltas[..., :2] * sides + center
    reach = 0.5 * deltas[..., 2:].exp() * sides
    return torch.cat((middle - reach, middle + reach), -1)


def encode(anchors: Tensor, boxes: Tensor) -> Tensor:
    """Return the coordinates of boxes relative to anchors: dx, dy, log dw, log dh."""
    center, sides = _centers(anchors)
    middle, extents = _centers(boxes)
    return torch.cat(((middle - center) / sides, (extents / sides).log()), -1)


def clip(boxes: Tensor, high: float, wide: float) -> Tensor:
    """Return boxes with their corners inside an image."""
    x = boxes[..., 0::2].clamp(0, max(wide - 1, 0))
    y = boxes[..., 1::2].clamp(0, max(high - 1, 0))
    return torch.stack((x[..., 0], y[..., 0], x[..., 1], y[..., 1]), -1)


def overlaps(a: Tensor, b: Tensor) -> Tensor:
    """Return the intersection over union of each pair of boxes, len(a) x len(b)."""
    low = torch.maximum(a[:, None, :2], b[None, :, :2])
    high = torch.minimum(a[:, None, 2:], b[None, :, 2:])
    common = (high - low + 1).clamp(min=0).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2] + 1).prod(-1) for boxes in (a, b)]
    return common / (areas[0][:, None] + areas[1][None, :] - common)


def suppress(boxes: Tensor, threshold: float, most: int) -> Tensor:
    """Return the indices of the boxes that stay of boxes in the order of falling scores.

    A box stays unless its overlap with one that stays before it exceeds the threshold (non-maximum
    suppression).

    Args:
        boxes: N x 4.
        threshold: the largest overlap.
        most: the maximum number of boxes to return.
    """
    kept: list[int] = []
    left = torch.arange(len(boxes), device=boxes.device)
    while len(left) and len(kept) < most:
        first = left[0]
        kept.append(int(first))
        left = left[1:]
        left = left[overlaps(boxes[first].unsqueeze(0), boxes[left])[0] <= threshold]
    return torch.tensor(kept, dtype=torch.long, device=boxes.device)
