"""Every exchange, on hosts of every role, in real jobs: one process gets the same weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe.proto.caffe_pb2 import SolverState
from poseidon.engine.snapshot_files import seal
from poseidon.exchange.options import ExchangeKind
from poseidon.observe.metrics.job_statistics import read_statistics
from tests.support.training import Job, largest_difference, run, weights, write_definitions
from tests.support.training_processes import machinefile, make_data, poseidon_here

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

BATCH = 12
WORKER, SERVER, BOTH = "role=worker", "role=server", ""
STEPS = 12


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, where one process has trained on the whole batch."""
    folder = tmp_path_factory.mktemp("alone")
    make_data(folder)
    run(write_definitions(folder, batch=BATCH, extra=f"max_iter: {STEPS}"), Job())
    return folder


@pytest.fixture(scope="module")
def one(alone: Path) -> list[np.ndarray]:
    """Its weights."""
    return weights(alone, STEPS)


@pytest.mark.parametrize(
    ("roles", "exchange", "counts"),
    [
        pytest.param(
            (WORKER, SERVER, WORKER),
            "ps",
            "3 clients, 2 workers, 1 shard",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            (WORKER, SERVER, WORKER, SERVER),
            "hybrid",
            "4 clients, 2 workers, 2 shards",
            marks=pytest.mark.thorough,
        ),
        ((WORKER, SERVER, BOTH), "svb", "3 clients, 2 workers, 2 shards"),
        pytest.param(
            (BOTH, WORKER),
            "allreduce",
            "2 clients, 2 workers, 0 shards",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_the_weights_are_one_processes(
    alone: Path, one: list[np.ndarray], roles: tuple[str, ...], exchange: str, counts: str
) -> None:
    (alone / f"snap_iter_{STEPS}.caffemodel").unlink(missing_ok=True)
    lines = [f"{number} 127.0.0.1 0 {role}\n" for number, role in enumerate(roles)]
    (alone / "hosts").write_text("".join(lines), encoding="utf-8")
    write_definitions(alone, batch=BATCH // 2, extra=f"max_iter: {STEPS}")
    words = ("--hostfile=hosts", f"--exchange={exchange}", "--output=o")
    # keys change nothing
    encrypted = ("--encrypt=on",) if exchange in ("svb", "allreduce") else ()
    result = poseidon_here(alone, "train", "--solver=solver.prototxt", *words, *encrypted)
    assert result.returncode == 0, result.stderr
    assert counts in result.stderr
    assert largest_difference(weights(alone, STEPS), one) <= 1e-5
    plan = (alone / "o" / "exchange_plan.txt").read_text(encoding="utf-8")
    ways = {"ps": {"ps"}, "hybrid": {"ps", "svb"}, "svb": {"ps", "svb"}, "allreduce": {"allreduce"}}
    assert {line.split()[2] for line in plan.splitlines()[1:-2]} == ways[exchange]
    assert not list((alone / "o").glob("trace_*"))
    for worker in read_statistics(alone / "o" / "statistics.json").workers.values():
        moved = STEPS * 4 * (BATCH // 2) * (10 + 16)
        factors = {t.name: (t.bytes_out, t.bytes_in) for t in worker.tensors if t.scheme == "svb"}
        assert factors == ({"ip.0": (moved, moved)} if "svb" in ways[exchange] else {})


SCHEMES = ("allreduce", "ps", "svb", "allreduce")
"""Of the net's tensors: the weight and the bias of `conv`, then of `ip`."""


def test_a_job_of_three_schemes_with_a_limit_resumes_with_its_bits(tmp_path: Path) -> None:
    """A resumed job follows the plan of its snapshot, which has all schemes. A job that is given
    that job's `exchange_plan.json` follows it, too, and so does its snapshot.
    """
    make_data(tmp_path)
    limited = f"clip_gradients: 0.5\nsnapshot: {STEPS // 2}\nmax_iter"
    run(write_definitions(tmp_path, batch=BATCH, extra=f"{limited}: {STEPS}"), Job())
    exact = weights(tmp_path, STEPS)
    hosts = machinefile(tmp_path, 2, 1)
    job = Job(workers=2, shards=1, kind=ExchangeKind.AUTO)

    def definitions(steps: int) -> Path:
        return write_definitions(tmp_path, batch=BATCH // 2, extra=f"{limited}: {steps}")

    def train(steps: int, *words: str) -> str:
        definitions(steps)
        common = ("--solver=solver.prototxt", f"--hostfile={hosts}", "--output=o")
        result = poseidon_here(tmp_path, "train", *common, *words)
        assert result.returncode == 0, result.stderr
        plan = (tmp_path / "o" / "exchange_plan.txt").read_text(encoding="utf-8")
        return " ".join(line.split()[2] for line in plan.splitlines()[1:-2])

    def schemes_of_snapshot(steps: int) -> tuple[str, ...]:
        state = (tmp_path / f"snap_iter_{steps}.solverstate").read_bytes()
        return tuple(SolverState.FromString(state).poseidon.scheme)

    run(definitions(STEPS // 2), job)
    path = tmp_path / f"snap_iter_{STEPS // 2}.solverstate"
    state = SolverState.FromString(path.read_bytes())
    state.poseidon.scheme[:] = SCHEMES
    path.write_bytes(state.SerializeToString())
    seal(path, path.with_suffix(".caffemodel"))
    assert train(STEPS, f"--snapshot={path}") == " ".join(SCHEMES)
    resumed = (tmp_path / f"snap_iter_{STEPS}.caffemodel").read_bytes()
    assert largest_difference(weights(tmp_path, STEPS), exact) <= 1e-5
    assert schemes_of_snapshot(STEPS) == SCHEMES
    record = json.loads((tmp_path / "o" / "exchange_plan.json").read_text(encoding="utf-8"))
    assert tuple(record["schemes"].values()) == SCHEMES
    (tmp_path / "plan.json").write_text(json.dumps(record), encoding="utf-8")
    assert train(1, "--exchange_plan=plan.json") == " ".join(SCHEMES)
    assert schemes_of_snapshot(1) == SCHEMES
    run(definitions(STEPS), replace(job, resume=path))
    assert (tmp_path / f"snap_iter_{STEPS}.caffemodel").read_bytes() == resumed
