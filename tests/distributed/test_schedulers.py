"""Jobs whose tasks are started by torchrun, mpirun and srun, or with their environment
variables.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from poseidon.caffe.snapshot.caffemodel import read_model
from tests.support import small_slurm
from tests.support.free_ports import free_port
from tests.support.ssh_hosts import SshHosts
from tests.support.training import write_definitions
from tests.support.training_processes import environment, make_data

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
WAIT_S = 240.0
ITERATIONS = 6
JOB = ("train", "--solver=solver.prototxt", "--output=out")


def words(*job: str, key: str = "key") -> list[str]:
    """Return the command of each task."""
    return [
        sys.executable,
        "-m",
        "poseidon",
        "worker",
        f"--key_file={key}",
        "--rendezvous_timeout=200",
        *job,
    ]


def slurm(rank: int, size: int, master: str, port: int) -> dict[str, str]:
    """The variables of one task on each node."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_LOCALID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": master,
        "MASTER_PORT": str(port),
    }


def open_mpi(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables of tasks on this machine, each as if on a host of its own."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@contextmanager
def tasks(
    folder: Path, argv: Sequence[Sequence[str]], variables: Sequence[Mapping[str, str]]
) -> Iterator[list[subprocess.Popen[str]]]:
    """One process for each, ended with the block."""
    started = [
        subprocess.Popen(
            words,
            cwd=folder,
            env={**environment(folder), **more},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words, more in zip(argv, variables, strict=True)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def ends(started: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit status and standard error of each."""
    said = [process.communicate(timeout=WAIT_S)[1] for process in started]
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


def weights(folder: Path) -> dict[str, list[np.ndarray]]:
    return dict(read_model(folder / f"snap_iter_{ITERATIONS}.caffemodel"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, definitions and a key."""
    folder = tmp_path_factory.mktemp("job")
    make_data(folder)
    write_definitions(folder, batch=5, extra=f"max_iter: {ITERATIONS}")
    argv = [sys.executable, "-m", "poseidon", "worker", "--new_key=key"]
    subprocess.run(argv, cwd=folder, env=environment(folder), check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def by_torchrun(prepared: Path) -> dict[str, list[np.ndarray]]:
    """The weights of two tasks that torchrun has started on one host."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "-m",
    ]
    for _ in range(3):  # the port after the one that torchrun chooses may be taken by chance
        with tasks(prepared, [[*torchrun, *words(*JOB)[2:]]], [{}]) as started:
            ((status, said),) = ends(started)
        if "Address already in use" not in said:
            break
    assert status == 0, said
    assert "1 client, 2 workers, 0 shards" in said
    return weights(prepared)


def test_torchrun(by_torchrun: dict[str, list[np.ndarray]]) -> None:
    assert list(by_torchrun) == ["data", "conv", "pool", "relu", "ip", "loss"]


@pytest.fixture
def work(prepared: Path, tmp_path: Path) -> Path:
    """A folder with the data, definitions and key."""
    ignored = shutil.ignore_patterns("snap*", "out")
    return Path(shutil.copytree(prepared, tmp_path, dirs_exist_ok=True, ignore=ignored))


MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
MPIRUN += ["-x", "MASTER_ADDR", "-x", "MASTER_PORT", "-x", "PYTHONPATH", "-x", "POSEIDON_HOME"]
SRUN = ["srun", "--ntasks=2", "--overcommit", "--unbuffered"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "starter",
    [
        pytest.param(MPIRUN, marks=pytest.mark.needs("mpirun")),
        pytest.param(SRUN, marks=pytest.mark.needs("slurm")),
    ],
    ids=["mpirun", "srun"],
)
def test_other_starters_have_the_weights_of_torchrun(
    work: Path, by_torchrun: dict[str, list[np.ndarray]], starter: list[str]
) -> None:
    with ExitStack() as stack:
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        if starter is SRUN:
            own = dict(stack.enter_context(small_slurm.small_slurm(work / "slurm")))
        started = stack.enter_context(tasks(work, [[*starter, *words(*JOB)]], [own]))
        ((status, said),) = ends(started)
    assert status == 0, said
    assert "1 client, 2 workers, 0 shards" in said
    for layer, blobs in by_torchrun.items():
        for mine, theirs in zip(weights(work)[layer], blobs, strict=True):
            assert np.array_equal(mine, theirs)


HAS_AVX2 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


@pytest.mark.needs("hosts")
@pytest.mark.thorough
def test_two_nodes_with_the_variables_of_slurm_train_the_same_weights(
    prepared: Path, by_torchrun: dict[str, list[np.ndarray]], tmp_path: Path
) -> None:
    """Also where one has other vector instructions: replicas that drifted apart would be found
    after the second iteration.
    """
    port = free_port()
    job = words(*JOB, "--exchange=svb", "--check_replicas=2")
    with SshHosts(tmp_path, 2) as hosts:
        for host in hosts:
            shutil.copytree(
                prepared, host.outside("/root/work"), ignore=shutil.ignore_patterns("snap*", "out")
            )
        inside = {"PYTHONPATH": str(ROOT), "POSEIDON_HOME": "/root/home"}
        argv = []
        for rank, host in enumerate(hosts):
            own = {**inside, **slurm(rank, 2, hosts[0].name, port)}
            own.update({"ONEDNN_MAX_CPU_ISA": "SSE41"} if rank else {})
            own_words = [f"{name}={value}" for name, value in own.items()]
            argv.append(host.command(["env", "--chdir=/root/work", *own_words, *job]))
        with tasks(tmp_path, argv, [{}, {}]) as started:
            ended = ends(started)
        assert [status for status, _ in ended] == [0, 0], ended
        assert "2 clients, 2 workers, 2 shards" in ended[0][1] and not ended[1][1]
        slowly = "have no fast matrix product in common, so factors are multiplied slowly"
        assert (slowly in ended[0][1]) == HAS_AVX2
        assert [host.processes() for host in hosts] == [[], []]
        found = weights(hosts[0].outside("/root/work"))
    for layer, blobs in by_torchrun.items():
        for mine, theirs in zip(found[layer], blobs, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.skipif(not HAS_AVX2, reason="no AVX2 here")
@pytest.mark.thorough
def test_a_worker_that_computes_different_bits_ends_the_job(work: Path) -> None:
    port = free_port()
    variables = [open_mpi(rank, 3, port) for rank in range(3)]
    variables[1]["ATEN_CPU_CAPABILITY"] = "default"
    argv = [words(*JOB, "--exchange=svb", "--check_replicas=2")] * 3
    with tasks(work, argv, variables) as started:
        ended = ends(started)
    assert ended[0][0] == 1, ended
    assert "compute different bits from the same numbers" in ended[0][1]
    assert not (work / f"snap_iter_{ITERATIONS}.caffemodel").exists()


@pytest.mark.thorough
def test_the_host_of_a_task_that_is_asked_to_end_leaves_an_elastic_job(work: Path) -> None:
    write_definitions(work, batch=5, extra="max_iter: 1000000")
    port = free_port()
    argv = [words(*JOB, "--max_restarts=1", "--virtual_workers=3")] * 3
    said: list[str] = []
    with tasks(work, argv, [open_mpi(rank, 3, port) for rank in range(3)]) as started:
        assert started[0].stderr is not None
        for line in started[0].stderr:
            said.append(line)
            if "Iteration 4," in line:
                os.kill(started[1].pid, signal.SIGTERM)
            if ", without client 1 (127.0.0.1): 2 clients" in line:
                assert started[1].wait(WAIT_S) == 0
                os.kill(started[0].pid, signal.SIGTERM)
        ended = ends(started)
    assert [status for status, _ in ended] == [143, 0, 143], said
    assert "client 1 (127.0.0.1) was asked to end and leaves the job" in "".join(said)
    assert "repeated" not in said[-1]
