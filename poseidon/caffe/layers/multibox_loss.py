"""MultiBoxLoss: the loss of SSD's detectors.

Legend: N images, P prior boxes, C classes, L classes of locations (1 with share_location, else C),
M positive examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from poseidon.caffe.layers.base import Layer, LayerError, Shape, check_shape, times
from poseidon.caffe.layers.matching import (
    SIDES,
    UNMATCHED,
    BoxCode,
    Matches,
    Objects,
    match,
    mine,
    objects_of,
    split_priors,
)
from poseidon.caffe.layers.registry import register
from poseidon.caffe.layers.softmax import NegativeLogLikelihood, normalization
from poseidon.caffe.proto.caffe_pb2 import LossParameter, MultiBoxLossParameter

OBJECT_VALUES = 8
# The largest loss of a probability, Caffe's -log of the smallest float.
LARGEST_LOSS = -math.log(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Examples:
    """The examples of a batch.

    Attributes:
        image_M: the image of each positive example.
        column_M: its class of locations.
        box_M4: its object's box.
        negatives: image and prior box of each negative example; None: all other prior boxes.
    """

    image_M: Tensor
    prior_M: Tensor
    column_M: Tensor
    label_M: Tensor
    box_M4: Tensor
    negatives: tuple[Tensor, Tensor] | None


@register("MultiBoxLoss")
class MultiBoxLoss(Layer):
    """loss = (loc_weight x the loss of positive locations + the loss of the examples' classes) / Z.

    Positive examples are prior boxes (or, without use_prior_for_matching, decoded boxes) that
    overlap with an object; see `poseidon.caffe.layers.matching`. Negative ones are mined. An image
    without objects has no examples if any are mined. Location loss: SMOOTH_L1 or L2 / 2 of the
    difference to the object's code, summed. Class loss: softmax, or the cross-entropy of sigmoids,
    summed. Z (loss_param.normalization): VALID = positive examples, FULL = N P, BATCH_SIZE = N,
    NONE = 1; at least 1.

    Bottoms: locations N x 4LP; scores N x CP; prior boxes 1 x 2 x 4P of a PriorBox layer; objects 1
    x 1 x G x 8 of an AnnotatedData layer (image, label, instance, xmin, ymin, xmax, ymax,
    difficult). Only the first two have gradients; with `propagate_down: false` one of them adds
    nothing to the loss. Top: a scalar.

    Fields: all of multibox_loss_param; do_neg_mining must not contradict mining_type. bp_inside: a
    corner outside the image adds no location loss. top_k of nms_param: all boxes if it is not set
    (SSD takes none then).
    """

    BOTTOMS = (4, 4)
    IS_LOSS = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param = self.param.multibox_loss_param
        _check(param)
        self.settings = param
        self.classes = param.num_classes
        self.locations = 1 if param.share_location else self.classes
        self.priors = check_bottoms(bottoms[:3], self.locations, self.classes)
        check_shape("bottom 3", bottoms[3], f"1x1xGx{OBJECT_VALUES}")
        self.columns = [
            column
            for column in range(self.locations)
            if param.share_location or column != param.background_label_id
        ]
        self.normalization = normalization(self.param.loss_param)
        if self.normalization == LossParameter.PRE_FIXED:
            raise LayerError("normalization is PRE_FIXED, expected FULL, VALID, BATCH_SIZE or NONE")
        down = list(self.param.propagate_down)
        self.with_locations, self.with_scores = down[:2] if len(down) == 4 else (True, True)
        return [()]

    def forward(self, locations: Tensor, scores: Tensor, prior: Tensor, objects: Tensor) -> Tensor:
        images = locations.shape[0]
        loc_NPL4 = locations.reshape(images, self.priors, self.locations, SIDES)
        conf_NPC = scores.reshape(images, self.priors, self.classes)
        priors_P4, variances_P4 = split_priors(prior)
        code = BoxCode(
            self.settings.code_type,
            priors_P4.to(loc_NPL4),
            variances_P4.to(loc_NPL4),
            variance_in_target=self.settings.encode_variance_in_target,
        )
        rows = objects.detach().cpu().numpy().reshape(-1, OBJECT_VALUES).astype(np.float32)
        found = objects_of(rows, images, self.settings)
        with torch.no_grad():
            examples = self._examples(loc_NPL4, conf_NPC, code, found)
        # Sums of nothing, so that both bottoms have a gradient.
        total = locations.flatten()[:0].sum() + scores.flatten()[:0].sum()
        if self.with_locations and len(examples.image_M):
            losses = self._location_losses(loc_NPL4, code, examples)
            total = total + self.settings.loc_weight * losses.sum()
        if self.with_scores:
            total = total + self._class_loss(conf_NPC, examples)
        return total / self._normalizer(images, len(examples.image_M))

    def _normalizer(self, images: int, positives: int) -> float:
        if self.normalization == LossParameter.NONE:
            return 1.0
        if self.normalization == LossParameter.BATCH_SIZE:
            return float(max(1, images))
        return float(
            max(1, positives if self.normalization == LossParameter.VALID else images * self.priors)
        )

    def _examples(
        self, loc_NPL4: Tensor, conf_NPC: Tensor, code: BoxCode, found: Sequence[Objects]
    ) -> Examples:
        matches = [
            self._matches(loc_P4L, code, own) for loc_P4L, own in zip(loc_NPL4, found, strict=True)
        ]
        examples = _positives(matches, found, self.columns, loc_NPL4)
        if self.settings.mining_type == MultiBoxLossParameter.NONE:
            return examples
        losses_NP = self._mining_losses(loc_NPL4, conf_NPC, code, examples).float().cpu().numpy()
        negative_images: list[int] = []
        negative_priors: list[int] = []
        for image, (by_column, own) in enumerate(zip(matches, found, strict=True)):
            if not len(own.labels_G):
                continue
            for column, matched in by_column.items():
                boxes = self._suppression_boxes(loc_NPL4[image, :, column], code)
                mined = mine(matched, losses_NP[image], boxes, self.settings)
                by_column[column] = Matches(mined.object_P, matched.overlap_P)
                negative_images += [image] * len(mined.negatives)
                negative_priors += mined.negatives.tolist()
        chosen = _positives(matches, found, self.columns, loc_NPL4)
        device = loc_NPL4.device
        negatives = (
            torch.tensor(negative_images, dtype=torch.long, device=device),
            torch.tensor(negative_priors, dtype=torch.long, device=device),
        )
        return Examples(
            chosen.image_M,
            chosen.prior_M,
            chosen.column_M,
            chosen.label_M,
            chosen.box_M4,
            negatives,
        )

    def _matches(self, loc_PL4: Tensor, code: BoxCode, own: Objects) -> dict[int, Matches]:
        """Return the matches of an image for each class of locations."""
        if not self.settings.use_prior_for_matching:
            found = {}
            for column in self.columns:
                boxes = code.decode(loc_PL4[:, column]).float().cpu().numpy()
                of_class = np.flatnonzero(own.labels_G == column)
                if self.settings.share_location:
                    of_class = np.arange(len(own.labels_G))
                matched = match(boxes, own.boxes_G4[of_class], self.settings)
                objects = matched.object_P.copy()
                objects[objects > UNMATCHED] = of_class[objects[objects > UNMATCHED]]
                found[column] = Matches(objects, matched.overlap_P)
            return found
        matched = match(code.priors_P4.float().cpu().numpy(), own.boxes_G4, self.settings)
        if self.settings.share_location:
            return {0: matched}
        labels = np.append(own.labels_G, -1)[matched.object_P.clip(UNMATCHED)]
        # A box counts for the class of its object only.
        return {
            column: Matches(
                np.where(labels == column, matched.object_P, UNMATCHED), matched.overlap_P
            )
            for column in self.columns
        }

    def _suppression_boxes(
        self, loc_P4: Tensor, code: BoxCode
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        as_they_are = self.settings.use_prior_for_nms or not self.settings.HasField("nms_param")
        boxes = code.priors_P4 if as_they_are else code.decode(loc_P4)
        return boxes.float().cpu().numpy()

    def _mining_losses(
        self, loc_NPL4: Tensor, conf_NPC: Tensor, code: BoxCode, examples: Examples
    ) -> Tensor:
        """Return the loss (N, P) of each prior box, with its matched class or as background."""
        labels_NP = torch.full(
            conf_NPC.shape[:2],
            self.settings.background_label_id,
            dtype=torch.long,
            device=conf_NPC.device,
        )
        labels_NP[examples.image_M, examples.prior_M] = examples.label_M
        losses_NP = self._each_class_loss(conf_NPC, labels_NP)
        if self.settings.mining_type == MultiBoxLossParameter.HARD_EXAMPLE and len(
            examples.image_M
        ):
            of_locations = self._location_losses(loc_NPL4, code, examples)
            losses_NP[examples.image_M, examples.prior_M] += of_locations.sum(1)
        return losses_NP

    def _location_losses(self, loc_NPL4: Tensor, code: BoxCode, examples: Examples) -> Tensor:
        """Return the loss (M, 4) of each number of the positive locations."""
        prior_M = examples.prior_M
        predicted = loc_NPL4[examples.image_M, prior_M, examples.column_M]
        target = code.encode(prior_M, examples.box_M4)
        if self.settings.bp_inside:
            boxes = code.priors_P4[prior_M]
            if not self.settings.use_prior_for_matching:
                with torch.no_grad():
                    columns = loc_NPL4[examples.image_M, :, examples.column_M]
                    boxes = code.decode(columns)[torch.arange(len(prior_M)), prior_M]
            predicted = torch.where((boxes < 0) | (boxes > 1), target, predicted)
        if self.settings.encode_variance_in_target:
            predicted = predicted / code.variances_P4[prior_M]
            target = target / code.variances_P4[prior_M]
        if self.settings.loc_loss_type == MultiBoxLossParameter.L2:
            return (predicted - target).square() / 2
        return functional.smooth_l1_loss(predicted, target, reduction="none")

    def _class_loss(self, conf_NPC: Tensor, examples: Examples) -> Tensor:
        background = self.settings.background_label_id
        if examples.negatives is None:
            scores = conf_NPC.flatten(0, 1)
            labels_NP = torch.full(
                conf_NPC.shape[:2], background, dtype=torch.long, device=conf_NPC.device
            )
            labels_NP[examples.image_M, examples.prior_M] = examples.label_M
            labels = labels_NP.flatten()
        else:
            images, priors = examples.negatives
            scores = torch.cat(
                (conf_NPC[examples.image_M, examples.prior_M], conf_NPC[images, priors])
            )
            labels = torch.cat((examples.label_M, torch.full_like(images, background)))
        if self.settings.conf_loss_type != MultiBoxLossParameter.SOFTMAX:
            # Without mining, SSD's logistic loss has no target for the background.
            return self._logistic(
                scores, labels, targets_background=examples.negatives is not None
            ).sum()
        loss: Tensor
        loss, _ = NegativeLogLikelihood.apply(  # type: ignore[no-untyped-call]
            scores.unsqueeze(-1), labels.view(-1, 1, 1), None, None, 1.0
        )
        return loss

    def _each_class_loss(self, conf_NPC: Tensor, labels_NP: Tensor) -> Tensor:
        """Return the class loss (N, P) of each prior box."""
        if self.settings.conf_loss_type != MultiBoxLossParameter.SOFTMAX:
            return self._logistic(conf_NPC, labels_NP, targets_background=True)
        log_probability = functional.log_softmax(conf_NPC, -1).gather(-1, labels_NP.unsqueeze(-1))
        return -log_probability.squeeze(-1).clamp(min=-LARGEST_LOSS)

    def _logistic(self, scores: Tensor, labels: Tensor, *, targets_background: bool) -> Tensor:
        """Return the cross-entropies (...) of the sigmoids of scores (..., C), summed over the
        classes.
        """
        exists = labels < self.classes
        if not targets_background:
            exists = exists & (labels != self.settings.background_label_id)
        index = labels.clamp(max=self.classes - 1).unsqueeze(-1)
        target = torch.zeros_like(scores).scatter_(-1, index, exists.unsqueeze(-1).to(scores))
        return functional.binary_cross_entropy_with_logits(scores, target, reduction="none").sum(-1)


def _positives(
    matches: Sequence[dict[int, Matches]],
    found: Sequence[Objects],
    columns: Sequence[int],
    like: Tensor,
) -> Examples:
    """Return all positive examples, in the order of images, classes and prior boxes."""
    images, priors, places, labels = [], [], [], []
    boxes = [np.zeros((0, SIDES), np.float32)]
    for image, (by_column, own) in enumerate(zip(matches, found, strict=True)):
        for column in columns:
            objects = by_column[column].object_P
            chosen = np.flatnonzero(objects > UNMATCHED)
            images += [image] * len(chosen)
            places += [column] * len(chosen)
            priors += chosen.tolist()
            labels += own.labels_G[objects[chosen]].tolist()
            boxes.append(own.boxes_G4[objects[chosen]])
    indices = torch.tensor([images, priors, places, labels], dtype=torch.long, device=like.device)
    image_M, prior_M, column_M, label_M = indices.unbind()
    return Examples(
        image_M, prior_M, column_M, label_M, torch.from_numpy(np.concatenate(boxes)).to(like), None
    )


def check_bottoms(bottoms: Sequence[Shape], locations: int, classes: int) -> int:
    """Return the number of prior boxes.

    Args:
        bottoms: the shapes of locations, scores and prior boxes.
        locations: the classes of locations.
        classes: the classes of scores.

    Raises:
        LayerError: the shapes contradict each other.
    """
    loc, conf, prior = bottoms
    if len(prior) < 3 or prior[:2] != (1, 2) or math.prod(prior[2:]) % SIDES:
        raise LayerError(
            f"bottom 2 has shape {times(prior)}, expected 1x2x4P, the top of a PriorBox layer"
        )
    priors = math.prod(prior[2:]) // SIDES
    if len(loc) < 2 or len(conf) < 2 or loc[0] != conf[0]:
        raise LayerError(
            f"bottoms 0 and 1 have shapes {times(loc)} and {times(conf)}, expected the same "
            "number of images"
        )
    for index, what, shape, values in (
        (0, "locations", loc, SIDES * locations * priors),
        (1, "scores", conf, classes * priors),
    ):
        if math.prod(shape[1:]) != values:
            raise LayerError(
                f"bottom {index} has {math.prod(shape[1:])} {what} for each image, expected "
                f"{values} for {priors} prior boxes"
            )
    return priors


def _check(param: MultiBoxLossParameter) -> None:
    """Raise LayerError unless the settings suit each other."""
    if param.num_classes < 1:
        raise LayerError("num_classes is missing; it must be at least 1")
    mines = param.mining_type != MultiBoxLossParameter.NONE
    if param.HasField("do_neg_mining") and param.do_neg_mining != mines:
        raise LayerError(
            "do_neg_mining contradicts mining_type: remove do_neg_mining, which is deprecated"
        )
    if mines and not param.share_location:
        raise LayerError("share_location is false, but examples are mined: set mining_type: NONE")
    if param.mining_type == MultiBoxLossParameter.MAX_NEGATIVE and not param.neg_pos_ratio > 0:
        raise LayerError(f"neg_pos_ratio is {param.neg_pos_ratio:g}, expected a positive number")
    if param.mining_type == MultiBoxLossParameter.HARD_EXAMPLE and param.sample_size < 1:
        raise LayerError(f"sample_size is {param.sample_size}, expected at least 1")
    softmax = param.conf_loss_type == MultiBoxLossParameter.SOFTMAX
    if softmax and param.background_label_id >= param.num_classes:
        raise LayerError(
            f"background_label_id is {param.background_label_id}, expected less than num_classes "
            f"{param.num_classes}"
        )
    if param.map_object_to_agnostic and (param.num_classes != 2 or param.background_label_id > 0):
        raise LayerError(
            f"num_classes is {param.num_classes} and background_label_id "
            f"{param.background_label_id}, expected 2 and 0 with map_object_to_agnostic"
        )
    if not math.isfinite(param.loc_weight):
        raise LayerError(f"loc_weight is {param.loc_weight:g}, expected a finite number")
