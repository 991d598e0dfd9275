"""The nets of whole_nets have the depth and width of the definitions in prototxt/."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import whole_nets
from poseidon.caffe.proto.caffe_pb2 import NetParameter
from poseidon.caffe.proto.definition import read_net

ROOT = Path(__file__).parents[2] / "prototxt"
# The definition, and the layers whose outputs depend on the number of classes.
DEFINITIONS = {
    "shufflenet": ("shufflenet/train_val", {"fc1000"}),
    "senet": ("senet/train_val", {"classifier"}),
    "segnet": ("segnet/train_val", {"conv1_1_D"}),
    "pspnet": ("pspnet/train_val", {"conv6"}),
    "mobilenet_ssd": ("ssd/mobilenet_ssd_train", {"_mbox_conf"}),
    "ssd300": ("ssd/ssd300_train", {"_mbox_conf"}),
    "rfcn": ("rfcn/train", {"rfcn_cls"}),
    "faster_rcnn": ("faster_rcnn/train", {"cls_score", "bbox_pred"}),
}
KINDS = ("Convolution", "DepthwiseConvolution", "InnerProduct")


def widths(net: NetParameter, without: set[str]) -> dict[str, tuple[int, ...]]:
    """Outputs, kernel, stride, dilation and groups of each layer with weights."""
    found = {}
    for layer in net.layer:
        if layer.type in KINDS and not any(layer.name.endswith(name) for name in without):
            conv = layer.convolution_param
            outputs = conv.num_output or layer.inner_product_param.num_output
            found[layer.name] = (
                outputs,
                *conv.kernel_size,
                *conv.stride,
                *conv.dilation,
                conv.group,
            )
    return found


@pytest.mark.parametrize("name", whole_nets.JOBS)
def test_nets_are_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    for writer in ("write_masks", "write_windows", "write_labelled"):
        monkeypatch.setattr(
            whole_nets.branch_nets, writer, lambda folder, count, **_: folder / "list.txt"
        )
    monkeypatch.setattr(
        whole_nets, "write_detection_set", lambda folder, count, **_: folder / "list.txt"
    )
    monkeypatch.setattr(whole_nets, "poseidon", lambda arguments: 0)
    job = whole_nets.JOBS[name]
    made, use = job.make(tmp_path, job.side, job.batch)
    path, without = DEFINITIONS[name]
    expected = widths(read_net(ROOT / f"{path}.prototxt").param, without)
    assert len(expected) >= 14
    assert widths(made, without) == expected
    assert widths(use, without) == expected
