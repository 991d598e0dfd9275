"""The solvers, step by step, against recorded trajectories and closed forms."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import poseidon.pycaffe as caffe
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import encode_datum
from poseidon.caffe.proto import caffe_pb2
from poseidon.errors import DataError, DefinitionError, SnapshotError, UsageError
from poseidon.exchange.options import ExchangeKind
from tests.poseidon.pycaffe.conftest import Write
from tests.support import training
from tests.support.databases import make_database, picture
from tests.support.training_processes import make_data

SETTINGS = """
test_iter: 3 test_interval: 10 base_lr: 0.01 momentum: 0.9 weight_decay: 0.0005 lr_policy: "inv" gamma: 0.0001 power: 0.75
display: 5 max_iter: 20 snapshot_after_train: false snapshot_prefix: "model"
"""
Make = Callable[..., Any]


@pytest.fixture
def make(write: Write, simple: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    """Makes a solver of the little net, its labels filled in; snapshots go to the current
    folder.
    """
    monkeypatch.chdir(tmp_path)

    def make(settings: str = SETTINGS, kind: Callable[..., Any] = caffe.get_solver) -> Any:
        solver = kind(str(write(f'net: "{simple}" {settings}', "solver.prototxt")))
        for net in (solver.net, *solver.test_nets):
            net.blobs["label"].data[...] = np.arange(5).reshape(5, 1, 1, 1)
        return solver

    return make


def test_records_of_many_sizes(write: Write, tmp_path: Path) -> None:
    shapes = [(1, 4, 5), (1, 9, 7), (1, 6, 6)]
    records = ((b"%d" % n, encode_datum(picture(n, shape), n)) for n, shape in enumerate(shapes))
    make_database(tmp_path / "db", Backend.LMDB, records)
    data = 'layer { name: "d" type: "Data" top: "x" top: "l" data_param { source: "db" batch_size: 1 backend: LMDB } }'
    scale = 'layer { name: "s" type: "Scale" bottom: "x" top: "y" }'
    pool = 'layer { name: "p" type: "Pooling" bottom: "y" top: "p" pooling_param { pool: AVE global_pooling: true } }'
    loss = 'layer { name: "e" type: "EuclideanLoss" bottom: "p" bottom: "l" top: "e" }'
    write(data + scale + pool + loss, "train.prototxt")
    write(data + scale, "test.prototxt")
    settings = 'train_net: "train.prototxt" test_net: "test.prototxt" base_lr: 0 lr_policy: "fixed" test_iter: 2'
    solver = caffe.get_solver(
        str(write(settings + " test_interval: 9 test_initialization: false", "solver.prototxt"))
    )
    for number in (0, 1, 2, 0):
        solver.step(1)
        expected = picture(number, shapes[number]).mean(dtype=np.float64)
        assert solver.net.blobs["p"].data.item() == pytest.approx(expected, rel=1e-5)
        assert solver.net.blobs["e"].data.item() == pytest.approx(
            (expected - number) ** 2 / 2, rel=1e-5
        )
    with pytest.raises(DataError, match=r"'y' has shape 1x1x9x7 after 1x1x4x5.* Silence layer"):
        solver.test_all()


@pytest.mark.parametrize(
    "case", ["adam", "rmsprop", "sgd_clip", "sgd_iter_size", "sgd_l1", "sgd_step"]
)
def test_weights_are_those_of_caffe(shared: Path, write: Write, case: str) -> None:
    recorded = np.load(shared / "golden" / "solvers" / f"{case}.npz", allow_pickle=False)
    net = shared / "golden" / "solvers" / "net.prototxt"
    solver = caffe.get_solver(write(f'{recorded["solver"]}\nnet: "{net}"'))
    for key in recorded.files:
        kind, *place = key.split(":")
        if kind == "start":
            solver.net.params[place[0]][int(place[1])].data[...] = recorded[key]
    for step, (x, labels) in enumerate(zip(recorded["x"], recorded["l"], strict=True)):
        solver.net.blobs["x"].data[...] = x
        solver.net.blobs["l"].data[...] = labels
        solver.step(1)
        assert float(solver.net.blobs["loss"].data) == pytest.approx(
            recorded["loss"][step], rel=1e-4
        )
        for key in recorded.files:
            kind, *place = key.split(":")
            if kind == f"step{step}":
                found, expected = solver.net.params[place[0]][int(place[1])].data, recorded[key]
                scale = np.maximum(np.abs(expected), np.abs(expected).max() / 100)
                assert float((np.abs(found - expected) / scale).max()) <= 1e-4, key


@pytest.mark.parametrize("case", ["sgd_momentum", "adam", "adadelta"])
def test_goes_on_from_what_caffe_wrote(shared: Path, write: Write, case: str) -> None:
    recorded = np.load(shared / "golden" / "solvers" / f"{case}.npz", allow_pickle=False)
    net = shared / "golden" / "solvers" / "net.prototxt"
    solver = caffe.get_solver(write(f'{recorded["solver"]}\nnet: "{net}"'))
    solver.restore(shared / "golden" / "files" / f"{case}_iter_12.solverstate")
    assert solver.iter == 12
    np.testing.assert_array_equal(solver.net.params["ip1"][0].data, recorded["step11:ip1:0"])


def test_classes_and_types(make: Make) -> None:
    kinds = {
        caffe.SGDSolver: "SGD",
        caffe.NesterovSolver: "Nesterov",
        caffe.AdaDeltaSolver: "AdaDelta",
        caffe.AdamSolver: "Adam",
        caffe.AdaGradSolver: "AdaGrad",
        caffe.RMSPropSolver: "RMSProp",
    }
    for kind, name in kinds.items():
        settings = SETTINGS + " rms_decay: 0.9"
        if name in ("AdaGrad", "RMSProp"):
            settings = settings.replace("momentum: 0.9", "")
        assert make(settings, kind).type == name
        assert type(make(f'{settings} type: "{name}"')) is kind


def test_solve_ends_at_max_iter_and_tests_on_the_way(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    solver = make()
    with caplog.at_level(logging.INFO, logger="poseidon.solver"):
        solver.solve()
    assert solver.iter == 20
    lines = [record.getMessage() for record in caplog.records]
    assert sum("Testing net (#0)" in line for line in lines) == 3  # at 0, 10 and the end
    assert sum(line.startswith("Iteration") and ", lr = " in line for line in lines) == 4
    assert lines[-1] == "Optimization Done."
    solver.solve()
    assert solver.iter == 20


def test_the_last_loss_is_averaged_with_those_before_it(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def losses(window: int) -> list[float]:
        caplog.clear()
        caffe.set_random_seed(4)
        solver = make(
            f'base_lr: 0 lr_policy: "fixed" max_iter: 5 display: 1 average_loss: {window} '
            "random_seed: 4 snapshot_after_train: false"
        )
        with caplog.at_level(logging.INFO, logger="poseidon.solver"):
            solver.solve()
        found = re.findall(r"Iteration \d, loss(?: =|:) ([\d.]+)", caplog.text)
        return [float(loss) for loss in found]

    own = losses(1)
    assert len(own) == 6
    assert losses(3)[-1] == pytest.approx(sum(own[-3:]) / 3, rel=1e-5)


def test_a_script_that_counts_its_steps_needs_no_max_iter(make: Make) -> None:
    solver = make('base_lr: 0.01 lr_policy: "fixed" snapshot_prefix: "model"')
    solver.step(2)
    assert solver.iter == 2


def test_apply_update_takes_the_diffs_and_ends_the_iteration(make: Make) -> None:
    solver = make()
    blob = solver.net.layers[1].blobs[0]
    blob.data[...] = 0
    blob.diff[...] = 1
    solver.apply_update()
    np.testing.assert_allclose(blob.data, -0.01, rtol=1e-6)
    np.testing.assert_allclose(blob.diff, 0.01, rtol=1e-6)
    assert solver.iter == 1


def test_rates_of_param_count_while_running(make: Make) -> None:
    solver = make(SETTINGS.replace("0.01", "0.5"))
    solver.param.base_lr = 0.0
    before = solver.net.params["ip"][0].data.copy()
    solver.step(1)
    np.testing.assert_array_equal(solver.net.params["ip"][0].data, before)
    assert solver.lr == 0.0 and solver.param.max_iter == 20


def test_test_nets_share_the_weights(make: Make) -> None:
    solver = make()
    (test,) = solver.test_nets
    solver.step(1)
    assert np.shares_memory(test.params["ip"][0].data, solver.net.params["ip"][0].data)
    other = caffe.Net(str(Path(solver.param.net)), caffe.TEST)
    solver.share_weights(other)
    solver.net.params["ip"][0].data[...] = 2
    assert (other.params["ip"][0].data == 2).all()


def test_nets_outlive_the_solver(make: Make) -> None:
    solver = make()
    nets = [solver.net, *solver.test_nets]
    assert len(nets) == 2
    del solver
    assert np.isfinite(sum(float(blob.data.sum()) for net in nets for blob in net.blobs.values()))


@pytest.mark.parametrize(("form", "ending"), [("BINARYPROTO", ""), ("HDF5", ".h5")])
def test_snapshot_and_restore(make: Make, form: str, ending: str) -> None:
    caffe.set_random_seed(3)
    solver = make(f"{SETTINGS} snapshot_format: {form}")
    solver.step(3)
    solver.snapshot()
    model, state = (
        Path(f"model_iter_3.caffemodel{ending}"),
        Path(f"model_iter_3.solverstate{ending}"),
    )
    assert model.is_file() and state.is_file()
    # Data are drawn anew in each pass: two solvers go on alike only with data of their own.
    other = make()
    other.restore(str(state))
    assert other.iter == 3
    for one in (solver, other):
        one.net.clear_param_diffs()
        for blobs in one.net.params.values():
            for blob in blobs:
                blob.diff[...] = 1
        one.apply_update()
    for name, blobs in solver.net.params.items():
        for mine, theirs in zip(blobs, other.net.params[name], strict=True):
            np.testing.assert_allclose(mine.data, theirs.data, rtol=1e-6)


def test_snapshot_diff(make: Make) -> None:
    solver = make(SETTINGS + "snapshot_diff: true")
    before = solver.net.params["ip"][1].data.copy()
    solver.step(1)
    solver.snapshot()
    saved = caffe_pb2.NetParameter.FromString(Path("model_iter_1.caffemodel").read_bytes())
    (bias,) = (layer.blobs[1] for layer in saved.layer if layer.name == "ip")
    values, diffs = (caffe.io.blobproto_to_array(bias, return_diff=diff) for diff in (False, True))
    np.testing.assert_allclose(values, before - diffs, rtol=1e-6)
    assert np.abs(diffs).max() > 0


def test_solve_resumes(make: Make) -> None:
    solver = make()
    solver.step(18)
    solver.snapshot()
    other = make()
    other.solve("model_iter_18.solverstate")
    assert other.iter == 20


def test_callbacks(make: Make) -> None:
    solver = make("iter_size: 2 " + SETTINGS)
    seen = []
    solver.add_callback(
        lambda: seen.append(("start", solver.iter)), lambda: seen.append(("ready", solver.iter))
    )
    solver.step(2)
    assert seen == [("start", 0), ("ready", 0), ("start", 1), ("ready", 1)]


def test_weights_of_the_solver_file(make: Make, tmp_path: Path) -> None:
    first = make()
    path = tmp_path / "start.caffemodel"
    first.net.save(path)
    second = make(f'{SETTINGS} weights: "{path}, {path},"')
    np.testing.assert_array_equal(first.net.params["ip"][0].data, second.net.params["ip"][0].data)


def test_the_same_seed_gives_the_same_weights(make: Make) -> None:
    found = []
    for seed in (7, 7, 8):
        caffe.set_random_seed(seed)
        solver = make()
        solver.step(2)
        found.append(solver.net.params["ip"][0].data.copy())
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(found[0] - found[2]).max() > 0


NOISY = """
layer { name: "ip1" type: "InnerProduct" bottom: "pool" top: "ip1" inner_product_param { num_output: 10
  weight_filler { type: "gaussian" std: 0.1 } } }
layer { name: "noisy" type: "Python" bottom: "ip1" top: "noisy" include { phase: TRAIN }
  python_param { module: "tests.support.python_layers" layer: "Noisy" } }
layer { name: "loss1" type: "SoftmaxWithLoss" bottom: "noisy" bottom: "label" top: "loss1" include { phase: TRAIN } }
"""


@pytest.mark.parametrize(
    ("extra", "virtual", "after_norm"),
    [
        ("", None, "Bias"),
        ("", None, "Scale"),
        ("iter_size: 2\nclip_gradients: 0.5", 3, "Bias"),
        ('type: "Adam"\nmomentum: 0.8', 2, "Bias"),
    ],
)
def test_weights_are_those_of_the_engine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    extra: str,
    virtual: int | None,
    after_norm: str,
) -> None:
    """Random seed, first weights, records, crops, mirrors, dropout, statistics, several losses, a
    layer in Python that draws numbers and all, to the bit; the engine computes BatchNorm and a
    Scale after it as one, which rounds differently.
    """
    make_data(tmp_path)
    path = training.write_definitions(
        tmp_path, batch=5, norm=True, dropout=True, extra=f"max_iter: 9\n{extra}"
    )
    net = tmp_path / "net.prototxt"
    scale = 'type: "Scale" bottom: "norm" top: "pool2" scale_param { bias_term: true }'
    plain = scale if after_norm == "Scale" else 'type: "Bias" bottom: "norm" top: "pool2"'
    assert scale in net.read_text()
    net.write_text(net.read_text().replace(scale, plain) + (NOISY if virtual else ""))
    training.run(path, training.Job(kind=ExchangeKind.SERVER, bounds=(0, virtual or 1)))
    engines = training.weights(tmp_path, 9)
    (tmp_path / "snap_iter_9.caffemodel").unlink()
    monkeypatch.chdir(tmp_path)
    caffe.set_solver_rank(0)  # the engine was in this process, too
    caffe.set_solver_count(1)
    if virtual is not None:
        caffe.set_virtual_workers(virtual)
    solver = caffe.get_solver(path)
    assert len(solver.nets) == (virtual or 1)
    solver.solve()
    found = training.weights(tmp_path, 9)
    assert training.largest_difference(found, engines) < (1e-5 if after_norm == "Scale" else 1e-30)
    del solver


def test_errors(make: Make, tmp_path: Path) -> None:
    solver = make()
    with pytest.raises(UsageError, match="expected 0 or more iterations"):
        solver.step(-1)
    with pytest.raises(SnapshotError, match="cannot read the solver state"):
        solver.restore(tmp_path / "none")
    with pytest.raises(DefinitionError, match="no such solver"):
        caffe.SGDSolver(tmp_path / "none")
    with pytest.raises(DefinitionError, match="did you mean"):
        make(SETTINGS + 'type: "Adan"')


def test_the_history_of_a_frozen_blob_has_decay_terms(write: Write, tmp_path: Path) -> None:
    """Caffe's AdaGrad adds (decay value)^2 to the history of a blob whose rate and gradient are
    0.
    """
    net = write(
        """layer { name: "x" type: "DummyData" top: "x" dummy_data_param { shape { dim: 4 dim: 2 } data_filler { type: "gaussian" } } }
        layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y" param { lr_mult: 0 } param { lr_mult: 1 }
          inner_product_param { num_output: 3 weight_filler { type: "gaussian" } } }
        layer { name: "loss" type: "Reduction" bottom: "y" top: "loss" loss_weight: 1 }""",
        "frozen.prototxt",
    )
    prefix = tmp_path / "snap"
    solver = caffe.get_solver(
        str(
            write(
                f'net: "{net}" base_lr: 1 lr_policy: "fixed" type: "AdaGrad" weight_decay: 0.5 '
                f'snapshot_prefix: "{prefix}"',
                "solver.prototxt",
            )
        )
    )
    weights = solver.net.params["ip"][0].data.copy()
    solver.step(3)
    solver.snapshot()
    state = caffe_pb2.SolverState.FromString((tmp_path / "snap_iter_3.solverstate").read_bytes())
    np.testing.assert_allclose(
        np.array(state.history[0].data).reshape(3, 2), 3 * (weights / 2) ** 2, rtol=1e-6
    )
    np.testing.assert_array_equal(solver.net.params["ip"][0].data, weights)
    solver.restore(str(tmp_path / "snap_iter_3.solverstate"))
    solver.step(1)
    solver.snapshot()
    state = caffe_pb2.SolverState.FromString((tmp_path / "snap_iter_4.solverstate").read_bytes())
    np.testing.assert_allclose(
        np.array(state.history[0].data).reshape(3, 2), 4 * (weights / 2) ** 2, rtol=1e-6
    )
