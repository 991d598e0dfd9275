"""The measurement of a worker's speed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from poseidon.engine.solver import speed
from poseidon.layers.base import LayerContext
from poseidon.net.net import Net
from poseidon.proto.caffe_pb2 import TRAIN
from poseidon.proto.definition import read_solver
from tests.support.training import write_definitions
from tests.support.training_processes import make_data


def test_a_measurement_begins_when_all_workers_are_ready_and_closes_its_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    make_data(tmp_path)
    solver = read_solver(write_definitions(tmp_path, batch=5, extra="max_iter: 1"))
    monkeypatch.setattr(speed, "LIMIT_S", 0.0)
    happened = []
    forward, close = Net.forward, Net.close
    monkeypatch.setattr(Net, "forward", lambda *a: happened.append("pass") or forward(*a))
    monkeypatch.setattr(Net, "close", lambda net: happened.append("close") or close(net))
    found = speed.passes_per_second(
        solver, LayerContext(phase=TRAIN, seed=3), lambda: happened.append("meet")
    )
    assert found > 0
    assert happened == ["pass", "meet", *["pass"] * speed.LEAST_PASSES, "close"]
