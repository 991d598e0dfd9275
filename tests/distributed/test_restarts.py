"""Restarts of a job that loses a process: a job that lost none gets the same weights."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from poseidon.exchange.options import ExchangeKind
from tests.support.live_processes import none_left
from tests.support.training import Job, run, weights, write_definitions
from tests.support.training_processes import machinefile, make_data, training

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]
END = 40


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind", [ExchangeKind.FACTORS, ExchangeKind.SERVER, ExchangeKind.ALLREDUCE]
)
def test_a_killed_worker_costs_no_bit(tmp_path: Path, kind: ExchangeKind) -> None:
    """With factors, with the server, and by all-reduce.

    The settings of the command line hold after a restart.
    """
    make_data(tmp_path)
    extra = f"max_iter: {END}\nsnapshot: 10\ndisplay: 1\nclip_gradients: 0.5"
    solver = write_definitions(tmp_path, batch=5, extra=extra)
    assert run(solver, Job(workers=2, shards=1, kind=kind)).by_factors == (
        kind is ExchangeKind.FACTORS
    )
    expected = weights(tmp_path, END)
    for path in tmp_path.glob("snap_*"):
        path.unlink()
    write_definitions(
        tmp_path, batch=5, extra=extra.replace(f"{END}", "99999").replace("0.5", "5.5")
    )
    flags = (
        f"--max_iter={END}",
        "--set=clip_gradients=0.5",
        f"--solver={solver}",
        f"--hostfile={machinefile(tmp_path, 2, 1)}",
        f"--output={tmp_path / 'out'}",
    )
    with training(
        tmp_path,
        *flags,
        "--max_restarts=2",
        "--elastic=0",
        "--snapshot_keep=2",
        f"--exchange={kind.value}",
    ) as job:
        job.wait_for("Iteration 15, loss")
        children = list(job.children().values())
        job.children()["worker 1"].kill()
        line = job.wait_for("restart 1 of 2: continuing from ")
        assert job.end() == 0, job.lines
    assert re.search(
        r"worker 1 .* was killed by signal 9 \(SIGKILL\), last seen at iteration \d+", line
    )
    assert re.search(
        r"snap_iter_\d0\.solverstate at iteration \d0(, at least \d+ iterations? to repeat)?$", line
    )
    assert f"finished at iteration {END} after 1 restart" in job.lines[-1]
    assert all(np.array_equal(a, b) for a, b in zip(weights(tmp_path, END), expected, strict=True))
    assert none_left([child.pid for child in children])
    assert len(list(tmp_path.glob("snap_*.solverstate"))) == 2
