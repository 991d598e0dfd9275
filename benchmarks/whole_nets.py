"""Train a net of prototxt/ for detection, segmentation or channels, whole, on drawn shapes, and
measure its score.

    python -m benchmarks.whole_nets segnet --folder=runs/segnet [--iterations=N] [--weights=FILE]

Depth and width are as in the definitions; the input is smaller, and there are three classes of
shapes. `poseidon train` trains with two clients of one worker each on this machine. The score is
measured on scenes which are not in the training set: mean average precision at an overlap of 0.5,
mean intersection over union, or the share of right names. Prints a row of the table of
benchmarks/results/accuracy.md.

ImageNet's weights, from which the definitions start, are replaced by weights of nets that learned
from drawn shapes too: `senet` leaves `backbone.caffemodel` in its folder for `rfcn`, and `segnet`
leaves one for `faster_rcnn` and `ssd300`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

import numpy as np
import torch
from torch.nn import functional

from poseidon import pycaffe
from poseidon.caffe.data.prepare.procedural import draw_scene, write_detection_set
from poseidon.caffe.proto.caffe_pb2 import LayerParameter, NetParameter
from poseidon.caffe.proto.text import to_text
from poseidon.caffe.snapshot.caffemodel import read_model, write_model
from poseidon.cli.main import main as poseidon
from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from prototxt.backbones import Anchors
from prototxt.faster_rcnn import generate as faster_rcnn
from prototxt.pspnet import generate as pspnet
from prototxt.rfcn import generate as rfcn
from prototxt.segnet import generate as segnet
from prototxt.senet import generate as senet
from prototxt.shufflenet import generate as shufflenet
from prototxt.ssd import generate as ssd
from prototxt.ssd.detector import Detector
from tests.support import branch_nets
from tests.support.branch_nets import CLASSES

NamedBlobs = list[tuple[str, str, list[Any]]]
MEAN = (102.9801, 115.9465, 122.7717)
# Statistics of the last iterations: BatchNorm's 0.999 is for longer jobs.
RECENT = 0.95
TESTED = 120
SSD_DATA = ("train_lmdb", "test_lmdb", "test/labelmap.prototxt")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A net's training.

    Attributes:
        make: writes the data into a folder; returns the net for training and the one for use, for a
            side and a batch.
        score: of the net for use and its model, on new scenes of a side.
        side: height and width of the images.
        batch: images of a worker in an iteration.
        rate: of Adam at the first iteration; it falls to 0.
        iterations: of the job.
        unit: of the score.
    """

    make: Callable[[Path, int, int], tuple[NetParameter, NetParameter]]
    score: Callable[[NetParameter, Path, int], float]
    side: int
    batch: int
    rate: float
    iterations: int
    unit: str


def make_classifier(
    body: Callable[[NetSpec, bool], Any], folder: Path, side: int, batch: int
) -> tuple[NetParameter, NetParameter]:
    """Write scenes of one object; return a classifier of them."""
    listed = str(branch_nets.write_labelled(folder, 3000, size=(side, side)))
    n, use = NetSpec(), NetSpec()
    n.data, n.label = L.ImageData(
        ntop=2,
        transform_param={"mean_value": list(MEAN), "mirror": True},
        image_data_param={
            "source": listed,
            "batch_size": batch,
            "shuffle": True,
            "shared_file_system": True,
        },
    )
    n.loss = L.SoftmaxWithLoss(body(n, True), n.label)
    use.data = L.Input(input_param={"shape": {"dim": [1, 3, side, side]}})
    use.prob = L.Softmax(body(use, False))
    return n.to_proto(), use.to_proto()


def make_segnet(folder: Path, side: int, batch: int) -> tuple[NetParameter, NetParameter]:
    """Write scenes and masks; return SegNet."""
    listed = str(branch_nets.write_masks(folder, 1500, size=(side, side)))
    size = segnet.Size(
        classes=CLASSES,
        image=(side, side),
        batch=batch,
        weights=(0.3, 1, 1, 1),
        ignored=None,
        source=listed,
        test_source=listed,
    )
    return segnet.train(size), segnet.deploy(size, inference=False)


def make_pspnet(folder: Path, side: int, batch: int) -> tuple[NetParameter, NetParameter]:
    """Write scenes and masks; return PSPNet-50."""
    listed = str(branch_nets.write_masks(folder, 1500, size=(side, side)))
    size = pspnet.Size(
        classes=CLASSES, crop=side, batch=batch, momentum=0.9, source=listed, test_source=listed
    )
    return pspnet.train(size), pspnet.deploy(size)


def anchor_scales(side: int) -> tuple[float, ...]:
    """Return the scales of anchors for shapes, which have 0.25 to 0.55 of the image's side."""
    return side / 64, side / 42, side / 28


def make_faster_rcnn(folder: Path, side: int, _batch: int) -> tuple[NetParameter, NetParameter]:
    """Write scenes and windows; return Faster R-CNN with VGG-16, whose first two stages are
    fixed.
    """
    size = faster_rcnn.Size(
        classes=CLASSES,
        dropout=0,
        anchors=Anchors(scales=anchor_scales(side), smallest=12, kept=(200, 50)),
        image=(side, side),
        regions=32,
        source=str(branch_nets.write_windows(folder, 800, size=(side, side))),
        scale=0,
    )
    return faster_rcnn.train(size), branch_nets.with_regions(faster_rcnn.deploy(size))


def make_rfcn(folder: Path, side: int, _batch: int) -> tuple[NetParameter, NetParameter]:
    """Write scenes and windows; return R-FCN with ResNet-50, whose normalizations are fixed."""
    size = rfcn.Size(
        classes=CLASSES,
        anchors=Anchors(scales=anchor_scales(side), smallest=12, kept=(100, 50)),
        hardest=64,
        image=(side, side),
        source=str(branch_nets.write_windows(folder, 800, size=(side, side))),
        scale=0,
    )
    return rfcn.train(size), branch_nets.with_regions(rfcn.deploy(size))


def make_ssd(
    detector: Detector, folder: Path, side: int, batch: int
) -> tuple[NetParameter, NetParameter]:
    """Write databases of scenes; return an SSD net for training and its test net."""
    for part, count, first in (("train", 1200, 0), ("test", TESTED, branch_nets.FIRST_TEST)):
        source = write_detection_set(folder / part, count, first=first, size=(side, side))
        labels = f"--label_map_file={folder}/{part}/labelmap.prototxt"
        flags = ["convert_annoset", "--anno_type=detection", "--encoded", labels]
        if poseidon([*flags, f"{folder / part}/", str(source), f"{folder}/{part}_lmdb"]):
            raise SystemExit("the database is not made")
    share = side / detector.side
    heads = tuple(
        replace(head, least=head.least * share, most=head.most * share, step=head.step * share)
        for head in detector.heads
    )
    data = tuple(f"{folder}/{name}" for name in SSD_DATA)
    small = replace(
        detector,
        side=side,
        classes=CLASSES,
        heads=heads,
        batch=(batch, 8),
        data=data,  # type: ignore[arg-type]
        samples=False,
        distorts=False,
    )
    return small.train(), small.test()


def score_labels(net: NetParameter, model: Path, side: int) -> float:
    """Return the share of scenes of one object whose class has the highest score."""
    found = branch_nets.scenes(TESTED, size=(side, side), most=1)
    loaded = branch_nets.load(net, model)
    with torch.no_grad():
        guesses = [
            int(loaded({"data": branch_nets.as_input(scene, MEAN)})["prob"].argmax())
            for scene in found
        ]
    return float(
        np.mean([guess == scene.labels[0] - 1 for guess, scene in zip(guesses, found, strict=True)])
    )


def score_masks(mean: tuple[float, ...], net: NetParameter, model: Path, side: int) -> float:
    """Return the mean intersection over union."""
    found = branch_nets.scenes(TESTED, size=(side, side))
    return branch_nets.mean_iou(branch_nets.load(net, model), found, mean)


def score_boxes(net: NetParameter, model: Path, side: int) -> float:
    """Return the mean average precision of a net with regions."""
    found = branch_nets.scenes(TESTED, size=(side, side))
    return branch_nets.mean_ap(branch_nets.detect(branch_nets.load(net, model), found, MEAN), found)


def score_ssd(net: NetParameter, model: Path, _side: int) -> float:
    """Return the mean average precision that `poseidon test` prints."""
    definition = model.parent / "test.prototxt"
    definition.write_text(to_text(net))
    flags = ["test", f"--model={definition}", f"--weights={model}", f"--iterations={TESTED // 8}"]
    done = subprocess.run(
        [sys.executable, "-m", "poseidon", *flags], capture_output=True, text=True, check=True
    )
    return float(re.findall(r"detection_eval = (\S+)", done.stdout + done.stderr)[-1])


def vgg_backbone(model: Path, use: NetParameter, folder: Path) -> NamedBlobs:
    """Return VGG-16's convolutions from SegNet's encoder: each with its normalization by the
    statistics of 32 images.
    """
    blobs = {
        name: [torch.from_numpy(np.array(array)) for array in arrays]
        for name, arrays in read_model(model)
    }
    scenes = [
        draw_scene(number, size=tuple(use.layer[0].input_param.shape[0].dim[2:]))
        for number in range(32)
    ]
    top, found = torch.cat([branch_nets.as_input(scene, (0, 0, 0)) for scene in scenes]), []
    for stage, count in enumerate(segnet.Size().counts, 1):
        for place in range(1, count + 1):
            name = f"conv{stage}_{place}"
            weight, bias = blobs[name]
            scale, shift = (blob.flatten() for blob in blobs[f"{name}_bn"])
            top = functional.conv2d(top, weight, bias.flatten(), padding=1)
            mean, variance = top.mean((0, 2, 3)), top.var((0, 2, 3), unbiased=False)
            factor = scale / (variance + 1e-9).sqrt()
            top = (
                (top - mean.view(-1, 1, 1)) * factor.view(-1, 1, 1) + shift.view(-1, 1, 1)
            ).relu()
            weight, bias = (
                weight * factor.view(-1, 1, 1, 1),
                (bias.flatten() - mean) * factor + shift,
            )
            if name == "conv1_1":  # SegNet reads whole values, the others differences from the mean
                bias = bias + (weight.sum((2, 3)) * torch.tensor(MEAN)).sum(1)
            found.append((name, "Convolution", [weight.numpy(), bias.numpy()]))
        top = functional.max_pool2d(top, 2)
    return found


def resnet_backbone(model: Path, use: NetParameter, folder: Path) -> NamedBlobs:
    """Return ResNet-50's layers from SE-ResNet-50: the factors of channels become their means
    over 32 images, in the scales.
    """
    (folder / "use.prototxt").write_text(to_text(use))
    net = pycaffe.Net(str(folder / "use.prototxt"), str(model), pycaffe.TEST)
    side = use.layer[0].input_param.shape[0].dim[2]
    scenes = [draw_scene(number, size=(side, side), most=1) for number in range(32)]
    net.blobs["data"].reshape(len(scenes), 3, side, side)
    net.blobs["data"].data[...] = torch.cat(
        [branch_nets.as_input(scene, MEAN) for scene in scenes]
    ).numpy()
    net.forward()
    names = [("conv1/7x7_s2", "conv1", "_conv1")]
    for stage, blocks in enumerate(senet.Size().blocks, 2):
        for index in range(blocks):
            block, short = f"conv{stage}_{index + 1}", f"{stage}{'abcdef'[index]}"
            pairs = [("reduce", "2a"), ("increase", "2c")] + [("proj", "1")] * (index == 0)
            pairs = [(f"{block}_1x1_{kind}", f"{short}_branch{branch}") for kind, branch in pairs]
            pairs.append((f"{block}_3x3", f"{short}_branch2b"))
            names += [(theirs, f"res{ours}", ours) for theirs, ours in pairs]
    found = []
    for theirs, ours, suffix in names:
        scale = [np.array(blob.data) for blob in net.params[f"{theirs}/bn/scale"]]
        if theirs.endswith("increase"):
            factors = net.blobs[theirs.replace("increase", "up")].data.mean(0).ravel()
            scale = [array * factors for array in scale]
        found.append((ours, "Convolution", [np.array(blob.data) for blob in net.params[theirs]]))
        found.append(
            (
                f"bn{suffix}",
                "BatchNorm",
                [np.array(blob.data) for blob in net.params[f"{theirs}/bn"]],
            )
        )
        found.append((f"scale{suffix}", "Scale", scale))
    return found


def write_backbone(path: Path, found: NamedBlobs) -> None:
    """Write a model of these layers."""
    net = NetParameter(layer=[LayerParameter(name=name, type=kind) for name, kind, _ in found])
    write_model(path, net, found)


SHUFFLE = partial(shufflenet.body, shufflenet.Size(classes=CLASSES - 1))
SE = partial(senet.body, senet.Size(classes=CLASSES - 1))
SEGNET, PSPNET = partial(score_masks, (0, 0, 0)), partial(score_masks, pspnet.MEAN)
MOBILENET, VGG = partial(make_ssd, ssd.MOBILENET), partial(make_ssd, ssd.VGG)
names = partial(Job, score=score_labels, unit="accuracy", side=64)
masks = partial(Job, unit="mean IoU")
boxes = partial(Job, score=score_ssd, unit="mAP")
regions = partial(Job, score=score_boxes, unit="mAP", side=128, batch=1)
JOBS = {
    "shufflenet": names(
        make=partial(make_classifier, SHUFFLE), batch=24, rate=0.004, iterations=500
    ),
    "senet": names(make=partial(make_classifier, SE), batch=12, rate=0.001, iterations=250),
    "segnet": masks(make=make_segnet, score=SEGNET, side=48, batch=3, rate=0.002, iterations=220),
    "pspnet": masks(make=make_pspnet, score=PSPNET, side=49, batch=3, rate=0.0015, iterations=150),
    "mobilenet_ssd": boxes(make=MOBILENET, side=160, batch=6, rate=0.002, iterations=250),
    "rfcn": regions(make=make_rfcn, rate=0.0003, iterations=300),
    "faster_rcnn": regions(make=make_faster_rcnn, rate=0.0001, iterations=500),
    "ssd300": boxes(make=VGG, side=300, batch=1, rate=0.0002, iterations=450),
}


BACKBONES = {"senet": resnet_backbone, "segnet": vgg_backbone}


def train(folder: Path, net: NetParameter, job: Job, weights: str | None) -> tuple[Path, float]:
    """Train with two clients; return the model and the seconds."""
    for layer in net.layer:
        if layer.type == "BatchNorm":
            layer.batch_norm_param.moving_average_fraction = RECENT
    (folder / "train.prototxt").write_text(to_text(net))
    (folder / "solver.prototxt").write_text(
        f"""train_net: "{folder}/train.prototxt"
snapshot_prefix: "{folder}/{net.name or "net"}"
type: "Adam"
base_lr: {job.rate}
momentum: 0.9
momentum2: 0.99
lr_policy: "poly"
power: 1
weight_decay: 0.0001
clip_gradients: 10
max_iter: {job.iterations}
display: 10
average_loss: 10
random_seed: 1
solver_mode: CPU
"""
    )
    (folder / "machinefile").write_text("0 127.0.0.1 0\n1 127.0.0.1 0\n")
    flags = ["--solver=solver.prototxt", "--hostfile=machinefile", "--threads=1"]
    flags += [f"--weights={weights}"] if weights else []
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "POSEIDON_HOME": str(folder / "home"),
    }
    began_s = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "poseidon", "train", *flags], cwd=folder, env=environment, check=True
    )
    seconds = time.monotonic() - began_s
    return folder / f"{net.name or 'net'}_iter_{job.iterations}.caffemodel", seconds


def main(arguments: list[str] | None = None) -> int:
    """Train one net, and print its row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=JOBS)
    parser.add_argument("--folder", type=Path, required=True, help="for data, logs and models")
    parser.add_argument("--weights", help="a model to start from")
    for field, kind in (("side", int), ("batch", int), ("rate", float), ("iterations", int)):
        parser.add_argument(f"--{field}", type=kind, help=f"in place of the net's own {field}")
    flags = parser.parse_args(arguments)
    given = {name: getattr(flags, name) for name in ("side", "batch", "rate", "iterations")}
    job = replace(
        JOBS[flags.name], **{name: value for name, value in given.items() if value is not None}
    )
    folder = flags.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    net, use = job.make(folder / "data", job.side, job.batch)
    model, seconds = train(folder, net, job, flags.weights)
    if flags.name in BACKBONES:
        write_backbone(folder / "backbone.caffemodel", BACKBONES[flags.name](model, use, folder))
    score = job.score(use, model, job.side)
    cells = (
        flags.name,
        job.side,
        job.batch,
        job.iterations,
        f"{seconds / job.iterations:.2f}",
        f"{seconds / 60:.1f}",
    )
    print("| " + " | ".join(map(str, cells)) + f" | {score:.3f} {job.unit} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
