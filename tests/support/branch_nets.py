"""Small detection and segmentation nets on drawn shapes: their data, their training by workers,
and their scores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from poseidon.caffe.data.prepare.procedural import DEFAULT, Scene, draw_scene
from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.layers.detection import clip, decode, overlaps, suppress
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST, NetParameter, NetState
from poseidon.caffe.proto.text import to_text
from poseidon.caffe.snapshot.caffemodel import read_model
from tests.support.nets import definition
from tests.support.training import Job, run

Floats = NDArray[np.float32]
CLASSES = 1 + len(DEFAULT)
# Scenes with these numbers are not in the training sets.
FIRST_TEST = 10_000


def write_windows(folder: Path, count: int, **options: Any) -> Path:
    """Write scenes as PNG images and a window file of their objects."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for number in range(count):
        scene = draw_scene(number, **options)
        path = folder / f"{number}.png"
        path.write_bytes(bytes(cv2.imencode(".png", scene.image)[1]))
        lines += [
            f"# {number}",
            str(path),
            "3",
            *map(str, scene.image.shape[:2]),
            str(len(scene.labels)),
        ]
        lines += [
            f"{label} 1 {box[0]} {box[1]} {box[2] - 1} {box[3] - 1}"
            for label, box in zip(scene.labels, scene.boxes.tolist(), strict=True)
        ]
    (folder / "windows.txt").write_text("\n".join(lines) + "\n")
    return folder / "windows.txt"


def write_masks(folder: Path, count: int, **options: Any) -> Path:
    """Write scenes and masks whose gray value is the class, and their list with whole paths."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        scene = draw_scene(number, **options)
        image, mask = (folder / f"{part}_{number:06d}.png" for part in ("image", "mask"))
        cv2.imwrite(str(image), scene.image)
        cv2.imwrite(str(mask), scene.mask)
        lines.append(f"{image} {mask}\n")
    listed = folder / "list.txt"
    listed.write_text("".join(lines))
    return listed


def write_labelled(folder: Path, count: int, **options: Any) -> Path:
    """Write scenes of one object as PNG images, and their list with labels from 0."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        scene = draw_scene(number, most=1, **options)
        path = folder / f"{number}.png"
        path.write_bytes(bytes(cv2.imencode(".png", scene.image)[1]))
        lines.append(f"{path} {scene.labels[0] - 1}")
    (folder / "list.txt").write_text("\n".join(lines) + "\n")
    return folder / "list.txt"


def train(
    folder: Path, net: NetParameter, *, rate: float, iterations: int, workers: int = 2
) -> tuple[Path, list[float]]:
    """Train a net by Adam with a parameter server; return its model and the loss of each
    iteration, the mean over workers.
    """
    (folder / "net.prototxt").write_text(to_text(net))
    (folder / "solver.prototxt").write_text(
        f'''net: "{folder}/net.prototxt" snapshot_prefix: "{folder}/snap" type: "Adam" base_lr: {rate} momentum: 0.9
        lr_policy: "poly" power: 1 weight_decay: 0.0005 max_iter: {iterations} clip_gradients: 10 display: 1 random_seed: 1'''
    )
    ended = run(folder / "solver.prototxt", Job(workers=workers, shards=1))
    return folder / f"snap_iter_{iterations}.caffemodel", [
        record.loss for record in ended.sink.train
    ]


def load(net: NetParameter, model: Path) -> Net:
    """A net for use, with the weights of a model."""
    state = NetState(phase=TEST)
    compiled = compile_net(definition(to_text(net)), LayerContext(phase=TEST, seed=1), state=state)
    compiled.load_blobs(read_model(model))
    return compiled


def scenes(count: int, **options: Any) -> list[Scene]:
    """Scenes that no training set has."""
    return [draw_scene(FIRST_TEST + number, **options) for number in range(count)]


def as_input(scene: Scene, mean: tuple[float, ...]) -> torch.Tensor:
    """A scene as the data of one image."""
    pixels = scene.image.astype(np.float32) - np.array(mean, np.float32)
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)[np.newaxis]))


def mean_iou(net: Net, found: list[Scene], mean: tuple[float, ...]) -> float:
    """The mean over classes of intersection over union of all pixels."""
    counts = np.zeros((CLASSES, CLASSES), np.int64)
    for scene in found:
        with torch.no_grad():
            guess = net({"data": as_input(scene, mean)})["prob"][0].argmax(0).numpy()
        np.add.at(counts, (scene.mask, guess), 1)
    common = np.diag(counts)
    return float((common / (counts.sum(0) + counts.sum(1) - common)).mean())


def accuracy(net: Net, found: list[Scene]) -> float:
    """The share of scenes of one object whose class has the highest score."""
    with torch.no_grad():
        guesses = [
            int(net({"data": as_input(scene, (0, 0, 0))})["prob"].argmax()) for scene in found
        ]
    return float(
        np.mean([guess == scene.labels[0] - 1 for guess, scene in zip(guesses, found, strict=True)])
    )


Detections = list[tuple[int, int, float, Floats]]
"""Image, class, score and box of each detection."""


def detect(net: Net, found: list[Scene], mean: tuple[float, ...]) -> Detections:
    """Detections of a net with the tops rois, cls_prob and bbox_pred, after suppression by
    class.
    """
    detections: Detections = []
    for image, scene in enumerate(found):
        high, wide = scene.image.shape[:2]
        with torch.no_grad():
            tops = dict(
                net({"data": as_input(scene, mean), "im_info": torch.tensor([[high, wide, 1.0]])})
            )
        scores, deltas = tops["cls_prob"].flatten(1), tops["bbox_pred"].flatten(1)
        scores, deltas, rois = (
            scores[:, :CLASSES],
            deltas.view(len(deltas), -1, 4),
            tops["out_rois"][:, 1:],
        )
        for label in range(1, CLASSES):
            column = label if deltas.shape[1] > 2 else 1
            moved = deltas[:, column] * torch.tensor([0.1, 0.1, 0.2, 0.2])
            boxes = clip(decode(rois, moved), high, wide)
            order = scores[:, label].argsort(descending=True)
            order = order[scores[order, label] > 0.05]
            kept = order[suppress(boxes[order], 0.3, 20)]
            detections += [
                (image, label, float(scores[index, label]), boxes[index].numpy())
                for index in kept.tolist()
            ]
    return detections


def mean_ap(detections: Detections, found: list[Scene]) -> float:
    """The mean over classes of average precision at an overlap of 0.5, the area under the
    falling curve.
    """
    results = []
    for label in range(1, CLASSES):
        truth = [
            torch.tensor(scene.boxes[[other == label for other in scene.labels]])
            .float()
            .view(-1, 4)
            - torch.tensor([0.0, 0, 1, 1])
            for scene in found
        ]
        total = sum(map(len, truth))
        used = [set[int]() for _ in truth]
        hits = []
        for image, _, _, box in sorted(
            (d for d in detections if d[1] == label), key=lambda d: -d[2]
        ):
            hit = False
            if len(truth[image]):
                shared = overlaps(torch.from_numpy(box).view(1, 4), truth[image])[0]
                best = int(shared.argmax())
                hit = float(shared[best]) >= 0.5 and best not in used[image]
                used[image].add(best)
            hits.append(hit)
        right = np.cumsum(hits)
        precision = right / np.arange(1, len(hits) + 1)
        falling = np.maximum.accumulate(precision[::-1])[::-1]
        results.append(float(falling[np.array(hits, bool)].sum() / total))
    return float(np.mean(results))


def with_regions(net: NetParameter) -> NetParameter:
    """A net for use whose regions are an output too, `out_rois`."""
    shown = NetParameter()
    shown.CopyFrom(net)
    shown.layer.add(name="out_rois", type="Power", bottom=["rois"], top=["out_rois"])
    return shown
