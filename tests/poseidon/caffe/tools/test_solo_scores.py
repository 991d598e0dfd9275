"""Scores are means over batches of every number of every output."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import encode_datum
from poseidon.caffe.proto.caffe_pb2 import TEST
from poseidon.caffe.tools.solo import NetRequest, open_net, score
from poseidon.errors import DataError
from tests.support.databases import make_database, make_pictures

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


def test_records_of_many_sizes(tmp_path: Path) -> None:
    shapes = [(3, 4, 5), (3, 6, 6), (3, 9, 7)]
    records = (
        (b"%d" % n, encode_datum(np.full(shape, n, np.uint8), n)) for n, shape in enumerate(shapes)
    )
    make_database(tmp_path / "db", Backend.LMDB, records)
    path = tmp_path / "net.prototxt"
    pool = 'layer { name: "p" type: "Pooling" bottom: "data" top: "p" pooling_param { pool: AVE global_pooling: true } }'
    data = NET.splitlines()[1].replace("batch_size: 2", "batch_size: 1")
    path.write_text(data + pool, encoding="utf-8")
    with closing(open_net(NetRequest(model=path, phase=TEST))) as net:
        assert [output.value for output in score(net, 3, lambda line: None).outputs] == [1, 1, 1, 1]
    path.write_text(data, encoding="utf-8")
    message = "output 'data' has shape 1x3x6x6 after 1x3x4x5, expected one shape .* hidden with a Silence layer"
    with (
        closing(open_net(NetRequest(model=path, phase=TEST))) as net,
        pytest.raises(DataError, match=message),
    ):
        score(net, 3, lambda line: None)


def test_inputs_that_nothing_fills_are_zeros(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
