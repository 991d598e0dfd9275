"""The histories of blobs without a rate are Caffe's: weight decay enters them, and their values
stay.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from poseidon.caffe.net.params import ParamInfo
from poseidon.caffe.proto.blob import to_array
from poseidon.caffe.proto.caffe_pb2 import SolverState
from poseidon.caffe.proto.definition import read_solver
from poseidon.caffe.snapshot.caffemodel import read_model
from poseidon.caffe.solver.frozen import FrozenHistories
from poseidon.caffe.solver.settings import solver_settings
from poseidon.engine.state_tree import Found, StateSource
from tests.support.training import Job, run, write_definitions
from tests.support.training_processes import make_data

DECAY, RMS, BETA1, BETA2 = 0.1, 0.98, 0.9, 0.999


def next_history(kind: str, history: list[np.ndarray], value: np.ndarray) -> list[np.ndarray]:
    """One step of Caffe's rule for the gradient DECAY value."""
    g = np.float32(DECAY) * value
    if kind == "AdaGrad":
        return [history[0] + g * g]
    if kind == "RMSProp":
        return [RMS * history[0] + (1 - RMS) * g * g]
    if kind == "Adam":
        return [BETA1 * history[0] + (1 - BETA1) * g, BETA2 * history[1] + (1 - BETA2) * g * g]
    return [np.zeros_like(g)]


@pytest.mark.parametrize("kind", ["AdaGrad", "RMSProp", "Adam", "SGD"])
def test_statistics_have_decay_terms_in_their_histories(tmp_path: Path, kind: str) -> None:
    make_data(tmp_path)
    extra = f'type: "{kind}"\nweight_decay: {DECAY}\nmomentum: {0.9 if kind in ("Adam", "SGD") else 0}\nsnapshot: 1\nmax_iter: 4'
    if kind == "RMSProp":
        extra += f"\nrms_decay: {RMS}"
    solver = write_definitions(tmp_path, batch=5, norm=True, extra=extra)
    run(solver, Job())
    expected: list[list[np.ndarray]] | None = None
    for iteration in range(1, 5):
        model = read_model(tmp_path / f"snap_iter_{iteration}.caffemodel")
        counts = [len(arrays) for _, arrays in model]
        flat = [np.asarray(array) for _, arrays in model for array in arrays]
        place = next(i for i, (_, arrays) in enumerate(model) if len(arrays) == 3)
        first = sum(counts[:place])
        statistics = flat[first : first + 3]
        if expected is None:
            expected = [[np.zeros_like(value)] * 2 for value in statistics]
        expected = [
            next_history(kind, h, value) for h, value in zip(expected, statistics, strict=True)
        ]
        state = SolverState.FromString(
            (tmp_path / f"snap_iter_{iteration}.solverstate").read_bytes()
        )
        for index, histories in enumerate(expected):
            for column, history in enumerate(histories):
                found = to_array(state.history[column * len(flat) + first + index])
                np.testing.assert_allclose(found, history, rtol=1e-4, atol=1e-12)
    last = (tmp_path / "snap_iter_4.solverstate").read_bytes()
    run(solver, Job(resume=tmp_path / "snap_iter_2.solverstate"))
    assert (tmp_path / "snap_iter_4.solverstate").read_bytes() == last


def test_histories_come_back_as_a_leaf(tmp_path: Path) -> None:
    settings = solver_settings(
        read_solver(
            write_definitions(
                tmp_path, batch=5, extra='type: "Adam"\nweight_decay: 0.1\nmomentum: 0.9'
            )
        )
    )

    def histories() -> FrozenHistories:
        blob = nn.Parameter(torch.arange(1.0, 7.0), requires_grad=False)
        info = ParamInfo(
            name="ip",
            shape=(2, 3),
            lr_mult=0.0,
            decay_mult=1.0,
            parameter=blob,
            layer="ip",
            layer_type="InnerProduct",
            factors=False,
        )
        return FrozenHistories([info], settings)

    first, other = histories(), histories()
    for iteration in range(3):
        first.advance(iteration)
    read, source = first.leaf().read(), StateSource(name="a test")
    other.leaf().write(Found(shared=read, each=[], own=range(1), source=source))
    np.testing.assert_array_equal(other.arrays()["ip"], first.arrays()["ip"])
    assert np.all(first.arrays()["ip"][0] != other.arrays()["ip"][1])
