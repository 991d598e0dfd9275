"""The SSD nets of prototxt/: their parameters and prior boxes, and that OpenCV's importer
computes the same.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.layers.batch_norm import BatchNorm
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN, NetState
from poseidon.caffe.proto.definition import read_net, read_solver
from poseidon.caffe.snapshot.caffemodel import write_model
from tests.support import opencv

FOLDER = Path(__file__).parents[1] / "prototxt" / "ssd"
# Stem: side of the input, parameters with BatchNorm's, prior boxes.
NETS = {
    "ssd300": (300, 26_285_486, 8732),
    "mobilenet_ssd": (300, 5_821_468, 1917),
    "shapes_ssd": (96, 48_212, 720),
}
BLOBS = ("mbox_loc", "mbox_conf", "mbox_priorbox", "mbox_conf_flatten", "detection_out")


def built(stem: str, kind: str, *, device: str = "cpu") -> Net:
    """The net; what it reads are inputs."""
    phase = TRAIN if kind == "train" else TEST
    definition = read_net(FOLDER / f"{stem}_{kind}.prototxt")
    for layer in definition.param.layer:
        if layer.type == "AnnotatedData":
            layer.type = "Input"
            layer.input_param.shape.add(dim=(1, 3, *[NETS[stem][0]] * 2))
            layer.input_param.shape.add(dim=(1, 1, 2, 8))
    context = LayerContext(phase=phase, seed=3, device=torch.device(device))
    return compile_net(definition, context, state=NetState(phase=phase))


@pytest.mark.parametrize("stem", NETS)
def test_parameters_and_prior_boxes(stem: str) -> None:
    _, parameters, priors = NETS[stem]
    blobs = []
    for kind in ("train", "test", "deploy"):
        net = built(stem, kind, device="meta")
        assert net.blob_shapes["mbox_priorbox"] == (1, 2, 4 * priors)
        found = {
            f"{name}.{index}": tuple(blob.shape)
            for name, layer in net.layer_modules
            for index, blob in enumerate(layer.blobs())
        }
        assert (
            sum(blob.numel() for _, layer in net.layer_modules for blob in layer.blobs())
            == parameters
        )
        blobs.append(found)
        expected = {"train": "mbox_loss", "test": "detection_eval", "deploy": "detection_out"}[kind]
        assert [name for name, _ in net.plan.outputs] == [expected]
    assert blobs[0] == blobs[1] == blobs[2]
    solver = read_solver(FOLDER / f"{stem}_solver.prototxt").param
    assert (solver.train_net, *solver.test_net) == (
        f"{stem}_train.prototxt",
        f"{stem}_test.prototxt",
    )


@pytest.mark.parametrize(
    "stem",
    [pytest.param(stem, marks=pytest.mark.thorough if stem == "ssd300" else ()) for stem in NETS],
)
def test_the_whole_net_is_equal_to_opencvs(stem: str, tmp_path: Path) -> None:
    """Random weights, with scores that differ enough to have one order."""
    net = built(stem, "deploy")
    generator = torch.Generator().manual_seed(7)
    image = torch.randn(1, 3, *[NETS[stem][0]] * 2, generator=generator)
    with torch.no_grad():
        for _, layer in net.layer_modules:
            if isinstance(layer, BatchNorm):
                mean, variance, factor = layer.blobs()
                mean.copy_(torch.randn(mean.shape, generator=generator) * 0.1)
                variance.copy_(torch.rand(variance.shape, generator=generator) + 0.5)
                factor.fill_(1)
        net.keep_blobs = True
        net({"data": image})
        for name, layer in net.layer_modules:
            for kind, spread in (("loc", 1.0), ("conf", 4.0)):
                if name.endswith(f"_mbox_{kind}"):
                    weight, bias = layer.blobs()
                    weight.mul_(spread / max(float(net.blobs[name].std()), 1e-6))
                    bias.copy_(torch.randn(bias.shape, generator=generator) * 0.1)
        found = net({"data": image})
        ours = [net.blobs[name].numpy() for name in BLOBS]
    assert list(found) == ["detection_out"]
    write_model(tmp_path / "model", net.definition.param, net.layer_blobs())
    theirs = opencv.outputs(
        FOLDER / f"{stem}_deploy.prototxt", tmp_path / "model", {"data": image.numpy()}, BLOBS
    )
    for name, mine, other in zip(BLOBS[:-1], ours, theirs, strict=False):
        assert np.abs(mine.ravel() - other.ravel()).max() <= 1e-4 * np.abs(other).max(), name
    mine, other = (rows.reshape(-1, 7) for rows in (ours[-1], theirs[-1]))
    other = other[other[:, 2] > 0]
    assert mine.shape == other.shape == (200, 7)
    # Its rows are in the order of scores.
    mine, other = (rows[np.lexsort((rows[:, 2], rows[:, 1]))] for rows in (mine, other))
    np.testing.assert_allclose(mine, other, atol=1e-4)
