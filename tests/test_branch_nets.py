"""Small nets of the kinds that prototxt/ has for detection, segmentation and channels learn
drawn shapes with two workers.

The default run trains a few iterations. With `--thorough` each net trains until it finds the
shapes: the scores were measured with two workers and one shard, and the limits are below them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe.proto.caffe_pb2 import NetParameter
from poseidon.pycaffe import NetSpec
from poseidon.pycaffe import layers as L
from prototxt.backbones import Anchors
from prototxt.faster_rcnn import generate as faster_rcnn
from prototxt.pspnet import generate as pspnet
from prototxt.rfcn import generate as rfcn
from prototxt.segnet import generate as segnet
from prototxt.senet import generate as senet
from prototxt.shufflenet import generate as shufflenet
from tests.support import branch_nets
from tests.support.branch_nets import CLASSES

ANCHORS = Anchors(stride=8, scales=(1.5, 2.25, 3.2), ratios=(1,), smallest=8, kept=(100, 50))
DETECTION, SEGMENTATION, ODD, SINGLE = (96, 96), (48, 48), (49, 49), (48, 48)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A net that learns.

    Attributes:
        make: writes its data into a folder; returns the net for training and the net for use.
        score: of a model, on scenes that are not in the data.
        rate: of Adam at the first iteration.
        iterations: in the thorough run.
        expected: a score that is reached then.
        images: of the training set then.
    """

    make: Callable[[Path, int], tuple[NetParameter, NetParameter]]
    score: Callable[[NetParameter, Path], float]
    rate: float
    iterations: int
    expected: float
    images: int = 300


def make_segnet(folder: Path, count: int) -> tuple[NetParameter, NetParameter]:
    listed = str(branch_nets.write_masks(folder, count, size=SEGMENTATION))
    size = segnet.Size(
        classes=CLASSES,
        widths=(16, 32, 32),
        counts=(1, 1, 1),
        image=SEGMENTATION,
        weights=(0.3, 1, 1, 1),
        ignored=None,
        source=listed,
        test_source=listed,
    )
    return segnet.train(size), segnet.deploy(size, inference=False)


def make_pspnet(folder: Path, count: int) -> tuple[NetParameter, NetParameter]:
    listed = str(branch_nets.write_masks(folder, count, size=ODD))
    size = pspnet.Size(
        classes=CLASSES,
        widths=(8, 16, 16, 16),
        blocks=(1, 1, 1, 1),
        pool=16,
        levels=(1, 2, 3, 6),
        crop=ODD[0],
        momentum=0.9,
        source=listed,
        test_source=listed,
    )
    return pspnet.train(size), pspnet.deploy(size)


def make_faster_rcnn(folder: Path, count: int) -> tuple[NetParameter, NetParameter]:
    size = faster_rcnn.Size(
        classes=CLASSES,
        widths=(16, 32, 48, 64),
        counts=(1, 1, 1, 1),
        frozen=0,
        hidden=64,
        dropout=0,
        pooled=4,
        anchors=ANCHORS,
        rpn=48,
        image=DETECTION,
        regions=32,
        source=str(branch_nets.write_windows(folder, count, size=DETECTION)),
        scale=0,
    )
    return faster_rcnn.train(size), branch_nets.with_regions(faster_rcnn.deploy(size))


def make_rfcn(folder: Path, count: int) -> tuple[NetParameter, NetParameter]:
    size = rfcn.Size(
        classes=CLASSES,
        stem=16,
        widths=(8, 16, 16, 16),
        blocks=(1, 1, 1, 1),
        strides=(1, 2, 1),
        top=48,
        rpn=48,
        parts=3,
        fixed=False,
        anchors=ANCHORS,
        hardest=32,
        image=DETECTION,
        source=str(branch_nets.write_windows(folder, count, size=DETECTION)),
        scale=0,
    )
    return rfcn.train(size), branch_nets.with_regions(rfcn.deploy(size))


def make_classifier(
    body: Callable[[NetSpec, bool], object], folder: Path, count: int
) -> tuple[NetParameter, NetParameter]:
    listed = str(branch_nets.write_labelled(folder, count, size=SINGLE))
    n = NetSpec()
    n.data, n.label = L.ImageData(
        ntop=2,
        image_data_param={
            "source": listed,
            "batch_size": 16,
            "shuffle": True,
            "shared_file_system": True,
        },
    )
    n.loss = L.SoftmaxWithLoss(body(n, True), n.label)
    use = NetSpec()
    use.data = L.Input(input_param={"shape": {"dim": [1, 3, *SINGLE]}})
    use.prob = L.Softmax(body(use, False))
    return n.to_proto(), use.to_proto()


def score_masks(
    size: tuple[int, int], mean: tuple[float, ...], net: NetParameter, model: Path
) -> float:
    return branch_nets.mean_iou(
        branch_nets.load(net, model), branch_nets.scenes(60, size=size), mean
    )


def score_boxes(mean: tuple[float, ...], net: NetParameter, model: Path) -> float:
    found = branch_nets.scenes(60, size=DETECTION)
    return branch_nets.mean_ap(branch_nets.detect(branch_nets.load(net, model), found, mean), found)


def score_labels(net: NetParameter, model: Path) -> float:
    return branch_nets.accuracy(
        branch_nets.load(net, model), branch_nets.scenes(120, size=SINGLE, most=1)
    )


SE_SIZE = senet.Size(classes=CLASSES - 1, widths=(8, 16), blocks=(1, 1), reduction=4)
SHUFFLE_SIZE = shufflenet.Size(
    classes=CLASSES - 1, stem=12, widths=(48, 96), blocks=(2, 2), groups=3
)
TRIALS = {
    "segnet": Trial(
        make=make_segnet,
        score=partial(score_masks, SEGMENTATION, (0, 0, 0)),
        rate=0.003,
        iterations=500,
        expected=0.6,
    ),
    "pspnet": Trial(
        make=make_pspnet,
        score=partial(score_masks, ODD, pspnet.MEAN),
        rate=0.003,
        iterations=600,
        expected=0.5,
    ),
    "faster_rcnn": Trial(
        make=make_faster_rcnn,
        score=partial(score_boxes, faster_rcnn.MEAN),
        rate=0.001,
        iterations=500,
        expected=0.5,
    ),
    "rfcn": Trial(
        make=make_rfcn,
        score=partial(score_boxes, rfcn.MEAN),
        rate=0.002,
        iterations=900,
        expected=0.3,
    ),
    "senet": Trial(
        make=partial(make_classifier, partial(senet.body, SE_SIZE)),
        score=score_labels,
        rate=0.003,
        iterations=150,
        expected=0.7,
    ),
    "shufflenet": Trial(
        make=partial(make_classifier, partial(shufflenet.body, SHUFFLE_SIZE)),
        score=score_labels,
        rate=0.01,
        iterations=400,
        expected=0.65,
        images=600,
    ),
}


@pytest.mark.parametrize("name", TRIALS)
def test_two_workers_learn_for_a_few_iterations(tmp_path: Path, name: str) -> None:
    trial = TRIALS[name]
    net, use = trial.make(tmp_path / "set", 8)
    model, losses = branch_nets.train(tmp_path, net, rate=trial.rate, iterations=12)
    assert np.isfinite(losses).all() and np.mean(losses[-4:]) < np.mean(losses[:4])
    assert 0 <= trial.score(use, model) <= 1 if name in ("segnet", "senet") else model.is_file()


@pytest.mark.thorough
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TRIALS)
def test_two_workers_learn_to_find_shapes(tmp_path: Path, name: str) -> None:
    trial = TRIALS[name]
    net, use = trial.make(tmp_path / "set", trial.images)
    model, _ = branch_nets.train(tmp_path, net, rate=trial.rate, iterations=trial.iterations)
    found = trial.score(use, model)
    print(f"{name}: {found:.3f} after {trial.iterations} iterations of two workers")
    assert found >= trial.expected
