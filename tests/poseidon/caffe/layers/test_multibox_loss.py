"""MultiBoxLoss: a case worked out by hand, values for all settings, finite differences."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

from poseidon.caffe.net.net import Net
from poseidon.errors import DataError
from tests.support.gradient_check import check_gradients
from tests.support.nets import build, inputs, layer

IMAGES, PRIORS, CLASSES = 3, 14, 4


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
    loc, conf, objects = case["loc"].shape[1], case["conf"].shape[1], case["gt"].shape[2]
    sizes = {"loc": loc, "conf": conf, "priors": PRIORS, "objects": objects, "images": IMAGES}
    return net(body, **sizes, rest=rest).double()


def single(case: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A case in single precision, in which boxes are matched."""
    return {name: value.float().double() for name, value in case.items()}


def value(made: Net, case: dict[str, torch.Tensor]) -> float:
    return float(made(case)["loss"].detach())


# The sums of the losses of six batches, as loops over the boxes gave them.
SETTINGS = {
    "": 46.80153,
    "code_type: CENTER_SIZE overlap_threshold: 0.3 loc_weight: 2": 66.88171,
    "code_type: CORNER_SIZE match_type: BIPARTITE neg_pos_ratio: 1.5": 42.15435,
    "code_type: CENTER_SIZE encode_variance_in_target: true use_difficult_gt: false": 105.4395,
    "encode_variance_in_target: true loc_loss_type: L2": 205.3941,
    "loc_loss_type: L2 neg_overlap: 0.1 use_prior_for_matching: false code_type: CORNER_SIZE": 44.35067,
    "conf_loss_type: LOGISTIC code_type: CENTER_SIZE": 85.74369,
    "mining_type: NONE do_neg_mining: false": 74.28521,
    "mining_type: NONE conf_loss_type: LOGISTIC": 136.0104,
    "mining_type: NONE share_location: false": 76.85373,
    "mining_type: NONE share_location: false use_prior_for_matching: false": 84.5563,
    "mining_type: HARD_EXAMPLE sample_size: 5 code_type: CENTER_SIZE": 49.93683,
    "mining_type: HARD_EXAMPLE sample_size: 9 loc_loss_type: L2 conf_loss_type: LOGISTIC": 97.27838,
    "mining_type: HARD_EXAMPLE sample_size: 6 nms_param { nms_threshold: 0.3 top_k: 10 } "
    "use_prior_for_nms: true": 59.3054,
    "nms_param { nms_threshold: 0.2 top_k: 12 } neg_overlap: 0.4": 39.81104,
    "ignore_cross_boundary_bbox: true overlap_threshold: 0.2": 30.31479,
    "ignore_cross_boundary_bbox: true mining_type: HARD_EXAMPLE sample_size: 7": 38.19458,
    "bp_inside: true overlap_threshold: 0.2": 31.81629,
    "bp_inside: true use_prior_for_matching: false code_type: CORNER overlap_threshold: 0.2": 30.57861,
}


@pytest.mark.parametrize("text", SETTINGS)
def test_settings(text: str) -> None:
    body = f"num_classes: {CLASSES} {text}"
    cases = [
        random_case(seed, locations=CLASSES if "share_location: false" in text else 1)
        for seed in range(6)
    ]
    total = sum(value(loss_of(body, case), case) for case in map(single, cases))
    assert total == pytest.approx(SETTINGS[text], rel=2e-6)


def test_objects_may_be_of_one_class() -> None:
    body = "num_classes: 2 map_object_to_agnostic: true"
    case = single(random_case(1))
    case["conf"] = case["conf"][:, : PRIORS * 2].contiguous()
    assert value(loss_of(body, case), case) == pytest.approx(4.504921, rel=1e-5)


@pytest.mark.parametrize(
    ("mode", "divisor"),
    [("VALID", 8), ("FULL", IMAGES * PRIORS), ("BATCH_SIZE", IMAGES), ("NONE", 1)],
)
def test_normalizations(mode: str, divisor: int) -> None:
    case = single(random_case(2))
    made = loss_of(f"num_classes: {CLASSES}", case, f"loss_param {{ normalization: {mode} }}")
    assert value(made, case) == pytest.approx(47.64142 / divisor, rel=1e-5)


def test_worked_out_by_hand() -> None:
    """Two prior boxes, of which the first is the object's; the second is the only negative."""
    body = "num_classes: 2 code_type: CORNER loc_weight: 3"
    made = net(body, loc=8, conf=4, priors=2, objects=1, images=1)
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
    case = single(random_case(5))
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
