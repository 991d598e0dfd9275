"""The detection and segmentation nets of prototxt/: their parameters, and that what is trained
fits the net for use.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN, NetState
from poseidon.caffe.proto.definition import filter_net, read_net, read_solver

FOLDER = Path(__file__).parents[1] / "prototxt"
SOURCES = {
    "ROIData": {"data": (1, 3, 224, 320), "im_info": (1, 3), "gt_boxes": (2, 5)},
    "DenseImageData": {"data": (1, 3, 473, 473), "label": (1, 1, 473, 473)},
}
# Folder, definition for training, parameters, with those that do not learn.
NETS = {
    "faster_rcnn": ("train", 137_078_239),
    "rfcn": ("train", 31_862_712),
    "segnet": ("train_val", 29_449_355),
    "pspnet": ("train_val", 46_841_174),
}


def planned(path: Path, phase: int) -> Net:
    """The net without memory for its blobs, with inputs in place of what it reads."""
    state = NetState(phase=phase)  # type: ignore[arg-type]
    definition = filter_net(read_net(path), state)
    for layer in definition.param.layer:
        if layer.type in SOURCES:
            shapes = SOURCES[layer.type]
            if path.parent.name == "segnet":
                shapes = {"data": (1, 3, 360, 480), "label": (1, 1, 360, 480)}
            layer.type = "Input"
            for top in layer.top:
                layer.input_param.shape.add(dim=shapes[top])
    context = LayerContext(phase=phase, seed=1, device=torch.device("meta"))
    return compile_net(definition, context, state=state)


@pytest.mark.parametrize("name", NETS)
def test_parameters_of_training_and_use(name: str) -> None:
    stem, expected = NETS[name]
    trained = planned(FOLDER / name / f"{stem}.prototxt", TRAIN)
    deployed = planned(FOLDER / name / "deploy.prototxt", TEST)
    counts = []
    for net in (trained, deployed):
        blobs = {
            f"{layer_name}.{index}": tuple(blob.shape)
            for layer_name, layer in net.layer_modules
            for index, blob in enumerate(layer.blobs())
        }
        counts.append(
            (blobs, sum(blob.numel() for _, layer in net.layer_modules for blob in layer.blobs()))
        )
    assert counts[0] == counts[1]
    assert counts[0][1] == expected
    assert read_solver(FOLDER / name / "solver.prototxt").net_definition().source == str(
        FOLDER / name / f"{stem}.prototxt"
    )


def test_tops_of_the_nets_for_use() -> None:
    shapes = {name: planned(FOLDER / name / "deploy.prototxt", TEST).blob_shapes for name in NETS}
    assert shapes["faster_rcnn"]["cls_prob"] == (300, 21) and shapes["faster_rcnn"][
        "bbox_pred"
    ] == (300, 84)
    assert shapes["rfcn"]["cls_prob"] == (300, 21, 1, 1) and shapes["rfcn"]["bbox_pred"] == (
        300,
        8,
        1,
        1,
    )
    assert shapes["segnet"]["prob"] == (1, 11, 360, 480)
    assert shapes["pspnet"]["prob"] == (1, 150, 473, 473)
    # The extents of the pyramid of the released model.
    assert [shapes["pspnet"][f"conv5_3_pool{level}"][2] for level in (1, 2, 3, 6)] == [1, 2, 3, 6]
