"""What the SSD nets have in common: data layers with augmentation, predictions of feature maps,
losses and detections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from poseidon.caffe.proto.caffe_pb2 import NetParameter
from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from poseidon.pycaffe import params as P
from prototxt.parts import TWICE, XAVIER, constant, convolution, header, named, put, records

PAPER = (
    'Liu, Anguelov, Erhan, Szegedy, Reed, Fu, Berg, "SSD: single shot multibox detector" (2016).'
)
CENTER = 0


@dataclass(frozen=True, kw_only=True)
class Head:
    """The predictions of a feature map.

    Attributes:
        source: the layer that makes the map.
        least: side of the smaller square in pixels.
        most: side from which the larger square is made; 0: none.
        ratios: aspect ratios besides 1, each with its inverse.
        step: pixels of a cell; 0: the image's size over the map's.
        normalized: initial scale of a Normalize layer; 0: none.
    """

    source: str
    least: float
    most: float = 0
    ratios: tuple[float, ...] = (2,)
    step: float = 0
    normalized: float = 0

    @property
    def priors(self) -> int:
        """Boxes of a cell."""
        return 1 + bool(self.most) + 2 * len(self.ratios)


@dataclass(frozen=True, kw_only=True)
class Detector:
    """One net.

    Attributes:
        stem: how its files begin.
        name: of the net.
        about: first line of each header.
        expect: published accuracy.
        side: height and width of its input.
        classes: with the background.
        heads: the predictions.
        kernel: of their convolutions.
        body: adds the feature maps.
        mean: subtracted from the image; and the scale of the difference.
        batch: images of a worker in TRAIN and in TEST.
        data: database of training and of testing, and label map.
        tests: batches of a test.
        distorts: the images' colors are changed and they are shrunk at random.
        samples: windows of the images are taken.
        solver: its settings.
    """

    stem: str
    name: str
    about: str
    expect: str
    side: int = 300
    classes: int = 21
    heads: tuple[Head, ...]
    kernel: int = 3
    body: Callable[[NetSpec], None]
    mean: tuple[float, ...] = (104, 117, 123)
    scale: float = 1
    batch: tuple[int, int] = (32, 8)
    data: tuple[str, str, str] = (
        "examples/VOC0712/VOC0712_trainval_lmdb",
        "examples/VOC0712/VOC0712_test_lmdb",
        "data/VOC0712/labelmap_voc.prototxt",
    )
    tests: int = 619
    distorts: bool = True
    samples: bool = True
    solver: tuple[tuple[str, Any], ...]

    def source(self, n: NetSpec, *, train: bool) -> None:
        """Add the layer that reads images and objects."""
        resize: dict[str, Any] = {
            "prob": 1,
            "resize_mode": P.Resize.WARP,
            "height": self.side,
            "width": self.side,
        }
        transform: dict[str, Any] = {"mean_value": list(self.mean), "resize_param": resize}
        annotated: dict[str, Any] = {"label_map_file": self.data[2]}
        if self.scale != 1:
            transform["scale"] = self.scale
        if train:
            modes = (
                P.Resize.LINEAR,
                P.Resize.AREA,
                P.Resize.NEAREST,
                P.Resize.CUBIC,
                P.Resize.LANCZOS4,
            )
            transform["mirror"] = True
            transform["emit_constraint"] = {"emit_type": CENTER}
            resize["interp_mode"] = list(modes)
        if train and self.samples:
            annotated["batch_sampler"] = samplers()
        if train and self.distorts:
            transform["distort_param"] = DISTORTION
            transform["expand_param"] = {"prob": 0.5, "max_expand_ratio": 4.0}
        n.data, n.label = L.AnnotatedData(
            ntop=2,
            data_param=records(self.data[not train], self.batch[not train]),
            transform_param=transform,
            annotated_data_param=annotated,
        )

    def train(self) -> NetParameter:
        """Return the net for training."""
        n = NetSpec()
        self.source(n, train=True)
        locations, scores, priors = self.predictions(n)
        n.mbox_loss = L.MultiBoxLoss(
            locations,
            scores,
            priors,
            n.label,
            propagate_down=[True, True, False, False],
            loss_param={"normalization": P.Loss.VALID},
            multibox_loss_param={
                "loc_loss_type": P.MultiBoxLoss.SMOOTH_L1,
                "conf_loss_type": P.MultiBoxLoss.SOFTMAX,
                "loc_weight": 1.0,
                "num_classes": self.classes,
                "share_location": True,
                "match_type": P.MultiBoxLoss.PER_PREDICTION,
                "overlap_threshold": 0.5,
                "use_prior_for_matching": True,
                "background_label_id": 0,
                "use_difficult_gt": True,
                "neg_pos_ratio": 3.0,
                "neg_overlap": 0.5,
                "code_type": P.PriorBox.CENTER_SIZE,
                "ignore_cross_boundary_bbox": False,
                "mining_type": P.MultiBoxLoss.MAX_NEGATIVE,
            },
        )
        return named(f"{self.name}_train", n)

    def test(self) -> NetParameter:
        """Return the net for testing."""
        n = NetSpec()
        self.source(n, train=False)
        self.detections(n)
        n.detection_eval = L.DetectionEvaluate(
            n.detection_out,
            n.label,
            detection_evaluate_param={
                "num_classes": self.classes,
                "background_label_id": 0,
                "overlap_threshold": 0.5,
                "evaluate_difficult_gt": False,
            },
        )
        return named(f"{self.name}_test", n)

    def deploy(self) -> NetParameter:
        """Return the net for use."""
        n = NetSpec()
        n.data = L.Input(shape={"dim": [1, 3, self.side, self.side]})
        self.detections(n)
        return named(f"{self.name}_deploy", n)

    def detections(self, n: NetSpec) -> None:
        """Add the scores' softmax and the detections."""
        locations, scores, priors = self.predictions(n)
        n.mbox_conf_reshape = L.Reshape(scores, shape={"dim": [0, -1, self.classes]})
        n.mbox_conf_softmax = L.Softmax(n.mbox_conf_reshape, axis=2)
        n.mbox_conf_flatten = L.Flatten(n.mbox_conf_softmax, axis=1)
        n.detection_out = L.DetectionOutput(
            locations,
            n.mbox_conf_flatten,
            priors,
            include={"phase": "TEST"},
            detection_output_param={
                "num_classes": self.classes,
                "share_location": True,
                "background_label_id": 0,
                "nms_param": {"nms_threshold": 0.45, "top_k": 400},
                "code_type": P.PriorBox.CENTER_SIZE,
                "keep_top_k": 200,
                "confidence_threshold": 0.01,
            },
        )

    def predictions(self, n: NetSpec) -> tuple[Any, Any, Any]:
        """Add the feature maps and their predictions; return locations, scores and prior boxes
        of all.
        """
        self.body(n)
        found: tuple[list[Any], ...] = ([], [], [])
        for head in self.heads:
            top, name = n[head.source], head.source.removesuffix("/relu")
            if head.normalized:
                name = f"{name}_norm"
                how = {"across_spatial": False, "channel_shared": False}
                how["scale_filler"] = constant(head.normalized)
                top = put(n, name, L.Normalize(top, norm_param=how))
            for kind, values, into in (("loc", 4, found[0]), ("conf", self.classes, found[1])):
                stem = f"{name}_mbox_{kind}"
                how = {"pad": self.kernel // 2, "param": TWICE, "weight_filler": XAVIER}
                at = convolution(n, top, stem, head.priors * values, self.kernel, **how)
                at = put(n, f"{stem}_perm", L.Permute(at, order=[0, 2, 3, 1]))
                into.append(put(n, f"{stem}_flat", L.Flatten(at, axis=1)))
            n[f"{name}_mbox_priorbox"] = L.PriorBox(top, n.data, prior_box_param=_prior(head))
            found[2].append(n[f"{name}_mbox_priorbox"])
        n.mbox_loc = L.Concat(*found[0], axis=1)
        n.mbox_conf = L.Concat(*found[1], axis=1)
        n.mbox_priorbox = L.Concat(*found[2], axis=2)
        return n.mbox_loc, n.mbox_conf, n.mbox_priorbox

    def definitions(self) -> dict[str, str]:
        """Return the text of each file, by its name."""
        head = header(
            self.about, PAPER, "ssd", run=f"{self.stem}_solver.prototxt", expect=self.expect
        )
        lines = [
            f'train_net: "{self.stem}_train.prototxt"',
            f'test_net: "{self.stem}_test.prototxt"',
            f"test_iter: {self.tests}",
            *(f"{key}: {value}" for key, value in self.solver),
            f'snapshot_prefix: "{self.stem}"',
            'eval_type: "detection"',
            'ap_version: "11point"',
        ]
        return {
            f"{self.stem}_train.prototxt": head + str(self.train()),
            f"{self.stem}_test.prototxt": head + str(self.test()),
            f"{self.stem}_deploy.prototxt": header(self.about, PAPER, "ssd", expect=self.expect)
            + str(self.deploy()),
            f"{self.stem}_solver.prototxt": head + "\n".join(lines) + "\n",
        }


def _prior(head: Head) -> dict[str, Any]:
    param: dict[str, Any] = {
        "min_size": head.least,
        "aspect_ratio": list(head.ratios),
        "flip": True,
        "clip": False,
        "variance": [0.1, 0.1, 0.2, 0.2],
        "offset": 0.5,
    }
    if head.most:
        param["max_size"] = head.most
    if head.step:
        param["step"] = head.step
    return param


def samplers() -> list[dict[str, Any]]:
    """Return SSD's batch samplers: the whole image, and windows that overlap with an object by
    so much.
    """
    window = {"min_scale": 0.3, "max_scale": 1.0, "min_aspect_ratio": 0.5, "max_aspect_ratio": 2.0}
    limits = [{"min_jaccard_overlap": least} for least in (0.1, 0.3, 0.5, 0.7, 0.9)]
    return [
        {"max_sample": 1, "max_trials": 1},
        *(
            {"sampler": window, "sample_constraint": limit, "max_sample": 1, "max_trials": 50}
            for limit in [*limits, {"max_jaccard_overlap": 1.0}]
        ),
    ]


DISTORTION = {
    "brightness_prob": 0.5,
    "brightness_delta": 32,
    "contrast_prob": 0.5,
    "contrast_lower": 0.5,
    "contrast_upper": 1.5,
    "hue_prob": 0.5,
    "hue_delta": 18,
    "saturation_prob": 0.5,
    "saturation_lower": 0.5,
    "saturation_upper": 1.5,
    "random_order_prob": 0.0,
}
