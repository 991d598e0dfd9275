"""Detection against plain loops over boxes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.caffe2_operators import Array, run

RANDOM = np.random.RandomState(5)


def some_boxes(count: int, size: float = 40) -> Array:
    corners = RANDOM.rand(count, 2) * size
    return np.concatenate([corners, corners + RANDOM.rand(count, 2) * size / 2 + 2], 1).astype("f4")


def overlap(a: Array, b: Array) -> float:
    wide = min(a[2], b[2]) - max(a[0], b[0]) + 1
    high = min(a[3], b[3]) - max(a[1], b[1]) + 1
    common = max(wide, 0) * max(high, 0)
    areas = [(box[2] - box[0] + 1) * (box[3] - box[1] + 1) for box in (a, b)]
    return common / (sum(areas) - common)


def suppressed(boxes: Array, scores: Array, limit: float) -> list[int]:
    kept: list[int] = []
    for place in np.argsort(-scores, kind="stable"):
        if all(overlap(boxes[place], boxes[other]) <= limit for other in kept):
            kept.append(int(place))
    return kept


BOXES, SCORES = some_boxes(20), RANDOM.rand(20, 3).astype("f4")
WIDE = np.concatenate([BOXES, BOXES + 3, BOXES - 2], 1)


def best_of_image(scores: Array, boxes: Array, most: int) -> tuple[Array, Array, Array, Array]:
    rows = []
    for label in (1, 2):
        own = np.nonzero(scores[:, label] > 0.3)[0]
        corners = boxes[:, 4 * label : 4 * label + 4]
        kept = own[suppressed(corners[own], scores[own, label], 0.2)]
        rows += [(scores[place, label], corners[place], label, place) for place in kept]
    if 0 < most < len(rows):
        limit = sorted((row[0] for row in rows), reverse=True)[most - 1]
        rows = [row for row in rows if row[0] >= limit]
    values, corners, classes, places = zip(*rows, strict=True)
    return np.array(values), np.stack(corners), np.array(classes), np.array(places)


@pytest.mark.parametrize("most", [0, 4])
@pytest.mark.parametrize("background", [0, 1])
def test_the_best_boxes_of_each_class(most: int, background: int) -> None:
    sizes = np.array([12, 8], "f4")
    boxes = WIDE if background else WIDE[:, 4:]
    settings = {"score_thresh": 0.3, "nms": 0.2, "detections_per_im": most}
    settings["input_boxes_include_bg_cls"] = background
    settings["output_classes_include_bg_cls"] = background
    # Where the boxes have no background, the scores have theirs in the last column, as in Caffe2.
    scores = SCORES if background else np.roll(SCORES, -1, axis=1)
    found = run("BoxWithNMSLimit", [scores, boxes, sizes], 6, **settings)
    parts = [best_of_image(SCORES[part], WIDE[part], most) for part in (slice(12), slice(12, None))]
    wanted = [np.concatenate(column) for column in zip(*parts, strict=True)]
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-6)
    np.testing.assert_array_equal(found[2], wanted[2] - (1 - background))
    np.testing.assert_array_equal(found[3], [len(part[0]) for part in parts])
    np.testing.assert_array_equal(found[4], wanted[3])
    counts = [np.bincount(part[2], minlength=3) for part in parts]
    np.testing.assert_array_equal(found[5], np.stack(counts))


@pytest.mark.parametrize("method", ["linear", "gaussian", "hard"])
def test_scores_of_overlapping_boxes_are_lowered(method: str) -> None:
    settings = {"score_thresh": 0.3, "nms": 0.2, "detections_per_im": 0, "soft_nms_enabled": 1}
    settings |= {"soft_nms_method": method, "soft_nms_sigma": 0.5, "soft_nms_min_score_thres": 0.25}
    found = run("BoxWithNMSLimit", [SCORES[:, :2], WIDE[:, :8]], 5, **settings)
    left = {int(place): float(SCORES[place, 1]) for place in np.nonzero(SCORES[:, 1] > 0.3)[0]}
    wanted = []
    while left:
        best = max(left, key=lambda place: left[place])
        wanted.append((best, left.pop(best)))
        for place in list(left):
            common = overlap(WIDE[best, 4:8], WIDE[place, 4:8])
            lowered = {"linear": 1 - common, "gaussian": np.exp(-(common**2) / 0.5), "hard": 0.0}[
                method
            ]
            left[place] *= lowered if method == "gaussian" or common > 0.2 else 1
            if left[place] < 0.25:
                del left[place]
    np.testing.assert_array_equal(found[4], [place for place, _ in wanted])
    np.testing.assert_allclose(found[0], [score for _, score in wanted], rtol=1e-5)


def test_boxes_are_proposed_from_anchors() -> None:
    scores = RANDOM.rand(2, 3, 4, 5).astype("f4")
    deltas = (0.3 * RANDOM.randn(2, 12, 4, 5)).astype("f4")
    anchors = np.array([[-4, -4, 11, 11], [-8, -4, 15, 11], [-2, -8, 9, 15]], "f4")
    info = np.array([[30, 40, 1.0], [24, 28, 1.5]], "f4")
    settings = {"spatial_scale": 0.125, "pre_nms_topN": 25, "post_nms_topN": 6}
    settings |= {"nms_thresh": 0.4, "min_size": 5.0}
    boxes, values = run("GenerateProposals", [scores, deltas, info, anchors], 2, **settings)
    wanted_boxes, wanted_values = [], []
    for image in range(2):
        rows = []
        for a, y, x in np.ndindex(3, 4, 5):
            x1, y1, x2, y2 = anchors[a] + np.array([x, y, x, y]) * 8
            dx, dy, dw, dh = deltas[image, 4 * a : 4 * a + 4, y, x]
            wide, high = x2 - x1 + 1, y2 - y1 + 1
            centre = np.array([x1 + wide / 2 + dx * wide, y1 + high / 2 + dy * high])
            half = np.array([wide * np.exp(dw), high * np.exp(dh)]) / 2
            box = np.concatenate([centre - half, centre + half - 1])
            limits = [info[image, 1] - 1, info[image, 0] - 1] * 2
            rows.append((scores[image, a, y, x], np.clip(box, 0, limits)))
        rows = sorted(rows, key=lambda row: -row[0])[:25]
        rows = [row for row in rows if (row[1][2:] - row[1][:2] + 1 >= 5 * info[image, 2]).all()]
        kept = suppressed(
            np.stack([row[1] for row in rows]), np.array([row[0] for row in rows]), 0.4
        )[:6]
        wanted_boxes += [np.append(image, rows[place][1]) for place in kept]
        wanted_values += [rows[place][0] for place in kept]
    np.testing.assert_allclose(values, wanted_values, rtol=1e-6)
    np.testing.assert_allclose(boxes, np.stack(wanted_boxes), rtol=1e-4, atol=1e-3)


def test_boxes_of_all_levels_go_to_the_level_of_their_size() -> None:
    levels = [some_boxes(count, size) for count, size in [(3, 100), (4, 400), (5, 1600)]]
    boxes = [np.concatenate([np.zeros((len(part), 1), "f4"), part], 1) for part in levels]
    scores = [RANDOM.rand(len(part)).astype("f4") for part in levels]
    settings = {"rpn_min_level": 2, "rpn_max_level": 4, "roi_min_level": 2, "roi_max_level": 5}
    found = run(
        "CollectAndDistributeFpnRpnProposals", [*boxes, *scores], 6, rpn_post_nms_topN=9, **settings
    )
    best = np.argsort(-np.concatenate(scores))[:9]
    wanted = np.concatenate(boxes)[best]
    np.testing.assert_array_equal(found[0], wanted)
    sides = wanted[:, 3:] - wanted[:, 1:3] + 1
    level = np.clip(np.floor(4 + np.log2(np.sqrt(sides.prod(1)) / 224 + 1e-6)), 2, 5)
    for number, part in enumerate(found[1:5], 2):
        np.testing.assert_array_equal(part, wanted[level == number])
    np.testing.assert_array_equal(np.concatenate(found[1:5])[found[5]], wanted)
    with pytest.raises(RuntimeError, match="expected 6"):
        run("CollectAndDistributeFpnRpnProposals", [*boxes, *scores[:2]], 6, **settings)
