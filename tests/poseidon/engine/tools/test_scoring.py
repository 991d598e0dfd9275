"""Scores are means over batches of every number of every output."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.engine.tools.scoring import score
from poseidon.engine.tools.solo import NetRequest, open_net
from poseidon.proto.caffe_pb2 import TEST
from tests.support.databases import make_pictures

NET = """
layer { name: "data" type: "Data" top: "data" top: "label" data_param { source: "db" backend: LMDB batch_size: 2 } }
layer { name: "silence" type: "Silence" bottom: "data" }
layer { name: "twice" type: "Power" bottom: "label" top: "twice" power_param { scale: 2 } loss_weight: 0.5 }
"""


@pytest.fixture
def net_file(tmp_path: Path) -> Path:
    make_pictures(tmp_path / "db", 6)  # labels are 0 to 5
    path = tmp_path / "net.prototxt"
    path.write_text(NET, encoding="utf-8")
    return path


def test_means_of_every_number(net_file: Path) -> None:
    said: list[str] = []
    net = open_net(NetRequest(model=net_file, phase=TEST))
    scores = score(net, 2, lambda line: said.append(line.text))
    net.close()
    assert [output.value for output in scores.outputs] == [2, 4]
    assert scores.loss == pytest.approx((0.5 * (0 + 2) + 0.5 * (4 + 6)) / 2)
    assert said == [
        "Batch 0, twice = 0",
        "Batch 0, twice = 2",
        "Batch 1, twice = 4",
        "Batch 1, twice = 6",
        "Loss: 3",
        "twice = 2 (* 0.5 = 1 loss)",
        "twice = 4 (* 0.5 = 2 loss)",
    ]


def test_inputs_that_nothing_fills_are_zeros(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text(
        'layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 1 dim: 2 } } }'
        'layer { name: "p" type: "Power" bottom: "x" top: "p" power_param { shift: 3 } }',
        encoding="utf-8",
    )
    with caplog.at_level("WARNING"):
        scores = score(open_net(NetRequest(model=path, phase=TEST)), 2, lambda line: None)
    assert [output.value for output in scores.outputs] == [3, 3]
    assert "inputs that nothing fills (x)" in caplog.text
