"""MultiBoxLoss: a case worked out by hand, loops over boxes for all settings, finite
differences, refusals.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from google.protobuf import text_format

from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import MultiBoxLossParameter
from poseidon.errors import DataError, DefinitionError
from tests.support.gradient_check import check_gradients
from tests.support.nets import build, inputs, layer

IMAGES, PRIORS, CLASSES = 3, 14, 4
Box = tuple[float, ...]


def net(
    body: str, *, loc: int, conf: int, priors: int, objects: int, images: int, rest: str = ""
) -> Net:
    text = inputs(
        loc=(images, loc), conf=(images, conf), prior=(1, 2, priors * 4), gt=(1, 1, objects, 8)
    )
    param = f"multibox_loss_param {{ {body} }} {rest} propagate_down: true propagate_down: true "
    param += "propagate_down: false propagate_down: false"
    return build(text + layer("MultiBoxLoss", "loc conf prior gt", "loss", param))


def random_case(seed: int, *, locations: int = 1, empty: bool = False) -> dict[str, torch.Tensor]:
    """Bottoms of a batch whose first image has three objects, whose second has none and whose
    third has two.
    """
    random = np.random.default_rng(seed)
    centers = random.uniform(0.1, 0.9, (PRIORS, 2))
    half = random.uniform(0.1, 0.3, (PRIORS, 2))
    priors = np.concatenate([centers - half, centers + half], 1)
    rows = []
    for image, count in ((0, 3), (2, 2)):
        for instance in range(0 if empty else count):
            # An object near a prior box, so that some overlaps are large.
            box = priors[random.integers(PRIORS)] + random.normal(0, 0.03, 4)
            rows.append([image, random.integers(1, CLASSES), instance, *box, random.random() < 0.3])
    objects = np.array(rows or [[-1.0] * 8], np.float64)
    return {
        "loc": torch.from_numpy(random.normal(0, 0.5, (IMAGES, PRIORS * locations * 4))),
        "conf": torch.from_numpy(random.normal(0, 1, (IMAGES, PRIORS * CLASSES))),
        "prior": torch.from_numpy(
            np.stack([priors.ravel(), np.tile([0.1, 0.1, 0.2, 0.2], PRIORS)])[None].astype(
                np.float64
            )
        ),
        "gt": torch.from_numpy(objects[None, None]),
    }


def loss_of(body: str, case: dict[str, torch.Tensor], rest: str = "") -> Net:
    made = net(
        body,
        loc=case["loc"].shape[1],
        conf=case["conf"].shape[1],
        priors=PRIORS,
        objects=case["gt"].shape[2],
        images=IMAGES,
        rest=rest,
    )
    return made.double()


def value(made: Net, case: dict[str, torch.Tensor]) -> float:
    return float(made(case)["loss"].detach())


# The layer once more, box by box.


def area(box: Box) -> float:
    return 0.0 if box[2] < box[0] or box[3] < box[1] else (box[2] - box[0]) * (box[3] - box[1])


def jaccard(a: Box, b: Box) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    return width * height / (area(a) + area(b) - width * height)


def encode(box: Box, prior: Box, variance: Box, param: MultiBoxLossParameter) -> Box:
    w, h = prior[2] - prior[0], prior[3] - prior[1]
    if param.code_type == 2:
        code: Box = (
            ((box[0] + box[2]) / 2 - (prior[0] + prior[2]) / 2) / w,
            ((box[1] + box[3]) / 2 - (prior[1] + prior[3]) / 2) / h,
            math.log((box[2] - box[0]) / w),
            math.log((box[3] - box[1]) / h),
        )
    else:
        size = (w, h, w, h) if param.code_type == 3 else (1, 1, 1, 1)
        code = tuple((box[k] - prior[k]) / size[k] for k in range(4))
    return (
        code if param.encode_variance_in_target else tuple(code[k] / variance[k] for k in range(4))
    )


def decode(code: Box, prior: Box, variance: Box, param: MultiBoxLossParameter) -> Box:
    w, h = prior[2] - prior[0], prior[3] - prior[1]
    if not param.encode_variance_in_target:
        code = tuple(code[k] * variance[k] for k in range(4))
    if param.code_type != 2:
        size = (w, h, w, h) if param.code_type == 3 else (1, 1, 1, 1)
        return tuple(prior[k] + code[k] * size[k] for k in range(4))
    x, y = code[0] * w + (prior[0] + prior[2]) / 2, code[1] * h + (prior[1] + prior[3]) / 2
    w, h = math.exp(code[2]) * w / 2, math.exp(code[3]) * h / 2
    return (x - w, y - h, x + w, y + h)


def assign(
    boxes: list[Box], objects: list[Box], param: MultiBoxLossParameter
) -> tuple[list[int], list[float]]:
    found, largest = [-1] * len(boxes), [0.0] * len(boxes)
    table: dict[int, dict[int, float]] = {}
    for i, box in enumerate(boxes):
        if param.ignore_cross_boundary_bbox and any(value < 0 or value > 1 for value in box):
            found[i] = -2 if objects else -1
            continue
        for j, item in enumerate(objects):
            if jaccard(box, item) > 1e-6:
                table.setdefault(i, {})[j] = jaccard(box, item)
                largest[i] = max(largest[i], table[i][j])
    pool = list(range(len(objects)))
    while pool:
        pairs = [(i, j) for i in table if found[i] == -1 for j in pool if j in table[i]]
        if not pairs:
            break
        i, j = max(pairs, key=lambda pair: table[pair[0]][pair[1]])
        found[i], largest[i] = j, table[i][j]
        pool.remove(j)
    for i, row in table.items():
        best = max(row, key=lambda j: row[j])
        if param.match_type == 1 and found[i] == -1 and row[best] >= param.overlap_threshold:
            found[i] = best
    return found, largest


def smooth(d: float) -> float:
    return d * d / 2 if abs(d) < 1 else abs(d) - 0.5


def class_loss(
    scores: list[float], label: int, param: MultiBoxLossParameter, *, target: bool = True
) -> float:
    if param.conf_loss_type == 0:
        return math.log(sum(math.exp(s - scores[label]) for s in scores))
    total = 0.0
    for c, score in enumerate(scores):
        wanted = c == label and (target or c != param.background_label_id)
        total += math.log1p(math.exp(-score if wanted else score))
    return total


def by_hand(case: dict[str, torch.Tensor], text: str, mode: str = "VALID") -> float:
    """The loss, from loops."""
    param = text_format.Parse(text, MultiBoxLossParameter())
    columns = 1 if param.share_location else param.num_classes
    loc = case["loc"].view(IMAGES, PRIORS, columns, 4).tolist()
    conf = case["conf"].view(IMAGES, PRIORS, -1).tolist()
    priors, variances = (rows.view(-1, 4).tolist() for rows in case["prior"][0])
    total, positives = 0.0, 0
    for image in range(IMAGES):
        rows = [row for row in case["gt"][0, 0].tolist() if row[0] == image]
        rows = [row for row in rows if param.use_difficult_gt or not row[7]]
        labels = [1 if param.map_object_to_agnostic else int(row[1]) for row in rows]
        objects = [tuple(row[3:7]) for row in rows]
        background = param.background_label_id
        if not rows:
            if param.mining_type == 0:
                total += sum(class_loss(s, background, param, target=False) for s in conf[image])
            continue
        each: dict[int, tuple[list[int], list[float]]] = {}
        for column in range(columns):
            if columns > 1 and column == background:
                continue
            boxes = priors
            if not param.use_prior_for_matching:
                boxes = [
                    decode(loc[image][p][column], priors[p], variances[p], param)
                    for p in range(PRIORS)
                ]
            of_class = [g for g in range(len(rows)) if columns == 1 or labels[g] == column]
            if param.use_prior_for_matching:
                found, largest = assign(boxes, objects, param)
                found = [g if g < 0 or g in of_class else -1 for g in found]
            else:
                found, largest = assign(boxes, [objects[g] for g in of_class], param)
                found = [of_class[g] if g >= 0 else g for g in found]
            each[column] = (found, largest)
        loc_losses = [[0.0] * PRIORS for _ in range(columns)]
        for column, (found, _) in each.items():
            for p, g in enumerate(found):
                if g < 0:
                    continue
                target = encode(objects[g], priors[p], variances[p], param)
                code = loc[image][p][column]
                if param.bp_inside:
                    box = (
                        priors[p]
                        if param.use_prior_for_matching
                        else decode(code, priors[p], variances[p], param)
                    )
                    code = [target[k] if box[k] < 0 or box[k] > 1 else code[k] for k in range(4)]
                scale = variances[p] if param.encode_variance_in_target else [1] * 4
                differences = [(code[k] - target[k]) / scale[k] for k in range(4)]
                loc_losses[column][p] = sum(
                    d * d / 2 if param.loc_loss_type == 0 else smooth(d) for d in differences
                )
        label_of = [background] * PRIORS
        for found, _ in each.values():
            for p, g in enumerate(found):
                label_of[p] = labels[g] if g >= 0 else label_of[p]
        if param.mining_type == 0:
            total += sum(
                class_loss(conf[image][p], label_of[p], param, target=False) for p in range(PRIORS)
            )
            kept = {column: found for column, (found, _) in each.items()}
        else:
            ((found, largest),) = each.values()
            hard = param.mining_type == 2
            losses = [class_loss(conf[image][p], label_of[p], param) for p in range(PRIORS)]
            losses = [a + (b if hard else 0) for a, b in zip(losses, loc_losses[0], strict=True)]
            able = [
                p
                for p in range(PRIORS)
                if hard or (found[p] == -1 and largest[p] < param.neg_overlap)
            ]
            count = min(
                param.sample_size
                if hard
                else int(sum(g >= 0 for g in found) * param.neg_pos_ratio),
                len(able),
            )
            order = sorted(able, key=lambda p: -losses[p])
            if param.HasField("nms_param"):
                boxes = priors
                if not param.use_prior_for_nms:
                    boxes = [
                        decode(loc[image][p][0], priors[p], variances[p], param)
                        for p in range(PRIORS)
                    ]
                left: list[int] = []
                for p in order[: param.nms_param.top_k]:
                    if area(boxes[p]) >= 1e-5 and all(
                        jaccard(boxes[p], boxes[q]) <= param.nms_param.nms_threshold for q in left
                    ):
                        left.append(p)
                order = left
            chosen = order[:count]
            total += sum(
                class_loss(conf[image][p], background, param) for p in chosen if found[p] == -1
            )
            kept = {0: [g if not hard or p in chosen else -1 for p, g in enumerate(found)]}
            total += sum(
                class_loss(conf[image][p], labels[g], param)
                for p, g in enumerate(kept[0])
                if g >= 0
            )
        for column, found in kept.items():
            positives += sum(g >= 0 for g in found)
            total += param.loc_weight * sum(
                loc_losses[column][p] for p, g in enumerate(found) if g >= 0
            )
    divisors = {"VALID": positives, "FULL": IMAGES * PRIORS, "BATCH_SIZE": IMAGES, "NONE": 1}
    return total / max(1, divisors[mode])


SETTINGS = [
    "",
    "code_type: CENTER_SIZE overlap_threshold: 0.3 loc_weight: 2",
    "code_type: CORNER_SIZE match_type: BIPARTITE neg_pos_ratio: 1.5",
    "code_type: CENTER_SIZE encode_variance_in_target: true use_difficult_gt: false",
    "encode_variance_in_target: true loc_loss_type: L2",
    "loc_loss_type: L2 neg_overlap: 0.1 use_prior_for_matching: false code_type: CORNER_SIZE",
    "conf_loss_type: LOGISTIC code_type: CENTER_SIZE",
    "mining_type: NONE do_neg_mining: false",
    "mining_type: NONE conf_loss_type: LOGISTIC",
    "mining_type: NONE share_location: false",
    "mining_type: NONE share_location: false use_prior_for_matching: false",
    "mining_type: HARD_EXAMPLE sample_size: 5 code_type: CENTER_SIZE",
    "mining_type: HARD_EXAMPLE sample_size: 9 loc_loss_type: L2 conf_loss_type: LOGISTIC",
    "mining_type: HARD_EXAMPLE sample_size: 6 nms_param { nms_threshold: 0.3 top_k: 10 } "
    "use_prior_for_nms: true",
    "nms_param { nms_threshold: 0.2 top_k: 12 } neg_overlap: 0.4",
    "ignore_cross_boundary_bbox: true overlap_threshold: 0.2",
    "ignore_cross_boundary_bbox: true mining_type: HARD_EXAMPLE sample_size: 7",
    "bp_inside: true overlap_threshold: 0.2",
    "bp_inside: true use_prior_for_matching: false code_type: CORNER overlap_threshold: 0.2",
]


@pytest.mark.parametrize("text", SETTINGS)
def test_against_loops(text: str) -> None:
    body = f"num_classes: {CLASSES} {text}"
    columns = CLASSES if "share_location: false" in text else 1
    for seed in range(6):
        case = random_case(seed, locations=columns)
        # Matching is in single precision.
        case = {name: value.float().double() for name, value in case.items()}
        assert value(loss_of(body, case), case) == pytest.approx(by_hand(case, body), rel=1e-5)


def test_objects_may_be_of_one_class() -> None:
    body = "num_classes: 2 map_object_to_agnostic: true"
    case = {name: value.float().double() for name, value in random_case(1).items()}
    case["conf"] = case["conf"][:, : PRIORS * 2].contiguous()
    assert value(loss_of(body, case), case) == pytest.approx(by_hand(case, body), rel=1e-5)


@pytest.mark.parametrize("mode", ["VALID", "FULL", "BATCH_SIZE", "NONE"])
def test_normalizations(mode: str) -> None:
    body = f"num_classes: {CLASSES}"
    case = {name: value.float().double() for name, value in random_case(2).items()}
    made = loss_of(body, case, f"loss_param {{ normalization: {mode} }}")
    assert value(made, case) == pytest.approx(by_hand(case, body, mode), rel=1e-5)


def test_worked_out_by_hand() -> None:
    """Two prior boxes, of which the first is the object's; the second is the only negative."""
    made = net(
        "num_classes: 2 code_type: CORNER loc_weight: 3",
        loc=8,
        conf=4,
        priors=2,
        objects=1,
        images=1,
    )
    case = {
        "loc": torch.tensor([[0.5, -2.0, 0, 0, 9, 9, 9, 9]]),
        "conf": torch.tensor([[0.0, 1.0, 2.0, 0.0]]),
        "prior": torch.tensor([[[0, 0, 0.5, 0.5, 0.6, 0.6, 1, 1], [0.1] * 8]]),
        "gt": torch.tensor([[[[0, 1, 0, 0, 0, 0.5, 0.5, 0]]]]),
    }
    location = 0.5 * 0.5**2 + (2 - 0.5)
    classes = math.log(1 + math.exp(-1)) + math.log(1 + math.exp(-2))
    assert value(made, case) == pytest.approx(3 * location + classes, rel=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        "code_type: CENTER_SIZE",
        "mining_type: NONE conf_loss_type: LOGISTIC loc_loss_type: L2",
        "mining_type: HARD_EXAMPLE sample_size: 6 encode_variance_in_target: true",
        "mining_type: NONE share_location: false bp_inside: true overlap_threshold: 0.2",
    ],
)
def test_gradients(text: str) -> None:
    """The choice of examples is constant within a step of the finite differences."""
    case = random_case(3, locations=CLASSES if "share_location: false" in text else 1)
    made = loss_of(f"num_classes: {CLASSES} {text}", case)
    variables = [case[name].requires_grad_() for name in ("loc", "conf")]
    check_gradients(lambda: [made(case)["loss"]], variables, every=5)
    assert made(case)["loss"].requires_grad


def test_a_batch_without_objects_has_gradients_of_zero() -> None:
    case = random_case(4, empty=True)
    variables = [case[name].requires_grad_() for name in ("loc", "conf")]
    loss = loss_of(f"num_classes: {CLASSES}", case)(case)["loss"]
    assert float(loss.detach()) == 0
    assert all(not gradient.any() for gradient in torch.autograd.grad(loss, variables))


def test_a_bottom_without_propagation_adds_nothing() -> None:
    case = {name: value.float().double() for name, value in random_case(5).items()}
    text = inputs(**{name: tuple(value.shape) for name, value in case.items()})
    losses = []
    for first, second in product(("true", "false"), repeat=2):
        down = f"propagate_down: {first} propagate_down: {second} propagate_down: false propagate_down: false"
        body = f"multibox_loss_param {{ num_classes: {CLASSES} }} {down}"
        made = build(text + layer("MultiBoxLoss", "loc conf prior gt", "loss", body)).double()
        losses.append(value(made, case))
    both, locations, scores, nothing = losses
    assert nothing == 0 < min(locations, scores)
    assert both == pytest.approx(locations + scores)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "num_classes is missing"),
        ("num_classes: 4 share_location: false", "set mining_type: NONE"),
        ("num_classes: 4 do_neg_mining: false", "do_neg_mining contradicts mining_type"),
        ("num_classes: 4 neg_pos_ratio: 0", "neg_pos_ratio is 0"),
        ("num_classes: 4 mining_type: HARD_EXAMPLE sample_size: 0", "sample_size is 0"),
        ("num_classes: 4 background_label_id: 4", "background_label_id is 4"),
        ("num_classes: 4 map_object_to_agnostic: true", "expected 2 and 0"),
        ("num_classes: 4 loc_weight: inf", "loc_weight is inf"),
        ("num_classes: 5", "bottom 1 has 56 scores for each image, expected 70 for 14 prior boxes"),
        ("num_classes: 4 share_location: false mining_type: NONE", "has 56 locations"),
    ],
)
def test_refusals(body: str, message: str) -> None:
    with pytest.raises(DefinitionError, match=message):
        loss_of(body, random_case(1))


def test_bottoms_of_other_shapes_are_refused() -> None:
    text = inputs(loc=(2, 8), conf=(2, 4), prior=(1, 2, 8), gt=(1, 1, 3, 7))
    with pytest.raises(DefinitionError, match="bottom 3 has shape 1x1x3x7, expected 1x1xGx8"):
        build(
            text
            + layer(
                "MultiBoxLoss", "loc conf prior gt", "l", "multibox_loss_param { num_classes: 2 }"
            )
        )
    text = inputs(loc=(2, 8), conf=(2, 4), prior=(2, 8), gt=(1, 1, 3, 8))
    with pytest.raises(DefinitionError, match="bottom 2 has shape 2x8, expected 1x2x4P"):
        build(
            text
            + layer(
                "MultiBoxLoss", "loc conf prior gt", "l", "multibox_loss_param { num_classes: 2 }"
            )
        )


@pytest.mark.parametrize(
    ("column", "number", "message"),
    [
        (0, 5, "belong to image 5, but the batch has 3"),
        (1, 0, "label 0, which is background_label_id"),
        (1, 9, r"label 9, expected 0 to 3"),
    ],
)
def test_objects_out_of_range_are_refused(column: int, number: float, message: str) -> None:
    case = random_case(1)
    case["gt"][0, 0, 0, column] = number
    made = loss_of(f"num_classes: {CLASSES} code_type: CENTER_SIZE", case)
    with pytest.raises(DataError, match=message):
        made(case)


def test_an_object_without_a_width_is_no_example() -> None:
    case = random_case(1)
    case["gt"][0, 0, 0, 5] = case["gt"][0, 0, 0, 3]
    assert math.isfinite(
        value(loss_of(f"num_classes: {CLASSES} code_type: CENTER_SIZE", case), case)
    )


def test_priors_without_a_size_are_refused() -> None:
    case = random_case(1)
    case["prior"][0, 0, 2] = case["prior"][0, 0, 0]
    with pytest.raises(DataError, match="a prior box has no width"):
        loss_of(f"num_classes: {CLASSES} code_type: CENTER_SIZE", case)(case)
    case["prior"][0, 1, 0] = 0
    with pytest.raises(DataError, match="a variance of the prior boxes is not positive"):
        loss_of(f"num_classes: {CLASSES}", case)(case)
