"""What is sent of memory snapshots."""

from __future__ import annotations

import numpy as np
import torch

from poseidon.engine.solver.memory import MemorySnapshot
from poseidon.exchange.kinds import Scheme
from poseidon.proto.caffe_pb2 import PoseidonWorkerState


def test_what_is_sent_of_a_snapshot_comes_back() -> None:
    states = tuple(
        PoseidonWorkerState(rank=rank, smoothed_loss=[0.5, rank], torch_rng=b"r")
        for rank in range(3)
    )
    frozen = {"conv": [np.arange(6, dtype=np.float32).reshape(2, 3)], "ip": []}
    snapshot = MemorySnapshot(
        iteration=12,
        tests_done=3,
        states=states,
        frozen=frozen,
        schemes=(Scheme.SERVER, Scheme.FACTORS),
        values=(torch.zeros(1),),
        histories=([np.zeros(1, np.float32)],),
        held_back={},
    )
    found = MemorySnapshot.unpack(snapshot.pack())
    assert (found.iteration, found.tests_done, found.schemes) == (12, 3, snapshot.schemes)
    assert (found.states, found.values, found.histories) == (states, (), ())
    assert found.frozen.keys() == frozen.keys()
    np.testing.assert_array_equal(found.frozen["conv"][0], frozen["conv"][0])
    assert found.progress(range(1, 3)).losses == ((0.5, 1.0), (0.5, 2.0))
