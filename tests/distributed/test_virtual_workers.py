"""The weights of a job depend on its virtual workers alone: not on how many processes compute for
them, and not on which process computes for which.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from poseidon.exchange import build
from poseidon.exchange.auto.trial import measure
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.exchange.replicas import NO_CHECK
from poseidon.pycaffe import mode
from tests.poseidon.exchange.auto.test_rates import FAST
from tests.support.training import Ended, Job, run, write_definitions

EXTRA = "max_iter: 6\nsnapshot: 3\nclip_gradients: 0.5\niter_size: 2\ntest_interval: 4"
LAST, HALF = 6, 3


@pytest.fixture
def solver(data_folder: Path) -> Path:
    """A net with dropout and statistics, whose solver clips and tests on the way."""
    torch.set_num_threads(1)
    return write_definitions(data_folder, batch=5, extra=EXTRA, dropout=True, norm=True)


def job(bounds: tuple[int, ...], kind: ExchangeKind, options: ExchangeOptions = NO_CHECK) -> Job:
    workers = len(bounds) - 1
    served = kind.has_shards and (workers > 1 or options.is_encoded)
    return Job(
        workers=workers,
        shards=min(workers, 2) if served else 0,
        kind=kind,
        options=options,
        bounds=bounds,
    )


def trained(solver: Path, job: Job) -> tuple[bytes, bytes | None, list[object]]:
    """Return the last model, the last state, and what was shown."""
    ended = run(solver, job)
    model, state = (
        (solver.parent / f"snap_iter_{LAST}.{kind}").read_bytes()
        for kind in ("caffemodel", "solverstate")
    )
    # What codecs hold back is with the first virtual worker of the process that held it.
    return model, None if job.options.is_encoded else state, shown(ended)


def shown(ended: Ended) -> list[object]:
    train = [(r.iteration, r.loss, r.outputs) for r in ended.sink.train]
    return [*train, *((r.iteration, r.outputs) for r in ended.sink.tests)]


CASES = [
    (ExchangeKind.SERVER, NO_CHECK),
    (ExchangeKind.FACTORS, NO_CHECK),
    (ExchangeKind.HYBRID, NO_CHECK),
    (ExchangeKind.ALLREDUCE, NO_CHECK),
    (ExchangeKind.SERVER, replace(NO_CHECK, compress="ip*=topk:0.1/int8")),
]
LOCAL = [
    (ExchangeKind.HYBRID, replace(NO_CHECK, local_steps=2)),
    (ExchangeKind.SERVER, replace(NO_CHECK, local_steps=4, sync_fragments=2, sync_delay=1)),
]


def name_of(value: object) -> str:
    """Return a part of a test's name."""
    if isinstance(value, ExchangeOptions):
        return "rounds" if value.local_steps else value.compress[4:8]
    return value.value if isinstance(value, ExchangeKind) else ""


def some_of(first: int) -> list[object]:
    """Return every other one of the cases from this one on, and the others as thorough."""
    return [
        pytest.param(*case, marks=() if number % 2 == first else pytest.mark.thorough)
        for number, case in enumerate([*CASES, *LOCAL])
    ]


@pytest.mark.parametrize(("kind", "options"), some_of(0), ids=name_of)
def test_any_number_of_processes_has_the_same_bits(
    solver: Path, kind: ExchangeKind, options: ExchangeOptions
) -> None:
    """Also of the state, and all losses and scores."""
    expected = trained(solver, job((0, 4), kind, options))
    for bounds in ((0, 1, 4), (0, 1, 2, 3, 4)):
        assert trained(solver, job(bounds, kind, options)) == expected, bounds


STATE = """
layer { name: "x" type: "DummyData" top: "x" top: "cont" top: "target" include { phase: TRAIN }
  dummy_data_param { data_filler { type: "gaussian" } data_filler { type: "constant" value: 1 }
    data_filler { type: "gaussian" } shape { dim: 4 dim: 5 dim: 3 } shape { dim: 4 dim: 5 }
    shape { dim: 4 dim: 5 dim: 2 } } }
layer { name: "lstm" type: "LSTM" bottom: "x" bottom: "cont" top: "lstm" include { phase: TRAIN }
  recurrent_param { num_output: 2 weight_filler { type: "uniform" min: -0.5 max: 0.5 } } }
layer { name: "distance" type: "EuclideanLoss" bottom: "lstm" bottom: "target" top: "distance"
  include { phase: TRAIN } }
layer { name: "past" type: "Python" bottom: "ip0" top: "past" include { phase: TRAIN }
  python_param { module: "tests.support.python_layers" layer: "Remembering" } }
layer { name: "loss2" type: "SoftmaxWithLoss" bottom: "past" bottom: "label" top: "loss2"
  include { phase: TRAIN } }
"""


def test_each_virtual_worker_has_the_state_that_its_layers_keep(
    solver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that continue from iteration to iteration, a layer in Python that counts, beside
    dropout and running statistics.
    """
    monkeypatch.setattr(mode, "MODE", mode.ProcessMode())
    net = solver.parent / "net.prototxt"
    net.write_text(net.read_text(encoding="utf-8") + STATE, encoding="utf-8")
    expected = trained(solver, job((0, 3), ExchangeKind.SERVER))
    for bounds in ((0, 1, 3), (0, 1, 2, 3)):
        assert trained(solver, job(bounds, ExchangeKind.SERVER)) == expected, bounds


@pytest.mark.parametrize(("kind", "options"), some_of(1), ids=name_of)
def test_a_job_is_resumed_on_another_number_of_processes(
    solver: Path, kind: ExchangeKind, options: ExchangeOptions
) -> None:
    """With the bits of the undisturbed run, though an odd number of virtual workers has uneven
    test batches.
    """
    whole = trained(solver, job((0, 2, 3), kind, options))
    resume = solver.parent / f"snap_iter_{HALF}.solverstate"
    for bounds in ((0, 1, 2, 3), (0, 3)):
        resumed = replace(job(bounds, kind, options), resume=resume)
        model, state, records = trained(solver, resumed)
        assert (model, state) == whole[:2], bounds
        assert set(map(repr, records)) <= set(map(repr, whole[2]))


def test_a_job_of_auto_keeps_its_plan_on_another_number_of_processes(
    solver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has measured that factors are fast, though they are more bytes: by bytes alone, as for
    virtual workers, the shards add gradients, which has other bits.
    """
    fast = replace(FAST, allreduce_s=math.inf, link_s_per_byte=0.0, product_s_per_flop=0.0)
    monkeypatch.setattr(build, "is_worth_measuring", lambda tensors: True)
    monkeypatch.setattr(build, "measure", lambda *given: measure(*given) and fast)
    measuring = replace(job((0, 1, 2, 3), ExchangeKind.AUTO), bounds=())
    whole = trained(solver, measuring)
    resume = solver.parent / f"snap_iter_{HALF}.solverstate"
    for bounds in ((0, 2, 3), (0, 3)):
        resumed = replace(job(bounds, ExchangeKind.AUTO), resume=resume)
        assert trained(solver, resumed)[:2] == whole[:2], bounds
    by_bytes = trained(solver, job((0, 2, 3), ExchangeKind.AUTO))
    assert by_bytes[0] != whole[0]
    resumed = replace(measuring, resume=resume)  # now a snapshot whose plan is by bytes
    assert trained(solver, resumed)[:2] == by_bytes[:2]
