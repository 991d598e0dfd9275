"""The state of a solver's loop: other nets continue from it, and depend on each part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from poseidon.caffe.net.net import Net
from poseidon.caffe.net.params import ParamInfo
from poseidon.caffe.proto.blob import to_array
from poseidon.caffe.proto.caffe_pb2 import PoseidonWorkerState, SolverState
from poseidon.caffe.proto.definition import read_solver
from poseidon.caffe.snapshot.caffemodel import read_model
from poseidon.caffe.solver import loss_scale
from poseidon.caffe.solver.checkpoint import Checkpoint
from poseidon.caffe.solver.replica import WorkerNets
from poseidon.caffe.solver.settings import solver_settings
from poseidon.caffe.solver.state import FrozenHistories, restore, state_of
from poseidon.engine.leaf import Found, StateSource
from poseidon.exchange.compute_options import Arithmetic, ComputeOptions
from poseidon.exchange.options import ExchangeKind
from poseidon.exchange.replicas import NO_CHECK
from tests.support.nets import build, layer, noise, stack
from tests.support.training import Job, run, write_definitions
from tests.support.training_processes import make_data

T, N, D, H = 3, 2, 4, 5


def nets(*, seed: int) -> WorkerNets:
    """Return a recurrent train net and a test net that is random, too."""

    def net(more: str) -> Net:
        filler = "weight_filler { type: 'constant' value: 0.3 }"
        body = f"recurrent_param {{ num_output: {H} {filler} }}"
        return build(stack(f"LSTM x={T},{N},{D} k={T},{N} > y | {body}") + more, seed=seed)

    dummy = "dummy_data_param { data_filler { type: 'gaussian' } shape { dim: 3 } }"
    return WorkerNets(
        number=0, name="worker 0", train=net(""), tests=(net(layer("DummyData", "", "z", dummy)),)
    )


def outputs(of: WorkerNets) -> list[torch.Tensor]:
    given = {"x": noise(T, N, D), "k": torch.ones(T, N)}
    return [value.detach() for net in of.all() for value in net(given).values()]


def test_other_nets_go_on_from_a_state_and_begin_anew_without_one() -> None:
    first, second = nets(seed=1), nets(seed=2)
    begin = outputs(first)
    packed = state_of(first, [0.5]).SerializeToString()
    expected = outputs(first)
    assert not torch.equal(begin[0], expected[0])
    restore(second, PoseidonWorkerState.FromString(packed))
    assert all(map(torch.equal, outputs(second), expected))
    restore(second, PoseidonWorkerState(torch_rng=second.train.random_state()))
    assert torch.equal(outputs(second)[0], begin[0])


def changed(state: dict[str, Any], leaf: str) -> dict[str, Any]:
    """Return a state with a leaf changed, of all workers and of each virtual worker."""
    own = [{**one, leaf: different(one[leaf])} if leaf in one else one for one in state["own"]]
    shared = {leaf: different(state[leaf])} if leaf in state else {}
    return {**state, **shared, "own": own}


def different(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: different(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [different(part) for part in value]
    if isinstance(value, bytes):
        worker = PoseidonWorkerState.FromString(value)
        worker.reader[0].batches += 1
        return worker.SerializeToString()
    return value if value is None else value + 1


FREE = {"workers", "own", "model", "schemes"}
"""What is no leaf, is in a file of its own, or is a plan that gives the same bits."""
ROUNDS = replace(NO_CHECK, local_steps=3, outer_momentum=0.5)
KINDS = {
    "a codec": Job(options=replace(NO_CHECK, compress="ip*=int8")),
    "low rank": Job(options=replace(NO_CHECK, compress="ip*=powersgd:1")),
    "local steps": Job(options=ROUNDS),
    "local steps of virtual workers": Job(options=ROUNDS, bounds=(0, 2, 3)),
    "float16": Job(bounds=(0, 2, 3), compute=ComputeOptions(precision=Arithmetic.FLOAT16)),
}


THOROUGH = ("a codec", "local steps")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.thorough if kind in THOROUGH else ()) for kind in KINDS],
)
def test_a_run_depends_on_each_leaf(
    kind: str, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_scale, "GROWS_AFTER", 2)  # so that it doubles within a few iterations
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**19)
    extra = (
        'type: "Adam"\nmomentum2: 0.99\nbase_lr: 0.005\nmax_iter: 6\nsnapshot: 3\ntest_interval: 3'
    )
    solver = write_definitions(data_folder, batch=5, extra=extra, dropout=True, norm=True)
    job = replace(KINDS[kind], workers=2, shards=1, kind=ExchangeKind.SERVER)

    def ended(job: Job) -> tuple[bytes, list[object]]:
        found = run(solver, job)
        state = (data_folder / "snap_iter_6.solverstate").read_bytes()
        model = (data_folder / "snap_iter_6.caffemodel").read_bytes()
        return model + state, [r.outputs for r in found.sink.tests if r.iteration == 6]

    whole = ended(job)
    resumed = replace(job, resume=data_folder / "snap_iter_3.solverstate")
    restore, leaf, seen = Checkpoint.restore, "", set[str]()

    def restored(checkpoint: Checkpoint, path: Path) -> dict[str, Any]:
        state = restore(checkpoint, path)
        seen.update(name for part in (state, *state["own"]) for name in part if part[name])
        return changed(state, leaf) if leaf else state

    monkeypatch.setattr(Checkpoint, "restore", restored)
    assert ended(resumed) == whole
    for leaf in sorted(seen - FREE):
        assert ended(resumed) != whole, leaf


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
            factors=False,
        )
        return FrozenHistories([info], settings)

    first, other = histories(), histories()
    for iteration in range(3):
        first.advance(iteration)
    read, source = first.leaf().read(), StateSource(name="a test")
    other.leaf().write(Found(shared=read, each=[], own=range(1), source=source))
    np.testing.assert_array_equal(other.copies()["ip"], first.copies()["ip"])
    assert torch.all(first.copies()["ip"][0] != other.copies()["ip"][1])
