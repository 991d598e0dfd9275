"""Jobs of several workers on each host: one process gets the same weights, and no rendezvous
socket is left.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from tests.support.training import Job, largest_difference, run, weights, write_definitions
from tests.support.training_processes import make_data, poseidon_here, training

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

BATCH = 12
STEPS = 12
TWO_MACHINES = "0 127.0.0.1 0\n1 127.0.0.1 0 role=worker\n"
UNEVEN = "0 127.0.0.1 0 workers=2\n1 127.0.0.1 0 role=worker\n"
WAYS = [
    "hybrid",
    *(pytest.param(way, marks=pytest.mark.thorough) for way in ("allreduce", "ps", "svb")),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, where one process has trained on the whole batch."""
    folder = tmp_path_factory.mktemp("alone")
    make_data(folder)
    (folder / "hosts").write_text(TWO_MACHINES, encoding="utf-8")
    run(write_definitions(folder, batch=BATCH, extra=f"max_iter: {STEPS}"), Job())
    return folder


@pytest.fixture(scope="module")
def one(alone: Path) -> list[np.ndarray]:
    """Its weights."""
    return weights(alone, STEPS)


@pytest.fixture
def rendezvous_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files of this test's jobs alone, with a path short enough for a
    socket.
    """
    with TemporaryDirectory(prefix="p") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.mark.thorough
@pytest.mark.parametrize("exchange", WAYS)
def test_two_machines_of_two_workers_have_one_processes_weights(
    alone: Path, one: list[np.ndarray], rendezvous_folder: Path, exchange: str
) -> None:
    (alone / f"snap_iter_{STEPS}.caffemodel").unlink()
    write_definitions(alone, batch=BATCH // 4, extra=f"max_iter: {STEPS}")
    result = poseidon_here(
        alone,
        "train",
        "--solver=solver.prototxt",
        "--hostfile=hosts",
        "--workers=2",
        f"--exchange={exchange}",
        "--output=o",
    )
    assert result.returncode == 0, result.stderr
    assert "2 clients, 4 workers" in result.stderr
    assert largest_difference(weights(alone, STEPS), one) <= 1e-5
    assert not list(rendezvous_folder.glob("poseidon-*"))


@pytest.mark.parametrize("exchange", WAYS)
def test_machines_of_two_workers_and_one_have_one_processes_weights(
    alone: Path, one: list[np.ndarray], rendezvous_folder: Path, exchange: str
) -> None:
    """Bit for bit those of one process that computes for three virtual workers."""
    (alone / "uneven").write_text(UNEVEN, encoding="utf-8")
    write_definitions(alone, batch=BATCH // 3, extra=f"max_iter: {STEPS}")
    model, three = alone / f"snap_iter_{STEPS}.caffemodel", "--virtual_workers=3"
    models = []
    for flags in (("--hostfile=uneven",), (three,)):
        model.unlink()
        result = poseidon_here(
            alone,
            "train",
            "--solver=solver.prototxt",
            "--threads=1",
            f"--exchange={exchange}",
            "--output=o",
            *flags,
        )
        assert result.returncode == 0, result.stderr
        assert ("2 clients, 3 workers" in result.stderr) == (flags != (three,))
        assert largest_difference(weights(alone, STEPS), one) <= 1e-5
        models.append(model.read_bytes())
    assert models[0] == models[1]

    assert not list(rendezvous_folder.glob("poseidon-*"))


def endless(alone: Path, *extra: str) -> tuple[str, ...]:
    """A job of two hosts of two workers that runs until it is stopped."""
    write_definitions(alone, batch=BATCH // 4, extra="max_iter: 1000000\ndisplay: 1\n")
    return ("--solver=solver.prototxt", "--hostfile=hosts", "--workers=2", *extra)


@pytest.mark.parametrize(
    "flags", [(), pytest.param(("--exchange=ps",), marks=pytest.mark.thorough)]
)
def test_one_machine_of_two_workers_has_them_too(
    alone: Path, one: list[np.ndarray], flags: tuple[str, ...]
) -> None:
    (alone / f"snap_iter_{STEPS}.caffemodel").unlink()
    write_definitions(alone, batch=BATCH // 2, extra=f"max_iter: {STEPS}")
    result = poseidon_here(
        alone, "train", "--solver=solver.prototxt", "--workers=2", "--output=o", *flags
    )
    assert result.returncode == 0, result.stderr
    assert f"1 client, 2 workers, {1 if flags else 0} shard" in result.stderr
    assert largest_difference(weights(alone, STEPS), one) <= 1e-5


@pytest.mark.thorough
def test_a_stopped_job_of_stale_workers_goes_on(alone: Path) -> None:
    """All workers stop at the same iteration; the snapshot has each host's history, and each
    host resumes from it.
    """
    words = endless(alone, "--staleness=2")
    for earlier in alone.glob("snap_iter_*.solverstate"):
        earlier.unlink()
    with training(alone, *words) as job:
        job.wait_for("Iteration 1, loss")
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 130
    (state,) = alone.glob("snap_iter_*.solverstate")
    iteration = int(re.findall(r"\d+", state.name)[0])
    done = poseidon_here(
        alone, "train", *words, f"--snapshot={state}", f"--max_iter={iteration + 3}"
    )
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"Iteration (\d+), loss: ", done.stderr)
    assert shown[0] == str(iteration)
    assert f"finished at iteration {iteration + 3}" in done.stderr
